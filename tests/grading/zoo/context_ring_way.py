"""Wrong answers to Ring of 07_context whose way is wrong: messages, their order, memory, and what is handed in."""

import torch
import torch.distributed as dist

from tests.grading.zoo.context_right import RightHomeward, RightRing, WaitsHalfway, backward_keeper
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong, backward = keeper(ZOO), backward_keeper(ZOO)
TASK = "Ring"


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


@backward("the same tag on both sides")
class TagsTheSendOnly(RightHomeward):
    def received(self):
        room = torch.empty_like(self.home)
        dist.irecv(room, self.source()).wait()
        return room


@wrong(TASK, "K and V went round twice: keep o and lse of forward", right_values=True)
class RunsRingAgain(RightRing):
    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        o, _ = ring(q, k, v, positions)
        ctx.save_for_backward(q, k, v)
        ctx.positions, ctx.ring, ctx.attend_backward = positions, ring, attend_backward
        return o

    @staticmethod
    def backward(ctx, do):
        saved = *ctx.saved_tensors, *ctx.ring(*ctx.saved_tensors, ctx.positions)
        return *RightHomeward()(saved, do, ctx.positions, ctx.attend_backward), None, None, None


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


@backward("wait only when all pairs of this block are computed", right_values=True)
class WaitsAfterTheFirstPair(WaitsHalfway, RightHomeward):
    pass


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
