"""Chapter 00's figures: what training needs and one GPU has, the path of a message, links, networks, a measured ping-pong."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import drawings, style, units
from manyranks.show.drawings import LARGE, WIDTH, Figure
from manyranks.show.explorer import Explorer, Measure, Panels, Said, choice, log_slider
from manyranks.show.lines import powers, ticks
from manyranks.show.scenario import in_code
from manyranks.theory import hardware
from manyranks.theory.hardware import Link
from manyranks.timeline import Timeline

_SIZES = [2**k for k in range(36)]
_TICKS = [1, 1e3, 1e6, 1e9]
_WIRE = {"color": style.INK, "linewidth": 1.2, "linestyle": "-"}
_DAY, _YEAR = 1e15 * 86400, 365.25 * 86400  # FLOPs of a petaFLOP/s-day; seconds


@style.styled
def outgrown(models: Mapping[str, tuple[float, ...]], devices: Mapping[str, tuple[float, ...]]) -> style.Figure:
    """Draws what training needs over the years, beside what one GPU has: memory, and compute in a year.

    models: name -> year, bytes, FLOPs
    devices: name -> year, bytes, FLOP/s
    """
    fig, panels = style.figure(columns=2, width=9, height=4)
    needed, held = ({name: each[:2] for name, each in group.items()} for group in (models, devices))
    _over_years(panels[0], {"to train a model": needed, "one GPU": held}, units.size)
    days = {name: (year, flops / _DAY) for name, (year, _, flops) in models.items()}
    in_a_year = {name: (year, flops * _YEAR / _DAY) for name, (year, _, flops) in devices.items()}
    _over_years(panels[1], {"to train a model": days, "one GPU, in a year": in_a_year}, "{:,.0f}".format)
    panels[0].set(title="Memory: bytes", ylim=(3e9, 6e13), yticks=[1e10, 1e11, 1e12, 1e13])
    panels[1].set(title="Compute: petaFLOP/s-days", ylim=(3, 3e6), yticks=[10, 1e3, 1e5])
    return fig


def _over_years(axes: Axes, groups: Mapping[str, Mapping[str, tuple[float, float]]], text: Callable[[float], str]) -> None:
    """Marks models and GPUs by year and amount, with their names beside them."""
    looks = ("o", style.BLUE, "right", -7), ("s", style.ORANGE, "left", 7)
    for (label, named), (look, color, ha, away) in zip(groups.items(), looks, strict=True):
        axes.semilogy(*zip(*named.values(), strict=True), look, color=color, label=label, linestyle="none", markersize=7)
        for name, at in named.items():
            axes.annotate(name, at, (away, 0), textcoords="offset points", ha=ha, va="center", fontsize=9)
    axes.set(xlim=(2016.6, 2026.3), xticks=range(2018, 2027, 2))
    axes.yaxis.set_major_formatter(lambda amount, _: text(amount))
    axes.minorticks_off()
    axes.legend(loc="upper left")


@style.styled
def path_of_a_message() -> style.Figure:
    """Draws the way between two GPUs of a node and between two nodes: past the CPUs, which only queue the work."""
    nvlink, pcie, network = (hardware.links[name] for name in ("NVLink, H100", "PCIe 5.0 x16", "InfiniBand 400G"))
    fig = Figure(WIDTH, 3.6)
    for x, title, first in ((0.05, "node 0", 0), (4.45, "node 1", 8)):
        fig.frame(x, 0.25, 2.7, 2.65)
        fig.write(x + 1.35, 0.12, f"{title}, two of its 8 GPUs", (2.7, 1))
        places = {f"GPU {first}": 0.55, f"GPU {first + 1}": 2.15}
        fig.block(x + 0.65, 0.35, 1.4, 0.46, "compute", f"NVLink switch\n{units.rate(nvlink.bandwidth)}")
        for gpu, at in places.items():
            fig.paper.plot((x + 1.35, x + at), (0.81, 1.2), **_WIRE)
            fig.paper.plot((x + at, x + at), (1.6, 2.45), **_WIRE)
            fig.paper.plot((x + 1.35, x + at), (2.0, 1.6), **_WIRE | {"linestyle": ":"})
            fig.block(x + at - 0.45, 1.2, 0.9, 0.4, "parameters", gpu, size=LARGE)
            fig.block(x + at - 0.45, 2.45, 0.9, 0.36, "optimizer", "network card")
        fig.block(x + 1.05, 1.85, 0.6, 0.36, "compute", "CPU")
        fig.write(x + 1.35, 2.55, f"PCIe\n{units.rate(pcie.bandwidth)}", (0.66, 1))
    fig.block(2.8, 3.05, 1.6, 0.46, "optimizer", f"InfiniBand switches\n{units.rate(network.bandwidth)}")
    fig.arrow([(0.45, 1.18), (1.1, 0.82)], style.BLUE, name="NVLink up")
    fig.arrow([(1.7, 0.82), (2.35, 1.18)], style.BLUE, name="NVLink down")
    for name, ends in {
        "to the card": ((2.35, 1.62), (2.35, 2.42)),
        "to the switches": ((2.3, 2.83), (2.78, 3.2)),
        "from the switches": ((4.42, 3.2), (4.9, 2.83)),
        "to the GPU": ((5.15, 2.42), (5.15, 1.62)),
    }.items():
        fig.arrow(ends, style.ORANGE, name=name)
    fig.write(1.4, 3.3, "dotted: a CPU queues the work;\nno message passes through it", (2.6, 1))
    return fig


_LANES = ("send", "sends", "send to", "gathered"), ("recv", "receives", "receive from", "activations")


def turns(runs: Mapping[str, Timeline]) -> style.Figure:
    """Draws when ranks 0 and 1 send and receive, a panel per run."""
    lanes = {
        title: {
            f"rank {rank} {does}": [
                (s.started, s.finished, f"{word} {s.name.split()[-1]}", kind) for s in run.of(rank) if s.name.startswith(op)
            ]
            for rank in (0, 1)
            for op, does, word, kind in _LANES
        }
        for title, run in runs.items()
    }
    return drawings.when(lanes, dict.fromkeys(runs, ()))


class MessageTime(Panels):
    """Draws time and bandwidth over size: of one message, and of a ring of n ranks that cut it into n pieces."""

    @style.styled
    def __init__(self, links: Mapping[str, Link]):
        self.links = dict(links)
        self.figure, (left, right) = style.figure(columns=2, width=8.6, height=3.7)
        looks = (style.BLUE, "-", 2), (style.ORANGE, "--", 1.2), (style.GREEN, ":", 1.2), (style.PINK, "-.", 2)
        self._times = [left.loglog(_SIZES, _SIZES, color=color, ls=line, lw=wide)[0] for color, line, wide in looks]
        one, ring = (style.BLUE, "-"), (style.PINK, "-.")
        self._shares = [right.semilogx(_SIZES, _SIZES, color=color, ls=line)[0] for color, line in (one, ring)]
        self._points = [axes.plot([1], [1], "o", color=style.INK, markersize=8)[0] for axes in (left, right, left, right)]
        self._half = right.plot([1, 1], [50, 50], "s", color=style.ORANGE, markersize=8)[0]
        left.set(ylim=(1e-7, 10))
        _frame(left, "T(n) = α + n/β", "time", [1e-6, 1e-3, 1])
        _frame(right, "bandwidth that is reached", "share of β (%)")
        left.legend(self._times, ["one message", "α alone", "n/β alone", "a ring, N pieces"], loc="upper left")
        right.set(ylim=(-4, 104))
        right.legend([self._half, self._points[1]], ["half of β", "this size"], loc="upper left")
        self.others = [*self._times, *self._shares, *self._points, self._half]

    def update(self, link: str, size: float, n: int) -> Said:
        """Shows `size` bytes on this link: in one message, and handed round a ring of n ranks."""
        chosen = self.links[link]
        one, ring = chosen.seconds, lambda size: (n - 1) * chosen.seconds(size / n)
        alone, half = (lambda _: chosen.latency), chosen.half_bandwidth_bytes
        for curve, seconds in zip(self._times, (one, alone, lambda size: size / chosen.bandwidth, ring), strict=True):
            curve.set_ydata([seconds(each) for each in _SIZES])

        def share(size: float) -> float:
            return 100 * size / half / (1 + size / half)

        for curve, pieces in zip(self._shares, (1, n), strict=True):
            curve.set_ydata([share(each / pieces) for each in _SIZES])
        for point, value in zip(self._points, (one(size), share(size), ring(size), share(size / n)), strict=True):
            point.set_data([size], [value])
        self._half.set_xdata([half, n * half])
        numbers = {"one message": f"{units.duration(one(size))}, {share(size):.0f}% of β"}
        numbers |= {f"{n:,} ranks in a ring": f"{units.duration(ring(size))}, {share(size / n):.0f}% of β"}
        numbers |= {"half of β": f"at {units.size(half)}", "in the ring": f"at {units.size(n * half)}"}
        limit = "latency" if size / n < half else "bandwidth"
        return Said(f"{units.size(size)} over {link}, in {n:,} pieces of {units.size(size / n)}", numbers, limit)

    def code(self, link: str, size: float, n: int) -> str:
        text = f'from manyranks.theory import links\n\nlink, n = links["{link}"], {size}\n'
        prints = {"one message": "duration(link.seconds(n))", "half of β": "'at', size(link.half_bandwidth_bytes)"}
        prints |= {f"{n:,} ranks in a ring": f"duration({n - 1} * link.seconds(n / {n}))"}
        return in_code(text, prints | {"in the ring": f"'at', size({n} * link.half_bandwidth_bytes)"})


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 00.

    measure: what "Measure it" runs, few_ranks.hardware
    """
    presets = {"1 kB": {"size": 2**10}, "1,024 ranks": {"n": 1024}, "today's NVLink": {"link": "NVLink, B200"}}
    link = choice("link", "InfiniBand 400G", list(hardware.links))
    size = log_slider("size n", 2**20, low=0, high=34, show=units.size)
    return Explorer(MessageTime(hardware.links), presets, measure, link=link, size=size, n=log_slider("ranks N", 8, 1, 10))


@style.styled
def links(chosen: Mapping[str, Link]) -> style.Figure:
    """Draws T(n) of several links on one pair of axes, with the half-bandwidth point of each."""
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
    """Draws measured times of one message, with the line T(n) = α + n/β that fits them."""
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
    ticks(axes, (sizes, units.size), (times, units.duration) if times else None)


@style.styled
def topologies() -> style.Figure:
    """Draws a fat tree of GPUs beside a torus of TPUs, with the cut through the middle of each."""
    fig, panels = style.figure(columns=2, width=8.6, height=3.6)
    for draw, axes in zip((_fat_tree, _torus), panels, strict=True):
        draw(axes)
        axes.set_axis_off()
    return fig


def _fat_tree(axes) -> None:
    for x in (0.5, 2.5, 4.5, 6.5):
        for spine in (1.5, 5.5):
            axes.plot((x, spine), (1.6, 3), **_WIRE)
        for gpu in (x - 0.5, x + 0.5):
            axes.plot((gpu, x), (0.25, 1.6), **_WIRE)
            _box(axes, gpu, 0.2, "GPU", style.BLUE)
        _box(axes, x, 1.6, "leaf", style.GREEN)
    for spine in (1.5, 5.5):
        _box(axes, spine, 3, "spine", style.GREEN)
    axes.axvline(3.5, color=style.ORANGE, linestyle="--")
    axes.set(xlim=(-0.7, 7.7), ylim=(-0.3, 3.6), title="Fat tree: any half to the other at full speed")


def _torus(axes) -> None:
    for i in range(4):
        for ends, look in (((0, 3), "-"), ((-0.55, 0), ":"), ((3, 3.55), ":")):
            axes.plot(ends, (i, i), **_WIRE | {"linestyle": look})
            axes.plot((i, i), ends, **_WIRE | {"linestyle": look})
        axes.plot(range(4), [i] * 4, "o", color=style.BLUE, markersize=11, zorder=3)
    axes.axvline(1.5, color=style.ORANGE, linestyle="--")
    axes.set(xlim=(-1, 4), ylim=(-0.8, 3.8), title="Torus: fast to neighbors (edges wrap around)")
    axes.set_aspect(1 / sqrt(1.2))


def _box(axes, x: float, y: float, text: str, color: str) -> None:
    axes.add_patch(Rectangle((x - 0.42, y - 0.24), 0.84, 0.48, facecolor=color, zorder=3))
    axes.text(x, y, text, color=drawings.on(color), ha="center", va="center", fontsize=8, fontweight="bold", zorder=4)
