"""Chapter 12's explorer: what failures leave of a run's time, over the interval between saves."""

from collections import namedtuple

import numpy as np

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, Measure, Panels, Said, value_slider
from manyranks.show.failures.figures import KINDS, TICKS
from manyranks.show.labels import word
from manyranks.show.scenario import controls, in_code
from manyranks.show.units import percent
from manyranks.theory import failures

HOUR, DAY, RUN = 3600, 86400, 54  # seconds; days that a run takes without failures
GPUS_PER_NODE = 8
_PLACES = np.geomspace(1, 1e6, 160)
_PARTS = {name: (color, hatch) for kind, (name, color, hatch) in KINDS.items() if kind != "wait"}
_HOURS = [digit * 10**k for k in range(6) for digit in (1, 2, 5)] + [10**6]
_STALLS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_WRITES = (0, 1, 5, 10, 30, 60, 120, 300, 600, 1800)
_RESTARTS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_INTERVALS = (0, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, DAY)
_REPAIRS = (1, 4, 12, 24, 48, 96, 168, 336)


class Setting(namedtuple("Setting", "gpus hours stall write restart interval mfu repair")):
    """Holds what the controls say. hours: between failures of one GPU; interval: 0 for Young's; repair: hours."""

    @property
    def mtbf(self) -> float:
        return failures.job_mtbf(self.hours * HOUR, self.gpus)

    @property
    def young(self) -> float:
        """Young's interval, but not shorter than a write."""
        return max(self.write, failures.young(self.stall, self.mtbf))

    @property
    def best(self) -> float:
        return max(self.write, failures.best_interval(self.stall, self.mtbf))

    def shares(self, interval: float) -> dict[str, float]:
        return failures.shares(interval, self.stall, self.restart, self.mtbf, self.write)

    @property
    def spares(self) -> str:
        """Says how many spare nodes are enough 99 % of the time."""
        per_node = min(GPUS_PER_NODE, self.gpus)
        nodes = -(-self.gpus // per_node)
        if self.gpus * self.repair > nodes * self.hours:
            return f"more than its {nodes:,}"
        return f"{failures.spares(nodes, self.hours / per_node, self.repair):,} for {nodes:,}"


class Intervals(Panels):
    """Draws goodput over the interval on the left, and where the time goes on the right."""

    @style.styled
    def __init__(self):
        self.figure, (left, right) = style.figure(columns=2, width=9.2, height=3.5, width_ratios=(1.1, 1))
        self._curve = left.semilogx([1], [0], color=style.BLUE)[0]
        look = {"color": style.ORANGE, "linestyle": ":", "linewidth": 2}
        self._young = left.plot([1, 1], [0, 100], **look, label="Young's interval")[0]
        look = {"linestyle": "none", "fillstyle": "none", "markeredgewidth": 2.2}
        self._point = left.plot([1], [0], "o", color=style.INK, markersize=11, label="this interval", **look)[0]
        left.set(xlim=(1, 1e6), ylim=(0, 104))
        left.set_title("Goodput", pad=25)
        left.set(xlabel="time between saves", ylabel="goodput (%)")
        left.set_xticks(TICKS, [units.duration(tick) for tick in TICKS])
        left.minorticks_off()
        left.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.1)
        self._bars = Bars(right, _PARTS, "Where the time goes", ["this", "Young's", "best"], percent, outline=word)
        self.panels, self.others = [self._bars], [self._young, self._curve, self._point]

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an interval that's shorter than a write."""
        now = Setting(**values)
        interval = now.interval or now.young
        rows = [now.shares(each) for each in (interval, now.young, now.best)]
        places = _PLACES[now.write <= _PLACES]
        curve = [100 * failures.goodput(at, now.stall, now.restart, now.mtbf, now.write) for at in places]
        self._curve.set_data(places, curve)
        self._young.set_xdata([now.young] * 2)
        self._point.set_data([interval], [100 * rows[0]["work"]])
        bars = [{KINDS[kind][0]: share for kind, share in row.items()} for row in rows]
        texts = [
            f"{units.duration(at)}|{percent(row['work'])}"
            for at, row in zip((interval, now.young, now.best), rows, strict=True)
        ]
        self._bars.update(bars, texts, 0, 1.0)
        return Said(
            f"{now.gpus:,} GPUs, a save every {units.duration(interval)}", _numbers(now, rows[0]), _limit(now, interval, rows)
        )

    def code(self, **values) -> str:
        """Returns Python that prints what is shown."""
        now = Setting(**values)
        interval = now.interval or f"max({now.write}, failures.young({now.stall}, mtbf))"
        prints = {"goodput": "percent(goodput)", "failures": "'one per', duration(mtbf)"}
        prints |= {f"{RUN} days of training": f"short({RUN} / goodput - {RUN}), 'days more'"}
        prints |= {"effective MFU": f"percent(failures.effective_mfu({now.mfu}, goodput))"}
        return in_code(_CODE.format(**now._asdict() | {"interval": interval}), prints)


_CODE = """\
from manyranks.theory import failures

mtbf = failures.job_mtbf({hours} * 3600, {gpus})
interval = {interval}
goodput = failures.goodput(interval, {stall}, {restart}, mtbf, {write})
"""


def _numbers(now: Setting, row: dict[str, float]) -> dict[str, str]:
    goodput = row["work"]
    numbers = {"goodput": percent(goodput), "failures": f"one per {units.duration(now.mtbf)}"}
    longer = f"{units.short(RUN / goodput - RUN)} days more" if goodput > 1e-3 else "never ends"
    numbers[f"{RUN} days of training"] = longer
    return numbers | {"effective MFU": percent(failures.effective_mfu(now.mfu, goodput)), "spare nodes": now.spares}


def _limit(now: Setting, interval: float, rows: list[dict[str, float]]) -> str:
    """Says what costs most, and what would help."""
    costs = {kind: share for kind, share in rows[0].items() if kind != "work"}
    most = max(costs, key=costs.get)
    said = f"{KINDS[most][0]}, {percent(costs[most])} of the time"
    if rows[1]["work"] > rows[0]["work"] + 0.002:
        return f"{said}; Young's interval of {units.duration(now.young)} gives a goodput of {percent(rows[1]['work'])}"
    if most == "restart":
        return f"{said}: find failures sooner, restart faster"
    if most == "lost" and now.write > interval / 2:
        return f"{said}: a checkpoint doesn't count until it's written; write faster"
    return f"{said}; the interval is already the best, so only a shorter stall or fewer failures help"


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 12. It opens on Llama 3's GPUs and rate of failures.

    MegaScale's stall of seconds and its 10 minutes to find a failure are published. The other stalls, writes and restarts are
    guesses: the papers don't print them.

    measure: what "Measure it" runs
    """
    presets = {
        "a blocking save of 5 min": {"stall": 300},
        "64 GPUs": {"gpus": 64},
        "131,072 GPUs": {"gpus": 131072},
        "MegaScale's two stages": {"gpus": 8192, "stall": 5, "write": 120, "restart": 600},
        "4 ranks on a laptop": {"gpus": 4, "hours": 1, "stall": 0.1, "restart": 5, "repair": 1},
    }

    def hours(value: float) -> str:
        return f"{value:,} h"

    return Explorer(
        Intervals(),
        presets,
        measure,
        **controls({"gpus": [2**k for k in range(18)]}, gpus=16384),
        hours=value_slider("a GPU fails every", 50000, _HOURS, hours),
        stall=value_slider("a save stalls for", 30, _STALLS, units.duration),
        write=value_slider("… and writes for", 0, _WRITES, lambda each: units.duration(each) if each else "0 s"),
        restart=value_slider("restart", 300, _RESTARTS, units.duration),
        interval=value_slider("save every", 0, _INTERVALS, lambda each: units.duration(each) if each else "Young's"),
        mfu=value_slider("MFU of a step", 0.4, [k / 20 for k in range(2, 15)], percent),
        repair=value_slider("a node's repair", 24, _REPAIRS, hours),
    )
