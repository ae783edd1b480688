"""Chapter 08's explorer: what the degrees of a model with experts make of a GPU's memory, a step's time, and its traffic."""

from collections.abc import Callable, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.expert_setting import (
    CLUSTERS,
    EXPERT,
    IMBALANCE,
    LIMITS,
    MODELS,
    NO_LIMIT,
    PIPELINE,
    SCHEDULES,
    TENSOR,
    Setting,
    Way,
)
from manyranks.show.expert_status import seconds, status
from manyranks.show.explorer import Explorer, choice, value_slider
from manyranks.show.labels import word

_MEMORY = {"states": (style.BLUE, ""), "activations, buffers": (style.ORANGE, "////")}
_TIME = {
    "compute": ("computing", (style.BLUE, "")),
    "waits": ("waits for the fullest", (style.YELLOW, "||||")),
    "tensor": ("tensor-parallel messages", (style.ORANGE, "////")),
    "expert": ("tokens to experts", ("#9ecae1", "----")),
    "bubble": ("bubble", ("#b0b0b0", "\\\\\\\\")),
    "rest": ("all else", (style.INK, "")),
}
_TRAFFIC = {"inside a node": ("#9ecae1", "----"), "between nodes": (style.ORANGE, "////")}
# name -> hops and the nodes that a token may reach
WAYS = {"one hop": (1, NO_LIMIT), "two hops": (2, NO_LIMIT)} | {f"{m} node{'s' * (m > 1)} at most": (2, m) for m in LIMITS if m}
_LETTERS = "abcdefghijklmnopqrstuvwxyzDRPETGMBk0123456789 .,µ»"
_SHOWN = 3  # times the shortest step
_ROOMS = 2  # times a GPU's memory: as far as bars go


class _Panel:
    """Bars that show every value of one control, the others as they are."""

    def __init__(self, axes: Axes, parts: dict, title: str, rows: Sequence[str], columns: int = 2, pad: float = 28):
        self._bars = Bars(axes, parts, title, rows, outline=word)
        axes.set_title(title, pad=pad)
        handles, _ = axes.get_legend_handles_labels()
        at = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.1}
        axes.legend(handles=handles, ncols=columns, columnspacing=1.0, handlelength=1.4, fontsize=8.5, **at)
        self.moving = self._bars.moving


class _Memory(_Panel):
    def __init__(self, axes: Axes):
        super().__init__(axes, _MEMORY, "Memory of a GPU, over e", [f"EP {ep}" for ep in EXPERT])
        axes.set_xlabel("»: longer than the axis", fontsize=9)

    def update(self, now: Setting) -> None:
        bars, texts, room, (most, why) = [], [], now.on.accelerator.memory, now.most
        for ep in EXPERT:
            peak = None if ep > most else _possible(now._replace(ep=ep).peak)
            bars.append(
                _named(_MEMORY, (peak.states, peak.activations + peak.buffers)) if peak else dict.fromkeys(_MEMORY, 0.0)
            )
            texts.append(units.size(peak.total) if peak else f"only {why}" if ep > most else "not this EP")
        self._bars.update(bars, texts, EXPERT.index(now.ranks), _ROOMS * room, (room, units.size(room)))


class _Time(_Panel):
    def __init__(self, axes: Axes):
        parts = dict(_TIME.values())
        super().__init__(axes, parts, "Time of a step, over t", [f"TP {tp}" for tp in TENSOR], 3, 42)

    def update(self, now: Setting) -> None:
        bars, texts = [], []
        for tp in TENSOR:
            each = now._replace(tp=tp)
            parts = _possible(lambda each=each: each._replace(imbalance=min(each.imbalance, each.worst)).parts())
            bars.append({label: parts[part] if parts else 0.0 for part, (label, _) in _TIME.items()})
            fewer = f", EP {each.ranks}" * (each.ranks < now.ep) if parts else ""
            texts.append(f"{seconds(sum(parts.values()))}{fewer}" if parts else "not this TP")
        self._bars.update(bars, texts, TENSOR.index(now.tp), _longest(bars))


class _Traffic(_Panel):
    def __init__(self, axes: Axes):
        super().__init__(axes, _TRAFFIC, "A layer's way to experts and back, over hops", list(WAYS))
        axes.set_xlabel("bytes and time of a GPU and micro-batch, forward", fontsize=9)

    def update(self, now: Setting) -> None:
        found = [_possible(lambda hops=hops, m=m: now._replace(limit=m).way(hops)) for hops, m in WAYS.values()]
        bars = [_named(_TRAFFIC, way[:2]) if way else dict.fromkeys(_TRAFFIC, 0.0) for way in found]
        row = list(WAYS.values()).index((2, now.limit))
        self._bars.update(bars, [_of(way) for way in found], row, max(sum(bar.values()) for bar in bars) or 1.0)


def _longest(bars: list[dict[str, float]]) -> float:
    """Of steps; one that is much longer than the shortest is cut off, so that the others' parts can be seen."""
    totals = [total for bar in bars if (total := sum(bar.values()))]
    return min(max(totals), _SHOWN * min(totals))


def _of(way: Way | None) -> str:
    if way is None:
        return "not possible"
    return f"{units.size(way.inside + way.between)}, {units.duration(way.seconds)}" if way.seconds else "nothing"


def _named(parts: dict, values: Sequence[float]) -> dict[str, float]:
    return dict(zip(parts, values, strict=True))


def _possible(find: Callable):
    """What it finds, or None for a setting that the model does not allow."""
    try:
        return find()
    except ValueError:
        return None


class Degrees:
    """Three panels: memory over e, a step's time over t, and what travels to experts over hops and the limit of nodes."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.5), layout="constrained")
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1, 1.25), height_ratios=(1, 1.1))
        left, above, below = (self.figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
        self._memory, self._time, self._traffic = _Memory(left), _Time(above), _Traffic(below)
        word(_LETTERS, 9, 0)  # a letter's outline takes milliseconds, the first time
        self.moving: list[Artist] = [*self._memory.moving, *self._time.moving, *self._traffic.moving]

    def update(self, model: str, cluster: str, pp: int, ep: int, tp: int, limit: int, imbalance: float, schedule: str) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown name and what the model does not allow."""
        now = Setting(model, cluster, pp, ep, tp, limit, imbalance, schedule)
        said = status(now)
        self._memory.update(now)
        self._time.update(now)
        self._traffic.update(now)
        return said


def explorer() -> Explorer:
    """The explorer of chapter 08. It opens on DeepSeek-V3 as it was trained: 2,048 H800s, PP 16 × EP 64, TP 1."""
    return Explorer(
        Degrees(),
        model=choice("model", "deepseek-v3", list(MODELS)),
        cluster=choice("cluster", "h800", CLUSTERS),
        pp=value_slider("pipeline stages p", 16, PIPELINE),
        ep=value_slider("expert ranks e", 64, EXPERT),
        tp=value_slider("tensor ranks t", 1, TENSOR),
        limit=value_slider("nodes for a token", 4, LIMITS, lambda m: str(m) if m else "all"),
        imbalance=value_slider("fullest ÷ mean", 1, IMBALANCE, str),
        schedule=choice("schedule", "dualpipe", SCHEDULES),
    )
