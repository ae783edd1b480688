"""Other right answers to the tasks of 07_context, which must get full marks."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.grading.zoo.context_right import RightForward, RightHomeward, RightUlysses, Swap, merged, places, ring_of
from tests.grading.zoo.wrong import me


def merge_two_by_two(parts):
    """By the logistic function of the difference, safe where nothing was seen."""
    o, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
    for other, its in parts:
        both = torch.logaddexp(lse, its)
        known = both.clamp(min=-1e300)
        o = o * (lse - known).exp()[..., None] + other * (its - known).exp()[..., None]
        lse = both
    return o, lse


def merge_by_softmax(parts):
    lse = torch.stack([lse for _, lse in parts], -1)
    weights = lse.softmax(-1).nan_to_num(0)
    outputs = torch.stack([o for o, _ in parts], -1)
    return [(outputs * weights[..., None, :]).sum(-1), lse.logsumexp(-1)]


def merge_from_the_back(parts):
    if len(parts) == 1:
        o, lse = parts[0]
        return o * lse.isfinite()[..., None], lse.clone()
    return merged([parts[0], merge_from_the_back(parts[1:])])


def positions_by_arithmetic(seq, rank, n):
    chunk, rest = divmod(seq, 2 * n)
    if rest:
        raise ValueError(f"{seq} is no multiple of {2 * n}")
    own = torch.arange(chunk)
    return torch.cat([own + (n + rank) * chunk, own + (n - 1 - rank) * chunk])


def positions_as_a_list(seq, rank, n):
    if seq % (2 * n):
        raise ValueError
    c = seq // (2 * n)
    late, early = (n + rank) * c, (n - 1 - rank) * c
    return torch.tensor([*range(late, late + c), *range(early, early + c)])


def unshard_by_index(parts):
    joined = torch.cat(parts)
    whole = torch.empty_like(joined)
    whole[torch.cat(places(len(joined), len(parts)))] = joined
    return whole


def unshard_by_argsort(parts):
    joined = torch.cat(parts)
    return joined[torch.cat(places(len(joined), len(parts))).argsort()]


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


class ByLists(RightUlysses):
    """By dist.all_to_all."""

    def swap(self, x):
        return Listed.apply(x)


class Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in x]
        dist.all_to_all(out, [one.contiguous() for one in x])
        return torch.stack(out)

    @staticmethod
    def backward(ctx, grad):
        return Listed.apply(grad)


class Together(RightUlysses):
    """q, k and v in one call."""

    def __call__(self, q, k, v, positions, attention):
        (self.r, self.n), self.p = me(), torch.cat(positions)
        parts = [self.heads(x) for x in (q, self.copied(k), self.copied(v))]
        sizes = [part.shape[3] for part in parts]
        return self.of_own(attention(*self.of_all(torch.cat(parts, 3)).split(sizes, 2)))


class ByHeadNumbers(RightUlysses):
    """By lists of heads, and a permutation in the end."""

    def heads(self, x):
        return torch.stack([x[:, :, list(range(r, x.shape[2], self.n))] for r in range(self.n)])

    def joined(self, y):
        heads = torch.arange(y.shape[0] * y.shape[3]).view(-1, y.shape[0]).t().flatten()
        joined = torch.cat(list(y), 2)
        out = torch.empty_like(joined)
        out[:, :, heads] = joined
        return out


class OneFunction(RightUlysses):
    """Copies are made by indices; tokens are sorted with index_select."""

    def copied(self, x):
        return x[:, :, torch.arange(max(self.n, x.shape[2])) % x.shape[2]]

    def sort(self, x):
        return x.index_select(0, self.p.argsort())

    def swap(self, x):
        return Swap.apply(x.contiguous(), self.return_back)


class AsyncSwap(RightUlysses):
    def swap(self, x):
        return Async.apply(x)


class Async(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty(x.shape, dtype=x.dtype)
        dist.all_to_all_single(out, F.pad(x, (0, 0)).contiguous(), async_op=True).wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Async.apply(grad)


ANSWERS = [
    ("merge", merge_two_by_two),
    ("merge", merge_by_softmax),
    ("merge", merge_from_the_back),
    ("positions", positions_by_arithmetic),
    ("positions", positions_as_a_list),
    ("unshard", unshard_by_index),
    ("unshard", unshard_by_argsort),
    ("ring_forward", Batched),
    ("ring_forward", ReceivesFirst),
    ("ring_forward", ByRank),
    ("ring_forward", FromNothing),
    ("ring_forward", TokenByToken),
    ("ring_forward", InFlatRows),
    ("Ring", ring_of(GradientsWaitedForLate)),
    ("Ring", ring_of(GradientsBatched)),
    ("Ring", ring_of(WholesByRank)),
    ("Ring", KEEPS_ATTRIBUTES),
    ("ulysses", ByLists),
    ("ulysses", Together),
    ("ulysses", ByHeadNumbers),
    ("ulysses", OneFunction),
    ("ulysses", AsyncSwap),
]
