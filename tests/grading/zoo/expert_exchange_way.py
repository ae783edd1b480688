"""Wrong answers to Exchange of 08_expert: who takes part, and what is sent."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightExchange, sent_rows
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Exchange"


@wrong(TASK, "all ranks have to call it, also one that has no rows", right_values=True)
class SkipsWhereNothingIsSent(RightExchange):
    cases = slice(2)

    @staticmethod
    def there(rows, sent, received):
        if not sum(sent):
            return rows.new_zeros(sum(received), rows.shape[1])
        return sent_rows(rows, sent, received)


@wrong(TASK, "which rank 1 did not call", right_values=True)
class SkipsWhereNothingHappens(RightExchange):
    """Two ranks have something to do; rank 1 of three has not."""

    cases = slice(2)

    @staticmethod
    def there(rows, sent, received):
        if not sum(sent) + sum(received):
            return rows.clone()
        return sent_rows(rows, sent, received)


@wrong(TASK, "all ranks have to call it, also one that has no rows", right_values=True)
class SkipsBackwardWhereNothingCame(RightExchange):
    cases = slice(2)

    @staticmethod
    def back(grad, sent, received):
        if not sum(received):
            return grad.new_zeros(sum(sent), grad.shape[1])
        return sent_rows(grad, received, sent)


@wrong(TASK, "dist.all_to_all takes parts of one size only, here: dist.all_to_all_single takes sizes")
class InLists(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = [rows.new_empty(count, rows.shape[1]) for count in received]
        dist.all_to_all(out, [part.contiguous() for part in rows.split(sent)])
        return torch.cat(out)


def padded(rows, sent, received):
    """Every message as long as the longest."""
    most = torch.tensor(max(*sent, *received))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    most, n = int(most), me()[1]
    filled = rows.new_zeros(n, most, rows.shape[1])
    for place, part in zip(filled, rows.split(sent), strict=True):
        place[: len(part)] = part
    out = torch.empty_like(filled)
    dist.all_to_all_single(out, filled)
    return torch.cat([part[:count] for part, count in zip(out, received, strict=True)])


@wrong(TASK, "rank 0 called all_reduce of 8 bytes of int64", right_values=True)
class PadsToTheLargest(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return padded(rows, sent, received)


@wrong(TASK, "more rows than there are", right_values=True)
class PadsToAConstant(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        n = me()[1]
        filled = rows.new_zeros(n, 9, rows.shape[1])
        for place, part in zip(filled, rows.split(sent), strict=True):
            place[: len(part)] = part
        out = torch.empty_like(filled)
        dist.all_to_all_single(out, filled)
        return torch.cat([part[:count] for part, count in zip(out, received, strict=True)])


@wrong(TASK, "sent and received are given: no counts travel here", right_values=True)
class AsksForCounts(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        coming = torch.empty(len(sent), dtype=torch.int64)
        dist.all_to_all_single(coming, torch.tensor(sent))
        return sent_rows(rows, sent, coming.tolist())


@wrong(TASK, "no rank needs what all others have", right_values=True)
class GathersEverything(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        r, n = me()
        whole = [None] * n
        dist.all_gather_object(whole, (rows.detach(), sent))
        return torch.cat([its.split(sizes)[r] for its, sizes in whole])


@wrong(TASK, "an all-to-all is one call", right_values=True)
class LoopOfMessages(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        r, n = me()
        parts = [part.contiguous() for part in rows.split(sent)]
        rooms = [rows.new_empty(count, rows.shape[1]) for count in received]
        rooms[r] = parts[r]
        works = [dist.isend(parts[k], k) for k in range(n) if k != r]
        works += [dist.irecv(rooms[k], k) for k in range(n) if k != r]
        for work in works:
            work.wait()
        return torch.cat(rooms)


@wrong(TASK, "a barrier is not needed", right_values=True)
class WithABarrier(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        dist.barrier()
        return sent_rows(rows, sent, received)


@wrong(TASK, "what is sent is float32: float64 has to stay float64")
class SendsFloat32(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return sent_rows(rows.float(), sent, received).double()


@wrong(TASK, "of float32; right is")
class ReturnsFloat32(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return sent_rows(rows.float(), sent, received)


@wrong(TASK, "out has the dtype of what comes, float64")
class RoomOfFloat32(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = torch.empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out


@wrong(TASK, "hint: save_for_backward takes tensors only")
class SavesLists(RightExchange):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.save_for_backward(sent, received)
        return sent_rows(rows, sent, received)


@wrong(TASK, "the same bytes in 2 calls where 1 is enough", right_values=True)
class ColumnByColumn(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return torch.cat([sent_rows(part, sent, received) for part in rows.tensor_split(2, 1)], 1)


@wrong(TASK, "the rows stand in another order")
class LastRankFirst(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return torch.cat(sent_rows(rows, sent, received).split(received)[::-1])


@wrong(TASK, "the rows are zeros")
class ReturnsTheEmptyRoom(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        sent_rows(rows, sent, received)
        return rows.new_zeros(sum(received), rows.shape[1])


@wrong(TASK, "did not wait for its all_to_all")
class DoesNotWait(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, async_op=True)
        return out


@wrong(TASK, "what forward returned has the shape")
class NoRoomForOwnRows(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        return sent_rows(rows, sent, received)[1:]


@wrong(TASK, "torch.distributed._functional_collectives is not allowed")
class ReadyMade(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        from torch.distributed import _functional_collectives as functional

        return functional.all_to_all_single(rows.contiguous(), received, sent, dist.group.WORLD).clone()


@wrong(TASK, "torch.distributed.nn.functional is not allowed")
class ReadyMadeWithGradient(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        import torch.distributed.nn.functional as ready

        out = rows.new_empty(sum(received), rows.shape[1])
        return ready.all_to_all_single(out, rows.contiguous(), received, sent)


@wrong(TASK, "manyranks.parallel.expert")
class TheLibrarys(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        from manyranks.parallel.expert import dispatch

        return dispatch.exchange(rows, sent, received, None)


@wrong(TASK, "Exchange is a function; hint: write class Exchange(torch.autograd.Function)")
def exchange_function(rows, sent, received):
    return sent_rows(rows, sent, received)


@wrong(TASK, "Exchange is a class of another kind")
class Module(torch.nn.Module):
    def forward(self, rows, sent, received):
        return sent_rows(rows, sent, received)


@wrong(TASK, "forward gets ctx first")
class WithoutCtx(torch.autograd.Function):
    @staticmethod
    def forward(rows, sent, received):
        return sent_rows(rows, sent, received)


@wrong(TASK, "sends one all-to-all in each direction")
class GradientsStay(RightExchange):
    """Where as many rows came as went, nobody would see it."""

    @staticmethod
    def back(grad, sent, received):
        return torch.cat([grad, grad.new_zeros(sum(sent), grad.shape[1])])[: sum(sent)]
