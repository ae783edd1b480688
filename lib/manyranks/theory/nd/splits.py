"""Which split of which operator: Alpa's and Colossal-Auto's question for a few dense layers on one mesh, answered exactly.

All choices of all operators are weighed: a shortest path from operator to operator, for an operator's cost depends on its
neighbours only, and on how the residual stream is laid out on both sides of a block. As in Alpa, costs are added up: nothing
overlaps. `every` tries all assignments of a block one by one, and finds the same.
Sources: Alpa, arXiv 2201.12023, section 4, an integer program where we take a shortest path; Colossal-Auto, arXiv 2302.02599,
which has memory as the constraint, too.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from manyranks.theory.nd.operators import Choice, Operator, Work, blocks, cost, edge, possible, reshard

# How the two known ways split each operator. Megatron's norms are split by tokens with sequence parallelism, else whole.
DATA = dict.fromkeys(("norm", "qkv", "core", "out", "up", "down"), "tokens")
MEGATRON = {"norm": "tokens", "qkv": "columns", "core": "columns", "out": "rows", "up": "columns", "down": "rows"}
PATTERNS = {"data": DATA, "Megatron": MEGATRON}
_NAMES = {  # what attention and the MLP do, by pattern
    ("data", "data"): "data",
    ("Megatron", "Megatron"): "Megatron",
    ("data", "Megatron"): "data, and Megatron's MLP",
}


class Path(NamedTuple):
    """Choices of a run of operators. seconds: of a step, with `once` of gradients and parameters; states, kept: bytes of a
    rank, kept for one micro-batch."""

    seconds: float = 0.0
    once: float = 0.0
    states: float = 0.0
    kept: float = 0.0
    choices: tuple[Choice, ...] = ()

    def then(self, other: "Path") -> "Path":
        """Both, one after the other."""
        seconds, once, states, kept, choices = other
        return Path(self.seconds + seconds, self.once + once, self.states + states, self.kept + kept, self.choices + choices)

    def memory(self, flying: int) -> float:
        """Bytes of a rank that keeps so many micro-batches' activations at once."""
        return self.states + flying * self.kept


class Stage(NamedTuple):
    """Consecutive layers on a mesh. seconds: of a micro-batch; once: of a step's gradients and parameters; memory: bytes of a
    rank; choices: of every operator, in order, with its name."""

    layers: int
    mesh: tuple[int, ...]
    seconds: float
    once: float
    memory: float
    choices: tuple[tuple[str, Choice], ...]

    @property
    def pattern(self) -> str:
        """Of each axis "data", "Megatron" or a mixture, as "data 2 × Megatron 4", from the outside in."""
        return " × ".join(f"{self._axis(axis)} {n}" for axis, n in enumerate(self.mesh) if n > 1) or "one GPU"

    def _axis(self, axis: int) -> str:
        found = tuple(self._of(names, axis) for names in (("qkv", "core", "out"), ("up", "down")))
        return _NAMES.get(found, "mixed")

    def _of(self, names: tuple[str, ...], axis: int) -> str:
        chosen = {(name, choice[axis]) for name, choice in self.choices if name in names}
        return next((pattern for pattern, rule in PATTERNS.items() if chosen <= rule.items()), "mixed")


def fastest(work: Work, layers: int, m: int = 1, flying: int = 1, limit: float = math.inf) -> Stage | None:
    """The best splits of so many layers; None where none fits. m: micro-batches of a step; flying: those whose activations are
    kept at once; limit: bytes of a rank."""
    for keep in (None, flying):  # mostly memory does not bind, and the fastest way of all is enough
        halves = [_fronts(block, work, m, keep) for block in blocks(work.shape)]
        paths: dict[Choice, list[Path]] = {start: [Path()] for start, _ in halves[0]}
        for half in halves * layers:
            paths = _joined(paths, half, keep)
        fitting = [path for front in paths.values() for path in front if path.memory(flying) <= limit]
        if fitting:
            return _stage(min(fitting), work, layers, m, flying)
    return None


def of_pattern(pattern: Iterable[str], work: Work, layers: int, m: int = 1, flying: int = 1) -> Stage:
    """What a pattern of PATTERNS on each axis of the mesh costs, on all layers."""
    rules, path = [PATTERNS[name] for name in pattern], Path()
    for block in blocks(work.shape) * layers:
        chosen = [tuple(rule[operator.name] for rule in rules) for operator in (*block, block[0])]
        path = path.then(_path(block, chosen, work, m))
    return _stage(path, work, layers, m, flying)


def every(block: tuple[Operator, ...], work: Work, m: int = 1) -> Iterator[tuple[Path, Choice]]:
    """Every assignment to a block's operators, with every layout of the stream after it."""
    for choices in itertools.product(*(possible(operator, work) for operator in (*block, block[0]))):
        yield _path(block, choices, work, m), choices[-1]


def _path(block: tuple[Operator, ...], choices: Iterable[Choice], work: Work, m: int) -> Path:
    """choices: of the block's operators, and of the norm after it, which is the next block's."""
    chosen = list(choices)
    path = _stream(block[0], chosen[0], chosen[-1], work, m)
    for (operator, after), (choice, following) in zip(_pairs(block), itertools.pairwise(chosen), strict=True):
        path = path.then(_step(operator, choice, after, following, work, m))
    return path


def _pairs(block: tuple[Operator, ...]) -> Iterator[tuple[Operator, Operator]]:
    return itertools.pairwise((*block, block[0]))


@functools.lru_cache(maxsize=65536)
def _step(operator: Operator, choice: Choice, after: Operator, following: Choice, work: Work, m: int) -> Path:
    """An operator, and the way from it to the next."""
    own = cost(operator, choice, work)
    seconds = m * (own.seconds + edge(operator, choice, after, following, work)) + own.once
    return Path(seconds, own.once, own.states, own.kept, (choice,))


@functools.lru_cache(maxsize=4096)
def _stream(norm: Operator, start: Choice, end: Choice, work: Work, m: int) -> Path:
    """The residual stream past a block, and its gradient."""
    return Path(m * (reshard(start, end, norm.reads, work) + reshard(end, start, norm.reads, work)))


@functools.lru_cache(maxsize=1024)
def _fronts(block: tuple[Operator, ...], work: Work, m: int, keep: int | None) -> dict[tuple, list[Path]]:
    """Of a block, by the stream's layout before and after it: the splits that no other beats in both time and memory, with
    `keep` micro-batches in flight; or the fastest alone."""
    norm, streams, found = block[0], possible(block[0], work), {}
    ways = [
        {(a, b): [_step(one, a, after, b, work, m)] for a in possible(one, work) for b in possible(after, work)}
        for one, after in _pairs(block)
    ]
    for start in streams:
        reached = {start: [Path()]}
        for way in ways:
            reached = _joined(reached, way, keep)
        for end in streams:
            past = _stream(norm, start, end, work, m)
            found[start, end] = [path.then(past) for path in reached[end]]
    return found


def _joined(paths: dict[Choice, list[Path]], ways: dict[tuple, list[Path]], keep: int | None) -> dict[Choice, list[Path]]:
    """Each path, and each way on from where it ends."""
    found: dict[Choice, list[Path]] = {}
    for (start, end), steps in ways.items():
        if keep is None and start in paths:  # one of each
            (path,), (step,) = paths[start], steps
            if end not in found or path.seconds + step.seconds < found[end][0].seconds:
                found[end] = [path.then(step)]
        elif start in paths:
            found.setdefault(end, []).extend(path.then(step) for path in paths[start] for step in steps)
    return found if keep is None else {end: _front(every_path, keep) for end, every_path in found.items()}


def _front(paths: list[Path], flying: int) -> list[Path]:
    """Those that take less memory than every faster one."""
    kept: list[Path] = []
    for path in sorted(paths):
        if not kept or path.memory(flying) < kept[-1].memory(flying):
            kept.append(path)
    return kept


def _stage(path: Path, work: Work, layers: int, m: int, flying: int) -> Stage:
    names = [operator.name for block in blocks(work.shape) for operator in block] * layers
    named = tuple(zip(names, path.choices, strict=True))
    return Stage(layers, work.mesh, (path.seconds - path.once) / m, path.once, path.memory(flying), named)
