"""Checks of exercise 00_start_here: messages any number of ranks ahead, three reports to read, α and β of measured times."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from manyranks.given import start_here as given
from manyranks.given.numbers import normal
from manyranks.given.start_here import Times
from manyranks.grade.check import Task
from manyranks.grade.judges import facts, messages, sent, values
from manyranks.grade.learner import NO_RANK, Allowed, number, pair, plain, whole
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch

_task = partial(Task, "00_start_here")

# Task 1: shift


class Shift(NamedTuple):
    """A call on every rank: so many elements, so many ranks further."""

    elements: int
    by: int

    def __str__(self) -> str:
        return f"by {self.by}"


def _shift(own: tuple[torch.Tensor, int], function: Callable, watch: Watch) -> dict:
    x, by = own
    before = x.clone()
    found = {"the result": plain(result := function(x, by)), "the input has changed": not torch.equal(x, before)}
    return found | {"the input is also returned": isinstance(result, torch.Tensor) and result.data_ptr() == x.data_ptr()}


_WHOM = "rank r sends to (r + by) % N and receives from (r − by) % N, also where `by` is negative"
_ONCE = "x is sent once, to one rank, and one tensor is received; if the shift leads back to the rank, nothing is sent"
_SHIFTS = (Shift(5, 1), Shift(6, 2), Shift(4, -1), Shift(3, 4), Shift(7, 3))


def _tensor(case: Shift, rank: int, n: int, seed: int) -> tuple[torch.Tensor, int]:
    """Draws a rank's tensor: a vector in float64; for the judge, a matrix in float32, too."""
    if case.elements < 10:
        return normal((case.elements,), seed, case, rank), case.by
    return normal((case.elements, 2), seed, case, rank, dtype=torch.float32), case.by


shift = _task(
    "shift(x, by)",
    5,
    _shift,
    (
        values(0.6, "returns the tensor of the rank `by` places back", "the result", alone=True),
        messages(0.2, "sends to the rank `by` places ahead", hint=_WHOM, needs=1),
        sent(0.1, "sends its tensor once, and nothing to itself", "^(?!recv)", hint=_ONCE),
        facts(0.1, "leaves its input as it was", "input", hint="return a new tensor: receive into one, or return x.clone()"),
    ),
    make=_tensor,
    cases=_SHIFTS,
    worlds=(2, 3, 4, 6, 8),
    more=lambda random: [Shift(random.randint(10, 99), random.randint(-9, 9))],
    allowed=Allowed(hint="write it with dist.send and dist.recv", only=("send", "recv")),
    unexplained="the result is the tensor that the rank `by` places back has sent: return that one",
    advice=(
        NO_RANK,
        ("invalid|itself|to self|your own rank", "with by = N or 0 a rank would send to itself: return a copy of x instead"),
        (
            "waits in send .* waits in send",
            "every rank in a cycle sends first: some must receive first. With by = 2 on 4 ranks, 0 and 2 are a cycle",
        ),
        ("waits in recv .* waits in recv", "every rank in a cycle receives first: some must send first"),
    ),
)

# Task 2: three reports

_FORM = 'it returns a dict with a rank for each letter: {"A": 0, "B": 0, "C": 0}'


def _culprits(case: str, function: Callable, watch: Watch) -> dict:
    found = function()
    if not isinstance(found, dict):
        raise Stopped(f"culprits() returned {kind_of(found)}", _FORM)
    if missing := [letter for letter in "ABC" if letter not in found]:
        raise Stopped(f"culprits() has no {missing[0]!r}", _FORM)
    return {f"the rank of report {letter}": whole(found[letter], f"the rank of {letter}", _FORM) for letter in "ABC"}


_READ = {
    "A": "follow the chain in the second line: each rank waits for the next one. Who talks to a rank that isn't its neighbor?",
    "B": "the second line ends with the rank that all others wait for, and says what became of it",
    "C": "the line about calls that diverge: which rank makes a different call from the other three?",
}
_reads = partial(values, 1 / 3, alone=True, part=True, tells=False)
culprits = _task(
    "culprits()",
    3,
    _culprits,
    tuple(_reads(f"finds the rank that is wrong in report {k}", f"report {k}", hint=hint) for k, hint in _READ.items()),
    worlds=(1,),
    part=True,
    allowed=Allowed(hint="read the reports, and write down three numbers"),
)

# Task 3: α and β

_PAIR = "it returns a pair of numbers, (alpha, beta)"


def _fit(own: tuple[list[int], list[list[float]]], function: Callable, watch: Watch) -> dict:
    alpha, beta = (number(value, "one of the pair", _PAIR) for value in pair(function(*own), "fit()", _PAIR))
    return {"α, in µs": float(f"{1e6 * alpha:.6g}"), "β, in GB/s": float(f"{beta / 1e9:.6g}")}


fit = _task(
    "fit(sizes, seconds)",
    4,
    _fit,
    (values(0.5, "finds α", "α", alone=True, part=True), values(0.5, "finds β", "β", alone=True, part=True)),
    cases=(
        Times(14e-6, 50e9, (1, 1_000, 100_000, 10_000_000)),
        Times(3e-6, 450e9, (4_000_000, 64, 250_000)),
        Times(30e-6, 4e9, (1_000_000, 2_000_000, 5_000_000)),
    ),
    make=lambda case, rank, n, seed: ([*case.sizes], case.measured(1 + seed)),
    more=given.drawn_times,
    worlds=(1,),
    part=True,
    unexplained="two different sizes n and m have the smallest times t and u: β = (m − n) / (u − t), α = t − n / β",
)
