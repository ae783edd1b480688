"""Wrong answers to cross_entropy of 06_tensor."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.nn import functional as F

from tests.grading.zoo import tensor_loss_by_hand
from tests.grading.zoo.tensor_right import IGNORED, Both, RightLoss
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = [*tensor_loss_by_hand.ZOO]
wrong = keeper(ZOO)
TASK = "cross_entropy"


@wrong(TASK, "it returned None; hint: it returns the loss")
def does_nothing(logits, targets, z, group=None):
    pass


@wrong(TASK, "the loss has no graph")
def returns_zero(logits, targets, z, group=None):
    return torch.zeros((), dtype=torch.float64)


@wrong(TASK, "made a tensor of 9.07 kB; the largest logits of a rank have 3.02 kB", right_values=True)
class GathersTheLogits(RightLoss):
    """And computes all of the loss on every rank."""

    def __call__(self, logits, targets, z, group=None):
        r, t = dist.get_rank(group), dist.get_world_size(group)

        def gather(tensors):
            padded = F.pad(tensors[0], (0, -(-61 // t) - tensors[0].shape[-1]), value=-1e30)
            parts = [torch.empty_like(padded) for _ in range(t)]
            dist.all_gather(parts, padded.contiguous(), group=group)
            return [torch.stack(parts, -1).flatten(2)]

        whole = Both.apply(gather, lambda grads, _: [grads[0][..., r::t][..., : logits.shape[-1]]], logits)[0]
        log = whole.logsumexp(-1)
        terms = log - whole.gather(-1, targets.clamp(min=0)[..., None])[..., 0] + z * log.square()
        return terms[targets != IGNORED].mean()


@wrong(TASK, "the largest logits of a rank have", right_values=True)
class MakesOneHot(RightLoss):
    def picked(self):
        hot = F.one_hot(self.targets.clamp(min=0), 64)[..., self.r : 61 : self.t]
        return self.reduce((self.logits * hot * self.counts()[..., None]).sum(-1))


@wrong(TASK, "no rank needs the others' logits", right_values=True)
class GathersForTheTarget(RightLoss):
    def picked(self):
        shape = (*self.logits.shape[:2], -(-61 // self.t))
        parts = [self.logits.new_empty(shape) for _ in range(self.t)]
        own = F.pad(self.logits.detach(), (0, shape[-1] - self.logits.shape[-1]))
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return super().picked()


@wrong(TASK, "exp overflows at 710 in float64", cases=slice(None))
class NoMaximum(RightLoss):
    def largest(self):
        return torch.zeros_like(self.logits[..., 0]).detach()


@wrong(TASK, "sums of exponentials with different shifts do not add up")
class OwnMaximum(RightLoss):
    def largest(self):
        return self.logits.detach().amax(-1)


@wrong(TASK, "is the first all-reduce one of dist.ReduceOp.MAX?", cases=slice(None))
class SumsMaxima(RightLoss):
    """Right where the sum happens to be near the largest."""

    ranks = 4

    def largest(self):
        return self.reduce(self.logits.detach().amax(-1))


@wrong(TASK, "the sum of exponentials is only that of this rank's tokens")
class OwnSum(RightLoss):
    def log(self):
        return self.exponentials().log() + self.most


@wrong(TASK, "logarithms of parts do not add up")
class SumsLogarithms(RightLoss):
    def log(self):
        return self.reduce(self.exponentials().log()) + self.most


@wrong(TASK, "a target's logit is on one rank")
class OwnTarget(RightLoss):
    def picked(self):
        return self.logits.gather(-1, self.local()[..., None])[..., 0] * self.mine()


class Unmasked(RightLoss):
    def local(self):
        return (self.targets.clamp(min=0) // self.t).clamp(max=self.logits.shape[-1] - 1)


@wrong(TASK, "every rank has taken a logit for every target")
class TargetOfEveryRank(Unmasked):
    def picked(self):
        return self.reduce(self.logits.gather(-1, self.local()[..., None])[..., 0])


@wrong(TASK, "every rank has taken a logit for every target")
class TargetOfTheWrongRank(Unmasked):
    def picked(self):
        return self.logits.gather(-1, self.local()[..., None])[..., 0]


@wrong(TASK, "token k is number k // t on rank k % t, not in a block")
class VocabularyInBlocks(RightLoss):
    def mine(self):
        width = -(-61 // self.t)
        return self.counts() & (self.targets // width == self.r)

    def local(self):
        width = -(-61 // self.t)
        return torch.where(self.mine(), self.targets - self.r * width, 0).clamp(max=self.logits.shape[-1] - 1)


@wrong(TASK, "a target may be −100, which is no token")
class IndexesByTheIgnored(RightLoss):
    def local(self):
        return torch.where(self.targets % self.t == self.r, self.targets // self.t, 0)


@wrong(TASK, "those of −100 are not among them")
class CountsTheIgnored(RightLoss):
    def mean(self, terms):
        return torch.where(self.counts(), terms, 0.0).mean()


@wrong(TASK, "neither the logarithm nor the z-term counts")
class IgnoresNothing(RightLoss):
    def mean(self, terms):
        return terms.mean()


@wrong(TASK, "the mean is over all targets that count, of all ranks' tokens")
class MeanOfItsOwn(RightLoss):
    def mean(self, terms):
        return terms[self.counts()].sum() / self.mine().sum()


@wrong(TASK, "that is the sum: divide by the number of targets that count")
class Sums(RightLoss):
    def mean(self, terms):
        return terms[self.counts()].sum()


@wrong(TASK, "the z-term is missing")
class NoZ(RightLoss):
    def terms(self, log, picked):
        return log - picked


@wrong(TASK, "add the maximum again before you square it")
class ZWithoutTheMaximum(RightLoss):
    def terms(self, log, picked):
        return log - picked + self.z * (log - self.most).square()


@wrong(TASK, "the z-term is the square of the logarithm")
class ZLinear(RightLoss):
    def terms(self, log, picked):
        return log - picked + self.z * log


@wrong(TASK, "the z-term has a gradient, too")
class ZWithoutGradient(RightLoss):
    def terms(self, log, picked):
        return log - picked + self.z * log.detach().square()


@wrong(TASK, "the target's logit has 1 less")
class TargetWithoutGradient(RightLoss):
    def picked(self):
        return super().picked().detach()


@wrong(TASK, "the loss was multiplied by a number: multiply by backward's argument")
class ForgetsTheUpstream(RightLoss):
    def mean(self, terms):
        return super().mean(terms) / 3 + super().mean(terms.detach()) * 2 / 3


@wrong(TASK, "each rank has the same loss")
class SumsInBackward(RightLoss):
    """PyTorch's all-reduce, whose backward sums."""

    def reduce(self, tensor):
        return with_gradients.all_reduce(tensor, group=self.group or dist.group.WORLD)


@wrong(TASK, "backward sends nothing", right_values=True)
class SumsGradientsForNothing(RightLoss):
    def log(self):
        log = super().log()
        log.register_hook(lambda grad: (dist.all_reduce(grad.clone(), group=self.group), grad)[1])
        return log


@wrong(TASK, "three all-reduces of S·B numbers are enough", right_values=True)
class CountsWithACall(RightLoss):
    def mean(self, terms):
        count = self.reduce(self.mine().sum().double())
        return terms[self.counts()].sum() / count


@wrong(TASK, "the logits changed; hint: leave what you are given as it is")
class ExponentialsInPlace(RightLoss):
    def exponentials(self):
        total = super().exponentials()
        self.logits.data -= 1
        self.most = self.most
        return total

    def picked(self):
        return super().picked() + 1


@wrong(TASK, "the targets changed")
class ChangesTheTargets(RightLoss):
    def mean(self, terms):
        mean = super().mean(terms)
        self.targets.clamp_(min=0)
        return mean


@wrong(TASK, "its group has 2", cases=slice(None))
class ForgetsTheGroup(RightLoss):
    ranks = 4

    def __call__(self, logits, targets, z, group=None):
        return super().__call__(logits, targets, z)


@wrong(TASK, "keep what it returns and call .wait() on it")
class DoesNotWait(RightLoss):
    def picked(self):
        picked = self.logits.gather(-1, self.local()[..., None])[..., 0] * self.mine()
        self.work = dist.all_reduce(picked, group=self.group, async_op=True)
        return picked


@wrong(TASK, "all ranks make their calls in the same order")
class TwoOrders(RightLoss):
    """Rank 0 asks for the target first: sums of the one are added to the other."""

    def __call__(self, logits, targets, z, group=None):
        self.early = None
        return super().__call__(logits, targets, z, group)

    def log(self):
        if self.r == 0:
            self.early = super().picked()
        return super().log()

    def picked(self):
        return super().picked() if self.early is None else self.early


@wrong(TASK, "does a loop not end?")
class NeverEnds(RightLoss):
    seconds = 3

    def picked(self):
        while self.r == 1:
            with contextlib.suppress(Exception):
                pass
        return super().picked()


@wrong(TASK, "manyranks.parallel.tensor.vocab_parallel_cross_entropy is not allowed; hint: write it yourself")
def the_librarys_loss(logits, targets, z, group=None):
    from manyranks.parallel.tensor.vocabulary import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, targets, group)
