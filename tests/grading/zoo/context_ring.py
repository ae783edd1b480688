"""Wrong answers to Ring of 07_context."""

import torch
import torch.distributed as dist

from tests.grading.zoo.context_right import RightHomeward, RightRing, ring_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Ring"
SOURCE = "after k hops rank r has the block of rank r + k, modulo N"


def backward(says, right_values=False, ranks=3):
    """A decorator: a Ring with the backward below it. ranks: on how many it shows."""

    def keep(engine):
        kind = ring_of(engine)
        kind.sizes = getattr(engine, "sizes", (ranks,))
        wrong(TASK, says, right_values)(kind)
        return engine

    return keep


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


class Upwards(RightHomeward):
    def to(self):
        return (self.r + 1) % self.n

    def source(self):
        return (self.r - 1) % self.n


backward("that is the wrong direction")(Upwards)


@backward("that is the wrong direction", right_values=True)
class TurnsUpwards(Upwards):
    def whose(self, hop):
        return (self.r - hop) % self.n


@backward("gradients have been taken for K and V", ranks=4)
class WithoutTags(RightHomeward):
    def send(self, part):
        self.sent.append(dist.isend(part, self.to()))

    def received(self):
        room = torch.empty_like(self.home)
        dist.irecv(room, self.source()).wait()
        return room


@backward("a rank's part for its own block stays at home", right_values=True)
class OwnPartTravels(RightHomeward):
    """N hops of gradients."""

    def send_on(self, part, hop):
        self.send(part + self.received() if hop else part)


@backward("a ring has one neighbour to send to", right_values=True)
class SendsGradientsStraightHome(RightHomeward):
    def send_on(self, part, hop):
        if hop == 0:
            self.home += part
            return
        self.sent.append(dist.isend(part, self.whose(hop), tag=1))

    def end(self):
        for hop in range(1, self.n):
            room = torch.empty_like(self.home)
            dist.irecv(room, (self.r - hop) % self.n, tag=1).wait()
            self.home += room


@backward("a sum over ranks adds gradients of different tokens", right_values=True)
class ReduceScatters(RightHomeward):
    def send_on(self, part, hop):
        self.all = self.all if hop else [torch.zeros_like(part) for _ in range(self.n)]
        self.all[self.whose(hop)] += part

    def end(self):
        dist.reduce_scatter(self.home, self.all)


@backward("a sum over ranks adds gradients of different tokens")
class AllReduces(RightHomeward):
    def send_on(self, part, hop):
        self.home += part

    def end(self):
        dist.all_reduce(self.home)


@backward("that is no ring", right_values=True)
class GathersAgain(RightHomeward):
    def start(self, block, hop):
        if hop == 0:
            self.all = [torch.empty_like(block) for _ in range(self.n)]
            dist.all_gather(self.all, block)
        return self.all[(self.r + hop + 1) % self.n]

    def arrived(self, room, block):
        return room


@backward("what is sent is float16")
class SendsGradientsInHalfPrecision(RightHomeward):
    def send(self, part):
        self.sent.append(dist.isend(part.half(), self.to(), tag=1))

    def received(self):
        room = torch.empty_like(self.home, dtype=torch.float16)
        dist.irecv(room, self.source(), tag=1).wait()
        return room.double()


@backward("what is sent is float32")
class SendsGradientsInSinglePrecision(RightHomeward):
    def send(self, part):
        self.sent.append(dist.isend(part.float(), self.to(), tag=1))

    def received(self):
        room = torch.empty_like(self.home, dtype=torch.float32)
        dist.irecv(room, self.source(), tag=1).wait()
        return room.double()


@backward("K and V go in one message, as do dK and dV", right_values=True)
class GradientsInTwoMessages(RightHomeward):
    def send(self, part):
        self.sent += [dist.isend(one, self.to(), tag=1) for one in part]

    def received(self):
        rooms = [torch.empty_like(one) for one in self.home]
        for room in rooms:
            dist.irecv(room, self.source(), tag=1).wait()
        return torch.stack(rooms)


@backward("call .wait() on it")
class DoesNotWaitForGradients(RightHomeward):
    def received(self):
        room = torch.empty_like(self.home)
        self.works_late = [*getattr(self, "works_late", []), dist.irecv(room, self.source(), tag=1)]
        return room


@backward("isend, irecv, compute, and only then wait", right_values=True)
class ComputesThenRequests(RightHomeward):
    def start(self, block, hop):
        return hop

    def arrived(self, hop, block):
        return super().arrived(super().start(block, hop), block)


@backward("wait() after computing, and not before", right_values=True)
class WaitsBeforeItComputes(RightHomeward):
    def start(self, block, hop):
        room = super().start(block, hop)
        for work in self.works if room is not None else ():
            work.wait()
        return room

    def arrived(self, room, block):
        return block if room is None else room


@backward("Leave the pair out", right_values=True)
class ComputesHiddenChunks(RightHomeward):
    def counts(self, q_at, k_at):
        return True


@backward("A tensor that is cleared and filled again is the same tensor")
class ReusesOneTensor(RightHomeward):
    """For what all blocks add, while it is sent."""

    def send(self, part):
        if not hasattr(self, "row"):
            self.row = torch.empty_like(part)
        super().send(self.row.copy_(part))


@backward("right on 2 ranks only; hint: on 2 ranks the next rank is also the previous one")
class OneHop(RightHomeward):
    sizes = (2, 3, 4)

    def hops(self):
        return 2


@backward("waits in")
class SendsBlocking(RightHomeward):
    def send(self, part):
        dist.send(part, self.to(), tag=1)

    def send_on(self, part, hop):
        if hop:
            self.send(part)


@wrong(TASK, "the blocks of the other ranks go round again in backward", right_values=True)
class KeepsAllBlocks(RightRing):
    """Gathered in forward."""

    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        kv = torch.stack((k, v))
        ctx.all = [torch.empty_like(kv) for _ in range(me()[1])]
        dist.all_gather(ctx.all, kv)
        return RightRing.forward(ctx, q, k, v, positions, ring, attend_backward)


@wrong(TASK, "called all_gather in forward", right_values=True)
class GathersInForward(KeepsAllBlocks):
    @staticmethod
    def backward(ctx, do):
        engine = FromKept()
        engine.all = ctx.all
        return *engine(ctx.saved_tensors, do, ctx.positions, ctx.attend_backward), None, None, None


class FromKept(RightHomeward):
    def start(self, block, hop):
        return self.all[(self.r + hop + 1) % self.n]

    def arrived(self, room, block):
        return room


@wrong(TASK, "the gradient of o changed; hint: leave what you are given as it is")
class ChangesUpstream(RightRing):
    @staticmethod
    def backward(ctx, do):
        grads = RightRing.backward(ctx, do)
        do.zero_()
        return grads


@wrong(TASK, "the check calls Ring.apply(q, k, v, positions, ring, attend_backward)")
class TakesThree(RightRing):
    @staticmethod
    def forward(ctx, q, k, v):
        return q


@wrong(TASK, "backward gets ctx and do_SBAD")
class WantsTwoGradients(RightRing):
    @staticmethod
    def backward(ctx, do, dlse):
        return RightRing.backward(ctx, do)


@wrong(TASK, "Ring is a class of another kind; hint: it is a class derived from torch.autograd.Function")
class IsAModule(torch.nn.Module):
    pass


@wrong(TASK, "manyranks.parallel.collectives")
class ByTheLibrary(RightRing):
    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        from manyranks.parallel import collectives

        collectives.ring_all_gather(k.flatten())
        return RightRing.forward(ctx, q, k, v, positions, ring, attend_backward)


@wrong(TASK, "elements are wrong")
class OfItsOwnForward(RightRing):
    """Saves the output of its own block only."""

    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        o = RightRing.forward(ctx, q, k, v, positions, ring, attend_backward)
        ctx.save_for_backward(q, k, v, o, torch.zeros_like(o[..., 0]))
        return o
