"""The task Ring: in backward, keys and values go round again, and their gradients travel home."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.context import given, travel
from manyranks.grade.old.context.attention import attend_backward
from manyranks.grade.old.context.buffers import Buffers
from manyranks.grade.old.context.forward import computed, must_of, note_of
from manyranks.grade.old.context.ready import READY
from manyranks.grade.old.context.shards import Shards, local
from manyranks.grade.old.context.task import ContextTask, tensor_of, untouched, values
from manyranks.grade.old.context.travel import BACKWARD, FORWARD, messages
from manyranks.grade.old.report import Line
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.ready import YOURSELF
from manyranks.grade.old.tensor.task import gradient, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Finding, Verdict
from manyranks.measure.journal import Stopped
from manyranks.measure.operators import POINT_TO_POINT
from manyranks.world.trouble import Notes

_NAMES = ("the gradient of q", "the gradient of k", "the gradient of v")
_LOOKS, _MOMENT = 6, 0.08  # seconds
_O = "the result"
_NOT_HOME = (
    "those are the rank's own part of the gradients of its K and V: what the other ranks have found of them never came "
    "home. Gradients travel with their block, and the last stop sends them to the block's own rank"
)
_OWN_DROPPED = "the part of the gradients of K and V that stayed at home is missing: add it to what arrives in the end"
_OWN_TWICE = "the part of the gradients of K and V that stayed at home counts twice: it stays, or it travels"
_SHIFTED = (
    "those are the gradients of another rank's K and V: they stop one hop short of home, or go one too far. The last stop of "
    "the block of rank s is rank s + 1, which sends them to rank s"
)
_MIXED = (
    "a rank adds up what it finds for the blocks of all ranks: these are gradients of different tokens. Each part belongs to "
    "the rank that the block came from"
)
_REPLACED = "the last stop's part alone came home: each stop adds its part to what it receives, and sends the sum on"
_ONE_MISSING = "one stop's part of the gradients of K and V is missing: all N − 1 ranks abroad add theirs"
_DQ_OWN = "the gradient of q has the part of the rank's own block only: add up the parts of all blocks, which all stay here"
_DQ_LAST = "the gradient of q has the last block's part only: add up the parts of all blocks"
_SWAPPED = "the gradients of K and V are swapped: attend_backward gives (dq, dk, dv)"
_MEAN = "the gradients of K and V are divided by N: they are sums, not means"
_SOURCE = (
    "those are the positions of another rank's keys: K and V come from rank r + 1, so that after k hops rank r has the block "
    "of rank r + k, modulo N"
)
_LOCAL = "the mask is of places within a rank: a query sees the keys whose position in the whole sequence is not larger"
_UNMASKED = "no mask was applied: a query sees the keys whose position is not larger than its own"
_STALE = "the rank computes with its own K and V in each hop: what came has to take their place"
_UPSTREAM = "the gradient that backward is given is not 1: do_SBAD is what attend_backward takes"
_TAGS = (
    "perhaps gradients have been taken for K and V: messages from one rank arrive in the order in which they were sent, unless "
    "they have tags. Give gradients another one: tag=1, on both sides"
)
_ONE_SIDE = (
    "a message is sent with one tag and waited for with another: the same tag on both sides, dist.isend(x, to, tag=1) and "
    "dist.irecv(x, source, tag=1)"
)
_NONE = "there is no gradient: backward returns dq_SBAD, dk_SBGD and dv_SBGD first, and None for the other arguments"
_HALVES = "the two chunks have changed places: a gradient's tokens stand in the order of the rank's tokens"
_UNEXPLAINED = (
    "dq is the sum over all blocks; dK and dV of a block are the sum over all ranks' queries, the own part from home, the "
    "others' from abroad"
)
_FORWARD = "forward calls ring, keeps what backward needs, and returns o"
_KIND = "it is a class derived from torch.autograd.Function, with the two static methods given above"
_KEPT = (
    "keep q, k, v, o and lse of this rank, with ctx.save_for_backward, and nothing else: the blocks of the other ranks go "
    "round again in backward"
)

Grads = list[list[tuple[Tensor, Tensor, Tensor]]]  # [rank of the queries][rank of the keys]: parts of dq, dk and dv
Cut = Callable[[Tensor], Tensor]


def _parts(shards: Shards, at: Callable[[int, int], int], q_at: Cut = torch.clone, k_at: Cut = torch.clone, **other) -> Grads:
    """at: of rank and source, whose positions the keys have. stale: whether K and V are the rank's own; ones: what do is."""
    all_ranks, places, forward, upstream = shards.ranks(), shards.places, computed(shards), shards.upstream()
    found: Grads = []
    for r, (q, own_k, own_v) in enumerate(all_ranks):
        o, lse = forward[r]
        do = torch.ones_like(o) if other.get("ones") else upstream[r]
        found.append([])
        for s, (_, k, v) in enumerate(all_ranks):
            kv = (own_k, own_v) if other.get("stale") else (k, v)
            where = q_at(places[r]), k_at(places[at(r, s)])
            found[r].append(attend_backward(q, *kv, o, lse, do, *where))
    return found


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) if parts else torch.tensor(0.0)


def _dq(grads: Grads, r: int) -> Tensor:
    return _sum([one[0] for one in grads[r]])


def _dkv(grads: Grads, s: int, i: int, among: Callable[[int], bool] = lambda r: True) -> Tensor:
    """Of rank s's keys (i = 1) or values (2), the parts that these ranks found."""
    return _sum([grads[r][s][i] for r in range(len(grads)) if among(r)])


def _triples(grads: Grads, dkv: Callable[[int, int], Tensor] | None = None) -> list[Tensors]:
    """By rank. dkv: of the rank, and 1 for keys or 2 for values, where it is not the right one."""
    dkv = dkv or (lambda r, i: _dkv(grads, r, i))
    return [dict(zip(_NAMES, (_dq(grads, r), dkv(r, 1), dkv(r, 2)), strict=True)) for r in range(len(grads))]


def _one_short(grads: Grads, r: int, i: int) -> Tensor:
    """The home part, and what came for the block that was last here."""
    s = (r - 1) % len(grads)
    return grads[r][r][i] + _dkv(grads, s, i, lambda rank: rank != s)


def _wrong_kv(grads: Grads) -> Iterator[tuple[str, Callable[[int, int], Tensor]]]:
    n = len(grads)
    yield _NOT_HOME, lambda r, i: grads[r][r][i]
    yield _OWN_DROPPED, lambda r, i: _dkv(grads, r, i, lambda rank: rank != r)
    yield _OWN_TWICE, lambda r, i: _dkv(grads, r, i) + grads[r][r][i]
    for step in (1, -1):
        yield _SHIFTED, lambda r, i, step=step: _dkv(grads, (r + step) % n, i)
    yield _SHIFTED, lambda r, i: _one_short(grads, r, i)
    yield _MIXED, lambda r, i: _sum([grads[r][s][i] for s in range(n)])
    yield _REPLACED, lambda r, i: grads[r][r][i] + grads[(r + 1) % n][r][i]
    yield _REPLACED, lambda r, i: grads[(r + 1) % n][r][i]
    for step in (1, -1):
        yield _ONE_MISSING, lambda r, i, step=step: _dkv(grads, r, i, lambda rank: rank != (r + step) % n)
    yield _SWAPPED, lambda r, i: _dkv(grads, r, 3 - i)
    yield _MEAN, lambda r, i: _dkv(grads, r, i) / n


def _wrong_parts(shards: Shards) -> Iterator[tuple[str, Grads]]:
    n = shards.n
    yield _SOURCE, _parts(shards, lambda r, s: (2 * r - s) % n)
    for step in (1, -1):
        yield _SOURCE, _parts(shards, lambda r, s, step=step: (s + step) % n)
    yield _SOURCE, _parts(shards, lambda r, s: r)
    yield _LOCAL, _parts(shards, lambda r, s: s, local, local)
    yield _UNMASKED, _parts(shards, lambda r, s: s, k_at=torch.zeros_like)
    yield _STALE, _parts(shards, lambda r, s: s, stale=True)
    yield _UPSTREAM, _parts(shards, lambda r, s: s, ones=True)


def _wrong(shards: Shards) -> Iterator[Wrong]:
    """Those of one tensor show where the others are right."""
    grads = _parts(shards, lambda r, s: s)
    right = _triples(grads)
    yield Wrong(_NONE, [{name: torch.zeros_like(one) for name, one in own.items()} for own in right])
    for hint, dkv in _wrong_kv(grads):
        yield Wrong(hint, _triples(grads, dkv))
    for hint, part in ((_DQ_OWN, lambda r: grads[r][r][0]), (_DQ_LAST, lambda r: grads[r][r - 1][0])):
        yield Wrong(hint, [own | {_NAMES[0]: part(r)} for r, own in enumerate(right)])
    yield Wrong(_HALVES, [{name: torch.cat(one.chunk(2)[::-1]) for name, one in own.items()} for own in right])
    for hint, parts in _wrong_parts(shards):
        yield Wrong(hint, [{_NAMES[0]: own[_NAMES[0]]} for own in _triples(parts)])


def _settled(watch, limit: int) -> None:
    """Counts the bytes held until they are as few as they may be: on a busy machine a call's thread lets go late."""
    for _ in range(_LOOKS):
        watch.weigh()
        if watch.held[-1] - watch.held[0] <= limit:
            break
        time.sleep(_MOMENT)


def _run(shards: Shards, limit: int, kind: Any, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        raise Stopped(f"Ring is a {'class of another kind' if isinstance(kind, type) else type(kind).__name__}", _KIND)
    r, places = torch.distributed.get_rank(), shards.places
    leaves = [one.clone().requires_grad_() for one in shards.ranks()[r]]
    arguments = dict(zip(("q", "k", "v"), leaves, strict=True)) | {f"positions[{s}]": at for s, at in enumerate(places)}
    before = {name: one.detach().clone() for name, one in arguments.items()}
    watch.weigh()
    watch.mark(FORWARD)
    y = kind.apply(*leaves, [*places], given.ring, given.attend_backward(watch, [*places]))
    tensor_of(y, leaves[0], "what forward returned", _FORWARD)
    _settled(watch, limit)
    do = shards.upstream()[r]
    watch.mark(BACKWARD)
    if not y.requires_grad:
        raise Stopped("the result has no graph", "forward returns o as ring gave it, and the class is called by apply")
    with Buffers(watch) as buffers:
        y.backward(do)
    buffers.note()
    untouched(watch, arguments | {"the gradient of o": do}, before | {"the gradient of o": shards.upstream()[r]})
    return {_O: y.detach().clone()} | {name: gradient(leaf) for name, leaf in zip(_NAMES, leaves, strict=True)}


@cache
def cases(n: int) -> list[Scene]:
    """Grouped heads and tensors that are not contiguous; chunks of one token and large scores."""
    first = Shards(n, chunk=3, batch=2, heads=4, kv_heads=2, size=5, transposed=True)
    second = Shards(n, chunk=1, batch=1, heads=3, kv_heads=3, size=4, strong=300.0)
    return [_scene(first), _scene(second)]


def _scene(shards: Shards) -> Scene:
    pairs, grads = computed(shards), _triples(_parts(shards, lambda r, s: s))
    right = [{_O: o} | own for (o, _), own in zip(pairs, grads, strict=True)]
    block, result = 2 * shards.of_heads(shards.kv_heads), shards.of_heads(shards.heads)
    must = must_of(shards, 2 * (shards.n - 1), limit=2 * result + result // 2 + block)  # o, lse, copies of own ones
    return Scene(
        shards.n, partial(_run, shards, must.limit), right, lambda: telling(right, _wrong(shards)), must, note_of(shards)
    )


def _kept(task: "Homeward", trial: Trial) -> Verdict:
    """After forward, no blocks of other ranks."""
    for rank, seen in enumerate(trial.answers):
        got = seen.held[-1] - seen.held[0]
        if got > trial.case.must.limit:
            there, here = sizes(got, trial.case.must.limit)
            return Verdict(False, f"rank {rank} keeps {there} more after forward; {here} are enough", _KEPT)
    return Verdict(True)


def _one_tag(trial: Trial) -> bool:
    """Whether nothing tells a rank's messages apart but their order."""
    sent = [call.tag for call in travel.calls_in(trial, 0, BACKWARD) if call.op == "send"]
    return trial.case.n > 2 and len(sent) > 1 == len(set(sent))


def _tagged_alike(notes: Notes) -> bool:
    """Whether no message is waited for that was sent with another tag."""
    met = Counter()
    for rank, entries in notes.items():
        for one in entries:
            if one.op in POINT_TO_POINT:
                pair = (rank, one.peer) if one.op == "send" else (one.peer, rank)
                met[*pair, one.tag] += 1 if one.op == "send" else -1
    sent = {key[:2] for key, more in met.items() if more > 0}
    return not any(more < 0 and key[:2] in sent for key, more in met.items())


@dataclass(frozen=True)
class Homeward(ContextTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            r"forward\(\) (takes|missing)",
            "the check calls Ring.apply(q, k, v, positions, ring, attend_backward): forward gets ctx first",
        ),
        (r"backward\(\) (takes|missing)", "backward gets ctx and do_SBAD"),
        *ContextTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the gradients of q, k and v are right", 0.45, values, each_world=True),
        Aspect("sends K and V and then their gradients, N − 1 times each", 0.25, messages),
        Aspect("computes while the next block is on its way", 0.1, partial(travel.overlap, 2, BACKWARD)),
        Aspect("computes no pair of chunks of which nothing is seen", 0.1, partial(travel.work, BACKWARD)),
        Aspect("keeps q, k, v, o and lse for backward", 0.1, _kept),
    )

    def line(self, finding: Finding, function) -> Line:
        """Where ranks wait for each other, tags may be why."""
        line, trial = super().line(finding, function), finding.trial
        if trial is None or not trial.trouble or not trial.trouble.deadlock or _tagged_alike(trial.notes):
            return line
        return replace(line, hint=f"{_ONE_SIDE}; {line.hint}")

    def better(self, trial: Trial, hint: str) -> str:
        """Where nothing explains them, messages may have been taken for others."""
        return travel.explained(self, trial, BACKWARD, hint, _SOURCE) or (_TAGS if _one_tag(trial) else "")
