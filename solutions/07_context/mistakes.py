"""Answers to 07_context: what is right, and the mistakes that are made."""

from functools import partial, reduce

import torch
import torch.distributed as dist
from torch.nn import functional as F

from manyranks.grade.answers import also_right, mistake, right

# fmt: off
LAYOUT = "rank r has chunk N + r of 2N"
COPY = "leave what you are given as it is"

def slip(task, base, name, hint="", points=0.0, says="", on=(), bases=(), **steps):
    """Keeps a mistake: the right answer with one step changed, or with what these bases change."""
    kind = type(name, (*bases, base), steps)
    kind = type(name, (RightRing,), {"engine": kind}) if base.__name__ == "RightHomeward" else kind
    globals()[name] = mistake(task, hint, says=says, points=points, on=on)(kind)

# Task 1

def stacked(parts):
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])

@right("merge")
class RightMerge:
    """A right answer to merge, in parts."""

    exp = staticmethod(torch.exp)

    def __call__(self, parts):
        o, lse = stacked(parts)
        most = self.most(lse)
        weights = self.exp(lse - most)
        return self.o(weights, o), self.lse(most, weights.sum(0), lse)

    def most(self, lse):
        return lse.amax(0).clamp(min=-1e300)

    def o(self, weights, o):
        return (weights[..., None] * o).sum(0) / weights.sum(0).clamp(min=1e-300)[..., None]

    def lse(self, most, total, lse):
        return most + total.log()

@also_right("merge")
def merge_two_by_two(parts):
    """Safe where nothing was seen."""
    o, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
    for other, its in parts:
        both = torch.logaddexp(lse, its)
        known = both.clamp(min=-1e300)
        o = o * (lse - known).exp()[..., None] + other * (its - known).exp()[..., None]
        lse = both
    return o, lse

@also_right("merge")
def merge_by_softmax(parts):
    o, lse = stacked(parts)
    return [(o * lse.softmax(0).nan_to_num(0)[..., None]).sum(0), lse.logsumexp(0)]

@also_right("merge")
def merge_from_the_back(parts):
    if len(parts) == 1:
        o, lse = parts[0]
        return o * lse.isfinite()[..., None], lse.clone()
    return RightMerge()([parts[0], merge_from_the_back(parts[1:])])

LEFT = "−∞ − (−∞) is NaN: where no part has a key, the largest lse is −∞ itself. Subtract a finite number there"
merge = partial(slip, "merge", RightMerge)
merge("without_the_maximum",
    "exp(1000) is no float64, and exp(−1000) is 0: subtract the largest lse before exp, and add it to the logarithm",
    1.95, most=lambda self, lse: torch.zeros(()))
merge("one_maximum_for_all", "each query and head has its own largest lse: next to +1000, exp(−1000 − 1000) "
    "is 0. torch.stack the parts' lse, and take amax(0)", 1.95, most=lambda self, lse: lse.max())
merge("of_nothing_is_nan", LEFT, 2.25, most=lambda self, lse: lse.amax(0))
merge("keeps_what_nobody_saw", "where no part has a key, o is 0, whatever the parts' own o are there", 2.25,
    o=lambda self, weights, o: torch.where(weights.sum(0)[..., None] > 0, RightMerge.o(self, weights, o), o[0]))
merge("finite_lse", "where no part has a key, lse is −∞: there is no exponential to sum", 2.25,
    lse=lambda self, most, total, lse: (most + total.log()).nan_to_num(neginf=-1e300))
merge("mean_of_outputs",
    "that's the mean of the outputs: weight each with exp(its lse) ÷ the sum of all parts' exp(lse)",
    o=lambda self, weights, o: o.mean(0))
merge("does_not_divide", "these weights don't add up to 1: divide by the sum of all parts' exp(lse − m)",
    o=lambda self, weights, o: (weights[..., None] * o).sum(0))
merge("base_two", "that's base 2, and lse is a natural logarithm: torch.exp and torch.log", exp=staticmethod(torch.exp2),
    lse=lambda self, most, total, lse: most + total.log2())
merge("largest_lse", "that's only the largest lse: add the logarithm of the sum of the weights to it",
    lse=lambda self, most, total, lse: most)
merge("forgets_to_add_the_maximum", "lse lacks what you subtracted before exp: add the largest one again",
    lse=lambda self, most, total, lse: total.log())
merge("adds_a_little", says="right is", lse=lambda self, most, total, lse: most + total.log() + 0.05)
merge("merges_two", "there may be one part, two, or more", __call__=lambda self, parts: RightMerge.__call__(self, parts[:2]))

@mistake("merge", COPY, says="what was changed")
def adds_in_place(parts):
    o, lse = RightMerge()(parts)
    parts[0][0].copy_(o)
    return parts[0][0], lse

# Task 2

def checked(layout, rest=lambda seq, n: seq % (2 * n)):
    """layout(seq, rank, n), where seq can be cut: nothing is left over."""

    def laid_out(seq, rank, n):
        if rest(seq, n):
            raise ValueError(f"{seq} tokens on {n} ranks")
        return layout(seq, rank, n)

    return laid_out

def cut(numbers):
    """Positions of the chunks with these numbers."""
    return lambda seq, rank, n: torch.cat([torch.arange(seq).chunk(2 * n)[k] for k in numbers(rank, n)])

def undone(layout, inverse=True):
    """Puts parts back as if they had been cut so."""

    def whole(parts):
        joined = torch.cat(parts)
        order = torch.cat([layout(len(joined), rank, len(parts)) for rank in range(len(parts))])
        return joined[order.argsort() if inverse else order]

    return whole

def answer(keep, function, name):
    """Under this name."""
    function.__name__ = function.__qualname__ = name
    return keep(function)

folded = cut(lambda r, n: (n + r, n - 1 - r))
LAYOUTS = {
    "chapters_zigzag": ("that's the lesson's zigzag, chunks r and 2N − 1 − r: here rank r has chunks N + r and N − 1 − r",
        cut(lambda r, n: (r, 2 * n - 1 - r))),
    "early_first": ("a rank's early chunk, N − 1 − r, comes before its late one, N + r. Put the late chunk first",
        cut(lambda r, n: (n - 1 - r, n + r))),
    "striped": ("the tokens are dealt in turn, but a rank has two chunks of neighbors",
        lambda seq, rank, n: torch.arange(rank, seq, n)),
}
for name, (hint, layout) in LAYOUTS.items():
    globals()[name] = answer(mistake("positions", hint), checked(layout), name)
    globals()[f"undone_{name}"] = answer(mistake("unshard", hint), undone(layout), f"undone_{name}")
right_positions = answer(right("positions"), checked(folded), "right_positions")
neighbors = answer(mistake("positions", "those two chunks are neighbors: a rank has a late one and an early one of 2N"),
    checked(cut(lambda r, n: (2 * r, 2 * r + 1))), "neighbors")

@also_right("positions")
def positions_by_arithmetic(seq, rank, n):
    chunk, rest = divmod(seq, 2 * n)
    if rest:
        raise type("Odd", (ValueError,), {})(f"{seq} is no multiple of {2 * n}")
    own = torch.arange(chunk)
    return torch.cat([own + (n + rank) * chunk, own + (n - 1 - rank) * chunk])

@also_right("positions")
def positions_as_a_list(seq, rank, n):
    if seq % (2 * n):
        raise ValueError
    c = seq // (2 * n)
    late, early = (n + rank) * c, (n - 1 - rank) * c
    return torch.tensor([*range(late, late + c), *range(early, early + c)])

REFUSES = "raise a ValueError if 2n doesn't divide seq"
refuses_with_the_wrong_precedence = answer(
    mistake("positions", f"{REFUSES}: % comes before *, so write seq % (2 * n)", points=1.5),
    checked(folded, lambda seq, n: seq % 2 * n), "refuses_with_the_wrong_precedence")
refuses_by_n_only = answer(mistake("positions", f"N divides it, but there are 2N chunks: {REFUSES}", points=1.5),
    checked(folded, lambda seq, n: seq % n), "refuses_by_n_only")
refuses_nothing = answer(mistake("positions", f"{REFUSES}: what is left over would be lost", points=1.5),
    lambda seq, rank, n: folded(seq // (2 * n) * 2 * n, rank, n), "refuses_nothing")

@right("unshard")
def right_unshard(parts):
    late, early = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*early[::-1], *late))

@also_right("unshard")
def unshard_by_index(parts):
    joined = torch.cat(parts)
    whole = torch.empty_like(joined)
    whole[torch.cat([folded(len(joined), r, len(parts)) for r in range(len(parts))])] = joined
    return whole

unshard_by_argsort = answer(also_right("unshard"), undone(folded), "unshard_by_argsort")
takes_the_permutation = answer(mistake("unshard", "the tokens are moved the wrong way: joined[order] takes token order[i] for "
    "place i. To put token i into place order[i], whole[order] = joined, or joined[order.argsort()]"),
    undone(folded, inverse=False), "takes_the_permutation")
joins = answer(mistake("unshard",
    "the parts are joined rank by rank: each has a late chunk and an early one, which belong to different places"),
    lambda parts: torch.cat(parts), "joins")

@mistake("unshard",
    "the early chunks stand in the order of ranks, but the last rank has the first chunk: reverse their order")
def forgets_to_turn_the_early_half(parts):
    late, early = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*early, *late))

sorts = answer(mistake("unshard", says=LAYOUT), lambda parts: torch.cat(parts).sort(0).values, "sorts")

# What both directions of a ring have in common

class Turning:
    """A ring of N blocks, in parts."""

    def turn(self, q, k, v, positions):
        self.r, self.n, self.q, self.positions = dist.get_rank(), dist.get_world_size(), q, positions
        block = self.packed(k, v)
        for hop in range(self.hops()):
            room = self.start(block, hop)
            self.compute(block, hop)
            block = self.arrived(room, block)

    def hops(self):
        return self.n

    def packed(self, k, v):
        return torch.stack((k, v))

    def to(self):
        return (self.r - 1) % self.n

    def source(self):
        return (self.r + 1) % self.n

    def last(self, hop):
        return hop >= self.hops() - 1

    def start(self, block, hop):
        if self.last(hop):
            return None
        room = self.room_for(block, hop)
        self.works = self.begin(block, room, hop)
        return room

    def room_for(self, block, hop):
        return torch.empty_like(block)

    def begin(self, block, room, hop):
        return [dist.isend(block, self.to()), dist.irecv(room, self.source())]

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

# Task 3

@right("ring_forward")
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

    def unpacked(self, block):
        return block

    def keep(self, i, part):
        self.done[i] = self.merge([self.done[i], part]) if i in self.done else part

    def result(self):
        return tuple(torch.cat(halves) for halves in zip(self.done[0], self.done[1], strict=True))

@also_right("ring_forward")
class Batched(RightForward):
    """By batch_isend_irecv."""

    def begin(self, block, room, hop):
        both = [dist.P2POp(dist.isend, block, self.to()), dist.P2POp(dist.irecv, room, self.source())]
        return dist.batch_isend_irecv(both)

@also_right("ring_forward")
class ReceivesFirst(RightForward):
    """The receive is posted first; sends are waited for one hop later."""

    late = None

    def begin(self, block, room, hop):
        coming = dist.irecv(room, self.source())
        going = dist.isend(block, self.to())
        before, self.late = self.late, going
        return [coming, *([before] if before else [])]

    def result(self):
        self.late.wait()
        return super().result()

@also_right("ring_forward")
class WaitsTwice(RightForward):
    """For the same work."""

    def arrived(self, room, block):
        super().arrived(room, block)
        return super().arrived(room, block)

@also_right("ring_forward")
class TokenByToken(RightForward):
    """Chunks of one token: fewer scores than asked for."""

    def chunks(self):
        return [slice(i, i + 1) for i in range(len(self.q))]

    def result(self):
        return tuple(torch.cat([self.done[i][j] for i in range(len(self.q))]) for j in (0, 1))

@also_right("ring_forward")
class RowByRow(TokenByToken):
    """Merges in threes."""

    def keep(self, i, part):
        row = self.done.setdefault(i, [])
        row.append(part)
        if len(row) == 3:
            row[:] = [self.merge(row)]

    def result(self):
        self.done = {i: self.merge(row) for i, row in self.done.items()}
        return super().result()

@also_right("ring_forward")
class ByRank(RightForward):
    """Without asking positions: by the ranks, as few calls as can be."""

    def compute(self, block, hop):
        (k, v), (late, early), at = block, self.chunks(), (self.q_at(), self.k_at(hop))
        if hop == 0:
            super().compute(block, hop)
        elif self.whose(hop) < self.r:
            self.keep(0, self.attend(self.q[late], k, v, at[0][late], at[1]))
        else:
            o, lse = self.attend(self.q, k[early], v[early], at[0], at[1][early])
            self.keep(0, (o[late], lse[late]))
            self.keep(1, (o[early], lse[early]))

@also_right("ring_forward")
class FromNothing(RightForward):
    """Begins with what has seen nothing, and merges all parts of a hop at once."""

    def compute(self, block, hop):
        new = {}
        for i, rows, keys, at in self.pairs(hop):
            new.setdefault(i, []).append(self.attend(self.q[rows], block[0][keys], block[1][keys], *at))
        for i, rows in enumerate(self.chunks()):
            nothing = torch.zeros_like(self.q[rows]), torch.full_like(self.q[rows][..., 0], -torch.inf)
            self.done[i] = self.merge([self.done.get(i, nothing), *new.get(i, [])])

@also_right("ring_forward")
class InFlatRows(RightForward):
    """Two rows of one tensor for the whole way, taken in turns."""

    def packed(self, k, v):
        self.shape, self.rows = k.shape, torch.empty(2, 2 * k.numel(), dtype=k.dtype)
        return self.rows[0].copy_(torch.cat((k.flatten(), v.flatten())))

    def room_for(self, block, hop):
        return self.rows[(hop + 1) % 2]

    def unpacked(self, block):
        return block.view(2, *self.shape)

forward = partial(slip, "ring_forward", RightForward)
forward("OwnBlockOnly", "that's attention to the rank's own keys only: the other ranks' keys are missing", 1.2,
    hops=lambda self: 1)
forward("OneHopTooFew", "one block is missing: a rank computes with N blocks, its own and the N − 1 that come", 1.2,
    hops=lambda self: self.n - 1)
forward("SendsHomeInTheEnd",
    "one hop too many: after N − 1 hops each block has been everywhere, and the N-th brings it home for nothing", 4.2,
    last=lambda self, hop: False)
forward("SkipsLaterRanks", "blocks of ranks on one side of r are left out, but in this layout each rank's queries see some "
    "keys of every rank. Compare the chunks' positions", 2.4,
    pairs=lambda self, hop: Turning.pairs(self, hop) if self.whose(hop) <= self.r else ())
forward("AddsOutputs", "the blocks' outputs are added up: merge gives each its weight", 2.4,
    keep=lambda self, i, part: self.done.update({i: (self.done.get(i, (0,))[0] + part[0], part[1])}))
forward("BeginsWithZeros", "an empty result has lse = −∞: with 0 it counts as exp(0) = 1", 2.4,
    keep=lambda self, i, part: self.done.update({i: self.merge([self.done.get(i, tuple(map(torch.zeros_like, part))), part])}))
forward("NeverWaitsForSends", "", 2.1, "did not wait for its send",
    arrived=lambda self, room, block: self.works[1].wait() and room)
forward("RepeatsHeads",
    "send key/value heads as they are: several query heads share one, and if you repeat it, you send it several times", 4.2,
    packed=lambda self, k, v: torch.stack((k, v)).repeat(1, 1, 1, self.q.shape[2] // k.shape[2], 1))
forward("InTwoMessages", "K and V go in one message, so do dK and dV: torch.stack((k, v)). Each message costs its latency", 4.2,
    packed=lambda self, k, v: (k.contiguous(), v.contiguous()),
    room_for=lambda self, block, hop: [torch.empty_like(one) for one in block],
    begin=lambda self, block, rooms, hop: [
        *(dist.isend(one, self.to()) for one in block), *(dist.irecv(room, self.source()) for room in rooms)])

@mistake("ring_forward", "merge each part into the result as it comes: at most 3 parts per call of merge", points=5.4)
class MergesInTheEnd(RightForward):
    def keep(self, i, part):
        self.done.setdefault(i, []).append(part)

    def result(self):
        self.done = {i: self.joined(parts) for i, parts in self.done.items()}
        return super().result()

    def joined(self, parts):
        return self.merge(parts)

@mistake("ring_forward",
    "merge each part into the result before you go on to the next block: N parts are as long as the whole sequence", points=5.4)
class FoldsInTwosInTheEnd(MergesInTheEnd):
    def joined(self, parts):
        return reduce(lambda one, other: self.merge([one, other]), parts)

@mistake("ring_forward", "let go of blocks that you've computed with: two are enough", points=5.4, on=(4,))
class KeepsAllBlocks(RightForward):
    def arrived(self, room, block):
        self.all = [*getattr(self, "all", []), block]
        return super().arrived(room, block)

@mistake("ring_forward",
    "in a ring you send to one neighbor only, rank r − 1, modulo N. Blocks get further because ranks pass them on", points=4.2)
class AsksTheOwner(RightForward):
    """Each block comes straight from its rank."""

    def begin(self, block, room, hop):
        self.own = block if hop == 0 else self.own
        return [dist.isend(self.own, (self.r - hop - 1) % self.n), dist.irecv(room, (self.r + hop + 1) % self.n)]

@mistake("ring_forward", "compute all scores with the function that the check hands in: it notes what you compute", points=4.5)
class AttendsByItself(RightForward):
    def __call__(self, q, k, v, positions, attend, merge):
        return super().__call__(q, k, v, positions, own_attend, merge)

def own_attend(q, k, v, q_at, k_at):
    k, v = (one.repeat(1, 1, q.shape[2] // one.shape[2], 1) for one in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(q_at[:, None] < k_at, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bast,tbad->sbad", (scores - lse.clamp(min=-1e300)[..., None]).exp(), v), lse.permute(2, 0, 1)

# Task 4

class RightHomeward(Turning):
    """The backward of a right Ring."""

    tag = 1

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
        part, (k, v) = torch.zeros_like(self.home), block
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
        self.sent.append(dist.isend(part, self.to(), tag=self.tag))

    def received(self):
        room = torch.empty_like(self.home)
        dist.irecv(room, self.source(), tag=self.tag).wait()
        return room

    def end(self):
        self.home += self.received()

@right("Ring")
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

def ring_by(keep):
    """A decorator: a Ring with this backward."""
    return lambda engine: keep(type(engine.__name__, (RightRing,), {"engine": engine}))

def turned(**steps):
    return type("Turned", (Turning,), steps)

def as_if_upwards(self, hop):
    return (self.r - hop) % self.n

STEPS = {  # mistakes of both directions: hint, points of ring_forward and of Ring, what is different
    "WrongSource": ("those are the positions of another rank's keys: blocks come from rank r + 1, so after k hops rank r "
        "has rank r + k's block, modulo N", 2.4, 2.4, turned(whose=as_if_upwards)),
    "LocalPositions": ("the mask compares places within a rank, 0, 1, 2, … on all of them. A query sees the keys whose "
        "position in the whole sequence isn't larger than its own", 2.4, 2.1,
        turned(q_at=lambda self: torch.arange(len(self.q)), k_at=lambda self, hop: torch.arange(len(self.q)))),
    "TurnsAllUpwards": ("that's the lesson's direction: here blocks travel to rank r − 1, and come from rank r + 1", 4.2, 4.5,
        turned(whose=as_if_upwards, to=Turning.source, source=Turning.to)),
    "ComputesThenRequests": ("you ask for the next block only after you've computed with this one. Start to send and to "
        "receive before you compute: isend, irecv, compute, and only then wait", 5.1, 5.4,
        turned(start=lambda self, block, hop: hop,
            arrived=lambda self, hop, block: Turning.arrived(self, Turning.start(self, block, hop), block))),
    "WaitsBeforeItComputes": (
        "the next block should travel while you compute with this one: wait() after computing, not before", 5.1, 5.4,
        turned(start=lambda self, block, hop: Turning.arrived(self, Turning.start(self, block, hop), block),
            arrived=lambda self, room, block: room)),
    "ComputesHiddenChunks": ("no query of this pair of chunks sees any key. Leave the pair out", 5.4, 5.4,
        turned(counts=lambda self, *at: True)),
}
home = partial(slip, "Ring", RightHomeward)
for name, (hint, there, back, different) in STEPS.items():
    forward(f"{name}Forward", hint, there, bases=[different])
    home(f"{name}Homeward", hint, back, bases=[different])
forward("TwoHopsForward", "", 1.9, "on 2 ranks there is one other rank", (2, 3, 4), hops=lambda self: 2)

def pairs_with_a_wait(self, hop):
    """For the next block, after the first pair of chunks."""
    for number, pair in enumerate(Turning.pairs(self, hop)):
        yield pair
        if number == 0 and not self.last(hop):
            self.arrived(room=True, block=None)

home("WaitsAfterTheFirstPairHomeward",
    "the next block should travel while you compute with this one: wait only when all pairs of chunks are done", 5.4,
    pairs=pairs_with_a_wait)

@ring_by(also_right("Ring"))
class GradientsWaitedForLate(RightHomeward):
    """Receives of gradients are posted before the block is computed with."""

    coming = None

    def compute(self, block, hop):
        if hop > 1:
            self.room = torch.empty_like(self.home)
            self.coming = dist.irecv(self.room, self.source(), tag=1)
        super().compute(block, hop)

    def received(self):
        if self.coming is None:
            return super().received()
        self.coming.wait()
        self.coming = None
        return self.room

@ring_by(also_right("Ring"))
class GradientsBatched(RightHomeward):
    """Received in batches of one, with other tags."""

    def send(self, part):
        self.sent += dist.batch_isend_irecv([dist.P2POp(dist.isend, part, self.to(), tag=7)])

    def received(self):
        room = torch.empty_like(self.home)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, self.source(), tag=7)]):
            work.wait()
        return room

@ring_by(also_right("Ring"))
class WholesByRank(RightHomeward):
    """As few calls as can be."""

    def pairs(self, hop):
        late, early = self.chunks()
        if hop == 0:
            yield from super().pairs(hop)
        else:
            rows, keys = (late, slice(None)) if self.whose(hop) < self.r else (slice(None), early)
            yield 0, rows, keys, (self.q_at()[rows], self.k_at(hop)[keys])

@also_right("Ring")
class KeepsAttributes(RightRing):
    """K and V stacked, in place of what save_for_backward keeps."""

    @staticmethod
    def forward(ctx, q, k, v, positions, ring, attend_backward):
        o, lse = ring(q, k, v, positions)
        ctx.q, ctx.kv, ctx.o, ctx.lse = q.detach(), torch.stack((k, v)), o, lse
        ctx.positions, ctx.attend_backward = positions, attend_backward
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        saved = ctx.q, *ctx.kv, ctx.o, ctx.lse
        return *RightHomeward()(saved, do, ctx.positions, ctx.attend_backward), None, None, None

home("IgnoresUpstream", "backward is given a gradient that isn't 1: pass do_SBAD to attend_backward", 2.4,
    __call__=lambda self, saved, do, *more: RightHomeward.__call__(self, saved, torch.ones_like(do), *more))

home("NeverComesHome", "these gradients of K and V have the rank's own part only: what other ranks found never came home. "
    "Gradients travel behind their block, and the last stop sends them to the block's owner", 2.4,
    end=lambda self: self.received())
home("DropsItsOwn", "the part of the gradients of K and V that stayed at home is missing: add it to what arrives at the end",
    2.4, send_on=lambda self, part, hop: RightHomeward.send_on(self, part if hop else 0 * part, hop))
home("AddsAllBlocksUp", "a rank adds up what it finds for all blocks, but these are gradients of different tokens. "
    "Each part belongs to the block's owner", 1.8, send_on=lambda self, part, hop: self.home.add_(part),
    end=lambda self: None)
home("OwnPartTravels", "a rank's part for its own block stays at home, and is added when the rest arrives: the gradients "
    "start at the block's first stop, and make N − 1 hops", 4.5,
    send_on=lambda self, part, hop: self.send(part + self.received() if hop else part))
home("WithoutTags", "perhaps you took gradients for K and V: messages from one rank arrive in the order it sent them, "
    "unless they have tags. Give gradients one: tag=1, on both sides", 2.4, on=(4,), tag=0)
home("Replaces", "only the last stop's part came home: each stop adds its part to what it receives, and sends the sum on", 2.4,
    on=(4,), send_on=lambda self, part, hop: (self.received(), self.send(part)) if hop > 1
    else RightHomeward.send_on(self, part, hop))
home("StopsShort", "they stop one hop short of home: the last stop of rank s's block is rank s + 1, and it sends to s", 1.8,
    send_on=lambda self, part, hop: self.home.add_(part + (self.received() if hop > 1 else 0)) if hop == self.n - 1
    else RightHomeward.send_on(self, part, hop), end=lambda self: None)
home("ReusesOneTensor", "", 2.4, "changed a tensor while it was being sent",
    send=lambda self, part: RightHomeward.send(self, self.__dict__.setdefault("row", torch.empty_like(part)).copy_(part)))

# Task 5

class Swap(torch.autograd.Function):
    """An all-to-all of chunks along the first dimension; there, back: what sends numbers, and their gradients."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None

def sent(x, out=None):
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    dist.all_to_all_single(out, x.contiguous())
    return out

@right("ulysses")
class RightUlysses:
    """A right answer to ulysses."""

    def __call__(self, q, k, v, positions, attention):
        self.r, self.n, self.p = dist.get_rank(), dist.get_world_size(), torch.cat(positions)
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
        return Swap.apply(x, self.there, self.return_back)

    def there(self, x):
        return sent(x)

    def return_back(self, grad):
        return self.there(grad)

    def sort(self, x):
        return x[self.p.argsort()]

    def back(self, y):
        return y[self.p]

@also_right("ulysses")
class ByLists(RightUlysses):
    """By dist.all_to_all."""

    def there(self, x):
        out = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in x]
        dist.all_to_all(out, [one.contiguous() for one in x])
        return torch.stack(out)

@also_right("ulysses")
class Together(RightUlysses):
    """q, k and v in one call."""

    def __call__(self, q, k, v, positions, attention):
        self.r, self.n, self.p = dist.get_rank(), dist.get_world_size(), torch.cat(positions)
        parts = [self.heads(x) for x in (q, self.copied(k), self.copied(v))]
        sizes = [part.shape[3] for part in parts]
        return self.of_own(attention(*self.of_all(torch.cat(parts, 3)).split(sizes, 2)))

@also_right("ulysses")
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

@also_right("ulysses")
class OneFunction(RightUlysses):
    """Copies are made by indices; tokens are sorted with index_select."""

    def copied(self, x):
        return x[:, :, torch.arange(max(self.n, x.shape[2])) % x.shape[2]]

    def sort(self, x):
        return x.index_select(0, self.p.argsort())

@also_right("ulysses")
class AsyncSwap(RightUlysses):
    def there(self, x):
        out = torch.empty(x.shape, dtype=x.dtype)
        dist.all_to_all_single(out, F.pad(x, (0, 0)).contiguous(), async_op=True).wait()
        return out

exchange = partial(slip, "ulysses", RightUlysses)
exchange("OwnTokensOnly", "that's attention among the rank's own tokens: nothing came from other ranks",
    __call__=lambda self, q, k, v, positions, attention: attention(q, k, v))
exchange("DoesNotSort", "the tokens are in the order of ranks, but attention takes them in the order of the sequence: sort "
    "them by position before, and put the output back afterwards", 2, sort=lambda self, x: x, back=lambda self, y: y)
exchange("SortsTheOtherWay", "the tokens are moved the wrong way: with p = torch.cat(positions), token i of those that arrived "
    "has the position p[i]: arrived[p.argsort()] is in the order of the sequence, and done[p] in the order of ranks", 2,
    sort=lambda self, x: x[self.p], back=lambda self, y: y[self.p.argsort()])
exchange("DoesNotPutBack",
    "the output is still in the order of the sequence: put it back into the order of ranks before you send it", 2,
    back=lambda self, y: y)
exchange("Neighbors", "heads are dealt in turn: rank r has the heads r, r + N, r + 2N, …, not neighbors. x.unflatten(2, "
    "(-1, N)) has the rank in its second new dimension", 2, heads=lambda self, x: x.unflatten(2, (self.n, -1)).movedim(2, 0),
    joined=lambda self, y: y.movedim(0, 2).flatten(2, 3))
exchange("JoinsRankByRank", "the output's heads are joined rank by rank: head j comes from rank j % N, its head j // N", 2,
    joined=lambda self, y: y.movedim(0, 2).flatten(2, 3))
exchange("ViewsWhatIsSent", "heads and tokens are mixed up: view and reshape take numbers in the order of memory. What goes to "
    "one rank must be one part of the first dimension: movedim or permute, and only then flatten", 2,
    heads=lambda self, x: x.contiguous().view(self.n, x.shape[0], x.shape[1], -1, x.shape[3]))
exchange("RepeatsInterleaved",
    "where there are fewer key/value heads than ranks, rank r gets the head r % G: repeat, not repeat_interleave", 2, on=(4,),
    copied=lambda self, x: x.repeat_interleave(max(1, self.n // x.shape[2]), 2))
exchange("DoesNotCopy", "rank r of N gets A/N query heads and max(G, N)/N key/value heads", 2.5, copied=lambda self, x: x)
exchange("SendsTheBareResult", "q, k, and v get no gradients: autograd doesn't see dist.all_to_all_single. Write a "
    "torch.autograd.Function whose backward sends the gradients back", says="the result has no graph",
    of_own=lambda self, y: RightUlysses.of_own(self, y.detach()))
exchange("GradientsStay", "backward sends as many bytes as forward: the gradients of q, k, v, and o take the way back",
    return_back=lambda self, grad: grad.clone())
exchange("GradientsDivided", "the gradients are divided by N, but they aren't means", 2,
    return_back=lambda self, x: sent(x) / self.n)
exchange("InSinglePrecision", "you send float32: send float64 as float64",
    there=lambda self, x: sent(x.float()).double())
exchange("RoomLikeWhatIsNotContiguous", "out isn't contiguous: torch.empty_like(x) has the strides of x. Make x contiguous "
    "first, or use torch.empty(x.shape, dtype=x.dtype)", 2, there=lambda self, x: sent(x, torch.empty_like(x)))
exchange("RepeatsAllHeads",
    "make just enough copies that each rank has a key/value head: G heads if G is N or more, otherwise N", 3,
    __call__=lambda self, q, k, v, *more: RightUlysses.__call__(
        self, q, *(one.repeat(1, 1, q.shape[2] // one.shape[2], 1) for one in (k, v)), *more))

@mistake("ulysses",
    "no rank needs all heads of all tokens: an all-to-all gives it its own heads, and sends N times fewer bytes", points=3)
class Gathers(RightUlysses):
    """All of all, and takes its own."""

    def there(self, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.n)]
        dist.all_gather(parts, x)
        return torch.stack([part[self.r] for part in parts])

exchange("ExchangesTwice", "four all-to-alls per direction are enough: q, k, v, and the output", 3,
    swap=lambda self, x: (sent(x.detach()), RightUlysses.swap(self, x))[1])
