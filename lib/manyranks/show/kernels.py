"""Chapter 11's figures: a chip and one of its processors, a warp's addresses, tiles of a product and of attention."""

import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.drawings import LARGE, WIDTH, Figure
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, log_slider, value_slider
from manyranks.show.lines import ticks
from manyranks.show.scenario import in_code
from manyranks.theory import blocks, hardware, kernels, roofline
from manyranks.theory.blocks import LINE, SECTOR, WARP
from manyranks.theory.hardware import Accelerator

_STRIP = 128  # sectors that a strip of memory shows at most
_HIGH = 1.75  # inches of one warp
_SIDE = 8192  # rows and columns of the explorer's product
CHIPS = ("V100 SXM2", "A100-80GB SXM", "H100 SXM", "H200 SXM", "B200 (HGX)")


@style.styled
def chip(accelerator: Accelerator) -> style.Figure:
    """Draws a GPU: its memory, its processors, and one of these with the warps of a block."""
    one = blocks.processor(accelerator)
    fig = Figure(WIDTH, 3.3)
    fig.frame(0.05, 0.35, 3.1, 2.9)
    fig.write(1.6, 0.18, accelerator.name, (3, 1), LARGE)
    columns = math.ceil(math.sqrt(accelerator.processors * 2.3))
    side = 2.9 / columns
    for i in range(accelerator.processors):
        x, y = 0.15 + i % columns * side, 0.45 + i // columns * side
        fig.block(x, y, 0.8 * side, 0.8 * side, "compute" if i else "parameters", name=f"processor {i}")
    rows = math.ceil(accelerator.processors / columns)
    under = 0.45 + rows * side
    fig.write(1.6, under + 0.12, f"{accelerator.processors} processors (SM)", (2.9, 1))
    fig.block(0.15, under + 0.3, 2.9, 0.3, "optimizer", "L2 cache, shared by all")
    fig.block(0.15, 2.72, 2.9, 0.42, "activations", f"DRAM: {units.size(accelerator.memory)}", size=LARGE)
    fig.arrow([(1.6, 2.72), (1.6, under + 0.6)], style.INK, name="DRAM to L2")
    fig.write(1.7, (2.72 + under + 0.6) / 2, units.rate(accelerator.memory_bandwidth), (1.4, 1), ha="left")
    fig.arrow([(0.15 + 0.8 * side, 0.45), (3.6, 0.4)], style.BLUE, thick=1.2, name="zoom")
    fig.frame(3.65, 0.35, 3.5, 2.9)
    fig.write(5.4, 0.18, f"one processor: up to {one.warps} warps", (3.4, 1), LARGE)
    for warp in range(4):
        y = 0.5 + warp * 0.34
        fig.write(4.05, y + 0.13, f"warp {warp}", (0.75, 1))
        for lane in range(WARP):
            fig.block(4.45 + lane * 0.081, y, 0.07, 0.26, "parameters")
    fig.write(5.4, 1.95, "32 lanes do the same instruction at once", (3.4, 1))
    fig.block(3.75, 2.12, 3.3, 0.42, "gathered", f"registers: {units.size(4 * one.registers)}", size=LARGE)
    fig.block(3.75, 2.72, 3.3, 0.42, "gradients", f"shared memory: {units.size(one.shared)}", size=LARGE)
    return fig


@style.styled
def warps(reads: Mapping[str, Sequence[int | None]]) -> style.Figure:
    """Draws where each lane of a warp goes: 32 lanes above, sectors of memory below, those it touches filled.

    reads: title -> the address of each lane's 4 bytes, None for one that is masked off; Access.first has them
    """
    fig = Figure(WIDTH, _HIGH * len(reads))
    for k, (title, addresses) in enumerate(reads.items()):
        asked = [address for address in addresses if address is not None]
        start = min(asked, default=0) // LINE * LINE
        touched = {byte // SECTOR for address in asked for byte in (address, address + 3)}
        span = (max(touched, default=0) + 1) * SECTOR - start
        strip = min(_STRIP, max(32, math.ceil(span / LINE) * LINE // SECTOR))
        _warp(fig, _HIGH * k, title, addresses, start, strip, touched)
    return fig


def _warp(fig: Figure, top: float, title: str, addresses: Sequence[int | None], start: int, strip: int, touched: set) -> None:
    wide, lane_wide = (WIDTH - 0.2) / strip, 0.13
    left = (WIDTH - WARP * lane_wide) / 2
    beyond = sum(sector - start // SECTOR >= strip for sector in touched)
    more = f", {beyond} of them further right" if beyond else ""
    fig.write(WIDTH / 2, top + 0.16, f"{title}: {len(touched)} sectors{more}", (WIDTH, 1), LARGE)
    fig.write(left - 0.1, top + 0.42, "lanes", ha="right")
    fig.write(0.1, top + 1.46, "memory, a box per sector of 32 bytes", ha="left")
    for lane, address in enumerate(addresses):
        x = left + lane * lane_wide
        fig.block(x, top + 0.32, 0.8 * lane_wide, 0.2, "parameters", name=f"lane {lane}", hollow=address is None)
        if address is not None and (at := (address - start) / SECTOR) < strip:
            ends = (x + 0.4 * lane_wide, 0.1 + at * wide), (top + 0.53, top + 1.05)
            fig.paper.plot(*ends, color=style.BLUE, linewidth=0.7, linestyle="-")
    for sector in range(strip):
        hit = sector + start // SECTOR in touched
        kind = "gradients" if hit else "compute"
        fig.block(0.1 + sector * wide, top + 1.05, wide, 0.24, kind, "", f"sector {sector}", hollow=not hit)


@style.styled
def tiles(m: int, k: int, n: int, rows: int, columns: int, step: int) -> style.Figure:
    """Draws A · B in tiles: the tile of the result that a program makes, and the rows and columns that it reads.

    m, k, n: A is m × k, B k × n
    rows, columns: of the tile
    step: elements of k that are read at a time
    """
    scale = 2.0 / max(m, n, k)
    fig = Figure(WIDTH, 0.6 + scale * (k + m) + 0.3)
    left, top = 0.3, 0.1
    x, y = left + 2.35, top + scale * k + 0.15
    left = x - 0.15 - scale * k
    i, j = rows * (math.ceil(m / rows) // 2), columns * (math.ceil(n / columns) // 2)
    places = {"A": (left, y, k, m), "B": (x, top, n, k), "A · B": (x, y, n, m)}
    for name, (at, above, wide, high) in places.items():
        fig.frame(at, above, scale * wide, scale * high)
        if name == "B":
            fig.write(at + scale * wide + 0.1, above + scale * high / 2, f"B: {high:,} × {wide:,}", ha="left")
        else:
            fig.write(at + scale * wide / 2, above + scale * high + 0.16, f"{name}: {high:,} × {wide:,}")
    fig.block(left, y + scale * i, scale * k, scale * min(rows, m - i), "gathered", name="rows")
    fig.block(x + scale * j, top, scale * min(columns, n - j), scale * k, "gathered", name="columns")
    fig.block(left, y + scale * i, scale * step, scale * min(rows, m - i), "gradients", name="step of A")
    fig.block(x + scale * j, top, scale * min(columns, n - j), scale * step, "gradients", name="step of B")
    fig.block(x + scale * j, y + scale * i, scale * min(columns, n - j), scale * min(rows, m - i), "parameters", name="tile")
    said = f"one program makes\n{rows} × {columns} of the result\n(dark blue). It reads two\n"
    said += f"strips, {step} of k at a\ntime (orange)."
    fig.write(x + scale * n + 0.1, y + scale * m / 2, said, ha="left")
    return fig


@style.styled
def walk(rows: int, columns: int, queries: int, keys: int, causal: bool = True) -> style.Figure:
    """Draws the scores that attention would write, cut into tiles, and which of them one program walks along.

    rows, columns: of the scores
    queries, keys: of a tile
    """
    down, across = math.ceil(rows / queries), math.ceil(columns / keys)
    tile = down // 2  # of queries, the program's
    side = min(0.62, 3.7 / across, 2.5 / down)
    fig = Figure(WIDTH, 1.15 + side * down)
    left, top = 1.75, 0.95
    for i in range(down):
        for j in range(across):
            seen = not causal or j * keys < min(rows, (i + 1) * queries)
            other = "compute", "", f"{'tile' if seen else 'skipped'} {i} {j}"
            look = ("gradients", f"{j + 1}", f"step {j}") if i == tile and seen else other
            fig.block(left + j * side, top + i * side, side, side, *look, hollow=not seen)
    for j in range(across):
        read = not causal or j * keys < (tile + 1) * queries
        fig.block(left + j * side, top - 0.35, side, 0.25, "gathered" if read else "compute", "", f"keys {j}", hollow=not read)
    for i in range(down):
        fig.block(left - 0.35, top + i * side, 0.25, side, "parameters" if i == tile else "compute", hollow=i != tile)
    fig.write(left + across * side / 2, top - 0.52, f"K and V, {keys} rows at a time", (4, 1))
    fig.write(left - 0.95, top + (tile + 0.5) * side, f"{queries} queries\nstay", (1.1, 1))
    room = WIDTH - left - across * side
    text = "tiles of scores:\norange, one program,\nin this order: it carries\nmost, total and sums;\ngray, other programs"
    if causal:
        text += ";\nempty, skipped"
    fig.write(left + across * side + room / 2, top + down * side / 2, text, (room - 0.1, 2.5))
    return fig


@style.styled
def requested(groups: Mapping[str, Mapping[str, float]]) -> style.Figure:
    """Draws how many bytes each way of computing something asks for, a panel per group.

    groups: title -> name -> bytes
    """
    fig, panels = style.figure(columns=len(groups), width=WIDTH, height=0.9 + 0.42 * max(map(len, groups.values())))
    for axes, (title, rows) in zip(panels, groups.items(), strict=True):
        places = range(len(rows))
        axes.barh(places, list(rows.values()), color=[style.ORANGE, *[style.BLUE] * len(rows)][: len(rows)], height=0.6)
        for y, amount in zip(places, rows.values(), strict=True):
            axes.annotate(units.size(amount), (amount, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, list(rows))
        axes.set(title=title, xlim=(0, 1.35 * max(rows.values())), ylim=(len(rows) - 0.5, -0.5), xlabel="bytes asked for")
        axes.xaxis.set_major_formatter(lambda amount, _: units.size(amount) if amount else "0")
        axes.locator_params(axis="x", nbins=3)
        axes.grid(visible=False)
    return fig


@style.styled
def waves(accelerator: Accelerator, sides: Iterable[int], tile: int = 128) -> style.Figure:
    """Draws how much of a chip a square product keeps at work: tiles stick out over its edges, and the last wave isn't full.

    sides: rows and columns of the product
    tile: rows and columns of a tile, one tile per processor at a time
    """
    sides, processors = list(sides), accelerator.processors

    def at_work(side: int) -> float:
        return 100 * kernels.filled(side, side, 1, processors, tile, tile)

    fig, (axes,) = style.figure(width=WIDTH, height=3)
    axes.plot(sides, list(map(at_work, sides)), color=style.BLUE)
    axes.set(xlabel="rows and columns of the result", ylabel="processors at work (%)", ylim=(0, 105))
    axes.set_title(f"{accelerator.name}: {processors} processors, tiles of {tile} × {tile}")
    n, arrow = math.isqrt(processors), {"arrowstyle": "->", "color": style.INK}
    at, said = n * tile + 16, f"from {n * n} tiles to {(n + 1) ** 2}:\na second wave begins"
    axes.annotate(said, (at, at_work(at)), (at + 134, 15), arrowprops=arrow, fontsize=10)
    return fig


_CODE = """\
from manyranks.theory import blocks, hardware

chip = hardware.accelerators["{chip}"]
sectors = blocks.sectors({stride}, itemsize={itemsize})
moved = blocks.product_bytes({side}, {side}, {side}, {tile}, itemsize={itemsize}) * sectors * 32 / {line}
fits = blocks.occupancy(chip, {warps}, {threads}, {shared})
"""


class Product(namedtuple("Product", "chip stride itemsize tile step warps stages"), Setting):
    """Holds what the controls say: a product of 8,192 × 8,192 matrices in square tiles, its elements `stride` apart."""

    @property
    def accelerator(self) -> Accelerator:
        return hardware.accelerators[self.chip]

    @property
    def sectors(self) -> int:
        """Sectors that a warp touches for 32 elements."""
        return blocks.sectors(self.stride, itemsize=self.itemsize)

    @property
    def moved(self) -> float:
        """Bytes that the product moves: whole sectors, with the bytes in them that nobody uses."""
        asked = blocks.product_bytes(_SIDE, _SIDE, _SIDE, self.tile, itemsize=self.itemsize)
        return asked * self.sectors * SECTOR / (WARP * self.itemsize)

    @property
    def roof(self) -> roofline.Roof:
        """The roof of products of 1-, 2- or 4-byte numbers: fp8; bf16, or fp16 on a V100; TF32, or float32 there."""
        chip = self.accelerator
        names = {1: ("float8",), 2: ("bfloat16", "float16"), 4: ("tf32", "float32")}[self.itemsize]
        peaks = [peak for name in names if (peak := hardware.peak(chip, name))]
        if not peaks:
            raise ValueError(f"no rate is known at which {chip.name} multiplies {self.itemsize}-byte numbers: choose 2 bytes")
        return roofline.Roof(peaks[0], chip.memory_bandwidth)

    @property
    def intensity(self) -> float:
        return 2 * _SIDE**3 / self.moved

    @property
    def shared(self) -> int:
        """Bytes of a block: two operands, for every stage."""
        return self.stages * 2 * self.tile * self.step * self.itemsize

    @property
    def registers(self) -> int:
        """Registers of a thread: its part of the tile of sums, and 40 for addresses and operands, which is our guess."""
        return self.tile**2 // (WARP * self.warps) + 40

    @property
    def occupancy(self) -> blocks.Occupancy:
        return blocks.occupancy(self.accelerator, self.warps, self.registers, self.shared)

    def where(self) -> str:
        return f"{_SIDE:,}³ in tiles of {self.tile} on {self.chip}"

    def numbers(self) -> dict[str, str]:
        fits, chip, tiles = self.occupancy, self.accelerator, math.ceil(_SIDE / self.tile) ** 2
        numbers = {f"for {WARP * self.itemsize} bytes, a warp": f"touches {self.sectors} sectors"}
        numbers |= {"the product moves": units.size(self.moved), "intensity": f"{units.three(self.intensity)} FLOP/byte"}
        numbers |= {"shared memory": f"{units.size(self.shared)} of {units.size(blocks.processor(chip).per_block)}"}
        numbers |= {"per processor": f"{fits.blocks} ({fits.share:.0%} of all warps)"}
        return numbers | {"tiles": f"{tiles:,} in {blocks.waves(tiles, chip.processors, fits.blocks):.1f} waves"}

    def limits(self) -> str:
        bound, wastes, _ = self.roof.bound(self.intensity), self.sectors * SECTOR > WARP * self.itemsize, self.occupancy
        if bound == "memory" and wastes:
            return "memory, and the stride wastes most of what moves: let neighboring lanes read neighboring elements"
        if bound == "memory":
            return "memory, before the cache: larger tiles read each matrix fewer times"
        return "compute; part of what moves is wasted, but it doesn't matter here" if wastes else "compute"

    def code(self) -> str:
        now = self._asdict() | {"threads": self.registers, "shared": self.shared, "line": WARP * self.itemsize, "side": _SIDE}
        prints = {f"for {now['line']} bytes, a warp": "'touches', sectors, 'sectors'", "the product moves": "size(moved)"}
        prints |= {"intensity": f"three({2 * _SIDE**3} / moved), 'FLOP/byte'", "shared memory": f"size({self.shared})"}
        return in_code(_CODE.format(**now), prints | {"per processor": "fits.blocks"})


class Tiled(Board):
    """Draws a warp's addresses above, and the place of a tiled product under its chip's roof below."""

    setting = Product

    @style.styled
    def __init__(self):
        self.figure, (left, right) = style.figure(columns=2, width=9.2, height=3.7, width_ratios=(1, 1))
        self._memory(left)
        look = {"color": style.INK, "linewidth": 1.8}
        self._roof = right.loglog([1, 1], [1, 1], label="roof", **look)[0]
        self._ridge = right.plot([1, 1], [1e12, 1e16], color=style.INK, linestyle=":", linewidth=1)[0]
        marks = (("o", style.BLUE, "this product", 8), ("s", style.ORANGE, "with stride 1", 14))
        look = {"linestyle": "none", "fillstyle": "none", "markeredgewidth": 2}
        self._points = [right.plot([1], [1], mark, color=c, label=name, ms=size, **look)[0] for mark, c, name, size in marks]
        right.set(xlim=(0.5, 2000), ylim=(5e11, 8e15), title="Under the roof")
        right.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="FLOP/s at most")
        ticks(right, ([1, 10, 100, 1000], "{:,}".format), ([1e12, 1e13, 1e14, 1e15], units.flop_rate))
        right.legend(loc="upper left")
        self.others = [*self._lanes, self._sectors, self._roof, self._ridge, *self._points]

    def _memory(self, axes: Axes) -> None:
        axes.set(xlim=(-1, WARP), ylim=(-0.5, 1.4), title="A warp's 32 lanes, and the sectors they touch")
        axes.set_yticks([0, 1], ["sectors", "lanes"])
        axes.plot(range(WARP), [1] * WARP, "s", color=style.BLUE, markersize=5)
        self._lanes = [axes.plot([i, i], [1, 0], color=style.BLUE, linewidth=0.8, linestyle="-")[0] for i in range(WARP)]
        axes.plot(range(WARP), [0] * WARP, "s", color=style.INK, markersize=7, fillstyle="none")
        self._sectors = axes.plot([], [], "s", color=style.ORANGE, markersize=7)[0]
        axes.set_xticks([])
        axes.grid(visible=False)

    def draw(self, now: Product) -> None:
        roof, touched = now.roof, [lane * now.stride * now.itemsize // SECTOR for lane in range(WARP)]
        for line, at in zip(self._lanes, touched, strict=True):
            line.set_xdata([line.get_xdata()[0], at % WARP])
        filled = [at % WARP for at in dict.fromkeys(touched)]
        self._sectors.set_data(filled, [0] * len(filled))
        ends = [0.5, roof.ridge, 2000]
        self._roof.set_data(ends, [roof.flops_per_second(each) for each in ends])
        self._ridge.set_xdata([roof.ridge] * 2)
        for point, each in zip(self._points, (now, now._replace(stride=1)), strict=True):
            point.set_data([each.intensity], [roof.flops_per_second(each.intensity)])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 11.

    measure: what "Measure it" runs, few_ranks.kernels
    """
    presets = {"every eighth element": {"stride": 8}, "small tiles": {"tile": 32, "step": 32, "warps": 4}}
    presets |= {"a tile of 256": {"tile": 256, "warps": 16}, "more stages": {"step": 128, "stages": 4}}
    own = {"chip": choice("chip", "H100 SXM", CHIPS), "stride": log_slider("stride", 1, 0, 5)}
    own |= {"itemsize": choice("bytes per element", 2, [1, 2, 4]), "tile": log_slider("tile", 128, 4, 8)}
    own |= {"step": log_slider("step along k", 32, 4, 7), "warps": log_slider("warps per block", 8, 0, 5)}
    own["stages"] = value_slider("stages", 3, [1, 2, 3, 4])
    return Explorer(Tiled(), presets | {"today's chip": {"chip": "B200 (HGX)"}}, measure, **own)
