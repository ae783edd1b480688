"""Wrong answers to ring_forward of 07_context."""

import torch
import torch.distributed as dist

from tests.grading.zoo.context_right import RightForward
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "ring_forward"
PAIR = "it returns one pair, (o_SBAD, lse_SBA)"


@wrong(TASK, f"ring_forward returned a NoneType; hint: {PAIR}")
def returns_nothing(q, k, v, positions, attend, merge):
    pass


@wrong(TASK, PAIR)
class ReturnsO(RightForward):
    def result(self):
        return super().result()[0]


@wrong(TASK, "right is [6, 2, 4, 5]")
class ReturnsTheLateHalf(RightForward):
    def result(self):
        return self.done[0]


@wrong(TASK, "nothing was sent")
def zeros(q, k, v, positions, attend, merge):
    return torch.zeros_like(q), torch.zeros_like(q[..., 0])


@wrong(TASK, "that is attention to the rank's own keys")
def own_block_only(q, k, v, positions, attend, merge):
    own = positions[dist.get_rank()]
    return attend(q, k, v, own, own)


@wrong(TASK, "one block is missing: a rank computes with N blocks")
class OneHopTooFew(RightForward):
    def hops(self):
        return self.n - 1


@wrong(TASK, "the rank's own block counts twice")
class OneHopTooMany(RightForward):
    def hops(self):
        return self.n + 1


@wrong(TASK, "one hop too many: after N − 1 hops each block has been everywhere", right_values=True)
class SendsHomeInTheEnd(RightForward):
    def start(self, block, hop):
        room = torch.empty_like(block)
        self.works = [dist.isend(block, self.to()), dist.irecv(room, self.source())]
        return room


@wrong(TASK, "after k hops rank r has the block of rank r + k, modulo N")
class WrongSource(RightForward):
    def whose(self, hop):
        return (self.r - hop) % self.n


@wrong(TASK, "after k hops rank r has the block of rank r + k, modulo N")
class OneTooFar(RightForward):
    def whose(self, hop):
        return (self.r + hop + 1) % self.n


@wrong(TASK, "after k hops, they are those of rank r + k")
class OwnPositions(RightForward):
    def whose(self, hop):
        return self.r


@wrong(TASK, "list index out of range")
class WithoutModulo(RightForward):
    def whose(self, hop):
        return self.r + hop


@wrong(TASK, "the mask is of places within a rank")
class LocalPositions(RightForward):
    def q_at(self):
        return torch.arange(len(self.q))

    def k_at(self, hop):
        return torch.arange(len(self.q))


@wrong(TASK, "no mask was applied")
class Unmasked(RightForward):
    def k_at(self, hop):
        return torch.zeros_like(self.q_at())


@wrong(TASK, "that is the wrong direction", right_values=True)
class TurnsUpwards(RightForward):
    def to(self):
        return (self.r + 1) % self.n

    def source(self):
        return (self.r - 1) % self.n

    def whose(self, hop):
        return (self.r - hop) % self.n


@wrong(TASK, "that is the wrong direction: here K and V travel to rank r − 1")
class TurnsUpwardsUnawares(RightForward):
    def to(self):
        return (self.r + 1) % self.n

    def source(self):
        return (self.r - 1) % self.n


@wrong(TASK, "pass on what came last")
class SendsItsOwnEachTime(RightForward):
    def packed(self, k, v):
        self.own = super().packed(k, v)
        return self.own

    def start(self, block, hop):
        return super().start(self.own, hop)


@wrong(TASK, "what came has to take their place")
class ComputesWithItsOwn(RightForward):
    def packed(self, k, v):
        self.own = super().packed(k, v)
        return self.own

    def unpacked(self, block):
        return self.own


class OneTravels(RightForward):
    def packed(self, k, v):
        self.both = k, v
        return self.chosen(k, v).contiguous()


@wrong(TASK, "V travels, but K stays")
class VTravels(OneTravels):
    def chosen(self, k, v):
        return v

    def unpacked(self, block):
        return self.both[0], block


@wrong(TASK, "K travels, but V stays")
class KTravels(OneTravels):
    def chosen(self, k, v):
        return k

    def unpacked(self, block):
        return block, self.both[1]


@wrong(TASK, "K and V are swapped")
class TakesThemTheOtherWayRound(RightForward):
    def packed(self, k, v):
        self.own = super().packed(k, v)
        return self.own

    def unpacked(self, block):
        return block if block is self.own else block.flip(0)


@wrong(TASK, "blocks of ranks on one side of r are left out")
class SkipsLaterRanks(RightForward):
    """As is right where rank r has the r-th N-th of the sequence."""

    def compute(self, block, hop):
        if self.whose(hop) <= self.r:
            super().compute(block, hop)


@wrong(TASK, "the blocks' outputs are added up")
class AddsOutputs(RightForward):
    def keep(self, i, part):
        o, lse = self.done.get(i, (0, part[1]))
        self.done[i] = o + part[0], lse


@wrong(TASK, "the two chunks have changed places")
class SwapsHalves(RightForward):
    def result(self):
        return tuple(torch.cat(one.chunk(2)[::-1]) for one in super().result())


class OfWholes(RightForward):
    """Without cutting chunks."""

    def compute(self, block, hop):
        k, v = self.unpacked(block)
        self.keep(0, self.attend(self.q, k, v, self.q_at(), self.k_at(hop)))

    def result(self):
        return self.done[0]


@wrong(TASK, "the rank's own block is missing")
class WithoutItsOwn(OfWholes):
    def compute(self, block, hop):
        if hop:
            super().compute(block, hop)


@wrong(TASK, "Leave the pair out", right_values=True)
class ComputesAllPairs(OfWholes):
    pass


@wrong(TASK, "Leave the pair out", right_values=True)
class ComputesHiddenChunks(RightForward):
    def counts(self, q_at, k_at):
        return True


@wrong(TASK, "pair of chunks sees any key. Leave the pair out", right_values=True)
class SkipsWholeBlocksOnly(OfWholes):
    """Of which there are none in this layout."""

    def compute(self, block, hop):
        if self.counts(self.q_at(), self.k_at(hop)):
            super().compute(block, hop)


@wrong(TASK, "that is the mean of the blocks' outputs")
class MeanOfBlocks(OfWholes):
    def keep(self, i, part):
        self.done.setdefault(i, []).append(part)

    def result(self):
        outputs, sums = zip(*self.done[0], strict=True)
        return torch.stack(outputs).mean(0), sums[0]


@wrong(TASK, "each block's output is averaged with all that was before it")
class HalvesOutputs(RightForward):
    def keep(self, i, part):
        self.done[i] = ((self.done[i][0] + part[0]) / 2, part[1]) if i in self.done else part


@wrong(TASK, "an empty result has lse = −∞: with 0 it counts as exp(0) = 1")
class BeginsWithZeros(RightForward):
    def keep(self, i, part):
        self.done[i] = self.merge([self.done.get(i, tuple(map(torch.zeros_like, part))), part])


@wrong(TASK, "that is the last block's result")
class KeepsTheLast(OfWholes):
    def keep(self, i, part):
        self.done[i] = part


@wrong(TASK, "o is right and lse is not")
class ForgetsLse(RightForward):
    def result(self):
        o, lse = super().result()
        return o, torch.zeros_like(lse)
