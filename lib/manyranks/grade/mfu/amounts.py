"""Amounts that a learner's function returns: numbers by name. Read on the rank, compared here with what was counted."""

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.old.scripts import WAIT, Tensors, Wrong
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.journal import Stopped

if TYPE_CHECKING:
    from manyranks.grade.mfu.task import MfuTask

Amounts = dict[str, float | Tensor]
_TOLERANCE, _NEAR = 1e-9, 1e-6  # of float64, and of float32
_ROUNDED = "nearly right, as if rounded: keep to Python's numbers, which are float64; torch.tensor of them is float32"


class Unit(NamedTuple):
    """name: of a small amount; larger ones have a prefix."""

    name: str
    prefixes: tuple[tuple[float, str], ...]

    def __call__(self, amount: float) -> str:
        if not amount:
            return f"0 {self.name}"
        scale, prefix = next((each for each in self.prefixes if abs(amount) >= 0.9995 * each[0]), self.prefixes[-1])
        return f"{amount / scale:.4g} {prefix}{self.name}" if math.isfinite(amount) else str(amount)


FLOPS = Unit("FLOP", ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")))
SECONDS = Unit("s", ((1, ""), (1e-3, "m"), (1e-6, "µ")))
PERCENT = Unit("%", ((1e-2, ""),))


def named(value: Any, names: tuple[str, ...], call: str) -> Tensors:
    """The learner's dict. Raises Stopped where it has other names, or what is no number."""
    form = "it returns a dict: " + "{" + ", ".join(f'"{name}": …' for name in names) + "}"
    if not isinstance(value, dict):
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    if missing := [name for name in names if name not in value]:
        raise Stopped(f"what {call} returned has no {missing[0]!r}", form)
    if more := [name for name in value if name not in names]:
        raise Stopped(f"what {call} returned has {more[0]!r:.40}, too", form)
    return {name: number(value[name], name, form) for name in names}


def number(value: Any, what: str, form: str) -> Tensor:
    """The learner's, float64. Raises Stopped for what is none; form: what is asked for."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return torch.tensor(float(value), dtype=torch.float64)


def listed(value: Any) -> Any:
    """Tensors and arrays of several numbers as lists; all else as it is."""
    return value.tolist() if getattr(value, "ndim", 0) == 1 else value


def kind_of(value: Any) -> str:
    """ "nothing", "a tuple of 3"."""
    if value is None:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor of {value.numel()} elements"
    many = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{many}"


def exact(amounts: Amounts) -> Tensors:
    """As the ranks send them."""
    return {name: torch.as_tensor(amount, dtype=torch.float64) for name, amount in amounts.items()}


def alike(got: Tensor, right: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether they are the same, but for rounding."""
    scale = max(right.abs().max().item(), 1e-12) if right.numel() else 1.0
    return got.shape == right.shape and torch.allclose(got, right, rtol=tolerance, atol=tolerance * scale)


def aspect(what: str, share: float, names: tuple[str, ...], unit: Unit = FLOPS) -> Aspect:
    """Of the amounts with these names, for itself."""

    def judge(task: "MfuTask", trial: Trial) -> Verdict:
        for rank, seen in enumerate(trial.answers):
            for name in names:
                got, right = seen.tensors[name], trial.case.expected[rank][name]
                if not alike(got, right):
                    where = f"rank {rank}: " if trial.case.n > 1 else ""
                    return Verdict(False, where + task.found(trial, name, got, right, unit), why(task, trial, name))
        return Verdict(True)

    return Aspect(what, share, judge, for_itself=True)


def why(task: "MfuTask", trial: Trial, name: str) -> str:
    """Of the known mistakes in this amount, the one that explains all ranks' results; those of other amounts tell nothing."""
    if trial.unwaited:  # it is chance, then
        return WAIT
    results = [seen.tensors for seen in trial.answers]
    mistakes = [wrong for wrong in trial.case.mistakes() if name in wrong.results[0]]
    if hint := next((wrong.hint for wrong in mistakes if _explains(wrong.results, results)), ""):
        return hint
    if all(alike(got[name], right[name], _NEAR) for got, right in zip(results, trial.case.expected, strict=True)):
        return _ROUNDED
    return task.otherwise(trial, name) or task.unexplained


def _explains(wrong: list[Tensors], results: list[Tensors]) -> bool:
    pairs = zip(results, wrong, strict=True)
    return all(alike(got[name], theirs[name]) for got, theirs in pairs for name in theirs)


def mistakes(right: list[Tensors], wrong: Iterable[tuple[str, list[Amounts]]]) -> Iterator[Wrong]:
    """For each hint and its amounts by rank, those that are not right: in some cases a mistake does not show."""
    for hint, amounts in wrong:
        results = [exact(own) for own in amounts]
        names = {
            name for own, theirs in zip(right, results, strict=True) for name in theirs if not alike(theirs[name], own[name])
        }
        if names:
            yield Wrong(hint, results)


def times(got: float, right: float) -> str:
    """ "2 times", "1/3 of", where the quotient is simple; else ""."""
    quotient = got / right if right else 0.0
    for number in range(2, 1000):
        if math.isclose(quotient, number, rel_tol=_TOLERANCE):
            return f"{number} times"
        if math.isclose(quotient * number, 1, rel_tol=_TOLERANCE):
            return f"1/{number} of"
    return ""
