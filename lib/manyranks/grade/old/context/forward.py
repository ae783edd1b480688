"""The task ring_forward: keys and values travel, and results are merged as they come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.old.compare import same
from manyranks.grade.old.context import given, travel
from manyranks.grade.old.context.attention import Pair, attend, merge
from manyranks.grade.old.context.buffers import Buffers
from manyranks.grade.old.context.holding import memory
from manyranks.grade.old.context.layout import visible_pairs
from manyranks.grade.old.context.ready import READY
from manyranks.grade.old.context.shards import Shards, local
from manyranks.grade.old.context.task import ContextTask, pair_of, untouched, values
from manyranks.grade.old.context.travel import FORWARD, Must, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.ready import YOURSELF
from manyranks.grade.old.tensor.task import telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect

_O, _LSE = "o", "lse"
_NEAR = 1e-9
_CALL = "ring_forward"
_OWN = "that is attention to the rank's own keys: those of the other ranks are missing"
_ONE_LESS = "one block is missing: a rank computes with N blocks, its own and the N − 1 that come"
_ONE_MORE = "the rank's own block counts twice: after N − 1 hops, it has computed with all N blocks"
_NOT_OWN = "the rank's own block is missing: compute with it while the next one is on its way"
_SOURCE = (
    "those are the positions of another rank's keys: K and V come from rank r + 1, so that after k hops rank r has the block "
    "of rank r + k, modulo N"
)
_OWN_POSITIONS = "each block was masked with the positions of the rank's own keys: after k hops, they are those of rank r + k"
_LOCAL = (
    "the mask is of places within a rank: 0, 1, 2, … on all of them. A query sees the keys whose position in the whole "
    "sequence is not larger than its own"
)
_UNMASKED = "no mask was applied: a query sees the keys whose position is not larger than its own"
_NOT_PASSED = "each rank sends its own block in each hop: pass on what came last"
_STALE = "the rank computes with its own K and V in each hop: what came has to take their place"
_K_STAYED, _V_STAYED = "V travels, but K stays: they belong together", "K travels, but V stays: they belong together"
_SWAPPED = "K and V are swapped: what came is used the other way round"
_SUM = "the blocks' outputs are added up: merge weighs them"
_MEAN = "that is the mean of the blocks' outputs: merge weighs them"
_LAST = "that is the last block's result: merge it with what there was"
_HALVES = "the two chunks have changed places: a result's tokens stand in the order of the rank's queries"
_NOT_AFTER = (
    "blocks of ranks on one side of r are left out: in this layout, each rank's tokens see some of every rank's. Ask the "
    "chunks' positions"
)
_LSE_ONLY = "o is right and lse is not: return the lse of all blocks, as merge gives it"
_UNEXPLAINED = "attend(q, k, v, positions[r], positions[(r + hop) % N]), or halves of these, merged over N hops"
_ZERO_LSE = "an empty result has lse = −∞: with 0 it counts as exp(0) = 1"
_HALVING = "each block's output is averaged with all that was before it: merge weighs them by their lse"
_HALF_ODD = "cut what you have into two halves: queries, keys, values and positions alike"

Blocks = list[tuple[int, int, int]]


class Way(NamedTuple):
    """How it is computed. blocks: for rank r of n, of each block whose K, whose V and whose positions; join: of their results.

    q_at, k_at: of the positions, what is taken for the mask; pairs: whether results are those of pairs of chunks.
    """

    blocks: Callable[[int, int], Blocks]
    join: Callable[[list[Pair]], Pair] = merge
    q_at: Callable[[Tensor], Tensor] = torch.clone
    k_at: Callable[[Tensor], Tensor] = torch.clone
    pairs: bool = False


def hops(*steps: int, count: Callable[[int], range] = range) -> Callable[[int, int], Blocks]:
    """Of hop h, blocks of the ranks r + h·step, for K, V and positions; all of them 1 is right. count: which hops, of n."""
    k, v, at = steps or (1, 1, 1)

    def blocks(r: int, n: int) -> Blocks:
        return [((r + k * h) % n, (r + v * h) % n, (r + at * h) % n) for h in count(n)]

    return blocks


def _shifted(by: int) -> Callable[[int, int], Blocks]:
    return lambda r, n: [((r + h) % n, (r + h) % n, (r + h + by) % n) for h in range(n)]


def _own_sent(r: int, n: int) -> Blocks:
    return [(r, r, r), *(((r + 1) % n, (r + 1) % n, (r + h) % n) for h in range(1, n))]


def _one_side(before: bool) -> Callable[[int, int], Blocks]:
    return lambda r, n: [(s, s, s) for s in range(n) if (s <= r if before else s >= r)]


def _outputs(of: Callable[[Tensor], Tensor]) -> Callable[[list[Pair]], Pair]:
    return lambda parts: (of(torch.stack([o for o, _ in parts])), parts[0][1])


def _halved(parts: list[Pair]) -> Pair:
    """The mean of each output and what was before it."""
    o, lse = parts[0]
    for other, _ in parts[1:]:
        o = (o + other) / 2
    return o, lse


def _after_zeros(parts: list[Pair]) -> Pair:
    return merge([tuple(map(torch.zeros_like, parts[0])), *parts])


def _crossed(shards: Shards, r: int) -> Pair:
    """With V for K and K for V, where they came from another rank."""
    all_ranks = shards.ranks()
    parts = []
    for s, (_, k, v) in enumerate(all_ranks):
        k, v = (k, v) if s == r else (v, k)
        parts.append(attend(all_ranks[r][0], k, v, shards.places[r], shards.places[s]))
    return merge(parts)


def _in_pairs(shards: Shards, r: int, way: Way) -> Pair:
    """Chunk by chunk of the queries, of those pairs of which something is seen."""
    all_ranks, halves = shards.ranks(), []
    for rows in shards.halves:
        parts = []
        for k, v, at in way.blocks(r, shards.n):
            for keys in shards.halves:
                q_at, k_at = shards.places[r][rows], shards.places[at][keys]
                if k_at.min() <= q_at.max():
                    parts.append(attend(all_ranks[r][0][rows], all_ranks[k][1][keys], all_ranks[v][2][keys], q_at, k_at))
        halves.append(way.join(parts))
    return tuple(torch.cat(both) for both in zip(*halves, strict=True))


RIGHT = Way(hops())
_ADDED, _AVERAGED = (_outputs(of) for of in (lambda o: o.sum(0), lambda o: o.mean(0)))
_WAYS = [
    (_OWN, Way(hops(count=lambda n: range(1)))),
    (_ONE_LESS, Way(hops(count=lambda n: range(n - 1)))),
    (_ONE_MORE, Way(hops(count=lambda n: range(n + 1)))),
    (_NOT_OWN, Way(hops(count=lambda n: range(1, n)))),
    (_SOURCE, Way(hops(1, 1, -1))),
    (_SOURCE, Way(_shifted(1))),
    (_SOURCE, Way(_shifted(-1))),
    (_OWN_POSITIONS, Way(hops(1, 1, 0))),
    (_LOCAL, Way(hops(), q_at=local, k_at=local)),
    (_UNMASKED, Way(hops(), k_at=torch.zeros_like)),
    (_STALE, Way(hops(0, 0, 1))),
    (_STALE, Way(hops(0, 0, 0))),
    (_NOT_PASSED, Way(_own_sent)),
    (_K_STAYED, Way(hops(0, 1, 1))),
    (_V_STAYED, Way(hops(1, 0, 1))),
    (_NOT_AFTER, Way(_one_side(True))),
    (_NOT_AFTER, Way(_one_side(False))),
    *((_SUM, Way(hops(), join=_ADDED, pairs=pairs)) for pairs in (False, True)),
    *((_MEAN, Way(hops(), join=_AVERAGED, pairs=pairs)) for pairs in (False, True)),
    *((_HALVING, Way(hops(), join=_halved, pairs=pairs)) for pairs in (False, True)),
    (_ZERO_LSE, Way(hops(), join=_after_zeros)),
    *((_LAST, Way(hops(), join=lambda parts: parts[-1], pairs=pairs)) for pairs in (False, True)),
]


def computed(shards: Shards, way: Way = RIGHT) -> list[Pair]:
    """All ranks' (o, lse)."""
    if way.pairs:
        return [_in_pairs(shards, r, way) for r in range(shards.n)]
    all_ranks, found = shards.ranks(), []
    for r, (q, _, _) in enumerate(all_ranks):
        parts = []
        for k, v, at in way.blocks(r, shards.n):
            where = way.q_at(shards.places[r]), way.k_at(shards.places[at])
            parts.append(attend(q, all_ranks[k][1], all_ranks[v][2], *where))
        found.append(way.join(parts))
    return found


def _named(pairs: list[Pair]) -> list[Tensors]:
    return [{_O: o, _LSE: lse} for o, lse in pairs]


def _wrong(shards: Shards, right: list[Tensors]) -> Iterator[Wrong]:
    """Of those that do not merge, lse does not matter; it does where o is right."""
    for hint, way in _WAYS:
        results = _named(computed(shards, way))
        yield Wrong(hint, results if way.join is merge else [{_O: own[_O]} for own in results])
    yield Wrong(_SWAPPED, [{_O: _crossed(shards, r)[0]} for r in range(shards.n)])
    yield Wrong(_HALVES, [{_O: torch.cat(own[_O].chunk(2)[::-1])} for own in right])


def _run(shards: Shards, function: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    r = torch.distributed.get_rank()
    q, k, v = shards.ranks()[r]
    like = q, q[..., 0]
    arguments = dict(zip(("q", "k", "v"), (q, k, v), strict=True)) | {
        f"positions[{s}]": at for s, at in enumerate(shards.places)
    }
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    helpers = given.attend(watch, [*shards.places], shards.weighs), given.merge(watch)
    if shards.weighs:
        watch.weigh()
    watch.mark(FORWARD)
    with Buffers(watch) as buffers:
        o, lse = pair_of(function(q, k, v, [*shards.places], *helpers), like, _CALL)
    buffers.note()
    untouched(watch, arguments, before)
    return {_O: o, _LSE: lse}


@cache
def cases(n: int) -> list[Scene]:
    """Grouped heads and tensors that are not contiguous; chunks of one token and large scores; on four ranks, memory."""
    first = Shards(n, chunk=3, batch=2, heads=4, kv_heads=2, size=5, transposed=True)
    second = Shards(n, chunk=1, batch=1, heads=3, kv_heads=3, size=4, strong=300.0)
    third = Shards(n, chunk=4, batch=1, heads=2, kv_heads=2, size=32, weighs=True)
    return [_scene(one) for one in ((first, second, third) if n == 4 else (first, second))]


def must_of(shards: Shards, backward: int = 0, limit: int = 0) -> Must:
    """Of the messages and the work in forward, and so many in backward."""
    n, pairs = shards.n, [visible_pairs(rank, shards.n) for rank in range(shards.n)]
    scores = [count * shards.chunk**2 for count in pairs]
    block = 2 * shards.of_heads(shards.kv_heads)
    return Must(n - 1, backward, block, shards.heads // shards.kv_heads, scores, shards.tokens, limit)


def note_of(shards: Shards) -> str:
    """What distinguishes the case."""
    words = f"{shards.n * shards.tokens} tokens, {shards.heads} query and {shards.kv_heads} key/value heads"
    return words + (", scores near ±1000" if shards.strong > 1 else "")


def _scene(shards: Shards) -> Scene:
    right = _named(computed(shards))
    block, result = 2 * shards.of_heads(shards.kv_heads), shards.of_heads(shards.heads)
    limit = 2 * block + 3 * result + result // 2 if shards.weighs else 0  # two blocks, a result, and as much again for cuts
    must = must_of(shards, limit=limit)
    return Scene(shards.n, partial(_run, shards), right, lambda: telling(right, _wrong(shards, right)), must, note_of(shards))


@dataclass(frozen=True)
class Forward(ContextTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        *ContextTask.advice,
        (r"has no attribute 'wait'|'NoneType' object is not subscriptable", "after the last hop there is nothing to wait for"),
        (r"must match the size|size of tensor", _HALF_ODD),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("output and log-sum-exp are right", 0.35, values, each_world=True),
        Aspect("sends K and V N − 1 times to rank r − 1, and nothing else", 0.3, messages),
        Aspect("computes while the next block is on its way", 0.15, partial(travel.overlap, 99, FORWARD)),
        Aspect("computes no pair of chunks of which nothing is seen", 0.1, partial(travel.work, FORWARD)),
        Aspect("holds two blocks and one result", 0.1, memory),
    )

    def better(self, trial: Trial, hint: str) -> str:
        """Of lse alone, an own one."""
        pairs = zip(trial.answers, trial.case.expected, strict=True)
        if not hint and all(same(seen.tensors[_O], own[_O], _NEAR) for seen, own in pairs):
            return _LSE_ONLY
        return travel.explained(self, trial, FORWARD, hint, _SOURCE)
