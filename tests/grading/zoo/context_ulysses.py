"""Wrong answers to ulysses of 07_context."""

import torch
import torch.distributed as dist

from tests.grading.zoo.context_right import RightUlysses, sent
from tests.grading.zoo.wrong import Wrong, keeper, me

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


@wrong(TASK, "rank r gets the head r % G: repeat, not repeat_interleave")
class RepeatsInterleaved(RightUlysses):
    ranks = 4

    def copied(self, x):
        return x.repeat_interleave(max(1, self.n // x.shape[2]), 2)


@wrong(TASK, "all ranks use the first key/value head")
class FirstHeadOnly(RightUlysses):
    ranks = 4

    def copied(self, x):
        return x if x.shape[2] >= self.n else x[:, :, :1].repeat(1, 1, self.n, 1)


@wrong(TASK, "A/N query heads and max(G, N)/N key/value heads", right_values=True)
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


class Unseen(RightUlysses):
    """The all-to-all itself, without a Function."""

    names = "qkv"

    def of_all(self, x):
        self.now = self.names[0]
        self.names = self.names[1:] + self.names[:1]
        return super().of_all(x)

    def of_own(self, y):
        self.now = "o"
        return super().of_own(y)


@wrong(TASK, f"the result has no graph; hint: there is no gradient of q, k and v: {NONE}")
class SendsTheBareResult(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now == "o" else super().swap(x)


@wrong(TASK, f"there is no gradient of k and v: {NONE}")
class SendsBareKeysAndValues(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now in "kv" else super().swap(x)


@wrong(TASK, f"there is no gradient of q: {NONE}")
class SendsBareQueries(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now == "q" else super().swap(x)


@wrong(TASK, f"there is no gradient of q, k and v: {NONE}")
class SendsAllBare(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now != "o" else super().swap(x)


@wrong(TASK, "backward sends as many bytes as forward")
class GradientsStay(RightUlysses):
    def return_back(self, grad):
        return grad.clone()


@wrong(TASK, "the gradients are N times too large")
class GradientsNTimes(RightUlysses):
    def return_back(self, grad):
        return self.n * sent(grad) if self.later() else sent(grad)

    def later(self):
        """Of the result's exchange alone."""
        self.seen = getattr(self, "seen", 0) + 1
        return self.seen == 1


@wrong(TASK, "the gradients are divided by N")
class GradientsDivided(GradientsNTimes):
    def return_back(self, grad):
        return sent(grad) / (self.n if self.later() else 1)


@wrong(TASK, "no number is a sum over ranks here")
class GradientsReduced(RightUlysses):
    def return_back(self, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


@wrong(TASK, "a copied head has the gradient of one of its copies")
class OneCopysGradient(RightUlysses):
    ranks = 4

    def copied(self, x):
        copies = super().copied(x)
        return torch.cat((copies[:, :, : x.shape[2]], copies[:, :, x.shape[2] :].detach()), 2)


@wrong(TASK, "what is sent has to be contiguous")
class NotContiguous(RightUlysses):
    def swap(self, x):
        out = torch.empty(x.shape, dtype=x.dtype)
        dist.all_to_all_single(out, x.detach())
        return out


@wrong(TASK, "repeat key/value heads only as far as each rank gets one", right_values=True)
class RepeatsAllHeads(RightUlysses):
    def __call__(self, q, k, v, positions, attention):
        k, v = (one.repeat(1, 1, q.shape[2] // one.shape[2], 1) for one in (k, v))
        return super().__call__(q, k, v, positions, attention)


@wrong(TASK, "no rank needs all heads of all tokens", right_values=True)
class Gathers(RightUlysses):
    """All of all, and takes its own."""

    def swap(self, x):
        return Gathered.apply(x)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        (r, n), x = me(), x.contiguous()
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        return torch.stack([part[r] for part in parts])

    @staticmethod
    def backward(ctx, grad):
        return Gathered.apply(grad)


@wrong(TASK, "an all-to-all is one call", right_values=True)
class ByMessages(RightUlysses):
    def swap(self, x):
        return Exchanged.apply(x)


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        (r, n), out = me(), torch.empty(x.shape, dtype=x.dtype)
        out[r] = x[r]
        for far in range(1, n):
            to, source = (r + far) % n, (r - far) % n
            for work in [dist.isend(x[to].contiguous(), to), dist.irecv(out[source], source)]:
                work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchanged.apply(grad)


@wrong(TASK, "four all-to-alls in each direction are enough", right_values=True)
class ExchangesTwice(RightUlysses):
    def swap(self, x):
        sent(x.detach())
        return super().swap(x)


@wrong(TASK, "what is sent is float32")
class InSinglePrecision(RightUlysses):
    def swap(self, x):
        return super().swap(x.float()).double()


@wrong(TASK, "waits in all_to_all")
class OneRankLeavesOut(RightUlysses):
    def swap(self, x):
        return x if self.r == 1 else super().swap(x)


@wrong(TASK, "q changed; hint: leave what you are given as it is")
class ChangesQ(RightUlysses):
    def __call__(self, q, k, v, positions, attention):
        y = super().__call__(q, k, v, positions, attention)
        q.data.zero_()
        return y


@wrong(TASK, "rank 1 raised ZeroDivisionError")
class Raises(RightUlysses):
    def heads(self, x):
        return super().heads(x) * (1 / (1 - self.r))


@wrong(TASK, "attention takes q_TBaD, k_TBgD and v_TBgD of the whole sequence")
class KeepsOwnKeys(RightUlysses):
    """Queries of the whole sequence, keys of the rank's own tokens."""

    def __call__(self, q, k, v, positions, attention):
        (self.r, self.n), self.p = me(), torch.cat(positions)
        return self.of_own(attention(self.of_all(self.heads(q)), k, v))
