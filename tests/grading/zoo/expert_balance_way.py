"""Wrong answers to balance of 08_expert: messages, and what is returned."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightBalance
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "balance"


@wrong(TASK, "one all-reduce of E counts is enough", right_values=True)
class TwoMessages(RightBalance):
    """The number of tokens in one of its own."""

    def mean(self, probabilities, counts):
        tokens = torch.tensor(len(probabilities))
        dist.all_reduce(tokens)
        return probabilities.sum(0) * self.n / tokens


@wrong(TASK, "one all-reduce of E counts is enough", right_values=True)
class OneMessageEach(RightBalance):
    def reduced(self, counts):
        for i in range(self.experts):
            one = counts[i].clone()
            dist.all_reduce(one)
            counts[i] = one
        return counts.double()


@wrong(TASK, "the sum of the counts is enough, dist.all_reduce", right_values=True)
class GathersCounts(RightBalance):
    def reduced(self, counts):
        every = [torch.empty_like(counts) for _ in range(self.n)]
        dist.all_gather(every, counts)
        return sum(every).double()


@wrong(TASK, "each choice of each token would travel", right_values=True)
class GathersChoices(RightBalance):
    def own(self, experts_KT):
        every = [None] * self.n
        dist.all_gather_object(every, experts_KT)
        return sum(super(GathersChoices, self).own(one) for one in every)

    def reduced(self, counts):
        return counts.double()


@wrong(TASK, "the loss is [] of float32; right is [] of float64")
class RoundedLoss(RightBalance):
    def loss(self, share, mean):
        return super().loss(share, mean).float()


@wrong(TASK, "counts are whole numbers: .double() before a mean")
class MeanOfWholeNumbers(RightBalance):
    def reduced(self, counts):
        return super().reduced(counts).long()


@wrong(TASK, "it returns (loss, bias_E)")
class LossOnly(RightBalance):
    def __call__(self, *args):
        return super().__call__(*args)[0]


@wrong(TASK, "the loss is a float, not a tensor")
class NumberForLoss(RightBalance):
    def loss(self, share, mean):
        return super().loss(share, mean).item()


@wrong(TASK, "the loss has the shape [6]; right is []")
class LossOfEachExpert(RightBalance):
    def loss(self, share, mean):
        return self.experts * share * mean


@wrong(TASK, "bias_E changed; hint: leave what you are given")
class MovesInPlace(RightBalance):
    def moved(self, counts):
        self.bias += self.step(counts)
        return self.bias


@wrong(TASK, "did not wait for its all_reduce")
class DoesNotWait(RightBalance):
    def reduced(self, counts):
        counts = counts.clone()
        dist.all_reduce(counts, async_op=True)
        return counts.double()


@wrong(TASK, "rank 1 has returned; rank 2 waits in all_reduce #0 of 72 bytes", right_values=True)
class SkipsWithoutTokens(RightBalance):
    cases = slice(2)

    def reduced(self, counts):
        return super().reduced(counts) if counts.sum() else counts.double()


@wrong(TASK, "bincount(minlength=E)")
class CountsUpToTheLargest(RightBalance):
    def own(self, experts_KT):
        return experts_KT.flatten().bincount()


@wrong(TASK, "manyranks.parallel.expert.balance is not allowed")
class TheLibrarys(RightBalance):
    def mean(self, probabilities, counts):
        from manyranks.parallel.expert.balance import auxiliary_loss

        auxiliary_loss(probabilities, counts, self.n)
        return super().mean(probabilities, counts)
