"""Chapter 10's plans: the parts of their steps' times, published layouts beside their neighbors, and tables."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.looks import STEP
from manyranks.show.tables import Table, table
from manyranks.theory import Plan, pipeline
from manyranks.theory.nd.rules import Comparison
from manyranks.theory.planner import Found
from manyranks.theory.published.layouts import Neighbour
from manyranks.theory.step import StepTime

_MOST = 6  # plans
_SAME = 0.005  # of the time: what loses less is as fast


def degrees(plan: Plan) -> str:
    """TP 8, CP 2, PP 16, DP 64, EP 8: those above 1, and ETP where it is not TP; DP 4 × 16 is HSDP."""
    replicas = plan.dp // (plan.dp_shard or plan.dp)
    data = f"{replicas} × {plan.dp_shard}" if replicas > 1 else f"{plan.dp}"
    named = {"TP": plan.tp, "CP": plan.cp, "PP": plan.pp, "EP": plan.ep}
    used = [f"{name} {degree}" for name, degree in named.items() if degree > 1]
    folded = [f"ETP {plan.expert_tp}"] if plan.expert_tp != plan.tp else []
    return ", ".join([*used, *folded, f"DP {data}"])


def kept(plan: Plan) -> str:
    """ZB-V, ZeRO-1, b 2, selective: how a pipeline runs, what is sharded, a micro-batch, what is computed again."""
    turns = f"{pipeline.WRITTEN[plan.schedule]}{f' v {plan.virtual}' * (plan.virtual > 1)}, " * (plan.pp > 1)
    return f"{turns}ZeRO-{plan.zero}, b {plan.microbatch}, recompute {plan.recompute}"


class Steps(Bars):
    """The parts of the times of steps, a row for each plan, with its time, MFU and memory."""

    def __init__(self, axes: Axes, title: str, rows: Sequence[str], columns: int = 4, **labels):
        super().__init__(axes, {name: look for name, *look in STEP.values()}, title, rows, units.duration, columns, **labels)

    def show(self, times: Sequence[StepTime | None], texts: Sequence[str], row: int = -9, most: float = 1e9) -> None:
        """times: None for a plan that can't be; most: seconds beyond which bars are cut off."""
        bars = [{name: time.parts[part] for part, (name, *_) in STEP.items()} if time else {} for time in times]
        self.update(bars, texts, row, min(most, max(time.seconds for time in times if time)) * (1 + 1e-9))


@style.styled
def plans(found: Sequence[Found] | Mapping[str, Found], title: str = "Plans, the fastest first") -> style.Figure:
    """Draws the parts of each plan's step, and beside them its time, MFU and memory.

    found: what theory.planner.search returns, or name -> one of them: the first 6 are drawn, from above
    Raises ValueError for no plans.
    """
    if not found:
        raise ValueError("no plans: give those of theory.planner.search; it finds none where none fits in memory")
    shown = list(found.values() if isinstance(found, Mapping) else found)[:_MOST]
    names = [f"{name}: " for name in found] if isinstance(found, Mapping) else [""] * _MOST
    rows = [f"{name}{degrees(each.plan)}\n{kept(each.plan)}" for name, each in zip(names, shown, strict=False)]
    fig, (axes,) = style.figure(width=9.2, height=1.1 + 0.42 * len(shown))
    steps = Steps(axes, title, rows)
    axes.tick_params(axis="y", labelsize=8.5)
    steps.show([each.time for each in shown], [written(each.time, each.peak.total) for each in shown])
    return fig


def written(time: StepTime, size: float) -> str:
    """Time and MFU of a step, and bytes of a GPU, with its memory where that's less: in two columns of Bars."""
    room = time.cluster.accelerator.memory
    return f"{units.duration(time.seconds)}, MFU {time.mfu:.1%}|{units.size(size)}" + f" of {units.size(room)}!" * (size > room)


@style.styled
def layouts(named: Mapping[str, Sequence[Neighbour]]) -> style.Figure:
    """Draws each layout and its neighbors: the parts of a step, its time against the first one's, and bytes of a GPU.

    named: name -> what theory.published.layouts.why_not returns; the first is the layout as it was published
    Raises ValueError for none, and where the first neighbor is not possible.
    """
    if not named or not all(each and each[0].time for each in named.values()):
        raise ValueError("give 1 layout or more, and of each what why_not returns: the first row is one that can be")
    heights = [0.9 + 0.24 * len(each) for each in named.values()]
    fig, panels = style.figure(1, len(named), 9.2, sum(heights), height_ratios=heights)
    for (name, rows), axes in zip(named.items(), panels, strict=True):
        steps = Steps(axes, name, [row.name for row in rows])
        steps.show([row.time for row in rows], [_beside(row, rows[0]) for row in rows], 0, 2 * rows[0].time.seconds)
    return fig


def _beside(row: Neighbour, first: Neighbour) -> str:
    if row.time is None:
        return "not possible: " + textwrap.shorten(row.impossible, 40, placeholder=" …")
    change = f" ({row.slower:+.0%})".replace("-", "−") if abs(row.slower) >= _SAME else " (as long)" * (row is not first)
    size, again = written(row.time, row.peak.total).partition("|")[2], row.plan.recompute
    said = {"none": "", "full": ", recompute full"}.get(again, f", {again}") * (again != first.plan.recompute)
    return f"{units.duration(row.time.seconds)}{change}|{size}{said}"


def regimes(rows: Sequence[Comparison]) -> Table:
    """Compares for each row of theory.nd.rules.compare the rule's regime and the planner's: what it loses at best, in all."""
    cells = []
    for row in rows:
        rule, best = units.duration(row.rule.seconds), units.duration(row.best.seconds)
        losses = [f"{loss:.0%}" if loss >= _SAME else "–" for loss in (row.regime_loss, row.loss)]
        regime = "the same" if row.same else row.best_regime
        cells.append([row.name, f"{row.tokens:,.0f}", row.rule_regime, rule, regime, best, *losses])
    return table(["", "tokens/GPU", "rule of thumb", "step", "planner", "step", "its regime loses", "the rule loses"], cells)


def twin(
    theory: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]], at: Sequence[Mapping[str, int]] = ()
) -> Table:
    """Shows bytes of every rank: one number where both agree, else "measured ≠ theory". Below them are the sums of all ranks.

    theory, measured: by rank, quantity ("tp", "states") -> bytes; a quantity that no rank has is left out; at: by rank, its
    coordinates, as Mesh.coordinates gives them. Raises ValueError unless both have the same ranks and quantities.
    """
    numbers, quantities = map(len, (theory, measured, at or theory)), map(frozenset, (*theory, *measured))
    if len(set(numbers)) > 1 or len(set(quantities)) != 1:
        given = f"{len(theory)} ranks in theory, {len(measured)} measured" + f", {len(at)} places" * bool(at)
        raise ValueError(f"{given}: give as many of each, 1 or more, with the same quantities")
    pairs = list(zip(theory, measured, strict=True))
    shown = [name for name in theory[0] if any(each[name] for each in (*theory, *measured))]
    places = [[" ".join(f"{axis}{k}" for axis, k in each.items())] for each in at] or [[]] * len(pairs)
    rows = [[rank, *place] for rank, place in enumerate(places)]
    for row, (a, b) in zip(rows, pairs, strict=True):
        row += [b[name] if a[name] == b[name] else f"{b[name]:,} ≠ {a[name]:,}" for name in shown]
    sums = {"all, theory": lambda a, b: a, "all, measured": lambda a, b: b, "difference": lambda a, b: abs(b - a)}
    rows += [[said, *[""] * bool(at), *(sum(of(a[n], b[n]) for a, b in pairs) for n in shown)] for said, of in sums.items()]
    return table(["rank", *["at"] * bool(at), *shown], rows)
