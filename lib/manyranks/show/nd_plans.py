"""Chapter 10's picture of plans: the parts of a step's time, with what each plan needs of memory and its MFU."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.theory.plan import Plan
from manyranks.theory.planner import Found
from manyranks.theory.step import StepTime

_MOST = 12
_COLUMNS = (10, 62, 108)  # points
# Of each of StepTime.parts its name in a picture, colour and hatch.
PARTS = {
    "compute": ("computing", style.BLUE, ""),
    "tensor": ("tensor-parallel messages", style.ORANGE, "////"),
    "context": ("context-parallel messages", style.PINK, "oo"),
    "expert": ("tokens to experts", "#8172b3", "xxxx"),
    "pipeline": ("messages between stages", "#56B4E9", "++"),
    "bubble": ("bubble", "#b0b0b0", "\\\\\\\\"),
    "data": ("gradients, parameters", style.YELLOW, "----"),
    "optimizer": ("optimizer", style.GREEN, ""),
}
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2", "zb-v": "ZB-V"}
_SCHEDULES |= {"dualpipe": "DualPipe", "dualpipe-v": "DualPipe-V"}


def degrees(plan: Plan) -> str:
    """TP 8, CP 2, PP 16, DP 64, EP 8: those above 1; DP 4 × 16 is HSDP."""
    replicas = plan.dp // (plan.dp_shard or plan.dp)
    data = f"{replicas} × {plan.dp_shard}" if replicas > 1 else f"{plan.dp}"
    named = {"TP": plan.tp, "CP": plan.cp, "PP": plan.pp, "EP": plan.ep}
    found = [f"{name} {degree}" for name, degree in named.items() if degree > 1]
    return ", ".join([*found, f"DP {data}"])


def kept(plan: Plan) -> str:
    """ZB-V, ZeRO-1, b 2, selective: how a pipeline runs, what is sharded, a micro-batch, what is computed again."""
    turns = f"{_SCHEDULES.get(plan.schedule, plan.schedule)}{f' v {plan.virtual}' * (plan.virtual > 1)}, " * (plan.pp > 1)
    again = {"none": "nothing", "full": "all"}.get(plan.recompute, plan.recompute)
    return f"{turns}ZeRO-{plan.zero}, b {plan.microbatch}, recompute {again}"


@style.styled
def plans(
    found: Sequence[Found] | Mapping[str, Found],
    title: str = "Plans, the fastest first",
    most: int = 6,
    room: float | None = None,
) -> style.Figure:
    """The parts of each plan's step, and beside them its time, MFU and memory; no more than the first `most`.

    found: what theory.planner.search returns, or name -> one of them, from above. room: bytes of an accelerator, for plans
    beyond it; default: those of the plan's cluster. Raises ValueError for none, and for a `most` that is not 1 to 12.
    """
    named = dict(found) if isinstance(found, Mapping) else {degrees(each.plan) + f" #{k}": each for k, each in enumerate(found)}
    if not named:
        raise ValueError("no plans: give those of theory.planner.search; it finds none where none fits in memory")
    if type(most) is not int or not 1 <= most <= _MOST:
        raise ValueError(f"most={most!r}: a picture shows 1 to {_MOST} plans")
    shown = dict(list(named.items())[:most])
    own = isinstance(found, Mapping)
    labels = [f"{f'{name}: ' * own}{degrees(each.plan)}\n{kept(each.plan)}" for name, each in shown.items()]
    fig, (axes,) = style.figure(width=9.2, height=1.7 + 0.46 * len(shown))
    _bars(axes, [each.time for each in shown.values()])
    longest = max(each.seconds for each in shown.values())
    for row, each in enumerate(shown.values()):
        most_bytes = room or each.time.cluster.accelerator.memory
        over = f" of {units.size(most_bytes)}!" * (each.peak.total > most_bytes)
        cells = units.duration(each.seconds), f"{each.time.mfu:.1%}", units.size(each.peak.total) + over
        _beside(axes, row, cells)
    _beside(axes, -0.72, ("step", "MFU", "memory"), fontweight="bold")
    axes.set_yticks(range(len(shown)), labels, fontsize=8.5)
    axes.set(xlim=(0, 1.02 * longest), ylim=(len(shown) - 0.5, -0.5), xlabel="time of a step")
    axes.xaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_title(title, pad=14, x=0.0)
    fig.legend(loc="outside lower left", ncols=4, handlelength=1.8, fontsize=8.5)
    return fig


def _beside(axes: Axes, row: float, cells: Sequence[str], **look) -> None:
    """Texts in columns to the right of the axes."""
    for x, text in zip(_COLUMNS, cells, strict=True):
        at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (1, row), (x, 0), va="center", fontsize=9, **at, **look)


def _bars(axes: Axes, times: Sequence[StepTime]) -> None:
    """A bar for each step, its parts from left to right; those that take no time in any are left out."""
    starts, rows = [0.0] * len(times), range(len(times))
    for part, (label, colour, hatch) in PARTS.items():
        seconds = [time.parts[part] for time in times]
        if not any(seconds):
            continue
        look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.5}
        axes.barh(rows, seconds, 0.62, starts, label=label, **look)
        starts = [start + each for start, each in zip(starts, seconds, strict=True)]
