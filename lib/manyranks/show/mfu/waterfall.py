"""Chapter 09's waterfall: where the time of a step goes; and what of it is lost over a degree of a plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from math import inf

from matplotlib.axes import Axes

from manyranks.show import scenario, style, units
from manyranks.show.bars import Bars
from manyranks.show.lines import curves
from manyranks.show.looks import LOOKS
from manyranks.show.mfu.figures import count, rows
from manyranks.theory import Cluster, ModelShape, Plan, roofline, step

_BEFORE = "before"  # what a bar begins with, and what Bars doesn't draw, for it doesn't know it
# A part's name in the picture, colour and hatch; parts that are not known have the others in turn.
_KNOWN = {"matmul": ("matmul", style.BLUE, ""), "other": ("other operators", "#9ecae1", "....")}
_KNOWN |= {"communication": ("communication", style.ORANGE, "////"), "waiting": ("waiting", style.YELLOW, "||||")}
_KNOWN |= {"python": ("Python", "#b0b0b0", "\\\\\\\\"), "overhead": ("starting kernels", "#b0b0b0", "\\\\\\\\")}
_KNOWN |= {"tensor": ("tensor-parallel messages", style.ORANGE, "////")}
_KNOWN |= {"context": ("context-parallel messages", "#fdd9b5", "oo"), "expert": ("tokens to experts", "#e7a6c8", "xxxx")}
_KNOWN |= {"pipeline": ("messages between stages", "#fdd9b5", "++"), "bubble": ("bubble", style.FAINT, "||||")}
_KNOWN |= {"data": ("gradients, parameters", style.YELLOW, "----"), "optimizer": ("optimizer", style.GREEN, "")}


def _looks(parts: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    others = cycle(LOOKS)
    return {part: _KNOWN.get(part) or (part, *next(others)) for part in parts}


class Falls:
    """Rows of a step's parts, each beginning where the one above ends. A row's name says what its bar is: no hatches."""

    def __init__(self, axes: Axes, parts: Sequence[str], title: str, uses: Mapping[str, str] = {}, **labels):
        colours = dict(uses) | {name: colour for name, colour, _ in _looks(parts).values()}
        looks = {name: (colour, "") for name, colour in colours.items()}
        self._rows = list(looks)
        self._bars = Bars(axes, looks, title, [""] * len(looks), units.duration, columns=0, **labels)
        axes.set_title(title, pad=8)
        axes.set_ylim(len(self._rows) + 0.2, -0.6)  # with room for the limit's name
        axes.set_yticks(range(len(self._rows)), [row.removesuffix(" messages") for row in self._rows], fontsize=9)
        self.moving, self.parts = self._bars.moving, self._bars.parts

    def update(self, seconds: Mapping[str, float], longest: float, row: int, uses: Mapping[str, float] = {}) -> None:
        """seconds: of each part; longest: of the axis; row: of the band; uses: shares of the step, in rows above the parts."""
        spent, whole = list(seconds.values()), sum(seconds.values())
        begun = [*[0.0] * len(uses), *accumulate(spent[:-1], initial=0.0)]
        bars = zip(self._rows, begun, [*(share * whole for share in uses.values()), *spent], strict=True)
        texts = [f"{share:.1%}" for share in uses.values()]
        texts += [f"{units.duration(x)}, {x / whole:.1%}" if x else "none" for x in spent]
        every = [{_BEFORE: start, name: x} for name, start, x in bars]
        self._bars.update(every, texts, row, longest, (whole, f"together {units.duration(whole)}"))


@style.styled
def waterfall(budgets: Mapping[object, Mapping[str, float] | tuple], title: str = "") -> style.Figure:
    """Draws the parts of a step's time, one after another from 0 to their sum, with their seconds and shares.

    budgets: rank -> measure.budget.Budget, or name -> {part: seconds}. Up to 4 have a waterfall each, side by side; up to 16 a
    bar each. Where there are more than 5 parts, those without time are left out
    Raises ValueError for none, more than 16, other parts than the first one's, more than 10 of them, and negative seconds.
    """
    names = [f"rank {key}" if isinstance(key, int) else str(key) for key in budgets]
    spent = [dict(found) if isinstance(found, Mapping) else found._asdict() for found in budgets.values()]
    count("budgets", spent, 16)
    count("parts", spent[0], 10)
    for name, parts in zip(names, spent, strict=True):
        if [*parts] != [*spent[0]] or any(not 0 <= x < inf for x in parts.values()) or not sum(parts.values()):
            raise ValueError(f"{name!r} has {parts}: give seconds of {', '.join(spent[0])}, 0 or more, not all of them 0")
    shown = [part for part in spent[0] if len(spent[0]) <= 5 or any(parts[part] for parts in spent)]
    spent, longest = [{part: parts[part] for part in shown} for parts in spent], max(sum(parts.values()) for parts in spent)
    if len(names) > 4:
        looks = {name: look for name, *look in _looks(shown).values()}
        bars = {name: dict(zip(looks, parts.values(), strict=True)) for name, parts in zip(names, spent, strict=True)}
        return rows(title, looks, bars, [units.duration(sum(parts.values())) for parts in spent], longest)
    fig = style.Figure(figsize=(min(9.2, 3.4 + 3.0 * len(names)), 0.9 + 0.36 * len(shown)), layout="constrained")
    for axes, name, parts in zip(fig.subplots(1, len(names), squeeze=False)[0], names, spent, strict=True):
        Falls(axes, shown, name if len(names) > 1 else title or name, size=8).update(parts, longest, -9)
        axes.label_outer()
    fig.suptitle(title if len(names) > 1 else "", fontsize=11, fontweight="bold", x=0.01, ha="left")
    return fig


@style.styled
def over_degree(shape: ModelShape, plan: Plan, cluster: Cluster, degree: str, values: Sequence[int]) -> style.Figure:
    """Draws MFU over one degree of a plan, and the shares of a step that are lost to all else; the batch stays what it is.

    shape, plan, cluster: as theory.step.estimate takes them
    degree: "dp", "tp", "pp", or another degree of the plan
    values: what it is set to, one or more, from low to high
    MFU counts the causal half of the scores; "slow products" is the time of products beyond that of these FLOPs at the peak.
    Raises ValueError for no values, and for one that model, batch or cluster don't allow.
    """
    count("values", values, 16)
    steps = []
    for each in (replace(plan, **{degree: value}) for value in values):
        time, budget = step.estimate(shape, each, cluster), roofline.time_budget(shape, each, cluster)
        used = time.utilisation("causal") * time.seconds
        spent = {"MFU": used, "slow products": budget.pop("matmul") - used}
        spent |= {"other operators": budget.pop("other") + budget.pop("overhead")}
        spent |= {name: budget[part] for part, (name, *_) in _looks(budget).items()}
        steps.append({name: 100 * seconds / time.seconds for name, seconds in spent.items()})
    shown = {name: [each[name] for each in steps] for name in steps[0] if max(each[name] for each in steps) > 1}  # percent
    fig = curves(values, shown, scenario.SHARED[degree][0], "share of a step (%)", title=shape.name, xticks=values, ylog=False)
    fig.axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # inside it would lie on curves
    return fig
