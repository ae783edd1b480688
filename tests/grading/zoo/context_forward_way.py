"""Wrong answers to ring_forward of 07_context whose way is wrong: messages, their order, memory, and what is handed in."""

from functools import reduce

import torch
import torch.distributed as dist

from manyranks.parallel import collectives
from tests.grading.zoo.context_right import RightForward, WaitsHalfway
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "ring_forward"


@wrong(TASK, "rank 0 merged 4 parts in one call; 3 are enough", right_values=True)
class MergesInTheEnd(RightForward):
    def keep(self, i, part):
        self.done.setdefault(i, []).append(part)

    def result(self):
        halves = [self.merge(self.done[i]) for i in (0, 1)]
        return tuple(torch.cat(one) for one in zip(*halves, strict=True))


@wrong(TASK, "merge each part into the result before the next block is computed", right_values=True)
class FoldsInTwosInTheEnd(MergesInTheEnd):
    def result(self):
        halves = [reduce(lambda one, other: self.merge([one, other]), self.done[i]) for i in (0, 1)]
        return tuple(torch.cat(one) for one in zip(*halves, strict=True))


@wrong(TASK, "at most two blocks of K and V, the current and the next", right_values=True, cases=slice(None))
class KeepsAllBlocks(RightForward):
    ranks = 4

    def arrived(self, room, block):
        self.all = [*getattr(self, "all", []), block]
        return super().arrived(room, block)


@wrong(TASK, "isend, irecv, compute, and only then wait", right_values=True)
class ComputesThenRequests(RightForward):
    def start(self, block, hop):
        return hop

    def arrived(self, hop, block):
        return super().arrived(super().start(block, hop), block)


@wrong(TASK, "wait() after computing, and not before", right_values=True)
class WaitsBeforeItComputes(RightForward):
    def start(self, block, hop):
        room = super().start(block, hop)
        for work in self.works if room is not None else ():
            work.wait()
        return room

    def arrived(self, room, block):
        return block if room is None else room


@wrong(TASK, "wait only when all pairs of this block are computed", right_values=True)
class WaitsAfterTheFirstPair(WaitsHalfway, RightForward):
    pass


@wrong(TASK, "wait() after computing, and not before", right_values=True)
class BlockingInTurns(RightForward):
    """Rank 0 sends first, the others receive first."""

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        room = torch.empty_like(block)
        first, second = (self.send, self.receive) if self.r == 0 else (self.receive, self.send)
        first(block, room)
        second(block, room)
        return room

    def send(self, block, room):
        dist.send(block, self.to())

    def receive(self, block, room):
        dist.recv(room, self.source())

    def arrived(self, room, block):
        return block if room is None else room


@wrong(TASK, "waits in send")
class AllSendFirst(BlockingInTurns):
    def start(self, block, hop):
        dist.send(block, self.to())


@wrong(TASK, "call .wait() on it")
class NeverWaits(RightForward):
    def arrived(self, room, block):
        return block if room is None else room


@wrong(TASK, "a block is received into the tensor that is being sent; hint: what is sent must not change")
class ReceivesIntoWhatItSends(RightForward):
    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        self.works = [dist.isend(block, self.to()), dist.irecv(block, self.source())]
        return block


@wrong(TASK, "a block is received into the tensor that is being sent")
class ReceivesInPlaceInTheEnd(ReceivesIntoWhatItSends):
    """Computes first."""

    def compute(self, block, hop):
        super().compute(block, hop)
        if hop < self.n - 1:
            RightForward.arrived(self, super().start(block, hop), block)

    def start(self, block, hop):
        return block

    def arrived(self, room, block):
        return block


class InTwoMessages(RightForward):
    def packed(self, k, v):
        return k.contiguous(), v.contiguous()

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        rooms = [torch.empty_like(one) for one in block]
        self.works = [dist.isend(one, self.to()) for one in block] + [dist.irecv(room, self.source()) for room in rooms]
        return rooms


wrong(TASK, "K and V go in one message", right_values=True)(InTwoMessages)


@wrong(TASK, "what is sent has to be contiguous")
class NotContiguous(InTwoMessages):
    def packed(self, k, v):
        return k, v


@wrong(TASK, "and repeated it is sent 2 times", right_values=True)
class RepeatsHeads(RightForward):
    def packed(self, k, v):
        times = self.q.shape[2] // k.shape[2]
        return super().packed(k, v).repeat(1, 1, 1, times, 1)


@wrong(TASK, "what is sent is float32")
class SendsSinglePrecision(RightForward):
    def packed(self, k, v):
        return super().packed(k, v).float()

    def unpacked(self, block):
        return block.double()


@wrong(TASK, "that is no ring", right_values=True, cases=slice(None))
class Gathers(RightForward):
    ranks = 4

    def start(self, block, hop):
        if hop == 0:
            self.all = [torch.empty_like(block) for _ in range(self.n)]
            dist.all_gather(self.all, block)
        return self.all[(self.r + hop + 1) % self.n]

    def arrived(self, room, block):
        return room


@wrong(TASK, "a barrier is no message of the ring", right_values=True)
class MeetsAtABarrier(RightForward):
    def compute(self, block, hop):
        dist.barrier()
        super().compute(block, hop)


@wrong(TASK, "a ring has one neighbour to send to", right_values=True)
class AsksTheOwner(RightForward):
    """Each block comes straight from its rank."""

    def packed(self, k, v):
        self.own = super().packed(k, v)
        return self.own

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        room = torch.empty_like(block)
        far = hop + 1
        self.works = [dist.isend(self.own, (self.r - far) % self.n), dist.irecv(room, (self.r + far) % self.n)]
        return room


@wrong(TASK, "right on 2 ranks only; hint: on 2 ranks the next rank is also the previous one")
class OneHop(RightForward):
    sizes = (2, 3, 4)

    def hops(self):
        return 2


@wrong(TASK, "q changed; hint: leave what you are given as it is")
class ChangesQ(RightForward):
    def result(self):
        found = super().result()
        self.q.zero_()
        return found


@wrong(TASK, "manyranks.parallel.collectives")
def by_the_library(q, k, v, positions, attend, merge):
    collectives.ring_all_gather(torch.stack((k, v)).flatten())
    return RightForward()(q, k, v, positions, attend, merge)


@wrong(TASK, "queries, their o, lse and do, and their positions have the same length")
class CutsQueriesOnly(RightForward):
    def compute(self, block, hop):
        k, v = block
        for rows in self.chunks():
            self.attend(self.q[rows], k, v, self.q_at(), self.k_at(hop))


@wrong(TASK, "merge takes a list of pairs")
class MergesOutputs(RightForward):
    def keep(self, i, part):
        self.done[i] = self.merge([self.done[i][0], part[0]]) if i in self.done else part


@wrong(TASK, "use what the check hands in for all scores", right_values=True)
class AttendsByItself(RightForward):
    def __call__(self, q, k, v, positions, attend, merge):
        return super().__call__(q, k, v, positions, own_attend, merge)


@wrong(TASK, "use what the check hands in for all scores")
class AttendsWithoutScale(RightForward):
    def __call__(self, q, k, v, positions, attend, merge):
        return super().__call__(q * q.shape[-1] ** 0.5, k, v, positions, own_attend, merge)


@wrong(TASK, "attend(q, k, v, positions[r], positions[(r + hop) % N])")
class ScalesTwice(RightForward):
    def __call__(self, q, k, v, positions, attend, merge):
        return super().__call__(q / q.shape[-1] ** 0.5, k, v, positions, attend, merge)


def own_attend(q, k, v, q_at, k_at):
    k, v = (one.repeat(1, 1, q.shape[2] // one.shape[2], 1) for one in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(q_at[:, None] < k_at, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.clamp(min=-1e300)[..., None]).exp()
    return torch.einsum("bast,tbad->sbad", p, v), lse.permute(2, 0, 1)


@wrong(TASK, "a loop does not end")
class NeverEnds(RightForward):
    seconds = 3

    def compute(self, block, hop):
        while True:
            pass


@wrong(TASK, "rank 1")
class EndsOneRank(RightForward):
    def compute(self, block, hop):
        if me()[0] == 1:
            raise SystemExit(3)
        super().compute(block, hop)
