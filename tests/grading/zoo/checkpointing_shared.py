"""Wrong answers to the last task of 04_checkpointing: an input that is kept in shares."""

import torch
import torch.distributed as dist

from tests.grading.zoo.checkpointing_right import Right, RightShares
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "shared_checkpoint"
KEPT = []


@wrong(TASK, "backward has to run the function again", right_values=True)
def does_nothing(function, x, group):
    return function(x)


@wrong(TASK, "nothing was gathered: if each rank keeps only its share", right_values=True)
def KeepsAllOfX(function, x, group):
    return Right()(function, x)


@wrong(TASK, "one gather for each checkpoint", right_values=True)
class SharesAllActivations(RightShares):
    """And no checkpoint: what the layer keeps goes through the hooks."""

    def run(self, function, x, pack, unpack):
        def shaped(tensor):
            return pack(tensor), tensor.shape

        def whole(kept):
            return self.cut(self.gather(kept[0], me()[1], None), kept[1])

        with torch.autograd.graph.saved_tensors_hooks(shaped, whole):
            return function(x)


@wrong(TASK, "forward only takes the rank's own share", right_values=True)
class GathersInForward(RightShares):
    def run(self, function, x, pack, unpack):
        whole = unpack(pack(x))
        y = Right()(function, x)
        KEPT.append(whole)
        return y


@wrong(TASK, "a share has 1/t of x. Is x still in a closure", right_values=True)
class KeepsXInAClosure(RightShares):
    def run(self, function, x, pack, unpack):
        own = x.detach()

        def unpack_and_look(share):
            return unpack(share) if len(own) else own

        return super().run(function, x, pack, unpack_and_look)


@wrong(TASK, "A slice keeps the memory of all of x", right_values=True)
class KeepsAView(RightShares):
    def share(self, flat, rank, t):
        return torch.nn.functional.pad(flat, (0, -len(flat) % t)).view(t, -1)[rank]


@wrong(TASK, "a share has 1/t of x", right_values=True)
class KeepsAChunk(RightShares):
    """Another view."""

    def share(self, flat, rank, t):
        return torch.nn.functional.pad(flat, (0, -len(flat) % t)).chunk(t)[rank]


@wrong(TASK, "each rank puts in its share, and gets all of them", right_values=True)
class GathersWholes(RightShares):
    """N of them, of which it takes the first."""

    def share(self, flat, rank, t):
        self.elements = len(flat)
        return flat.clone()

    def gather(self, share, t, group):
        return super().gather(share, t, group)[: len(share)]


@wrong(TASK, "an all-reduce sends twice the bytes", right_values=True)
class AllReduces(RightShares):
    def gather(self, share, t, group):
        row = share.new_zeros(t * len(share))
        row.view(t, -1)[dist.get_rank(group)] = share
        dist.all_reduce(row, group=group)
        return row


@wrong(TASK, "if one rank keeps x for all, its memory is full first", right_values=True)
class BroadcastsFromTheFirst(RightShares):
    def share(self, flat, rank, t):
        return flat.clone() if rank == 0 else flat[:0].clone()

    def run(self, function, x, pack, unpack):
        self.elements = x.numel()
        return super().run(function, x, pack, unpack)

    def gather(self, share, t, group):
        row = share if len(share) else share.new_empty(self.elements)
        dist.broadcast(row, 0, group=group)
        return row


@wrong(TASK, "one gather for each checkpoint", right_values=True)
class GathersRowByRow(RightShares):
    """In two halves."""

    def gather(self, share, t, group):
        half = len(share) // 2
        parts = [super(GathersRowByRow, self).gather(part.clone(), t, group) for part in (share[:half], share[half:])]
        return torch.cat([part.view(t, -1) for part in parts], 1).flatten()


@wrong(TASK, "one gather for each checkpoint", right_values=True)
class GathersTwice(RightShares):
    def gather(self, share, t, group):
        super().gather(share, t, group)
        return super().gather(share, t, group)


@wrong(TASK, "a call with async_op=True returns at once")
class NeverWaits(RightShares):
    def gather(self, share, t, group):
        row = share.new_zeros(t * len(share))
        dist.all_gather_single(row, share, group=group, async_op=True)
        return row


@wrong(TASK, "elements // t leaves the last elements out")
class LeavesTheRestOut(RightShares):
    def share(self, flat, rank, t):
        size = len(flat) // t
        return flat[rank * size :][:size].clone()

    def cut(self, row, shape):
        return torch.nn.functional.pad(row, (0, shape.numel() - len(row))).view(shape)


@wrong(TASK, "the padding comes at the end")
class PadsAtTheFront(RightShares):
    def share(self, flat, rank, t):
        return torch.nn.functional.pad(flat, (-len(flat) % t, 0)).view(t, -1)[rank].clone()


@wrong(TASK, "the padding comes at the end")
class CutsAtTheFront(RightShares):
    def cut(self, row, shape):
        return row[len(row) - shape.numel() :].view(shape)


@wrong(TASK, "cut the padding off before view")
class NeverCuts(RightShares):
    def cut(self, row, shape):
        return row.view(shape)


@wrong(TASK, "few elements make fewer chunks than t", right_values=True, cases=slice(None))
class CutsChunks(RightShares):
    def share(self, flat, rank, t):
        chunk = flat.chunk(t)[rank]
        return torch.nn.functional.pad(chunk, (0, -(-len(flat) // t) - len(chunk))).clone()


@wrong(TASK, "shares have the same size on all ranks")
class CutsUnevenly(RightShares):
    """tensor_split: no padding, and other sizes on other ranks."""

    def share(self, flat, rank, t):
        return flat.tensor_split(t)[rank].clone()


@wrong(TASK, "the shares come back in another order")
class TakesEveryTthElement(RightShares):
    def share(self, flat, rank, t):
        return torch.nn.functional.pad(flat, (0, -len(flat) % t))[rank::t].clone()


@wrong(TASK, "the shares come back in another order")
class TakesTheNextRanksShare(RightShares):
    def rank(self, group):
        return (dist.get_rank(group) + 1) % dist.get_world_size(group)


@wrong(TASK, "the shares come back in another order")
class TakesThemBackwards(RightShares):
    def rank(self, group):
        return dist.get_world_size(group) - 1 - dist.get_rank(group)


@wrong(TASK, "nothing was gathered")
class RepeatsItsOwn(RightShares):
    def gather(self, share, t, group):
        return share.repeat(t)


@wrong(TASK, "only this rank's own share is there")
class FillsWithZeros(RightShares):
    def rank(self, group):
        self.place = dist.get_rank(group)
        return self.place

    def gather(self, share, t, group):
        row = super().gather(share, t, group)
        mask = torch.zeros_like(row).view(t, -1)
        mask[self.place] = 1
        return row * mask.flatten()


@wrong(TASK, "gather within the group")
class IgnoresTheGroup(RightShares):
    sizes = (4,)

    def __call__(self, function, x, group):
        return super().__call__(function, x, None)


@wrong(TASK, "gather within the group")
class TakesTheWorldsRank(RightShares):
    sizes = (4,)

    def rank(self, group):
        return dist.get_rank()


@wrong(TASK, "gather within the group")
class GathersInTheWorld(RightShares):
    sizes = (4,)

    def gather(self, share, t, group):
        row = share.new_empty(dist.get_world_size() * len(share))
        dist.all_gather_single(row, share)
        return row


@wrong(TASK, "float64 has to stay float64 on its way")
class SendsFloat32(RightShares):
    def share(self, flat, rank, t):
        return super().share(flat, rank, t).float()

    def cut(self, row, shape):
        return super().cut(row.double(), shape)


@wrong(TASK, "draws other random numbers than forward's")
class DoesNotRestoreOnRanks(RightShares):
    def checkpoint(self, function, x):
        return Careless()(function, x)


class Careless(Right):
    def restore(self, ctx):
        pass

    def put_back(self, now):
        pass


@wrong(TASK, "one gather for each checkpoint", right_values=True)
class GathersAllAtTheFirst(RightShares):
    """What the first backward needs and what the next one will."""

    def __init__(self):
        self.mine, self.ready = [], {}

    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            return function(x)
        number = len(self.mine)
        self.mine.append(pack(x))
        shape = x.shape

        def ready(nothing):
            if number not in self.ready:
                for k in reversed(range(number + 1)):
                    self.ready[k] = unpack(self.mine[k])
            return self.ready.pop(number).view(shape)

        with torch.autograd.graph.saved_tensors_hooks(lambda x: None, ready):
            return self.checkpoint(function, x)


@wrong(TASK, "forward only takes the rank's own share", right_values=True, cases=slice(None))
class GathersUnderNoGrad(RightShares):
    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            unpack(pack(x))
        return super().run(function, x, pack, unpack)


@wrong(TASK, "waits in all_gather")
class RankZeroGathersAlone(RightShares):
    def gather(self, share, t, group):
        return super().gather(share, t, group) if dist.get_rank() == 0 else share.repeat(t)
