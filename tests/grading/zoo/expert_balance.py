"""Wrong answers to balance of 08_expert."""

import torch.distributed as dist

from tests.grading.zoo.expert_right import RightBalance
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "balance"


@wrong(TASK, "the counts are this rank's own")
class OwnCounts(RightBalance):
    """And what follows from them."""

    def reduced(self, counts):
        return counts.double()


@wrong(TASK, "the counts are this rank's own")
class OwnShares(RightBalance):
    def own(self, experts_KT):
        self.mine = super().own(experts_KT).double()
        return self.mine.long()

    def share(self, counts):
        return super().share(self.mine)


@wrong(TASK, "P is the mean over this rank's own tokens")
class OwnMean(RightBalance):
    def mean(self, probabilities, counts):
        return probabilities.sum(0) / max(len(probabilities), 1)


@wrong(TASK, "P is the mean over this rank's own tokens")
class OwnMeanByTorch(RightBalance):
    def mean(self, probabilities, counts):
        return probabilities.mean(0) if len(probabilities) else probabilities.sum(0)


@wrong(TASK, "elements are wrong; element 0 is nan")
class MeanOfNothing(RightBalance):
    cases = slice(2)

    def mean(self, probabilities, counts):
        return probabilities.mean(0) * len(probabilities) * self.n * self.top_k / counts.sum()


@wrong(TASK, "their mean has to be, which takes a factor N")
class SumOfLosses(RightBalance):
    def mean(self, probabilities, counts):
        return super().mean(probabilities, counts) / self.n


@wrong(TASK, "the counts' sum is that of all T·K choices")
class MeanOverChoices(RightBalance):
    def mean(self, probabilities, counts):
        return probabilities.sum(0) * self.n / counts.sum()


@wrong(TASK, "a quotient of two int64 tensors is float32")
class QuotientOfWholeNumbers(RightBalance):
    def share(self, counts):
        return (counts.long() / counts.long().sum()).double()


@wrong(TASK, "the factor E is missing")
class WithoutE(RightBalance):
    def loss(self, share, mean):
        return (share * mean).sum()


@wrong(TASK, "f is the share of all choices")
class SharesOfTokens(RightBalance):
    def share(self, counts):
        return super().share(counts) * self.top_k


@wrong(TASK, "f counts all choices, not only the first ones")
class FirstChoices(RightBalance):
    def own(self, experts_KT):
        first = experts_KT[0].bincount(minlength=self.experts)
        self.firsts = first.clone()
        return super().own(experts_KT)

    def share(self, counts):
        dist.all_reduce(self.firsts)
        return super().share(self.firsts.double())


@wrong(TASK, "that is Σ f·f")
class SquaresOfShares(RightBalance):
    def loss(self, share, mean):
        return self.experts * (share * share).sum() + 0 * mean.sum()


@wrong(TASK, "that is Σ P·P")
class SquaresOfMeans(RightBalance):
    def loss(self, share, mean):
        return self.experts * (mean * mean).sum()


@wrong(TASK, "that is the whole loss on each rank")
class WholeLossEverywhere(RightBalance):
    def mean(self, probabilities, counts):
        total = probabilities.sum(0).detach()
        dist.all_reduce(total)
        return total * self.top_k / counts.sum() + 0 * probabilities.sum(0)


@wrong(TASK, "the loss has no gradient")
class Detached(RightBalance):
    def mean(self, probabilities, counts):
        return super().mean(probabilities.detach(), counts)


@wrong(TASK, "the loss has no gradient")
class DetachedInPart(RightBalance):
    def mean(self, probabilities, counts):
        return super().mean(probabilities.detach(), counts) + 0 * probabilities.sum(0)


@wrong(TASK, "the gradient lacks a factor N")
class GradientWithoutN(RightBalance):
    def mean(self, probabilities, counts):
        mean = super().mean(probabilities, counts)
        return mean / self.n + mean.detach() * (1 - 1 / self.n)


@wrong(TASK, "that is the sign's step, the chapter's", right_values=True)
class ChaptersStep(RightBalance):
    def step(self, counts):
        return self.speed * (counts.mean() - counts).sign()


@wrong(TASK, "the bias moves the wrong way", right_values=True)
class WrongWay(RightBalance):
    def step(self, counts):
        return -super().step(counts)


@wrong(TASK, "the bias moves the wrong way", right_values=True)
class WrongSign(RightBalance):
    def step(self, counts):
        return self.speed * (counts - counts.mean()).sign()


@wrong(TASK, "the difference is not divided by the mean count", right_values=True)
class NotRelative(RightBalance):
    def step(self, counts):
        return self.speed * (counts.mean() - counts)


@wrong(TASK, "the new bias differs from rank to rank", right_values=True)
class OwnBias(RightBalance):
    def own(self, experts_KT):
        self.mine = super().own(experts_KT)
        return self.mine

    def step(self, counts):
        return super().step(self.mine.double())


OwnBias.ranks = 2


@wrong(TASK, "that is the bias as it was", right_values=True)
class OldBias(RightBalance):
    def moved(self, counts):
        return self.bias.clone()


@wrong(TASK, "that is the step alone", right_values=True)
class StepAlone(RightBalance):
    def moved(self, counts):
        return self.step(counts)


@wrong(TASK, "each rank's step is added up", right_values=True)
class StepsAddedUp(RightBalance):
    def own(self, experts_KT):
        self.mine = super().own(experts_KT).double()
        return self.mine.long()

    def step(self, counts):
        step = self.speed * (1 - self.mine / self.mine.mean())
        dist.all_reduce(step)
        return step


StepsAddedUp.ranks = 2


@wrong(TASK, "count / mean count is E times the share f", right_values=True)
class ShareForRatio(RightBalance):
    def step(self, counts):
        return self.speed * (1 - self.share(counts))


@wrong(TASK, "count / mean count is E times the share f", right_values=True)
class ShareAgainstOneInE(RightBalance):
    def step(self, counts):
        return self.speed * (1 / self.experts - self.share(counts))
