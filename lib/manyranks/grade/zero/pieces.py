"""The tasks shard and gather: one tensor, cut over the ranks and put together again."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade.compare import sizes
from manyranks.grade.journal import Stopped
from manyranks.grade.scripts import Script, Tensors, Wrong, own_values, values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.grade.zero import traffic
from manyranks.grade.zero.models import pieces
from manyranks.grade.zero.task import ZeroTask, refuse
from manyranks.grade.zero.traffic import Must

_SHAPES = {"matrix": (5, 7), "cube": (2, 3, 4), "vector": (11,), "square": (2, 2), "five": (5,), "one": (1,), "number": ()}
_LARGE = (300, 101)
_CUT = "one chunk of ceil(E / N) elements each: flatten, pad with zeros to a multiple of N, and take chunk number rank"


def tensors() -> Tensors:
    """1, 2, 3, … in each of the shapes."""
    return {name: torch.arange(1.0, 1 + torch.Size(s).numel(), dtype=torch.float64).view(s) for name, s in _SHAPES.items()}


def _sharding(function, watch: Watch) -> Tensors:
    found = {}
    for name, tensor in tensors().items():
        given = tensor.clone()
        found[name] = _tensor(function(given), "shard", "this rank's piece")
        if not torch.equal(given, tensor):
            raise Stopped("shard has changed the tensor that it was given", "leave `tensor` as it is")
    watch.weigh()
    piece = function(torch.ones(_LARGE, dtype=torch.float64))
    watch.weigh()
    del piece
    return found


def _tensor(result, function: str, what: str) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise Stopped(f"{function} returned a {type(result).__name__}", f"return {what}: a tensor")
    return result


@cache
def shard_cases(n: int) -> list[Script]:
    """One, for tensors of several shapes, and one whose memory is weighed."""
    right = [{name: pieces(tensor, n)[rank] for name, tensor in tensors().items()} for rank in range(n)]
    return [Script(n, _sharding, right, lambda: _wrong_shards(n))]


def _wrong_shards(n: int) -> Iterator[Wrong]:
    flat = {name: tensor.flatten() for name, tensor in tensors().items()}

    def by_rank(hint: str, cut) -> Wrong:
        return Wrong(hint, [{name: cut(tensor, rank) for name, tensor in flat.items()} for rank in range(n)])

    yield by_rank(
        f"these are pieces of different sizes, and the collectives need equal ones: pad with zeros; {_CUT}",
        lambda t, r: t.tensor_split(n)[r],
    )
    yield by_rank(
        "the padding comes at the end: yours is at the front",
        lambda t, r: torch.cat([t.new_zeros(-t.numel() % n), t]).chunk(n)[r],
    )
    for shift in (1, -1):
        yield by_rank("that is another rank's chunk: rank r keeps chunk r", lambda t, r, s=shift: pieces(t, n)[(r + s) % n])
    yield by_rank("that is another rank's chunk: rank r keeps chunk r", lambda t, r: pieces(t, n)[n - 1 - r])
    yield by_rank("every rank has chunk 0: rank r keeps chunk r", lambda t, r: pieces(t, n)[0])
    yield by_rank(
        f"E // N leaves the last elements out: {_CUT}",
        lambda t, r: t[r * (len(t) // n) : (r + 1) * (len(t) // n)],
    )
    yield by_rank(
        "that is every N-th element: a chunk's elements lie side by side",
        lambda t, r: torch.cat([t, t.new_zeros(-t.numel() % n)])[r::n],
    )
    yield by_rank("that is the whole tensor, flat and padded: keep chunk number rank", lambda t, r: torch.cat(pieces(t, n)))
    yield by_rank("that is the whole tensor: keep chunk number rank", lambda t, r: t)
    yield by_rank("too much padding: none where E is a multiple of N, -E % N in general", lambda t, r: _too_long(t, n)[r])
    yield by_rank("the last rank's chunk is short: pad with zeros to a multiple of N", lambda t, r: _ceil(t, n, r))


def _too_long(flat: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """With N more zeros where none is missing."""
    return torch.cat([flat, flat.new_zeros(n - flat.numel() % n)]).chunk(n)


def _ceil(flat: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    size = -(-flat.numel() // n)
    return flat[rank * size : (rank + 1) * size]


def _own_memory(task: ZeroTask, trial: Trial) -> Verdict:
    """A piece holds its own bytes, and not the whole tensor's."""
    n = trial.case.n
    right = pieces(torch.empty(_LARGE, dtype=torch.float64), n)[0].nbytes
    for rank, seen in enumerate(trial.answers):
        holds = seen.held[1] - seen.held[0]
        if holds > right + 1024:
            there, here = sizes(holds, right)
            found = f"rank {rank} holds {there} when only its piece is left; a piece has {here}"
            return Verdict(False, found, "a slice or a chunk is a view, and keeps the whole tensor's memory: clone() it")
    return Verdict(True)


def _silent(task: ZeroTask, trial: Trial) -> Verdict:
    for rank, seen in enumerate(trial.answers):
        if called := [event.what for event in seen.events if event.kind == "call"]:
            hint = "every rank has the whole tensor here: it takes its piece without asking anybody"
            return Verdict(False, f"rank {rank} called {called[0]}", hint)
    return Verdict(True)


@dataclass(frozen=True)
class Shard(ZeroTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        own_values("returns the rank's piece", 0.5),
        Aspect("keeps no more than the piece", 0.4, _own_memory),
        Aspect("sends nothing", 0.1, _silent),
    )


def _gathering(function, watch: Watch) -> Tensors:
    rank, n = dist.get_rank(), dist.get_world_size()
    refuse(watch)
    found = {}
    for name, tensor in tensors().items():
        piece = pieces(tensor, n)[rank]
        given = piece.clone()
        found[name] = _tensor(function(given, tensor.shape), "gather", "the whole tensor")
        if not torch.equal(given, piece):
            raise Stopped("gather has changed the shard that it was given", "gather into a tensor of its own")
    return found


@cache
def gather_cases(n: int) -> list[Script]:
    """One, for tensors of several shapes."""
    gathers = tuple(pieces(tensor, n)[0].nbytes for tensor in tensors().values())
    return [Script(n, _gathering, [tensors()] * n, lambda: _wrong_gathers(n), Must(gathers, (), once="a tensor"))]


def _wrong_gathers(n: int) -> Iterator[Wrong]:
    flat = {name: torch.cat(pieces(tensor, n)) for name, tensor in tensors().items()}
    shaped = tensors()
    yield Wrong("the padding is still there: cut it off, shape.numel() elements are the tensor's, then view(shape)", [flat] * n)
    bare = {name: tensor[: shaped[name].numel()] for name, tensor in flat.items()}
    yield Wrong("the elements are right, the shape is not: .view(shape)", [bare] * n)
    backwards = {name: _cut(torch.cat(pieces(t, n)[::-1]), t) for name, t in shaped.items()}
    yield Wrong("the shards are in the wrong order: rank 0's comes first", [backwards] * n)
    own = [{name: _cut(torch.cat([pieces(t, n)[rank]] * n), t) for name, t in shaped.items()} for rank in range(n)]
    yield Wrong("that is this rank's own shard, N times: gather the others'", own)
    end = {name: torch.cat(pieces(t, n))[-t.numel() :].view(t.shape) for name, t in shaped.items()}
    yield Wrong("the padding is at the end, not at the front: keep the first shape.numel() elements", [end] * n)
    alone = [{name: _placed(t, n, rank) for name, t in shaped.items()} for rank in range(n)]
    yield Wrong("only this rank's own part is there: gather the others'", alone)


def _cut(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flat[: like.numel()].view(like.shape)


def _placed(tensor: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    parts = [piece if k == rank else piece * 0 for k, piece in enumerate(pieces(tensor, n))]
    return _cut(torch.cat(parts), tensor)


@dataclass(frozen=True)
class Gather(ZeroTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("returns the whole tensor", 0.6),
        Aspect("makes one all-gather of a shard", 0.4, traffic.traffic),
    )
