"""Chapter 07's explorer: what each rank computes and waits for in attention over a sequence that N ranks share."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from manyranks.show import style, units
from manyranks.show.context_setting import LENGTHS, MASKS, MODELS, RANKS, VARIANTS, Pass, Setting
from manyranks.show.context_status import status
from manyranks.show.explorer import Explorer, choice, value_slider
from manyranks.show.labels import Labels, word
from manyranks.theory import context
from manyranks.theory.names import nearest

CLUSTERS = ("h100-dgx", "a100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
SHOWN = 16  # ranks
_COMPUTES, _SLOWER, _MESSAGES = "computing", "waits for slower ranks", "waits for messages"
_PARTS = {_COMPUTES: (style.BLUE, ""), _SLOWER: ("#78787855", ""), _MESSAGES: (style.ORANGE, "////")}
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:µsmGMTkBN"
_NOTHING = Path(np.empty((0, 2)))
_LONGEST = 0.6  # of the axis, for the longest bar: the rest is for texts
_BOXES = list[tuple[float, float, float, float]]  # left, right, bottom, top


class _Boxes:
    """Boxes of each part; those of one part are one path, for to draw a hatch takes milliseconds for every path."""

    def __init__(self, axes: Axes):
        self._paths = {part: PathPatch(_NOTHING, facecolor=colour, hatch=hatch) for part, (colour, hatch) in _PARTS.items()}
        for part, path in self._paths.items():
            axes.add_patch(path).set(edgecolor="white", linewidth=0.5, label=part)
        self.moving = list(self._paths.values())

    def update(self, boxes: Mapping[str, _BOXES]) -> None:
        for part, path in self._paths.items():
            shown = np.array([box for box in boxes.get(part, []) if box[1] > box[0]])
            corners = shown[:, [[0, 2], [1, 2], [1, 3], [0, 3]]] if len(shown) else None
            path.set_path(_NOTHING if corners is None else Path.make_compound_path_from_polys(corners))


class _Timeline:
    """Forward, hop by hop: a row for each rank, of many for some."""

    def __init__(self, axes: Axes):
        self._boxes = _Boxes(axes)
        self._ends = axes.plot([], [], color=style.INK, linestyle=":", linewidth=0.8)[0]
        self._names = Labels(axes, size=8.5, left=1, outline=word, name="ranks")
        self._words = Labels(axes, size=8.5, outline=word, name="hops")
        self.moving = [*self._boxes.moving, self._ends, self._names.artist, self._words.artist]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[])
        axes.set_yticks([0.5], ["rank 63"], color="none")  # keeps room for the names
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_title("Forward, rank by rank", pad=20)
        axes.set_xlabel("time; dotted: the end of a hop", labelpad=18)

    def update(self, one: Pass) -> None:
        n, count = one.own.shape
        shown = np.unique(np.linspace(0, n - 1, min(n, SHOWN)).round().astype(int))
        high = 1 / len(shown)
        starts = one.before + np.concatenate(([0.0], np.cumsum(one.hops + one.late)))
        boxes: dict[str, _BOXES] = {part: [] for part in _PARTS}
        spans, whole = _spans if count <= SHOWN else _sums, one.seconds
        for row, rank in enumerate(shown):
            for part, left, right in spans(one, starts, one.own[rank]):
                boxes[part].append((left / whole, right / whole, (row + 0.1) * high, (row + 0.9) * high))
        self._boxes.update(boxes)
        self._names.update([(-0.015, (row + 0.5) * high) for row in range(len(shown))], [f"rank {rank}" for rank in shown])
        ends = starts[1:] / one.seconds if 1 < count <= SHOWN else []
        self._ends.set_data([x for end in ends for x in (end, end, math.nan)], [y for _ in ends for y in (0, 1, math.nan)])
        middles = [(left + right) / 2 for left, right in pairwise(starts)] if len(ends) else []
        places = [(0, 1.035), (1, 1.035), *((middle / one.seconds, -0.025) for middle in middles)]
        words = ["0", units.duration(one.seconds), *range(len(middles))]
        if count > SHOWN:
            places, words = [*places, (0.5, -0.025)], [*words, f"sums of {count} hops"]
        self._words.update(places, words)


def _spans(one: Pass, starts: np.ndarray, own: np.ndarray) -> Iterable[tuple[str, float, float]]:
    """What a rank does from when to when."""
    yield _MESSAGES, 0.0, starts[0]
    for start, mine, longest, late in zip(starts, own, one.hops, one.late, strict=False):
        yield _COMPUTES, start, start + mine
        yield _SLOWER, start + mine, start + longest
        yield _MESSAGES, start + longest, start + longest + late
    yield _MESSAGES, starts[-1], starts[-1] + one.after


def _sums(one: Pass, starts: np.ndarray, own: np.ndarray) -> Iterable[tuple[str, float, float]]:
    """The same, each part's hops together."""
    computes, hops = float(own.sum()), float(one.hops.sum())
    yield _COMPUTES, 0.0, computes
    yield _SLOWER, computes, hops
    yield _MESSAGES, hops, one.seconds


class _Lengths:
    """Seconds of a hop and of its message over s."""

    def __init__(self, axes: Axes):
        look = {"markersize": 3.5, "linewidth": 1.6}
        self._computing = axes.plot([], [], "o-", color=style.BLUE, label="computing, slowest rank", **look)[0]
        self._message = axes.plot([], [], "s--", color=style.ORANGE, label="message", **look)[0]
        self._now = axes.plot([], [], color=style.INK, linestyle=":", linewidth=1.4, gid="now")[0]
        self._words = Labels(axes, size=8.5, left=0, outline=word, within=axes.transAxes)
        self.moving = [self._computing, self._message, self._now, self._words.artist]
        axes.set(xscale="log", yscale="log", xlim=(LENGTHS[0] / 1.2, 1.2 * LENGTHS[-1]), ylim=(1e-6, 1e3))
        axes.set_xscale("log", base=2)
        ticks = [LENGTHS[0], 2**12, 2**14, 2**16, 2**18, LENGTHS[-1]]
        axes.set_xticks(ticks, [f"{s:,}" for s in ticks], fontsize=8)
        axes.set_yticks([1e-6, 1e-3, 1, 1e3], ["1 µs", "1 ms", "1 s", "1,000 s"], fontsize=8)
        axes.minorticks_off()
        axes.set_title("Forward: computing and message, over s", pad=20)
        axes.set_xlabel("tokens s of the sequence", fontsize=9)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=2, fontsize=8.5, handlelength=2.6, borderaxespad=0.1)

    def update(self, now: Setting) -> None:
        each = [now._replace(s=s).hop() for s in LENGTHS]
        computing, message = zip(*each, strict=True)
        self._computing.set_data(LENGTHS, computing)
        self._message.set_data(LENGTHS, [seconds or math.nan for seconds in message])
        self._now.set_data([now.s] * 2, [1e-6, 1e3])
        if now.n == 1:
            said = "one rank: no messages"
        elif now.ring > 1:
            said = "of one hop; a shorter message is hidden"
        else:
            said = "of the whole; nothing hides the messages"
        self._words.update([(0.02, 0.93)], [said])


class _Variants:
    """Forward and backward of each variant, with what a rank sends."""

    def __init__(self, axes: Axes):
        self._boxes = _Boxes(axes)
        self._band = axes.axhspan(0, 0.9, color=style.FAINT, linewidth=0, zorder=0)
        self._words = Labels(axes, size=8.5, left=0, outline=word)
        self.moving = [self._band, *self._boxes.moving, self._words.artist]
        axes.set(xlim=(0, 1), ylim=(len(VARIANTS) - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(len(VARIANTS)), list(VARIANTS))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_title("Forward + backward, and what a rank sends")

    def update(self, now: Setting) -> None:
        boxes: dict[str, _BOXES] = {part: [] for part in _PARTS}
        found = {row: each for row, name in enumerate(VARIANTS) if (each := now._replace(variant=name)).possible}
        longest = max(each.times().both("seconds") for each in found.values())
        words = ["not this N"] * len(VARIANTS)
        for row, each in found.items():
            times, left = each.times(), 0.0
            for part, name in zip(_PARTS, ("computing", "slower", "messages"), strict=True):
                right = left + times.both(name) / longest * _LONGEST
                boxes[part].append((left, right, row - 0.3, row + 0.3))
                left = right
            words[row] = f"{units.duration(times.both('seconds'))}, {units.size(each.bytes())}"
        self._boxes.update(boxes)
        self._band.set_y(VARIANTS.index(now.variant) - 0.45)
        self._words.update([(_LONGEST + 0.02, row) for row in range(len(VARIANTS))], words)


class Ranks:
    """One layer's attention: forward rank by rank; computing and message over s; all variants, forward and backward."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.5), layout="constrained")
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1, 1.15), height_ratios=(1.25, 1))
        left, above, below = (self.figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
        self._timeline, self._lengths, self._variants = _Timeline(left), _Lengths(above), _Variants(below)
        handles, _ = left.get_legend_handles_labels()
        self.figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.6)
        word(_LETTERS, 8.5, 0)  # a letter's outline takes milliseconds, the first time
        self.moving: list[Artist] = [*self._timeline.moving, *self._lengths.moving, *self._variants.moving]

    def update(self, model: str, cluster: str, s: int, n: int, mask: str, layout: str, variant: str) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown name, and what the variant cannot share."""
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: {nearest(variant, VARIANTS)}")
        now = Setting(model, cluster, s, n, MASKS[mask], layout, variant)
        self._timeline.update(now.times().forward)
        self._lengths.update(now)
        self._variants.update(now)
        return status(now)


def explorer() -> Explorer:
    """The explorer of chapter 07. It opens on contiguous shards, with which half of the ranks' time is waiting."""
    return Explorer(
        Ranks(),
        model=choice("model", "llama3-8b", list(MODELS)),
        cluster=choice("cluster", "h100-dgx", CLUSTERS),
        s=value_slider("sequence length s", 2**17, LENGTHS, "{:,}".format),
        n=value_slider("ranks N", 8, RANKS),
        mask=choice("mask", "causal", list(MASKS)),
        layout=choice("layout", "contiguous", list(context.LAYOUTS)),
        variant=choice("variant", "ring", list(VARIANTS)),
    )
