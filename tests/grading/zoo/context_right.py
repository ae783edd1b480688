"""What the zoo of context parallelism is made of: right answers, in parts that wrong ones leave out or replace."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import keeper, me


def merged(parts):
    """A right merge."""
    o, lse = torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])
    most = lse.amax(0).clamp(min=-1e30)
    weights = (lse - most).exp()
    total = weights.sum(0)
    return (weights[..., None] * o).sum(0) / total.clamp(min=1)[..., None], most + total.log()


def places(seq, n):
    """The right positions, by rank."""
    chunks = torch.arange(seq).chunk(2 * n)
    return [torch.cat((chunks[n + rank], chunks[n - 1 - rank])) for rank in range(n)]


class Turning:
    """A ring of N blocks, in parts: what both directions have in common."""

    def turn(self, q, k, v, positions):
        (self.r, self.n), self.q, self.positions = me(), q, positions
        block = self.packed(k, v)
        for hop in range(self.hops()):
            room = self.start(block, hop)
            self.compute(block, hop)
            block = self.arrived(room, block)

    def hops(self):
        return self.n

    def packed(self, k, v):
        return torch.stack((k, v))

    def unpacked(self, block):
        return block

    def to(self):
        return (self.r - 1) % self.n

    def source(self):
        return (self.r + 1) % self.n

    def start(self, block, hop):
        if hop >= self.hops() - 1:
            return None
        room = torch.empty_like(block)
        self.works = [dist.isend(block, self.to()), dist.irecv(room, self.source())]
        return room

    def arrived(self, room, block):
        if room is None:
            return block
        for work in self.works:
            work.wait()
        return room

    def whose(self, hop):
        return (self.r + hop) % self.n

    def q_at(self):
        return self.positions[self.r]

    def k_at(self, hop):
        return self.positions[self.whose(hop)]

    def chunks(self):
        half = len(self.q) // 2
        return slice(0, half), slice(half, None)

    def pairs(self, hop):
        for i, rows in enumerate(self.chunks()):
            for keys in self.chunks():
                at = self.q_at()[rows], self.k_at(hop)[keys]
                if self.counts(*at):
                    yield i, rows, keys, at

    def counts(self, q_at, k_at):
        return bool(k_at.min() <= q_at.max())


class WaitsHalfway(Turning):
    """Waits for the next block after the first pair of chunks of this one: a mistake of both directions."""

    def pairs(self, hop):
        for number, pair in enumerate(super().pairs(hop)):
            yield pair
            if number == 0 and hop < self.n - 1:
                super().arrived(True, None)

    def arrived(self, room, block):
        return block if room is None else room


class RightForward(Turning):
    """A right answer to ring_forward."""

    def __call__(self, q, k, v, positions, attend, merge):
        self.attend, self.merge, self.done = attend, merge, {}
        self.turn(q, k, v, positions)
        return self.result()

    def compute(self, block, hop):
        k, v = self.unpacked(block)
        for i, rows, keys, at in self.pairs(hop):
            self.keep(i, self.attend(self.q[rows], k[keys], v[keys], *at))

    def keep(self, i, part):
        self.done[i] = self.merge([self.done[i], part]) if i in self.done else part

    def result(self):
        return tuple(torch.cat(halves) for halves in zip(self.done[0], self.done[1], strict=True))


class RightHomeward(Turning):
    """The backward of a right Ring."""

    def __call__(self, saved, do, positions, attend_backward):
        q, k, v, self.o, self.lse = saved
        self.do, self.attend_backward, self.sent = do, attend_backward, []
        self.dq, self.home = torch.zeros_like(q), torch.zeros_like(torch.stack((k, v)))
        self.turn(q, k, v, positions)
        self.end()
        for work in self.sent:
            work.wait()
        return self.dq, *self.home

    def compute(self, block, hop):
        part, (k, v) = torch.zeros_like(self.home), self.unpacked(block)
        for _, rows, keys, at in self.pairs(hop):
            known = self.o[rows], self.lse[rows], self.do[rows]
            dq, dk, dv = self.attend_backward(self.q[rows], k[keys], v[keys], *known, *at)
            self.dq[rows] += dq
            part[:, keys] += torch.stack((dk, dv))
        self.send_on(part, hop)

    def send_on(self, part, hop):
        if hop == 0:
            self.home += part
            return
        self.send(part + self.received() if hop > 1 else part)

    def send(self, part):
        self.sent.append(dist.isend(part, self.to(), tag=1))

    def received(self):
        room = torch.empty_like(self.home)
        dist.irecv(room, self.source(), tag=1).wait()
        return room

    def end(self):
        self.home += self.received()


class RightRing(torch.autograd.Function):
    """A right Ring; engine: what makes its backward."""

    engine = RightHomeward

    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        o, lse = ring(q, k, v, positions)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.positions, ctx.attend_backward = positions, attend_backward
        return o

    @staticmethod
    def backward(ctx, do):
        engine = ctx._forward_cls.engine()
        return *engine(ctx.saved_tensors, do, ctx.positions, ctx.attend_backward), None, None, None


def ring_of(engine):
    """A Ring with this backward, under its name."""
    return type(engine.__name__, (RightRing,), {"engine": engine})


def backward_keeper(zoo):
    """As keeper: a decorator that keeps a Ring with the backward below it. ranks: on how many it shows."""

    def backward(says, right_values=False, ranks=3):
        def keep(engine):
            kind = ring_of(engine)
            kind.sizes = getattr(engine, "sizes", (ranks,))
            keeper(zoo)("Ring", says, right_values)(kind)
            return engine

        return keep

    return backward


class Swap(torch.autograd.Function):
    """An all-to-all of chunks along the first dimension; back: what sends gradients back."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return sent(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None


def sent(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    dist.all_to_all_single(out, x.contiguous())
    return out


class RightUlysses:
    """A right answer to ulysses."""

    def __call__(self, q, k, v, positions, attention):
        (self.r, self.n), self.p = me(), torch.cat(positions)
        q, k, v = (self.of_all(self.heads(x)) for x in (q, self.copied(k), self.copied(v)))
        return self.of_own(attention(q, k, v))

    def copied(self, x):
        return x.repeat(1, 1, max(1, self.n // x.shape[2]), 1)

    def heads(self, x):
        """[to rank, S, B, its heads, D]"""
        return x.unflatten(2, (-1, self.n)).movedim(3, 0)

    def of_all(self, x):
        return self.sort(self.swap(x).flatten(0, 1))

    def of_own(self, y):
        return self.joined(self.swap(self.back(y).unflatten(0, (self.n, -1))))

    def joined(self, y):
        return y.movedim(0, 3).flatten(2, 3)

    def swap(self, x):
        return Swap.apply(x, self.return_back)

    def return_back(self, grad):
        return sent(grad)

    def sort(self, x):
        return x[self.p.argsort()]

    def back(self, y):
        return y[self.p]
