"""Error bars of predicted steps and peaks: an interval from the errors of the published runs that are closest to one."""

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import Plan
from manyranks.theory.published import peaks, steps
from manyranks.theory.published.peaks import MeasuredPeak
from manyranks.theory.step import StepTime

# A bar reaches to the seventh of nine runs: a tenth that is like them is further off in three cases of ten.
CLOSEST, FEWEST, INSIDE = 9, 3, 0.7
FAR = 7.5  # steps away from a plan beyond which a run says nothing about it: see _away
LEAST = 0.03  # spread of repeated measurements: no bar is narrower, on either side of its middle
AWAY = 0.01  # what a step away adds to it. With this 80 % of the bars made without a table hold its runs
FASTER = 1  # doublings of a rate: of the chip's products and its memory, of the innermost and the outermost links
_GENERATIONS = {"A100": ("A100",), "H100": ("H100", "H200", "H800", "H20", "GH200"), "B200": ("B200", "GB200", "B300", "GB300")}


class Checked(NamedTuple):
    """The word of published runs on a predicted step, or on a predicted peak.

    runs: how many are close
    missing: why too few are, "" if enough are
    least, most: predicted ÷ measured − 1, between which seven of ten such runs are expected, or more
    """

    runs: int
    missing: str = ""
    least: float = math.nan
    most: float = math.nan

    @property
    def error(self) -> float:
        """Half of the interval's width."""
        return (self.most - self.least) / 2

    def ends(self, predicted: float) -> tuple[float, float]:
        """Returns the least and the most that is expected to be measured: of seconds, or of bytes."""
        return predicted / (1 + self.most), predicted / (1 + self.least)

    def __str__(self) -> str:
        if self.missing:
            return f"not checked: {self.missing}"
        short, long = (share - 1 for share in self.ends(1.0))
        if round(100 * short) == -round(100 * long):
            return f"± {long:.0%} ({self.runs} runs)"
        return f"{short:+.0%} to {long:+.0%} ({self.runs} runs)".replace("-", "−")


@dataclass(frozen=True)
class _Kind:
    """The kind of a step, or of its peak: runs are close to it if theirs is close.

    chip, rates: empty for a peak, which doesn't depend on them
    sharded: a stack whose shards are in 32 bits, FSDP's
    doublings: logarithms of sizes, each with the steps that a doubling of it counts
    """

    chip: str
    stack: str
    sharded: bool
    uses: frozenset[str]
    doublings: tuple[float, ...]
    rates: tuple[float, ...]
    recompute: str


def confidence(time: StepTime) -> Checked:
    """Says how far a predicted step can be trusted.

    The interval reaches over most errors of the closest published runs, and further the further away they are. They ran on
    chips of the same generation, with links like these, by a stack of the same family, and are close in what they use and in
    their sizes.
    Other constants count as not checked.
    """
    if time.constants != DEFAULT:
        return Checked(0, f"no published run with {time.constants}")
    return of_plan(time.shape, time.plan, time.cluster)


def peak_confidence(shape: ModelShape, plan: Plan) -> Checked:
    """Says how far the peak that memory.peak predicts can be trusted, as confidence does, but by runs on any chip."""
    return of_kind(_kind(shape, plan))


def barely_fits(shape: ModelShape, plan: Plan, room: float) -> str:
    """Says so where a plan fits, but by less than the error bar of its peak. Empty where it fits by more, where it doesn't fit,
    and where no run like it has its peak published.

    room: bytes of an accelerator's memory
    """
    held = memory.peak(shape, plan).total
    _, most = peak_confidence(shape, plan).ends(held)
    return "fits by less than the error bar" if held <= room < most else ""


def of_plan(shape: ModelShape, plan: Plan, cluster: Cluster) -> Checked:
    """Returns what published runs say of a plan's step, however long it takes."""
    return of_kind(_kind(shape, plan, cluster))


@functools.lru_cache(maxsize=65536)
def of_kind(kind: _Kind, without: str = "") -> Checked:
    """Returns what published runs say of steps, or of peaks, of this kind.

    without: a table whose runs don't count, or the name of a run
    """
    others = [run for run in _runs().get((kind.chip, kind.sharded), []) if without not in (run[1].table, run[1].name)]
    here = [run for run in others if all(abs(a - b) <= FASTER for a, b in zip(run[0].rates, kind.rates, strict=True))]
    if missing := _missing(kind, here):
        return Checked(0, missing)
    away = sorted((_away(kind, other), place) for place, (other, _) in enumerate(here))[:CLOSEST]
    near = [(steps_away, _error(here[place][1])) for steps_away, place in away if steps_away <= FAR]
    if len(near) < FEWEST:
        return Checked(len(near), f"{_counted(near, kind)} like this; {FEWEST} would say something")
    errors = [error for _, error in near]
    middle = statistics.median(errors) / 2  # half of what others are off by in the middle is what a run like them is, too
    apart = sorted(abs(error - middle) for error in errors)
    half = max(LEAST, apart[min(len(near), math.ceil(INSIDE * (len(near) + 1))) - 1])  # the furthest, where few are near
    half += AWAY * sum(steps_away for steps_away, _ in near) / len(near)
    return Checked(len(near), "", max(-0.9, middle - half), middle + half)


def _away(kind: _Kind, run: _Kind) -> float:
    """Steps: two for each thing that only the plan uses, one for each that only the run does and for another stack, half of one
    for another recomputation; and doublings of sizes."""
    sizes = sum(abs(a - b) for a, b in zip(kind.doublings, run.doublings, strict=True))
    uses = 2 * len(kind.uses - run.uses) + len(run.uses - kind.uses)
    return sizes + uses + (kind.stack != run.stack) + (kind.recompute != run.recompute) / 2


def _missing(kind: _Kind, here: list) -> str:
    """Says what keeps all runs away: their chips and links, or something that none of them uses; "" where nothing does."""
    if len(here) < FEWEST:
        return _counted(here, kind) + (", on such a chip with such links" if kind.rates else "")
    never = sorted(one for one in kind.uses if not any(one in other.uses for other, _ in here))
    return f"{_counted([], kind)} with {' or '.join(never)}" if never else ""


def _counted(runs: list, kind: _Kind) -> str:
    """Says how many runs, or peaks, of a family of stacks were published, as "no published run of FSDP on A100"."""
    what = "run" if kind.rates else "peak"
    number = f"{len(runs)} published {what}s" if len(runs) > 1 else f"{'one' if runs else 'no'} published {what}"
    family = "FSDP" if kind.sharded else "Megatron"
    return f"{number} of {family}" + (f" on {kind.chip}" if kind.chip else "")


def _uses(shape: ModelShape, plan: Plan) -> Iterator[str]:
    for name in ("tp", "pp", "cp"):
        if getattr(plan, name) > 1:
            yield name.upper()
    if plan.cp > 1 and plan.context == "ulysses":
        yield "Ulysses"
    if plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"):
        yield plan.schedule
    if shape.experts:
        yield "experts"
    if shape.experts and plan.expert_tp not in (1, plan.tp):
        yield "ETP other than TP"
    yield f"ZeRO-{plan.zero}" if plan.zero > 1 else "ZeRO-1 or less"
    if plan.dp_shard not in (None, plan.dp):
        yield "HSDP"
    if plan.offload != "none" or plan.offload_layers:
        yield "offloading"
    if plan.precision not in ("bf16", "fp16", "bf16-fp32-gradients", "fp16-fp32-gradients", "bf16-moments"):
        yield "FP32" if plan.precision == "fp32" else "8 bits or less"
    yield "flash attention" if plan.flash else "stored scores"
    if not plan.overlap:
        yield "no overlap"


def _kind(shape: ModelShape, plan: Plan, cluster: Cluster | None = None) -> _Kind:
    """Returns the kind of a step on this cluster, or without one that of its peak."""
    tokens = plan.microbatch * plan.seq / plan.cp
    sizes = {1: (shape.hidden,), 1 / 2: (plan.seq, tokens, plan.tp, plan.pp), 1 / 4: (plan.gpus,), 1 / 10: (plan.microbatches,)}
    return _Kind(
        _generation(cluster.accelerator.name) if cluster else "",
        plan.stack,
        plan.framework.fp32_shards,
        frozenset(_uses(shape, plan)) - (frozenset() if cluster else {"no overlap"}),
        tuple(each * math.log2(size) for each, those in sizes.items() for size in those),
        _rates(cluster) if cluster else (),
        plan.recompute,
    )


def _generation(chip: str) -> str:
    return next((each for each, names in _GENERATIONS.items() if chip.startswith(names)), chip)


def _rates(cluster: Cluster) -> tuple[float, ...]:
    """Returns logarithms of the rates of the chip's products and its memory, of the innermost and the outermost links."""
    chip, near, far = cluster.accelerator, cluster.levels[0], cluster.levels[-1]
    rates = (chip.flops * chip.matmul_fraction, chip.memory_bandwidth, near.share, far.share)
    return tuple(map(math.log2, rates))


@functools.cache
def _error(row: steps.PublishedRun | MeasuredPeak) -> float:
    return row.error() if isinstance(row, MeasuredPeak) else row.time_error()


@functools.cache
def _runs() -> dict[tuple[str, bool], list[tuple[_Kind, steps.PublishedRun | MeasuredPeak]]]:
    """Sorts runs by generation of chips, which peaks don't have, and whether FSDP ran them."""
    found: dict[tuple[str, bool], list[tuple[_Kind, steps.PublishedRun | MeasuredPeak]]] = {}
    each = [(_kind(row.shape, row.plan, row.cluster), row) for row in steps.rows()]
    for kind, row in (*each, *((_kind(row.shape, row.plan), row) for row in peaks.rows())):
        found.setdefault((kind.chip, kind.sharded), []).append((kind, row))
    return found


def of_run(row: steps.PublishedRun) -> Checked:
    """Returns the bar that a published run would have if the runs of its table weren't known."""
    return of_kind(_kind(row.shape, row.plan, row.cluster), row.table)


def of_measured(row: MeasuredPeak) -> Checked:
    """Returns the bar that a published peak would have if it weren't known."""
    return of_kind(_kind(row.shape, row.plan), row.name)


def without_own_table() -> list[tuple[steps.PublishedRun, Checked]]:
    """Each published run with its bar."""
    return [(row, of_run(row)) for row in steps.rows()]
