"""Wrong answers to cross_entropy of 06_tensor with a backward by hand, and some more by autograd."""

import torch
import torch.distributed as dist

from tests.grading.zoo.tensor_right import RightLoss
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "cross_entropy"


class ByHand(RightLoss):
    """Right; the parts of backward are methods."""

    def __call__(self, logits, targets, z, group=None):
        return _Loss.apply(logits, targets, z, group, self)

    def p(self, logits, log):
        return (logits - log[..., None]).exp()

    def weight(self, log):
        return 1 + 2 * self.z * log

    def hot(self, grad):
        return grad.scatter_add(-1, self.local()[..., None], -self.mine()[..., None].to(grad.dtype))

    def share(self, upstream):
        return self.counts() * upstream / self.counts().sum()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, z, group, answer):
        ctx.answer = answer
        loss = RightLoss.__call__(answer, logits, targets, z, group)
        answer.loss_log = answer.log_
        return loss

    @staticmethod
    def backward(ctx, upstream):
        answer, log = ctx.answer, ctx.answer.loss_log
        grad = answer.hot(answer.p(answer.logits, log) * answer.weight(log)[..., None])
        return grad * answer.share(upstream)[..., None], None, None, None, None


class Kept(ByHand):
    def log(self):
        self.log_ = super().log()
        return self.log_


@wrong(TASK, "the loss was multiplied by a number: multiply by backward's argument")
class ForgetsTheArgument(Kept):
    """And makes it float32 by dividing a bool by an int."""

    def share(self, upstream):
        return self.counts() / self.counts().sum()


@wrong(TASK, "token k is number k // t on rank k % t, not in a block")
class BlocksOfItsOwnWidth(RightLoss):
    def mine(self):
        return self.counts() & (self.targets // self.logits.shape[-1] == self.r)

    def local(self):
        return torch.where(self.mine(), self.targets % self.logits.shape[-1], 0)


@wrong(TASK, "add the largest logit to the logarithm again")
class DoesNotAddTheLargest(RightLoss):
    def log(self):
        return super().log() - self.most


@wrong(TASK, "p is over all ranks' tokens: divide by the sum of all")
class SoftmaxOfItsOwn(Kept):
    def p(self, logits, log):
        return logits.softmax(-1)


@wrong(TASK, "[k = y] is on the rank that has y only, and nowhere where the target is −100")
class PlaceZero(Kept):
    def hot(self, grad):
        return grad.scatter_add(-1, self.local()[..., None], -torch.ones_like(grad[..., :1]))


@wrong(TASK, "the z-term's gradient is p·2z·log Z")
class ForgetsTheTwo(Kept):
    def weight(self, log):
        return 1 + self.z * log


class Narrow(RightLoss):
    """The learner's width is not that of the logits."""

    def width(self):
        return self.logits.shape[-1] - 1

    def mine(self):
        return super().mine() & (self.targets // self.t < self.width())


@wrong(TASK, "where t does not divide V, some ranks have one more: do not count on V / t")
class WithoutTheLast(Narrow):
    pass


@wrong(TASK, "where t does not divide V, some ranks have one more: do not count on V / t")
class WithoutTheOneMore(Narrow):
    def width(self):
        return 61 // self.t


@wrong(TASK, "take the maximum of logits.detach()")
class GradientThroughAmax(RightLoss):
    def largest(self):
        most = self.logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most


@wrong(TASK, "take the maximum of logits.detach()")
class GradientThroughMax(RightLoss):
    def largest(self):
        most = self.logits.max(-1).values
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most


@wrong(TASK, "the gradient is (p·(1 + 2z·log Z) − [k = y]) / n, times the number that backward is given")
class PlusForMinus(Kept):
    def hot(self, grad):
        return grad.scatter_add(-1, self.local()[..., None], self.mine()[..., None].to(grad.dtype))


@wrong(TASK, "the loss is the mean of log Z − the target's logit")
class OtherBase(RightLoss):
    def terms(self, log, picked):
        return super().terms(log, picked) / torch.tensor(2.0).log()
