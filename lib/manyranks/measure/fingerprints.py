"""A few numbers that tell one tensor from another on every platform, and what differs between two values, in words."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

_LONGEST = 120  # characters of a value in a report
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_ALL, _SAMPLES = 16, 8  # elements: up to so many are all stored; of more, so many
_KEPT = 1 << 16  # elements: longer weights are made anew each time
_FACTORS = (2654435761, 2246822519, 3266489917, 668265263)  # of projections' weights: odd, so that elements differ
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
_EXACT, NEAR = 1e-9, 1e-6  # tolerance of float64 and whole numbers, and of what was rounded to float32 on its way
_NOT_A_NUMBER, _INFINITE = 7.7e7, 8.8e7  # what stands for them among a print's elements
_STAND_INS = (_NOT_A_NUMBER, _INFINITE, -_INFINITE)

Fact = object  # JSON: numbers, words, lists and dicts of them, or a Print


class Print(NamedTuple):
    """A tensor's shape and dtype, "[7] of float64", and numbers that tell it from others.

    numbers: all elements of a small tensor; of a large one some elements, then projections, then the root of its mean square.
    """

    form: str
    numbers: tuple[float, ...]


def print_of(tensor: torch.Tensor) -> Print:
    """The same on every platform but for rounding: positions and weights come from whole numbers."""
    flat = tensor.detach().cpu().flatten()
    form = form_of(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    flat, n = flat.double(), flat.numel()
    shown = flat.nan_to_num(*_STAND_INS)
    if n <= _ALL:
        return Print(form, tuple(map(_rounded, shown.tolist())))
    most = float(flat.nan_to_num(0, 0, 0).abs().max()) or 1.0
    flat = flat.nan_to_num(7 * most, 8 * most, -8 * most)  # so that projections tell small differences of the others
    weight = _weight if n <= _KEPT else _weight.__wrapped__
    projected = [float(flat @ weight(n, factor)) / math.sqrt(n) for factor in _FACTORS]
    numbers = [*shown[_places(n)].tolist(), *projected, float(flat.norm()) / math.sqrt(n)]
    return Print(form, tuple(map(_rounded, numbers)))


@lru_cache(maxsize=64)
def _weight(n: int, factor: int) -> torch.Tensor:
    """Returns what n elements are multiplied by in one projection."""
    return (torch.arange(n) * factor % 2**32).double() / 2**32 - 0.5


def _places(n: int) -> list[int]:
    """Picks the elements that are stored of many: the first, the last, and some between."""
    return [i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]


def _rounded(number: float) -> float:
    return float(f"{number:.13g}")


def form_of(tensor: torch.Tensor) -> str:
    """Shape and dtype: "[7] of float32"."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def fact(value) -> Fact:
    """Makes of a value what is stored: prints for tensors, lists for tuples."""
    if isinstance(value, torch.Tensor):
        return print_of(value)
    if isinstance(value, Print) or value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): fact(one) for name, one in value.items()}
    return [fact(one) for one in value]


def same(got: Fact, right: Fact, tolerance: float | None = None) -> bool:
    """Returns whether they are the same; numbers but for rounding, as far as their dtype has it."""
    got, right = fact(got), fact(right)
    if isinstance(got, Print) and isinstance(right, Print):
        limit = tolerance or _TOLERANCE.get(right.form.rpartition(" ")[2], _EXACT)
        return got.form == right.form and _close(got.numbers, right.numbers, limit)
    if _is_number(got) and _is_number(right) and (tolerance or float in (type(got), type(right))):
        return _close((float(got),), (float(right),), tolerance or _EXACT)
    if type(got) is not type(right):
        return False
    if isinstance(right, list):
        return len(got) == len(right) and all(same(one, other, tolerance) for one, other in zip(got, right, strict=True))
    if isinstance(right, dict):
        return got.keys() == right.keys() and all(same(got[name], right[name], tolerance) for name in right)
    return got == right


def _is_number(value: Fact) -> bool:
    return type(value) in (int, float)


def _close(got: tuple[float, ...], right: tuple[float, ...], tolerance: float) -> bool:
    room = tolerance * _scale(*got, *right)  # next to what is infinite, everything would be close
    return all(
        one == other or (abs(one - other) <= room < math.inf and not {one, other} & {*_STAND_INS})
        for one, other in zip(got, right, strict=True)
    )


def _scale(*numbers: float) -> float:
    """Returns what differences are measured by: the largest number that stands for itself."""
    return max([1e-12, *(abs(one) for one in numbers if one not in _STAND_INS)])


def only_rounded(got: Fact, right: Fact) -> bool:
    """Returns whether they differ as if float32 had been in between."""
    got, right = fact(got), fact(right)
    if isinstance(got, Print) and isinstance(right, Print) and got.form != right.form:
        return got.form.partition(" of ")[0] == right.form.partition(" of ")[0]
    return same(got, right, NEAR)


def difference(got: Fact, right: Fact) -> str:
    """Says in words how they differ: "2 of 7 elements are wrong; element 0 is 5, right is 7"."""
    got, right = fact(got), fact(right)
    if not (isinstance(got, Print) and isinstance(right, Print)):
        return _unlike(got, right)
    if got.form != right.form:
        return f"{got.form}; right is {right.form}"
    n = math.prod(json.loads(right.form.partition(" of ")[0]))
    places = range(n) if n <= _ALL else _places(n)
    room = _TOLERANCE.get(right.form.rpartition(" ")[2], _EXACT) * _scale(*right.numbers)
    numbers = list(zip(places, got.numbers, right.numbers, strict=False))
    wrong = [one for one in numbers if abs(one[1] - one[2]) > room]
    many = f"{len(wrong)} of {n} elements are wrong; " if n <= _ALL else ""
    if not wrong:
        return f"some of its {n:,} elements are wrong"
    place, there, here = wrong[0]
    return f"{many}element {place:,} is {_number(there, here)}, right is {_number(here, there)}"


def _number(one: float, other: float) -> str:
    """Writes a number with as many digits as tell it from the other."""
    special = {_NOT_A_NUMBER: "nan", _INFINITE: "inf", -_INFINITE: "-inf"}
    return special.get(one) or (f"{one:g}" if f"{one:g}" != f"{other:g}" else f"{one:.13g}")


def _unlike(got: Fact, right: Fact) -> str:
    """Says how they differ; of long lists, what differs first."""
    if isinstance(got, list) and isinstance(right, list) and len(str(right)) > 60:
        at = next(
            (i for i, (one, other) in enumerate(zip(got, right, strict=False)) if one != other), min(len(got), len(right))
        )
        there, here = (shown(its[at]) if at < len(its) else "missing" for its in (got, right))
        return f"has {len(got):,} items, item {at} is {there}; right are {len(right):,}, and item {at} is {here}"
    return f"is {shown(got)}; right is {shown(right)}"


def shown(value: Fact) -> str:
    """Writes a value for a report."""
    if isinstance(value, Print):
        return value.form
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {shown(one)}" for name, one in value.items()) + "}"
    elif isinstance(value, list):
        text = "(" + ", ".join(shown(one) for one in value) + ")"
    else:
        text = f"{value:g}" if isinstance(value, float) else "nothing" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def size(n: int) -> str:
    """Writes bytes: 3500000 -> "3.5 MB"; three digits, and exact bytes below 1 kB."""
    for unit, name in _UNITS:
        if n >= unit * 0.9995:  # it would round to 1,000 of the next
            return f"{n / unit:.3g} {name}"
    return f"{n} bytes"


def listed(words: list[str]) -> str:
    """Joins words: "2, 3 and 4"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
