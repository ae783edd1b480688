"""Chooses theory's numbers again without one source of runs, and tests them on that source.

    python -m benchmarks.held_out

Some numbers were chosen to fit published runs. For each of them, and for each source of runs that depends on it, this prints
the value with the least error on all other sources (each source counts the same), the error on the source left out, and the
error there with the library's value. No clock is read: the same numbers come out everywhere.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from benchmarks.theory import forget
from manyranks.theory import layer
from manyranks.theory.kernels import DEFAULT, MATMUL, Constants
from manyranks.theory.published import error_bars, steps
from manyranks.theory.stacks import STACKS

HOSTS = [5e-6 * x for x in range(4, 25)]  # seconds
LAUNCHES = (1, 4, 8, 12, 16, 20, 28)
SHARES = [x / 100 for x in range(80, 101)]
AWAY = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03)
WANTED = 0.8  # share of held-out runs that a bar should hold

Sources = dict[str, list[steps.PublishedRun]]


class Held(NamedTuple):
    """A source that was left out. chosen: the value with the least error on all others; error, today: the source's mean error
    with it, and with the library's own; alone: the value that the source itself would choose."""

    number: str
    source: str
    runs: int
    chosen: float
    error: float
    today: float
    alone: float

    def __str__(self) -> str:
        values = f"{self.chosen:g} without it, {self.alone:g} by itself"
        errors = f"{self.error:.1%} off, today {self.today:.1%}"
        return f"{self.number:34s} {self.source:28s} {self.runs:3d} runs: {values}; {errors}"


def launches(values: Sequence[float] = HOSTS) -> Iterator[Held]:
    """Seconds that Megatron takes to launch a kernel, by tables."""
    host, found = STACKS["megatron-core"].host, {}
    for table in steps.TABLES:
        found[table] = [row for row in steps.of(table) if row.plan.framework.host == host]
    return _each("seconds a launch of Megatron", host, values, _with_host, found)


def routing() -> Iterator[Held]:
    """Chooses the launches of a router and its sorting, from the models of one table: no other has Megatron's experts."""
    found: Sources = {}
    for row in steps.of(steps.BRIDGE):
        if row.shape.experts and row.plan.framework.host:
            found.setdefault(row.shape.name, []).append(row)
    return _each("launches of routing", layer.OPERATORS["route"], LAUNCHES, _with_launches, found)


def products() -> Iterator[Held]:
    """The share of a chip's best product that a step's products reach, by tables."""
    found = {table: list(steps.of(table)) for table in steps.TABLES}
    return _each("share of the best product", MATMUL, SHARES, _with_matmul, found)


def _each(number: str, today: float, values: Sequence[float], using: Callable, sources: Sources) -> Iterator[Held]:
    sources, errors = {name: rows for name, rows in sources.items() if rows}, {}
    for value in (*values, today):
        with using(value) as constants:
            errors[value] = {name: [math.log1p(row.time_error(constants)) for row in rows] for name, rows in sources.items()}

    def best(names: list[str]) -> float:
        return min(values, key=lambda value: mean(_size(errors[value][name]) for name in names))

    for name, rows in sources.items():
        chosen = best([other for other in sources if other != name])
        found = (mean(abs(math.expm1(x)) for x in errors[value][name]) for value in (chosen, today))
        yield Held(number, name, len(rows), chosen, *found, best([name]))


def _size(errors: list[float]) -> float:
    return mean(map(abs, errors))


@contextlib.contextmanager
def _with_host(seconds: float) -> Iterator[Constants]:
    before, own = dict(STACKS), STACKS["megatron-core"].host
    STACKS.update({name: replace(stack, host=seconds) for name, stack in before.items() if stack.host == own})
    forget()
    yield DEFAULT
    STACKS.update(before)
    forget()


@contextlib.contextmanager
def _with_launches(often: int) -> Iterator[Constants]:
    before, layer.OPERATORS["route"] = layer.OPERATORS["route"], often
    forget()
    yield DEFAULT
    layer.OPERATORS["route"] = before
    forget()


def _with_matmul(share: float) -> contextlib.AbstractContextManager[Constants]:
    return contextlib.nullcontext(Constants(matmul=share))


def bars() -> Iterator[str]:
    """Chooses what each step away adds to an error bar, on all sources but one, for each source.

    Says how many of that source's runs lie inside their bar, which is made without any run of the source.
    """
    known = {}
    own = error_bars.AWAY
    for error_bars.AWAY in AWAY:
        error_bars.of_kind.cache_clear()
        known[error_bars.AWAY] = {table: [] for table in steps.TABLES}
        for row, bar in error_bars.without_own_table():
            known[error_bars.AWAY][row.table].append((row, bar))
    error_bars.AWAY = own
    error_bars.of_kind.cache_clear()
    shares = {away: {name: _share(both) for name, both in found.items()} for away, found in known.items()}
    names = [name for name, share in shares[own].items() if share is not None]
    for name in names:
        others = [other for other in names if other != name]
        all_others = {away: _share([both for other in others for both in known[away][other]]) for away in AWAY}
        chosen = min((away for away in AWAY if all_others[away] >= WANTED), default=max(AWAY))
        barred = [bar for _, bar in known[chosen][name] if not bar.missing]
        half = sorted(bar.error for bar in barred)[len(barred) // 2]
        said = f"{chosen:g} without it; {shares[chosen][name]:.0%} held, half of the width ± {half:.1%}"
        yield f"{'bar, for each step away':34s} {name:28s} {len(barred):3d} runs: {said}; today {shares[own][name]:.0%}"


def outside() -> str:
    """The table that no number and no bar knows: its error, and how many of its runs are held by a bar."""
    both = [(row, error_bars.of_run(row)) for row in steps.megascale()]
    off = mean(abs(row.time_error()) for row, _ in both)
    return f"{'known to none':34s} {steps.MEGASCALE:28s} {len(both):3d} runs: {off:.1%} off; {_share(both):.0%} held"


def _share(both: list) -> float | None:
    held = [bar.least <= row.time_error() <= bar.most for row, bar in both if not bar.missing]
    return mean(held) if held else None


def main() -> None:
    for line in (*launches(), *routing(), *products(), *bars(), outside()):
        print(line)


if __name__ == "__main__":
    main()
