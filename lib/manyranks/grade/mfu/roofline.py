"""The task lost_time: how long each operator takes longer than its FLOPs, and what fusing neighbours gives back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.mfu import amounts, kernels
from manyranks.grade.mfu.amounts import SECONDS, Unit, aspect
from manyranks.grade.mfu.given import Operator
from manyranks.grade.mfu.kernels import Recorded
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect
from manyranks.measure.journal import Stopped

CALL = "lost_time(operators, needed, peak, bandwidth)"
_LOST, _SAVED = "lost", "saved"
_PAIR = "it returns a pair: a list with one number for each operator, and one number"
_WHOLE = "that is how long an operator takes: lost is what is beyond its FLOPs ÷ peak"
_MEMORY = "that is the bytes' time: where the FLOPs take longer, nothing is lost; where not, what is beyond them"
_SUM = "FLOPs and bytes go on at the same time: an operator takes the longer of both, not their sum"
_READS = "what an operator writes is missing: it moves what it reads and what it writes"
_WRITES = "what an operator reads is missing: it moves what it reads and what it writes"
_BELOW = "nothing is lost where the FLOPs take longer than the bytes: 0, not less"
_SWAPPED = "peak and bandwidth are swapped: FLOPs ÷ peak, bytes ÷ bandwidth"
_ELEMENTWISE = "operators without FLOPs lose time, too: all of it, for they only move bytes"
_ORDER = "the numbers stand in another order: one for each operator, in the operators' order"
_NO_LAST = "the run at the end is missing: there is no product behind it"
_LONELY = "products lose time, too, where their bytes take longer than their FLOPs"
_OVER = "a product ends a run: what runs on both sides of it make and read goes through memory"
_PRODUCT = "products are fused, too: they stay what they are"
_NEXT = "what any operator behind the run reads is written: not only the last result, or what the next operator reads"
_ALL = "everything is fused into one kernel: products stay what they are, and what is between two of them is one kernel"
_NEEDED = (
    "a fused kernel writes what is needed afterwards, too: by operators behind it, or in the end (`needed`). Not only its last "
    "result"
)
_NOT_LATER = "what operators behind the run read is written, too, not only what is in `needed`"
_NOT_END = "what is in `needed` is written, too, not only what operators behind the run read"
_ALL_WRITTEN = "what only the run itself reads is not written: it stays on the chip"
_READ_AGAIN = "what the run made itself is not read from memory: it stays on the chip"
_TWICE = "a tensor that several operators of the run read is read once"
_NO_READS = "a fused kernel still reads what comes from outside"
_FUSED_TIME = "that is how long the fused kernels take: saved is how much less that is than before"
_BYTES = "those are bytes: divide by the bandwidth"
_ALL_LOST = "that is all time of the runs: the fused kernels still take some"
_LOST_UNEXPLAINED = "max(FLOPs ÷ peak, bytes ÷ bandwidth) − FLOPs ÷ peak, with bytes of all that is read and written"
_SAVED_UNEXPLAINED = (
    "of each run of neighbours without FLOPs: all its bytes, less those of one kernel that reads what comes from outside once "
    "and writes what is read behind it or needed; ÷ bandwidth"
)


class Case(NamedTuple):
    """recorded: real operators; peak, bandwidth: of a chip."""

    recorded: Recorded
    peak: float
    bandwidth: float
    what: str


def _runs(operators: list[Operator]) -> Iterator[tuple[int, int]]:
    """From and to of neighbours without FLOPs."""
    at = 0
    for product, run in groupby(operators, lambda one: one.flops > 0):
        size = len(list(run))
        if not product:
            yield at, at + size
        at += size


class Rule(NamedTuple):
    """What a fused kernel moves; the defaults are right. made: what it reads of its own; once: whether a tensor is read once;
    reads: whether it reads at all; written: "needed", "last", "all", "end", "later", "next", "products" or "last, end".
    """

    made: bool = False
    once: bool = True
    reads: bool = True
    written: str = "needed"


RIGHT = Rule()


def fused_bytes(recorded: Recorded, start: int, end: int, rule: Rule = RIGHT) -> int:
    """Of the operators from start to end, as one kernel."""
    run, behind = recorded.operators[start:end], recorded.operators[end:]
    made = {name: size for one in run for name, size in one.writes.items()}
    reads = [(name, size) for one in run for name, size in one.reads.items() if rule.made or name not in made]
    later = {name for one in behind for name in one.reads}
    kept = {
        "needed": later | {*recorded.needed},
        "last": {*run[-1].writes},
        "all": {*made},
        "end": {*recorded.needed},
        "later": later,
        "next": {name for one in behind[:1] for name in one.reads} | {*recorded.needed},
        "products": {name for one in behind if one.flops for name in one.reads} | {*recorded.needed},
        "last, end": {*run[-1].writes, *recorded.needed},
    }[rule.written]
    total = sum(size for _, size in (dict(reads).items() if rule.once else reads)) * rule.reads
    return total + sum(size for name, size in made.items() if name in kept)


def _moved(operator: Operator, reads: bool = True, writes: bool = True) -> int:
    return reads * sum(operator.reads.values()) + writes * sum(operator.writes.values())


def _lost(case: Case, of: Callable[[float, float], float], reads: bool = True, writes: bool = True) -> Tensor:
    """of: seconds of FLOPs and of bytes."""
    found = [of(one.flops / case.peak, _moved(one, reads, writes) / case.bandwidth) for one in case.recorded.operators]
    return torch.tensor(found, dtype=torch.float64)


def _saved(case: Case, rule: Rule = RIGHT) -> float:
    runs = list(_runs(case.recorded.operators))
    before = sum(_moved(one) for start, end in runs for one in case.recorded.operators[start:end])
    return (before - sum(fused_bytes(case.recorded, *run, rule) for run in runs)) / case.bandwidth


_RULES: list[tuple[str, Rule]] = [
    (_NEEDED, Rule(written="last")),
    (_NOT_LATER, Rule(written="end")),
    (_NOT_END, Rule(written="later")),
    (_NEXT, Rule(written="next")),
    (_NEXT, Rule(written="products")),
    (_NEXT, Rule(written="last, end")),
    (_ALL_WRITTEN, Rule(written="all")),
    (_READ_AGAIN, Rule(made=True)),
    (_TWICE, Rule(once=False)),
    (_NO_READS, Rule(reads=False)),
]


def _wrong(case: Case) -> Iterator[tuple[str, list[Tensors]]]:
    """By what is lost, then by what is saved."""
    right = _right(case)
    for hint, lost in [
        (_WHOLE, _lost(case, max)),
        (_MEMORY, _lost(case, lambda compute, memory: memory)),
        (_MEMORY, _lost(case, lambda compute, memory: memory if memory > compute else 0.0)),
        (_SUM, _lost(case, lambda compute, memory: compute + memory)),
        (_READS, _lost(case, _beyond, writes=False)),
        (_WRITES, _lost(case, _beyond, reads=False)),
        (_BELOW, _lost(case, lambda compute, memory: memory - compute)),
        (_SWAPPED, _lost(case._replace(peak=case.bandwidth, bandwidth=case.peak), _beyond)),
        (_ELEMENTWISE, _lost(case, lambda compute, memory: _beyond(compute, memory) if compute else 0.0)),
        (_LONELY, _lost(case, lambda compute, memory: 0.0 if compute else memory)),
        (_ORDER, right[_LOST].flip(0)),
        (_ORDER, right[_LOST].sort().values),
        (_ORDER, right[_LOST].sort(descending=True).values),
    ]:
        yield hint, [{_LOST: lost}]
    runs, recorded = list(_runs(case.recorded.operators)), case.recorded
    whole = sum(_moved(one) for start, end in runs for one in recorded.operators[start:end]) / case.bandwidth
    for hint, rule in _RULES:
        yield hint, _seconds(_saved(case, rule))
    yield _FUSED_TIME, _seconds(whole - _saved(case))
    yield _SWAPPED, _seconds(_saved(case) * case.bandwidth / case.peak)
    for hint, changed in _other_runs(case, runs):
        yield hint, _seconds(changed / case.bandwidth)
    yield _BYTES, _seconds(_saved(case) * case.bandwidth)
    yield _ALL_LOST, _seconds(whole)
    everything = sum(map(_moved, recorded.operators)) - fused_bytes(recorded, 0, len(recorded.operators))
    yield _ALL, _seconds(everything / case.bandwidth)
    before = sum(_lost(case, max)).item()
    compute = sum(one.flops for one in recorded.operators) / case.peak
    fused = fused_bytes(recorded, 0, len(recorded.operators)) / case.bandwidth
    if fused > compute:
        yield _ALL, _seconds(before - fused)


def _other_runs(case: Case, runs: list[tuple[int, int]]) -> Iterator[tuple[str, float]]:
    """Bytes that are saved where something else is fused."""
    recorded, operators = case.recorded, case.recorded.operators

    def saved(start: int, end: int) -> int:
        return sum(map(_moved, operators[start:end])) - fused_bytes(recorded, start, end)

    yield _NO_LAST, sum(saved(*run) for run in runs[:-1])
    yield _PRODUCT, sum(saved(max(0, start - 1), end) for start, end in runs)
    yield _PRODUCT, sum(saved(start, min(end + 1, len(operators))) for start, end in runs)
    without = [one for one in operators if not one.flops]
    apart = recorded._replace(operators=[*without, *(one for one in operators if one.flops)])
    yield _OVER, sum(map(_moved, without)) - fused_bytes(apart, 0, len(without))


def _beyond(compute: float, memory: float) -> float:
    return max(0.0, memory - compute)


def _seconds(saved: float) -> list[Tensors]:
    return [amounts.exact({_SAVED: saved})]


def _right(case: Case) -> Tensors:
    """Lost by what was counted, saved by what was counted of each run as one kernel."""
    runs = list(_runs(case.recorded.operators))
    before = sum(_moved(one) for start, end in runs for one in case.recorded.operators[start:end])
    after = sum(size for _, size in case.recorded.runs)
    return {_LOST: _lost(case, _beyond), **amounts.exact({_SAVED: (before - after) / case.bandwidth})}


def _run(case: Case, function: Callable, watch) -> Tensors:
    operators = [Operator(*one[:2], dict(one.reads), dict(one.writes)) for one in case.recorded.operators]
    with own():
        found = amounts.listed(function(operators, list(case.recorded.needed), case.peak, case.bandwidth))
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Stopped(f"{CALL} returned {amounts.kind_of(found)}", _PAIR)
    return {
        _LOST: _row(amounts.listed(found[0]), len(case.recorded.operators)),
        _SAVED: amounts.number(found[1], _SAVED, _PAIR),
    }


def _row(value: Any, count: int) -> Tensor:
    if not isinstance(value, tuple | list) or len(value) != count:
        raise Stopped(f"lost is {amounts.kind_of(value)}, for {count} operators", _PAIR)
    return torch.stack([amounts.number(one, "what is lost", _PAIR) for one in value])


@cache
def cases(n: int) -> list[Scene]:
    """A gated MLP and the scores of attention, on chips with other ridges."""
    return [
        _scene(Case(kernels.gated(), 40e6, 4e6, "a gated MLP with a residual")),
        _scene(Case(kernels.attention(), 9e6, 4.5e6, "scores and their weights")),
    ]


def _scene(case: Case) -> Scene:
    right = [_right(case)]
    wrong = partial(_wrong, case)
    return Scene(1, partial(_run, case), right, lambda: amounts.mistakes(right, wrong()), case, f"for {case.what}")


@dataclass(frozen=True)
class LostTime(MfuTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    measured: ClassVar[str] = "by the bytes that were counted it is"
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("what each operator loses to memory", 0.55, (_LOST,), SECONDS),
        aspect("what fusing gives back", 0.45, (_SAVED,), SECONDS),
    )

    def found(self, trial: Trial, name: str, got: Tensor, right: Tensor, unit: Unit) -> str:
        """Of the first operator whose number is wrong."""
        if name == _SAVED:
            return super().found(trial, name, got, right, unit)
        operators, scale = trial.case.must.recorded.operators, right.abs().max()
        wrong = next(i for i in range(len(right)) if not torch.allclose(got[i], right[i], rtol=1e-9, atol=1e-9 * scale.item()))
        one = operators[wrong]
        what = f"lost at operator {wrong}, {one.name} of {one.flops:,} FLOPs and {_moved(one):,} bytes"
        return super().found(trial, what, got[wrong], right[wrong], unit)

    def otherwise(self, trial: Trial, name: str) -> str:
        """Of this number."""
        return _LOST_UNEXPLAINED if name == _LOST else _SAVED_UNEXPLAINED
