"""A comparison is a row: our values, the peer's from the same minutes, and the ratio of each pair."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

HEADER = ("what: ours; theirs", "ours", "theirs", "ours ÷ theirs", "target", "")

UNITS = {  # from what value on, its size, its name
    "s": ((0.3, 1.0, "s"), (3e-5, 1e-3, "ms"), (0.0, 1e-6, "µs")),
    "bytes": ((1e9, 1e9, "GB"), (0.0, 1e6, "MB")),
    "bytes/s": ((1e9, 1e9, "GB/s"), (0.0, 1e6, "MB/s")),
    "FLOP/s": ((0.0, 1e9, "GFLOP/s"),),
    "share": ((0.0, 0.01, "%"),),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. at_most: for our median; ratio_at_most: for the median ratio; ratio_within: how far that may be
    from 1.

    theirs: as many values as ours, theirs[i] measured next to ours[i]; empty where there is no peer.
    unit: "s", "bytes", "bytes/s", "FLOP/s" or "share". skipped: why there are no values.
    """

    what: str
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    unit: str = "s"
    at_most: float | None = None
    ratio_at_most: float | None = None
    ratio_within: float | None = None
    skipped: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True)) if self.theirs else ()

    @property
    def missed(self) -> bool:
        over = self.at_most is not None and median(self.ours) > self.at_most
        away = self.ratio_within is not None and abs(median(self.ratios) - 1) > self.ratio_within
        return over or away or (self.ratio_at_most is not None and median(self.ratios) > self.ratio_at_most)

    def columns(self) -> tuple[str, ...]:
        if self.skipped:
            return self.what, "skipped: " + self.skipped, "", "", "", ""
        ours, theirs = _spread(self.ours, self.unit), _spread(self.theirs, self.unit)
        return self.what, ours, theirs, _spread(self.ratios, "ratio"), self._target(), self._verdict()

    def _target(self) -> str:
        limits = ((self.at_most, self.unit), (self.ratio_at_most, "ratio"))
        texts = ["≤ " + _scaled(limit, limit, unit) for limit, unit in limits if limit is not None]
        return ", ".join([*texts, *([f"1 ± {self.ratio_within:.3g}"] if self.ratio_within is not None else [])])

    def _verdict(self) -> str:
        if not self._target():
            return ""
        return "MISSED" if self.missed else "ok"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(fn: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def processor_seconds(fn: Callable[[], object]) -> float:
    """Seconds of the processor, in all threads, that one call takes."""
    started = time.process_time()
    fn()
    return time.process_time() - started


def pairs(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int, pause: float = 0.0
) -> dict[str, tuple[float, ...]]:
    """Calls both `rounds` times, one right after the other, each first in turn; returns Row's `ours` and `theirs`."""
    values: dict[str, list[float]] = {"ours": [], "theirs": []}
    order = [("ours", ours), ("theirs", theirs)]
    for _ in range(rounds):
        for name, measure in order:
            values[name].append(measure())
        order.reverse()
    return {name: tuple(measured) for name, measured in values.items()}


def table(rows: list[Row]) -> str:
    lines = [HEADER, *(row.columns() for row in rows)]
    whole = [line for line in lines if not line[1].startswith("skipped")]
    widths = [max(len(line[0]) for line in lines), *(max(len(line[i]) for line in whole) for i in range(1, len(HEADER)))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    texts.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(
        [*texts, "", "Each cell: median (least – most). The ratio is that of neighboring pairs; below 1 we need less."]
    )


def _spread(values: tuple[float, ...], unit: str) -> str:
    if not values:
        return "–"
    middle, *ends = (_scaled(value, median(values), unit) for value in (median(values), min(values), max(values)))
    return middle + (f" ({ends[0].split()[0]} – {ends[1].split()[0]})" if len(values) > 1 else "")


def _scaled(value: float, scale: float, unit: str) -> str:
    """The value in the unit that suits `scale`; a small ratio as a fraction."""
    if unit == "ratio":
        return f"1/{1 / value:.3g}" if scale < 0.2 else f"{value:.3g}"
    size, name = next((size, name) for least, size, name in UNITS[unit] if scale >= least)
    return f"{value / size:.3g} {name}"
