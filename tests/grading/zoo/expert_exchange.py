"""Wrong answers to Exchange of 08_expert."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightExchange, sent_rows
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Exchange"
SPLITS = "how many rows come stands before how many go"
CONTIGUOUS = "have to be contiguous"


@wrong(TASK, SPLITS)
class SplitsSwapped(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), sent, received)
        return out


@wrong(TASK, SPLITS)
class EvenSplits(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous())
        return out


@wrong(TASK, SPLITS)
class RoomForWhatIsSent(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out


@wrong(TASK, "backward is forward with sent and received swapped")
class BackwardNotSwapped(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return grad.new_zeros(sum(received), grad.shape[1])


@wrong(TASK, SPLITS)
class BackwardTheSameWay(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return sent_rows(grad, sent, received)


@wrong(TASK, "the rows have no gradient")
class NoGradient(RightExchange):
    @staticmethod
    def backward(ctx, grad):
        return None, None, None


@wrong(TASK, "the rows have no gradient")
class ZeroGradient(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return grad.new_zeros(sum(sent), grad.shape[1])


@wrong(TASK, "backward returns three: the rows' gradient, None, None")
class OneGradient(RightExchange):
    @staticmethod
    def backward(ctx, grad):
        return ctx._forward_cls.back(grad, *ctx.splits)


@wrong(TASK, "N times too large")
class GradientsNTimes(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return sent_rows(grad, received, sent) * me()[1]


@wrong(TASK, "the gradients are divided by N")
class GradientsDivided(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return sent_rows(grad, received, sent) / me()[1]


@wrong(TASK, "backward gets the gradient of what forward returned")
class GradientOfOnes(RightExchange):
    @staticmethod
    def back(grad, sent, received):
        return sent_rows(torch.ones_like(grad), received, sent)


@wrong(TASK, CONTIGUOUS, right_values=True)
class NotContiguous(RightExchange):
    cases = slice(2)

    @staticmethod
    def there(rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out


@wrong(TASK, CONTIGUOUS, right_values=True)
class GradientNotContiguous(RightExchange):
    cases = slice(2)

    @staticmethod
    def back(grad, sent, received):
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad, sent, received)
        return out


@wrong(TASK, CONTIGUOUS)
class RoomNotContiguous(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = rows.new_empty(rows.shape[1], sum(received)).T
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out
