"""Chapter 07's explorer: what each rank computes and waits for in attention over a sequence that many ranks share."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from manyranks.show import style, units
from manyranks.show.bars import NOTHING, Bars, joined
from manyranks.show.context.setting import LENGTHS, MODELS, RANKS, TILE, VARIANTS, Setting
from manyranks.show.explorer import Explorer, Measure, choice
from manyranks.show.labels import Labels, word
from manyranks.show.limits import MUCH, Limits
from manyranks.show.said import Part, Said
from manyranks.show.scenario import controls, percent
from manyranks.theory import context
from manyranks.theory.context.times import Pass

CLUSTERS = ("h100-dgx", "a100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
SHOWN = 16  # ranks, and hops
_PARTS = {"computing": (style.BLUE, ""), "waits for slower ranks": ("#78787855", "")}
_PARTS |= {"waits for messages": (style.ORANGE, "////")}
_LIMITS = Limits(
    {"variant": VARIANTS, "layout": context.LAYOUTS, "cp": RANKS, "seq": LENGTHS},
    {"slower": ["layout"], "messages": ["variant"]},
    room=["cp"],
    said={"cp": "c = {}"},
)


class _Timeline:
    """Forward, hop by hop: a row for each rank, of many for some."""

    def __init__(self, axes: Axes):
        self._axes, self._says = axes, []
        self._paths = {part: PathPatch(NOTHING, facecolor=c, hatch=h) for part, (c, h) in _PARTS.items()}
        for part, path in self._paths.items():
            axes.add_patch(path).set(edgecolor="white", linewidth=0.5, label=part)
        self._ends = axes.plot([], [], color=style.INK, linestyle=":", linewidth=0.8)[0]
        self._names = Labels(axes, size=8.5, left=1, outline=word, name="ranks")
        self._words = Labels(axes, size=8.5, outline=word, name="hops")
        self.moving = [*self._paths.values(), self._ends, self._names.artist, self._words.artist]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[])
        axes.set_yticks([0.5], ["rank 63"], color="none")  # keeps room for the names
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_title("Forward, rank by rank", pad=20)
        axes.set_xlabel("time; dotted: the end of a hop", labelpad=18)

    def update(self, one: Pass) -> None:
        n, count, whole = len(one.own), len(one.hops), one.seconds
        ranks = np.linspace(0, n - 1, min(n, SHOWN)).round().astype(int)
        own, hops, late, before = np.array(one.own)[ranks], one.hops, one.late, one.before
        if count > SHOWN:  # the sums
            own, hops, late, before = own.sum(axis=1, keepdims=True), [np.sum(hops)], [one.messages], 0.0
        # Messages before and after all hops are late in a hop without computing.
        own, hops = np.pad(own, ((0, 0), (1, 1))), np.array([0, *hops, 0])
        late = np.array([before, *late, one.messages - before - sum(late)])
        starts = np.cumsum([0, *(hops + late)]) / whole
        edges = starts[:-1] + np.stack(np.broadcast_arrays(0, own, hops, hops + late)) / whole
        top, bottom = ((np.arange(len(ranks))[:, None] + at) / len(ranks) for at in (0.1, 0.9))
        for path, left, right in zip(self._paths.values(), edges, edges[1:], strict=False):
            path.set_path(joined(np.stack(np.broadcast_arrays(left, right, top, bottom), axis=-1)))
        self._says = []
        for rank, mine in zip(ranks, own, strict=True):
            seconds = mine.sum(), (hops - mine).sum(), one.messages
            times = (f"{part} {units.duration(each)}" for part, each in zip(_PARTS, seconds, strict=True))
            self._says.append(f"rank {rank}, forward: {', '.join(times)}")
        starts = starts[1:-1] if 1 < count <= SHOWN else ()
        self._ends.set_data([x for end in starts[1:] for x in (end, end, math.nan)], [0, 1, math.nan] * len(starts[1:]))
        above = {(a + b) / 2: f"{hop}" for hop, (a, b) in enumerate(pairwise(starts))}
        above |= {0.5: f"sums of {count} hops"} if count > SHOWN else {}
        places = [(0, 1.035), (1, 1.035), *((x, -0.025) for x in above)]
        self._words.update(places, ["0", units.duration(whole), *above.values()])
        middles = [(-0.015, (row + 0.5) / len(ranks)) for row in range(len(ranks))]
        self._names.update(middles, [f"rank {rank}" for rank in ranks])

    def parts(self) -> Iterator[Part]:
        high = 1 / len(self._says)
        return (Part(self._axes, 0, 1, (row + 0.9) * high, (row + 0.1) * high, says) for row, says in enumerate(self._says))


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
        axes.set_xticks(LENGTHS[::2], [f"{s:,}" for s in LENGTHS[::2]], fontsize=8)
        axes.set_yticks([1e-6, 1e-3, 1, 1e3], ["1 µs", "1 ms", "1 s", "1,000 s"], fontsize=8)
        axes.minorticks_off()
        axes.set_title("Forward: computing and message, over s", pad=20)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=2, fontsize=8.5, handlelength=2.6, borderaxespad=0.1)

    def update(self, now: Setting) -> None:
        computing, message = zip(*(now._replace(seq=s).hop() for s in LENGTHS), strict=True)
        self._computing.set_data(LENGTHS, computing)
        self._message.set_data(LENGTHS, [seconds or math.nan for seconds in message])
        self._now.set_data([now.seq] * 2, [1e-6, 1e3])
        ring = "of one hop; a shorter message is hidden" if now.ring.n > 1 else "of the whole; nothing hides the messages"
        self._words.update([(0.02, 0.93)], [ring if now.cp > 1 else "one rank: no messages"])


class Ranks:
    """One layer's attention: forward rank by rank; computing and message over s; all variants, forward and backward."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 3.95), layout="constrained")
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1, 1.15), height_ratios=(1.15, 1))
        left, above, below = (self.figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
        self._timeline, self._lengths = _Timeline(left), _Lengths(above)
        title = "Forward + backward, and what a rank sends"
        self._variants = Bars(below, _PARTS, title, VARIANTS, units.duration, columns=0, outline=word)
        self.figure.legend(handles=[*self._timeline.moving[:3]], loc="outside upper left", ncols=3, handlelength=1.6)
        self.moving: list[Artist] = [*self._timeline.moving, *self._lengths.moving, *self._variants.moving]

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name, and what the variant cannot share."""
        now = Setting(**values)
        said = _said(now)
        self._timeline.update(now.times().forward)
        self._lengths.update(now)
        each = [now._replace(variant=name) for name in VARIANTS]
        bars = [_split(one) if one.possible else {} for one in each]
        texts = [
            f"{units.duration(one.seconds)}, {units.size(one.bytes())}" if one.possible else "not so many ranks" for one in each
        ]
        self._variants.update(bars, texts, VARIANTS.index(now.variant), max(sum(bar.values()) for bar in bars))
        return said

    def parts(self) -> Iterator[Part]:
        """Yields what the rows say."""
        yield from self._timeline.parts()
        yield from self._variants.parts()

    def code(self, **values) -> str:
        """Python for the step's numbers, and for what the ring of the attention takes."""
        now = Setting(**values)
        ring = f"*{tuple(now.ring)}, cluster, {now.layout!r}, {now.causal}, {TILE}, stride={now.tp * now.together}"
        hops = f"for backward in (False, True):\n    print(context.hops({ring}, backward=backward))\n"
        return f"{now.scenario.code()}\nfrom manyranks.theory import context\n\n{hops}"


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 07. It opens on contiguous shards, where ranks wait half of the time.

    measure: what "Measure it" runs, manyranks.small's context
    """
    only = {"model": MODELS, "cluster": CLUSTERS, "seq": LENGTHS, "cp": RANKS}
    presets = {"zigzag": {}, "two nodes": {"cp": 16}, "ring × Ulysses": {"variant": "ring-ulysses"}}
    presets |= {"64 ranks": (many := {"cp": 64, "seq": 2**15}), "no grouped heads": {"model": "gpt3-175b", **many}}
    return Explorer(
        Ranks(),
        {name: {"layout": "zigzag", **change} for name, change in presets.items()},
        measure,
        **controls(only, model="llama3-8b", cluster="h100-dgx", seq=2**17, cp=8),
        causal=choice("mask", True, {"causal": True, "full": False}),
        layout=choice("layout", "contiguous", list(context.LAYOUTS)),
        variant=choice("variant", "ring", list(VARIANTS)),
    )


def _split(now: Setting) -> dict[str, float]:
    """Seconds forward and backward, by part."""
    return {name: now.times().both(part) for name, part in zip(_PARTS, ("computing", "slower", "messages"), strict=True)}


def _said(now: Setting) -> Said:
    times, longest = now.times(), now.longest()
    slower, messages = (percent(times.both(part) / now.seconds) for part in ("slower", "messages"))
    numbers = {
        "attention takes": units.duration(now.seconds),
        "of it waits": f"{slower} ranks, {messages} messages",
        "a rank sends": units.size(now.bytes()),
        "fits up to": f"s = {longest:,}" if longest else "no s",
    }
    where = f"{now.model}, s = {now.seq:,}, c = {now.cp}, {now.cluster}"
    return Said(where, numbers, _limit(now), now.fits, now.scenario)


def _limit(now: Setting) -> str:
    if not now.fits:
        helps = "no c helps alone: recompute whole layers (chapter 04), or cut the model further (chapters 03, 05, 06)"
        return _LIMITS.memory(now, helps)
    if now.cp == 1:
        return "one GPU's arithmetic: nothing is cut, nothing is sent"
    times, alone = now.times(), now._replace(cp=1, variant="ring").times().both("computing")
    shares = {part: times.both(part) for part in ("slower", "messages")}
    shares["small"] = times.both("computing") - alone / now.cp
    part = max(shares, key=shares.get)
    if shares[part] < MUCH * now.seconds:
        return "computing"
    if part == "small":
        ratio = now.cp * times.both("computing") / alone
        return f"small blocks: {now.cp} GPUs together compute {units.three(ratio)} times as long as one"
    takes = _LIMITS.takes(now, part, lambda cost: units.duration(cost / now.cp))
    if part == "slower":
        return f"ranks that wait for the slowest{takes}"
    inside = now.cp * now.scenario.plan.tp <= now.scenario.cluster.node or now.scenario.cluster.torus
    return f"messages {'inside a node' if inside else 'between nodes'}{takes or f'; {_longer(now)}'}"


def _longer(now: Setting) -> str:
    """Returns the least s at which messages take little time."""
    longer = (now._replace(seq=s) for s in LENGTHS if s > now.seq)
    enough = (each.seq for each in longer if each.times().both("messages") < MUCH * each.seconds)
    return next((f"they take less than {MUCH:.0%} from s = {s:,} on" for s in enough), "no s of these hides them")
