"""Wrong answers to Ring of 07_context."""

import torch

from tests.grading.zoo.context_right import RightHomeward, RightRing, backward_keeper
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong, backward = keeper(ZOO), backward_keeper(ZOO)
TASK = "Ring"
SOURCE = "after k hops rank r has the block of rank r + k, modulo N"


@wrong(TASK, "Ring is a function; hint: it is a class derived from torch.autograd.Function")
def ring(q, k, v, positions, ring, attend_backward):
    return ring(q, k, v, positions)[0]


@wrong(TASK, "what forward returned is a tuple, not a tensor; hint: forward calls ring")
class ReturnsThePair(RightRing):
    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        return ring(q, k, v, positions)


@wrong(TASK, "there is no gradient: backward returns")
class ReturnsNothing(RightRing):
    @staticmethod
    def backward(ctx, do):
        return (None,) * 6


@wrong(TASK, "backward returns one for each argument of apply")
class ReturnsThree(RightRing):
    @staticmethod
    def backward(ctx, do):
        return RightRing.backward(ctx, do)[:3]


@wrong(TASK, "the gradient that backward is given is not 1")
class IgnoresUpstream(RightRing):
    @staticmethod
    def backward(ctx, do):
        return RightRing.backward(ctx, torch.ones_like(do))


@wrong(TASK, "what the other ranks have found of them never came home")
class OwnPartOnly(RightRing):
    class engine(RightHomeward):
        def send_on(self, part, hop):
            self.home += part if hop == 0 else 0

        def end(self):
            pass


@backward("what the other ranks have found of them never came home")
class NeverComesHome(RightHomeward):
    def end(self):
        self.received()


@backward("in backward, K and V have to go round again")
class ComputesItsOwnBlockOnly(RightHomeward):
    def hops(self):
        return 1

    def end(self):
        pass


@backward("the part of the gradients of K and V that stayed at home is missing")
class DropsItsOwn(RightHomeward):
    def send_on(self, part, hop):
        if hop:
            super().send_on(part, hop)


@backward("the part of the gradients of K and V that stayed at home counts twice")
class CountsItsOwnTwice(RightHomeward):
    def send_on(self, part, hop):
        super().send_on(2 * part if hop == 0 else part, hop)


@backward("a rank adds up what it finds for the blocks of all ranks")
class AddsAllBlocksUp(RightHomeward):
    def send_on(self, part, hop):
        self.home += part

    def end(self):
        pass


@backward("each stop adds its part to what it receives", ranks=4)
class Replaces(RightHomeward):
    def send_on(self, part, hop):
        if hop > 1:
            self.received()
            self.send(part)
        else:
            super().send_on(part, hop)


@backward("one stop's part of the gradients of K and V is missing", ranks=4)
class LastStopAddsNothing(RightHomeward):
    def send_on(self, part, hop):
        super().send_on(0 * part if hop == self.n - 1 else part, hop)


@backward("one stop's part of the gradients of K and V is missing", ranks=4)
class FirstStopSendsZeros(RightHomeward):
    def send_on(self, part, hop):
        super().send_on(0 * part if hop == 1 else part, hop)


class Short(RightHomeward):
    """The last stop keeps them."""

    def send_on(self, part, hop):
        if hop == self.n - 1:
            self.home += part + (self.received() if hop > 1 else 0)
        else:
            super().send_on(part, hop)

    def end(self):
        pass


backward("they stop one hop short of home")(Short)


@backward("they stop one hop short of home, or go one too far")
class OneHopTooFar(RightHomeward):
    def end(self):
        super().end()
        self.send(self.home)
        self.home = self.received()


@backward("the gradients of K and V are swapped")
class SwapsThem(RightHomeward):
    def end(self):
        super().end()
        self.home = self.home.flip(0)


@backward("the gradients of K and V are divided by N")
class Averages(RightHomeward):
    def end(self):
        super().end()
        self.home /= self.n


@backward("the gradient of q has the part of the rank's own block only")
class DqOfItsOwn(RightHomeward):
    def send_on(self, part, hop):
        super().send_on(part, hop)
        if hop == 0:
            self.kept = self.dq.clone()

    def end(self):
        super().end()
        self.dq = self.kept


@backward("the gradient of q has the last block's part only")
class DqOfTheLast(RightHomeward):
    def compute(self, block, hop):
        self.dq = torch.zeros_like(self.dq)
        super().compute(block, hop)


@backward("the two chunks have changed places")
class SwapsHalves(RightHomeward):
    def end(self):
        super().end()
        self.dq = torch.cat(self.dq.chunk(2)[::-1])
        self.home = torch.cat(self.home.chunk(2, 1)[::-1], 1)


@backward(SOURCE)
class WrongSource(RightHomeward):
    def whose(self, hop):
        return (self.r - hop) % self.n


@backward(SOURCE)
class OwnPositions(RightHomeward):
    def whose(self, hop):
        return self.r


@backward("the mask is of places within a rank")
class LocalPositions(RightHomeward):
    def q_at(self):
        return torch.arange(len(self.q))

    def k_at(self, hop):
        return self.q_at()


@backward("no mask was applied")
class Unmasked(RightHomeward):
    def k_at(self, hop):
        return torch.zeros_like(self.q_at())


@backward("what came has to take their place")
class ComputesWithItsOwn(RightHomeward):
    def packed(self, k, v):
        self.own = super().packed(k, v)
        return self.own

    def unpacked(self, block):
        return self.own


@backward("dK and dV of a block are the sum")
class DropsTheSecondHalf(RightHomeward):
    def chunks(self):
        return super().chunks()[:1]
