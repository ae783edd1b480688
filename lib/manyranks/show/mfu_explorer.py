"""Chapter 09's explorer: the model's operators under the chip's roof, and where the time of a step goes."""

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, choice, log_slider, value_slider
from manyranks.show.labels import Labels, word
from manyranks.show.mfu_setting import CLUSTERS, CONVENTIONS, FLASH, LENGTHS, MODELS, PRECISIONS, RECOMPUTE, SEQUENCES, Setting
from manyranks.show.mfu_status import limit, status
from manyranks.show.mfu_waterfall import looks
from manyranks.theory.roofline import Part, Roof

# Intensities, and shares of the peak in percent.
_X, _Y = (1.0, 2e5), (0.05, 300.0)
_OPERATORS = {
    "attention projections": ("o", style.BLUE),
    "attention core": ("s", style.ORANGE),
    "MLP": ("D", style.GREEN),
    "head": ("^", style.PINK),
    "router": ("v", style.INK),
}
_USES = {"MFU": (style.BLUE, ""), "HFU": ("#56B4E9", "")}
BUDGET = ("matmul", "other", "overhead", "tensor", "expert", "data", "optimizer")
_BEFORE = "before"  # the part of a bar that is not drawn: where its row's time begins
_LETTERS = "abcdefghijklmnopqrstuvwxyzFLOPMGTHADRBEN»0123456789 .,µ%:/"


class _Roofline:
    """The roof of the chip, as shares of its peak, and the products of the model under it."""

    def __init__(self, axes: Axes):
        self._roof = axes.plot([1, 2, 3], [1, 1, 1], color=style.INK, linestyle="-", label="roof")[0]
        self._achievable = axes.plot([1, 2], [1, 1], color=style.INK, linestyle="--", linewidth=1.1, label="achievable")[0]
        self._ridge = axes.plot([1, 1], _Y, color="#666666", linestyle=":", linewidth=1.0, gid="ridge")[0]
        self._points = {name: self._marked(axes, name, *look) for name, look in _OPERATORS.items()}
        self._labels = Labels(axes, size=9, left=0, outline=word)
        axes.set(xscale="log", yscale="log", xlim=_X, ylim=_Y)
        axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate, as a share of the peak (%)")
        axes.set_xticks(at := [1, 10, 100, 1000, 1e4, 1e5], [f"{x:,.0f}" for x in at])
        axes.set_yticks(at := [0.1, 1, 10, 100], [f"{y:g}" for y in at])
        axes.minorticks_off()
        axes.grid(visible=False)
        axes.set_title("Operators under the roof", pad=46)
        at = {"loc": "lower left", "bbox_to_anchor": (-0.03, 1.0), "borderaxespad": 0.1}
        axes.legend(ncols=3, columnspacing=1.0, handlelength=1.8, fontsize=8.5, **at)

    @staticmethod
    def _marked(axes: Axes, name: str, marker: str, colour: str):
        look = {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.8, "linestyle": "none"}
        return axes.plot([], [], marker, markersize=8, label=name, **look)[0]

    @property
    def moving(self) -> list[Artist]:
        return [self._ridge, self._achievable, self._roof, *self._points.values(), self._labels.artist]

    def update(self, roof: Roof, achievable: float, parts: Sequence[Part]) -> None:
        """achievable: share of the peak."""
        x = _X[0], roof.ridge, _X[1]
        self._roof.set_data(x, [100 * roof.flops_per_second(each) / roof.peak for each in x])
        self._achievable.set_data([roof.ridge * achievable, _X[1]], [100 * achievable] * 2)
        self._ridge.set_xdata([roof.ridge] * 2)
        found = {part.name: part for part in parts if part.flops}
        for name, line in self._points.items():
            line.set_data(*_place(found.get(name), roof))
        names = [f"memory: {units.rate(roof.bandwidth)}", f"ridge: {units.short(roof.ridge)}", units.flop_rate(roof.peak)]
        self._labels.update([(1.3, 190), (1.15 * roof.ridge, 0.08), (max(1.3 * roof.ridge, 3e3), 145)], names)


class _Time:
    """MFU and HFU, and the parts of a step's time one after another, all as shares of the step."""

    def __init__(self, axes: Axes):
        found = looks(BUDGET)
        names = [name.removesuffix(" messages") for name, *_ in found.values()]
        # A row's name says what its bar is: hatches would take half of a redraw.
        parts = {_BEFORE: ("none", "")} | _USES | {part: (colour, "") for part, (_, colour, _) in found.items()}
        self._bars = Bars(axes, parts, "Where the time of a step goes", [*_USES, *names], outline=word)
        self._bars.hide(_BEFORE)
        axes.get_legend().remove()
        axes.set_title("Where the time of a step goes", pad=8)
        axes.tick_params(axis="y", labelsize=9)
        axes.set_xlabel("share of the step; MFU and HFU at the peak", fontsize=9, loc="right")

    @property
    def moving(self) -> list[Artist]:
        return self._bars.moving

    def update(self, uses: Mapping[str, float], budget: Mapping[str, float], row: int) -> None:
        """uses: shares of the step; budget: seconds; row: of the part that limits."""
        step, start = sum(budget.values()), 0.0
        bars = [{_BEFORE: 0.0, name: share} for name, share in uses.items()]
        texts = [f"{share:.1%}" for share in uses.values()]
        for part in BUDGET:
            bars.append({_BEFORE: start / step, part: budget[part] / step})
            start += budget[part]
            texts.append(f"{units.duration(budget[part])}, {budget[part] / step:.1%}" if budget[part] else "none")
        every = [dict.fromkeys([_BEFORE, *_USES, *BUDGET], 0.0) | bar for bar in bars]
        self._bars.update(every, texts, len(uses) + row, 1.0, (1.0, "the step"))


def _place(part: Part | None, roof: Roof) -> tuple[list[float], list[float]]:
    """Where a kind of operator is drawn, inside the axes; nothing where the model has none."""
    if part is None:
        return [], []
    x, y = part.intensity, 100 * part.flops_per_second / roof.peak
    return [min(max(x, _X[0]), _X[1])], [min(max(y, _Y[0]), _Y[1])]


class Utilisation:
    """Two panels: operators under the roof, and the time of a step."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.2), layout="constrained")
        left, right = self.figure.subplots(1, 2, width_ratios=(1.1, 1))
        self._roofline, self._time = _Roofline(left), _Time(right)
        word(_LETTERS, 9, 0)  # a letter's outline takes milliseconds, the first time
        self.moving: list[Artist] = [*self._roofline.moving, *self._time.moving]

    def update(
        self,
        model: str,
        cluster: str,
        precision: str,
        b: int,
        s: int,
        recompute: str,
        flash: str,
        tp: int,
        dp: int,
        convention: str,
    ) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown name and what model or chip forbid."""
        now = Setting(model, cluster, precision, b, s, recompute, flash, tp, dp, convention)
        said = status(now)
        self._roofline.update(now.roof, now.on.accelerator.matmul_fraction, now.parts())
        self._time.update({"MFU": now.mfu, "HFU": now.hfu}, now.budget(), BUDGET.index(limit(now)))
        return said


def explorer() -> Explorer:
    """The explorer of chapter 09. It opens on Llama 3 8B, one sequence of 8,192 tokens on each of 64 H100s."""
    return Explorer(
        Utilisation(),
        model=choice("model", "llama3-8b", list(MODELS)),
        cluster=choice("cluster", "h100-dgx", CLUSTERS),
        precision=choice("precision", "bf16", PRECISIONS),
        b=value_slider("micro-batch b", 1, SEQUENCES),
        s=value_slider("sequence s", 8192, LENGTHS, "{:,}".format),
        recompute=choice("recompute", "none", RECOMPUTE),
        flash=choice("flash attention", "on", list(FLASH)),
        tp=log_slider("tensor ranks t", 1, 0, 3),
        dp=log_slider("data ranks d", 64, 0, 10),
        convention=choice("convention", "full", CONVENTIONS),
    )
