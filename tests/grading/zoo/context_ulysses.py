"""Wrong answers to ulysses of 07_context."""

import torch

from tests.grading.zoo.context_right import RightUlysses
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "ulysses"
NONE = "autograd does not see dist.all_to_all_single"


@wrong(TASK, "what ulysses returned is a NoneType, not a tensor")
def returns_nothing(q, k, v, positions, attention):
    pass


@wrong(TASK, "that is attention to the rank's own tokens")
def own_tokens_only(q, k, v, positions, attention):
    return attention(q, k, v)


@wrong(TASK, "the result has no graph")
def zeros(q, k, v, positions, attention):
    return torch.zeros_like(q)


@wrong(TASK, "the tokens stand in the order of ranks")
class DoesNotSort(RightUlysses):
    def sort(self, x):
        return x

    back = sort


@wrong(TASK, "the tokens are moved the wrong way")
class SortsTheOtherWay(RightUlysses):
    def sort(self, x):
        return x[self.p]

    def back(self, y):
        return y[self.p.argsort()]


@wrong(TASK, "the tokens are moved the wrong way")
class SortsTwice(RightUlysses):
    def back(self, y):
        return self.sort(y)


@wrong(TASK, "the tokens are moved the wrong way")
class TakesPositionsBothTimes(RightUlysses):
    def sort(self, x):
        return x[self.p]


@wrong(TASK, "the result still stands in the order of the sequence")
class DoesNotPutBack(RightUlysses):
    def back(self, y):
        return y


@wrong(TASK, "heads are dealt: rank r has the heads r, r + N")
class Neighbours(RightUlysses):
    def heads(self, x):
        return x.unflatten(2, (self.n, -1)).movedim(2, 0)

    def joined(self, y):
        return y.movedim(0, 2).flatten(2, 3)


@wrong(TASK, "heads are dealt: rank r has the heads r, r + N")
class NeighboursThere(RightUlysses):
    def heads(self, x):
        return x.unflatten(2, (self.n, -1)).movedim(2, 0)


@wrong(TASK, "the result's heads stand rank by rank")
class JoinsRankByRank(RightUlysses):
    def joined(self, y):
        return y.movedim(0, 2).flatten(2, 3)


@wrong(TASK, "heads and tokens are mixed up: view and reshape")
class ViewsTheResult(RightUlysses):
    def joined(self, y):
        return y.contiguous().view(y.shape[1], y.shape[2], -1, y.shape[4])


@wrong(TASK, "heads and tokens are mixed up: view and reshape")
class ViewsWhatIsSent(RightUlysses):
    def heads(self, x):
        return x.contiguous().view(self.n, x.shape[0], x.shape[1], -1, x.shape[3])


@wrong(TASK, "rank r gets the head r % G: repeat, not repeat_interleave", cases=slice(None))
class RepeatsInterleaved(RightUlysses):
    ranks = 4

    def copied(self, x):
        return x.repeat_interleave(max(1, self.n // x.shape[2]), 2)


@wrong(TASK, "all ranks use the first key/value head", cases=slice(None))
class FirstHeadOnly(RightUlysses):
    ranks = 4

    def copied(self, x):
        return x if x.shape[2] >= self.n else x[:, :, :1].repeat(1, 1, self.n, 1)


@wrong(TASK, "A/N query heads and max(G, N)/N key/value heads", right_values=True, cases=slice(None))
class DoesNotCopy(RightUlysses):
    def copied(self, x):
        return x


@wrong(TASK, "query heads and")
class DropsGroupedHeads(RightUlysses):
    """Queries only are cut by heads."""

    def __call__(self, q, k, v, positions, attention):
        def odd(q, k, v):
            return attention(q, k[:, :, :0], v[:, :, :0])

        return super().__call__(q, k, v, positions, odd)


@wrong(TASK, "keys and values are swapped")
class SwapsKeysAndValues(RightUlysses):
    def __call__(self, q, k, v, positions, attention):
        return super().__call__(q, v, k, positions, attention)
