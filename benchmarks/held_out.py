"""What theory's numbers would be, and how far off its predictions, if a source had not been known when they were chosen.

    python -m benchmarks.held_out

For each number that was chosen with published runs in sight, and each source of runs that it decides: the value with the least
error on all other sources, each of which counts as much; and the source's own error with it, and with the library's value. No
clock is read: the same numbers come out everywhere.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
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
AWAY = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03)
WANTED = 0.8  # share of held-out runs that a bar should hold

Sources = dict[str, list[steps.Row]]


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


def held_out() -> Iterator[Held]:
    by_table = {table: list(steps.of(table)) for table in steps.TABLES}
    host = STACKS["megatron-core"].host
    launched = {name: [row for row in rows if row.plan.framework.host == host] for name, rows in by_table.items()}
    yield from _each("seconds a launch of Megatron", host, HOSTS, _with_host, _there(launched))
    bridge = _by(by_table[steps.BRIDGE], lambda row: row.shape.name)
    experts = {name: [row for row in rows if row.plan.framework.host] for name, rows in bridge.items() if rows[0].shape.experts}
    yield from _each("launches of routing", layer.OPERATORS["route"], LAUNCHES, _with_launches, _there(experts))
    yield from _each("share of the best product", MATMUL, [x / 100 for x in range(80, 101)], _with_matmul, _there(by_table))


def _each(number: str, today: float, values: list, using: Callable, sources: Sources) -> Iterator[Held]:
    errors = {}
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


def _there(sources: Sources) -> Sources:
    return {name: rows for name, rows in sources.items() if rows}


def _by(rows: list[steps.Row], key: Callable) -> Sources:
    found: Sources = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def bars() -> Iterator[str]:
    """For each source, what is added to a bar for each step away if that's chosen on all others; and how many of its runs with
    a bar are held by it, none of them with a run of its own source."""
    known = {}
    own = error_bars.AWAY
    for error_bars.AWAY in AWAY:
        error_bars.of_kind.cache_clear()
        known[error_bars.AWAY] = _by(error_bars.without_own_table(), lambda both: both[0].table)
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


def _share(both: list) -> float | None:
    held = [bar.least <= row.time_error() <= bar.most for row, bar in both if not bar.missing]
    return mean(held) if held else None


def main() -> None:
    for line in (*held_out(), *bars()):
        print(line)


if __name__ == "__main__":
    main()
