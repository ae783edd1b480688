"""Chapter 00's figures: models against memory, links, topologies, and a measured ping-pong."""

from collections.abc import Mapping, Sequence
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style, units
from manyranks.show.lines import powers
from manyranks.show.said import Said
from manyranks.theory.hardware import Link

_SIZES = [2**k for k in range(36)]
_TICKS = [1, 1e3, 1e6, 1e9]
_WIRE = {"color": "#777777", "linewidth": 1.2}


@style.styled
def models_and_memory(
    models: Mapping[str, tuple[int, float]], devices: Mapping[str, tuple[int, float]], bytes_each: int
) -> style.Figure:
    """Bytes to train models against the memory of one device, by year. Values are (year, parameters) and (year, bytes)."""
    fig, (axes,) = style.figure(height=3.8)
    of_models = f"model: {bytes_each} bytes per parameter", models, "o", style.BLUE, bytes_each, 7
    of_devices = "memory of one device", devices, "s", style.ORANGE, 1, -14
    for label, points, marker, color, factor, above in (of_models, of_devices):
        years, amounts = zip(*[(year, factor * amount) for year, amount in points.values()], strict=True)
        axes.semilogy(years, amounts, marker, color=color, label=label, linestyle="none", markersize=7)
        for name, *at in zip(points, years, amounts, strict=True):
            axes.annotate(name, at, (0, above), textcoords="offset points", ha="center", fontsize=8.5)
    axes.set(ylabel="bytes", ylim=(3e9, 6e13), xlim=(2016.3, 2025.2), title="Training outgrew one device")
    axes.set_yticks([1e10, 1e11, 1e12, 1e13], ["10 GB", "100 GB", "1 TB", "10 TB"])
    axes.legend(loc="upper left")
    return fig


class MessageTime:
    """Time and achieved bandwidth of a message over its size; `update` moves the chosen size and link."""

    @style.styled
    def __init__(self, links: Mapping[str, Link]):
        self.links = dict(links)
        self.figure, (left, right) = style.figure(columns=2, width=8.6, height=3.7)
        self._curve = left.loglog(_SIZES, _SIZES, color=style.BLUE)[0]
        looks = (style.ORANGE, "--"), (style.GREEN, ":")
        self._parts = [left.plot(_SIZES, _SIZES, color=color, linestyle=line, linewidth=1.2)[0] for color, line in looks]
        self._share = right.semilogx(_SIZES, _SIZES, color=style.BLUE)[0]
        self._points = [axes.plot([1], [1], "o", color=style.INK, markersize=8)[0] for axes in (left, right)]
        self._half = right.plot([1], [50], "s", color=style.ORANGE, markersize=8, label="half bandwidth, n = αβ")[0]
        left.set(ylim=(1e-7, 10))
        _frame(left, "T(n) = α + n/β", "time T(n)", [1e-6, 1e-3, 1])
        _frame(right, "n / T(n)", "achieved share of β (%)")
        left.legend([self._curve, *self._parts], ["T(n)", "α alone", "n/β alone"], loc="upper left")
        right.set(ylim=(-4, 104))
        self._points[1].set_label("this message")
        right.legend(loc="upper left")
        self.moving = [self._curve, *self._parts, self._share, *self._points, self._half]

    def update(self, link: str, n: float) -> Said:
        """Shows this link with a message of n bytes."""
        chosen = self.links[link]
        times = [chosen.seconds(size) for size in _SIZES]
        self._curve.set_ydata(times)
        self._parts[0].set_ydata([chosen.latency] * len(_SIZES))
        self._parts[1].set_ydata([size / chosen.bandwidth for size in _SIZES])
        self._share.set_ydata([100 * chosen.achieved_bandwidth(size) / chosen.bandwidth for size in _SIZES])
        share = chosen.achieved_bandwidth(n) / chosen.bandwidth
        self._points[0].set_data([n], [chosen.seconds(n)])
        self._points[1].set_data([n], [100 * share])
        self._half.set_xdata([chosen.half_bandwidth_bytes])
        numbers = {"time": units.duration(chosen.seconds(n)), "share of β": f"{share:.0%} of {units.rate(chosen.bandwidth)}"}
        numbers |= {"half bandwidth": f"at {units.size(chosen.half_bandwidth_bytes)}"}
        return Said(f"{units.size(n)} over {link}", numbers, "latency" if n < chosen.half_bandwidth_bytes else "bandwidth")


@style.styled
def links(chosen: Mapping[str, Link]) -> style.Figure:
    """T(n) of several links on one pair of axes, with the half-bandwidth point of each."""
    fig, (axes,) = style.figure(height=3.8)
    for (name, link), marker in zip(chosen.items(), style.MARKERS, strict=False):
        (line,) = axes.loglog(_SIZES, [link.seconds(n) for n in _SIZES], label=name)
        half = link.half_bandwidth_bytes
        axes.plot([half], [link.seconds(half)], marker, color=line.get_color(), markersize=7)
    _frame(axes, "A message over each link (marks: half bandwidth)", "time T(n)", [1e-6, 1e-3, 1])
    axes.legend(loc="upper left")
    return fig


@style.styled
def ping_pong(sizes: Sequence[int], seconds: Sequence[float], link: Link) -> style.Figure:
    """Measured times of one message, with the line T(n) = α + n/β that fits them."""
    fig, (axes,) = style.figure(height=3.5)
    axes.loglog(sizes, seconds, "o", color=style.ORANGE, linestyle="none", label="measured")
    fit = f"fit: α = {units.duration(link.latency)}, β = {units.rate(link.bandwidth)}"
    axes.loglog(sizes, [link.seconds(n) for n in sizes], color=style.BLUE, label=fit)
    half = link.half_bandwidth_bytes
    axes.axvline(half, color=style.INK, linestyle=":", linewidth=1.2)
    axes.annotate(f"half bandwidth\n{units.size(half)}", (half, min(seconds)), (6, 0), textcoords="offset points", fontsize=9)
    ends = min(seconds) / 3, max(seconds) * 3
    _frame(axes, "Ping-pong between two ranks", "time of one message", powers(ends), _TICKS[:3])
    axes.set_ylim(ends)
    axes.legend(loc="upper left")
    return fig


def _frame(axes: Axes, title: str, ylabel: str, times: Sequence[float] = (), sizes: Sequence[float] = _TICKS) -> None:
    """Titles axes over message sizes, and numbers them."""
    axes.set(title=title, xlabel="message size n", ylabel=ylabel)
    axes.set_xticks(sizes, [units.size(n) for n in sizes])
    if times:
        axes.set_yticks(times, [units.duration(t) for t in times])
    axes.minorticks_off()


@style.styled
def topologies() -> style.Figure:
    """A fat tree of GPUs beside a torus of TPUs, with the cut through the middle of each."""
    fig, panels = style.figure(columns=2, width=8.6, height=3.6)
    for draw, axes in zip((_fat_tree, _torus), panels, strict=True):
        draw(axes)
        axes.set_axis_off()
    return fig


def _fat_tree(axes) -> None:
    for x in (0.5, 2.5, 4.5, 6.5):
        for spine in (1.5, 5.5):
            axes.plot((x, spine), (1.6, 3), "-", **_WIRE)
        for gpu in (x - 0.5, x + 0.5):
            axes.plot((gpu, x), (0.25, 1.6), "-", **_WIRE)
            _box(axes, gpu, 0.2, "GPU", style.BLUE)
        _box(axes, x, 1.6, "leaf", style.GREEN)
    for spine in (1.5, 5.5):
        _box(axes, spine, 3, "spine", style.GREEN)
    axes.axvline(3.5, color=style.ORANGE, linestyle="--")
    axes.set(xlim=(-0.7, 7.7), ylim=(-0.3, 3.6), title="Fat tree: any half to the other at full speed")


def _torus(axes) -> None:
    for i in range(4):
        for ends, look in (((0, 3), "-"), ((-0.55, 0), ":"), ((3, 3.55), ":")):
            axes.plot(ends, (i, i), look, **_WIRE)
            axes.plot((i, i), ends, look, **_WIRE)
        axes.plot(range(4), [i] * 4, "o", color=style.BLUE, markersize=11, zorder=3)
    axes.axvline(1.5, color=style.ORANGE, linestyle="--")
    axes.set(xlim=(-1, 4), ylim=(-0.8, 3.8), title="Torus: fast to neighbors (edges wrap around)")
    axes.set_aspect(1 / sqrt(1.2))


def _box(axes, x: float, y: float, text: str, colour: str) -> None:
    axes.add_patch(Rectangle((x - 0.42, y - 0.24), 0.84, 0.48, facecolor=colour, zorder=3))
    axes.text(x, y, text, color="white", ha="center", va="center", fontsize=8, fontweight="bold", zorder=4)
