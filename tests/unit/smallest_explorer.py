"""The smallest explorer, to be copied for a new one: how long a step takes with each stage of ZeRO."""

from collections import namedtuple

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.theory import Plan, clusters

PARTS = {"compute": (style.BLUE, ""), "waiting": (style.ORANGE, "////")}


class Sharded(namedtuple("Sharded", "model cluster dp zero"), Setting):
    """Holds what the controls say."""

    remedies, room = {"waiting": ("zero", "dp")}, ("zero", "dp")

    @property
    def scenario(self) -> Scenario:
        return Scenario(SHAPES[self.model], Plan(dp=self.dp, zero=self.zero), clusters[self.cluster])

    def where(self) -> str:
        return f"{self.model}, d = {self.dp}"

    def numbers(self) -> dict[str, str]:
        return {"batch": f"{self.dp} sequences"}

    def limits(self) -> str:
        if not self.fits:
            return self.memory("no single control helps")
        time = self.scenario.time
        return "waiting" + self.takes("waiting", units.duration) if time.data > 0.1 * time.seconds else "compute"


class Stages(Board):
    """Draws a bar for each stage."""

    setting, over = Sharded, "dp"

    @style.styled
    def __init__(self):
        self.figure, (axes,) = style.figure(width=6.45, height=3)
        self.bars = Bars(axes, PARTS, "time of a step", [f"ZeRO-{stage}" for stage in range(4)], units.duration)
        self.panels = [self.bars]

    def draw(self, now: Sharded) -> None:
        times = [now._replace(zero=stage).scenario.time for stage in range(4)]
        bars = [{"compute": time.compute, "waiting": time.data} for time in times]
        self.bars.update(bars, [units.duration(time.seconds) for time in times], now.zero)


def explorer(measure: Measure | None = None) -> Explorer:
    presets = {"one GPU": {"dp": 1}}
    return Explorer(Stages(), presets, measure, **controls(model="llama3-8b", cluster="h100-dgx", dp=64, zero=1))
