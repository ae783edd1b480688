"""Layouts of published models over their accelerators, and what their neighbors would have cost.

Each layout keeps what a report says apart from what we assume. Where a report leaves numbers out, the time of a step
says little alone; what counts is how the layout compares with its neighbors on the same work.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import memory, step, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, clusters
from manyranks.theory.memory import Peak
from manyranks.theory.plan import RECOMPUTE, Plan
from manyranks.theory.published import steps
from manyranks.theory.shapes import models
from manyranks.theory.step import StepTime


class Layout(NamedTuple):
    """A model's layout.

    published: what the report says
    assumed: what we put in
    hours: measured GPU hours for a trillion tokens, or None
    """

    name: str
    shape: ModelShape
    plan: Plan
    cluster: Cluster
    published: str
    assumed: str
    source: str
    hours: float | None = None

    @property
    def time(self) -> StepTime:
        return step.estimate(self.shape, self.plan, self.cluster)


def layouts() -> list[Layout]:
    """Reads layouts.csv: Llama 3 405B's three, MegaScale's, Yi-34B's, Gemma 2's three, DeepSeek-V2's and DeepSeek-V3's.

    A layout whose step time was published, too, is that run of steps.rows(). Gemma 2's 2B model ran on two pods; only
    one is there, for another network than ours joins them.
    """
    runs = {row.name: row for row in (*steps.llama3(), *steps.megascale(), *steps.deepseek())}
    return [_layout(row, runs) for row in tables.rows("layouts")]


def _layout(row: dict[str, str], runs: dict[str, steps.PublishedRun]) -> Layout:
    if run := runs.get(row["run"]):
        ran = run.shape, run.plan, run.cluster
    else:
        cluster = clusters[row["cluster"]]
        ran = models[row["shape"]], steps.plan_of(row), cluster.of(int(row["chips"])) if row["chips"] else cluster
    hours = float(row["hours"]) if row["hours"] else None
    return Layout(row["name"], *ran, row["published"], row["assumed"], row["source"], hours)


class Neighbor(NamedTuple):
    """A layout next to a published one.

    fits: in the memory, with no more recomputation than plan says
    impossible: why there is no such plan; all else is empty then
    """

    name: str
    plan: Plan | None = None
    fits: bool = False
    peak: Peak | None = None
    time: StepTime | None = None
    slower: float = 0.0  # its seconds ÷ the published one's, − 1
    impossible: str = ""

    @property
    def limit(self) -> str:
        """The part that it has most of apart from computing, or why it cannot be."""
        return self.impossible or (self.time.limit if self.fits else "memory")


def why_not(layout: Layout) -> list[Neighbor]:
    """The published layout, and others on as many accelerators with the same batch: one change each. A neighbor that does not
    fit recomputes more, and has what it takes then."""
    found = [_neighbor("as published", layout, {})]
    found += [_neighbor(name, layout, change) for name, change in _changes(layout.plan, layout.shape, layout.cluster.node)]
    return found


def _changes(plan: Plan, shape: ModelShape, node: int) -> Iterator[tuple[str, dict[str, object]]]:
    dp, tp, pp, cp, ep = plan.dp, plan.tp, plan.pp, plan.cp, plan.ep
    for other in dict.fromkeys((1, tp // 2, 2 * tp)):
        if other and other != tp:
            yield (f"TP {other}" if other > 1 else "no TP"), {"tp": other, "dp": _share(dp * tp, other)}
    for other in dict.fromkeys((1, pp // 2, 2 * pp)):
        if other and other != pp and pp > 1:
            yield (f"PP {other}" if other > 1 else "no PP"), {"pp": other, "dp": _share(dp * pp, other)} | _stages(plan, other)
    for other in dict.fromkeys((1, ep // 2, 2 * ep, node)):
        if other and other != ep and shape.experts:
            yield (f"EP {other}" if other > 1 else "no EP"), {"ep": other}
    if cp > 1:
        yield f"CP {cp // 2}", {"cp": cp // 2, "dp": 2 * dp}
    if plan.zero == 3:
        yield "ZeRO-1", {"zero": 1}
    else:
        yield "ZeRO-3", {"zero": 3}
    if tp * pp > 1:
        yield "ZeRO-3 alone", {"zero": 3, "tp": 1, "pp": 1, "dp": dp * tp * pp} | _stages(plan, 1)
    if plan.schedule != "1f1b":
        yield "1F1B", {"schedule": "1f1b"}


def _share(ranks: int, other: int) -> int:
    return max(1, ranks // other)


def _stages(plan: Plan, pp: int) -> dict[str, object]:
    """Keeps as many stages as before, where ranks have several; one rank has no schedule."""
    if pp == 1:
        return {"virtual": 1, "schedule": "1f1b"}
    return {"virtual": max(1, plan.virtual * plan.pp // pp)} if plan.virtual > 1 else {}


def _neighbor(name: str, layout: Layout, change: dict[str, object]) -> Neighbor:
    shape, cluster, gpus = layout.shape, layout.cluster, layout.plan.gpus
    try:
        changed = replace(layout.plan, **change)
        more = RECOMPUTE[RECOMPUTE.index(layout.plan.recompute) :]  # this much recomputation, or more
        plans = [replace(changed, recompute=each) for each in more]
        peaks = [memory.peak(shape, plan) for plan in plans]
        fitting = [peak.total <= cluster.accelerator.memory for peak in peaks]
        index = fitting.index(True) if any(fitting) else len(plans) - 1
        time = step.estimate(shape, plans[index], cluster, gpus=gpus)
    except ValueError as error:
        return Neighbor(name, impossible=str(error))
    return Neighbor(name, plans[index], fitting[index], peaks[index], time, time.seconds / layout.time.seconds - 1)
