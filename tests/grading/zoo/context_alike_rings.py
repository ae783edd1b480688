"""Other right answers to ring_forward and Ring of 07_context, which must get full marks."""

import torch
import torch.distributed as dist

from tests.grading.zoo.context_right import RightForward, RightHomeward, ring_of


class Batched(RightForward):
    """By batch_isend_irecv."""

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        room = torch.empty_like(block)
        both = [dist.P2POp(dist.isend, block, self.to()), dist.P2POp(dist.irecv, room, self.source())]
        self.works = dist.batch_isend_irecv(both)
        return room


class ReceivesFirst(RightForward):
    """The receive is posted first; sends are waited for one hop later."""

    late = None

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        room = torch.empty_like(block)
        coming = dist.irecv(room, self.source())
        going = dist.isend(block, self.to())
        self.works = [coming, *([self.late] if self.late else [])]
        self.late = going
        return room

    def result(self):
        self.late.wait()
        return super().result()


class WaitsTwice(RightForward):
    """For the same work."""

    def arrived(self, room, block):
        super().arrived(room, block)
        return super().arrived(room, block)


class RowByRow(RightForward):
    """An attend for each query; merges in threes."""

    def keep(self, i, part):
        row = self.done.setdefault(i, [])
        row.append(part)
        if len(row) == 3:
            row[:] = [self.merge(row)]

    def compute(self, block, hop):
        k, v = block
        for i in range(len(self.q)):
            own, at = slice(i, i + 1), self.q_at()[i : i + 1]
            for keys in self.chunks():
                if self.counts(at, self.k_at(hop)[keys]):
                    self.keep(i, self.attend(self.q[own], k[keys], v[keys], at, self.k_at(hop)[keys]))

    def result(self):
        rows = [self.merge(self.done[i]) for i in range(len(self.q))]
        return tuple(torch.cat(one) for one in zip(*rows, strict=True))


class ByRank(RightForward):
    """Without asking positions: by the ranks, as few calls as can be."""

    def compute(self, block, hop):
        k, v = block
        early, late = self.chunks()[::-1]
        s = self.whose(hop)
        if hop == 0:
            return super().compute(block, hop)
        at = self.q_at(), self.k_at(hop)
        if s < self.r:
            self.keep(0, self.attend(self.q[late], k, v, at[0][late], at[1]))
        else:
            o, lse = self.attend(self.q, k[early], v[early], at[0], at[1][early])
            self.keep(0, (o[late], lse[late]))
            self.keep(1, (o[early], lse[early]))
        return None


class FromNothing(RightForward):
    """Begins with what has seen nothing, and merges all parts of a hop at once."""

    def compute(self, block, hop):
        new = {}
        for i, rows, keys, at in self.pairs(hop):
            new.setdefault(i, []).append(self.attend(self.q[rows], block[0][keys], block[1][keys], *at))
        for i, rows in enumerate(self.chunks()):
            nothing = torch.zeros_like(self.q[rows]), torch.full_like(self.q[rows][..., 0], -torch.inf)
            self.done[i] = self.merge([self.done.get(i, nothing), *new.get(i, [])])


class TokenByToken(RightForward):
    """Chunks of one token: fewer scores than asked for."""

    def chunks(self):
        return [slice(i, i + 1) for i in range(len(self.q))]

    def result(self):
        return tuple(torch.cat([self.done[i][j] for i in range(len(self.q))]) for j in (0, 1))


class InFlatRows(RightForward):
    """Two rows for the whole way, taken in turns."""

    def packed(self, k, v):
        self.shape = k.shape
        self.rows = [torch.cat((k.flatten(), v.flatten())), torch.empty(2 * k.numel(), dtype=k.dtype)]
        return self.rows[0]

    def start(self, block, hop):
        if hop >= self.n - 1:
            return None
        room = self.rows[(hop + 1) % 2]
        self.works = [dist.isend(block, self.to()), dist.irecv(room, self.source())]
        return room

    def unpacked(self, block):
        return block.view(2, *self.shape)


class GradientsWaitedForLate(RightHomeward):
    """Receives of gradients are posted before the block is computed with."""

    def compute(self, block, hop):
        if hop > 1:
            self.room = torch.empty_like(self.home)
            self.coming = dist.irecv(self.room, self.source(), tag=1)
        super().compute(block, hop)

    def received(self):
        if hasattr(self, "coming"):
            self.coming.wait()
            del self.coming
            return self.room
        return super().received()


class GradientsBatched(RightHomeward):
    """Received in batches of one, with other tags."""

    def send(self, part):
        self.sent += dist.batch_isend_irecv([dist.P2POp(dist.isend, part, self.to(), tag=7)])

    def received(self):
        room = torch.empty_like(self.home)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, self.source(), tag=7)]):
            work.wait()
        return room


class WholesByRank(RightHomeward):
    """As few calls as can be."""

    def compute(self, block, hop):
        late, early = self.chunks()
        everything = slice(None)
        if hop == 0:
            return super().compute(block, hop)
        rows, keys = (late, everything) if self.whose(hop) < self.r else (everything, early)
        part, at = torch.zeros_like(self.home), (self.q_at()[rows], self.k_at(hop)[keys])
        known = self.o[rows], self.lse[rows], self.do[rows]
        dq, dk, dv = self.attend_backward(self.q[rows], block[0][keys], block[1][keys], *known, *at)
        self.dq[rows] += dq
        part[0][keys] += dk
        part[1][keys] += dv
        self.send_on(part, hop)
        return None


class KeepsAttributes(RightHomeward):
    """A Ring that keeps its tensors as attributes, K and V stacked."""


def _forward(ctx, q, k, v, positions, ring, attend_backward):
    o, lse = ring(q, k, v, positions)
    ctx.q, ctx.kv, ctx.o, ctx.lse = q.detach(), torch.stack((k, v)), o, lse
    ctx.positions, ctx.attend_backward = positions, attend_backward
    return o.clone()


def _backward(ctx, do):
    saved = ctx.q, *ctx.kv, ctx.o, ctx.lse
    return *KeepsAttributes()(saved, do, ctx.positions, ctx.attend_backward), None, None, None


KEEPS_ATTRIBUTES = type(
    "KeepsAttributes",
    (torch.autograd.Function,),
    {
        "forward": staticmethod(_forward),
        "backward": staticmethod(_backward),
    },
)


ANSWERS = [
    ("ring_forward", Batched),
    ("ring_forward", ReceivesFirst),
    ("ring_forward", WaitsTwice),
    ("ring_forward", RowByRow),
    ("ring_forward", ByRank),
    ("ring_forward", FromNothing),
    ("ring_forward", TokenByToken),
    ("ring_forward", InFlatRows),
    ("Ring", ring_of(GradientsWaitedForLate)),
    ("Ring", ring_of(GradientsBatched)),
    ("Ring", ring_of(WholesByRank)),
    ("Ring", KEEPS_ATTRIBUTES),
]
