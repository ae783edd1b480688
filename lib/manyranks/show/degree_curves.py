"""Memory, bubble and MFU of a step over the degree that a chapter is about, as curves beside the chapter's own picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import floor, inf, log10, nan

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from manyranks.show import style, units
from manyranks.show.labels import Labels, heading, word
from manyranks.show.lines import ring
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, Cost
from manyranks.show.setting import Part

WIDE = 2.75  # inches that a figure gets wider
_LEFT, _RIGHT, _ABOVE, _BELOW = 0.68, 0.12, 0.3, 0.42  # of a curve's axes; below the last one
_SIZE = 8.5  # points
_MOST = 6  # numbers below an axis
# Name of the strip's number -> the number of a cost, how it's written, and at least how much the axis shows.
DRAWN: dict[str, tuple[Callable[[Cost], float], Callable[[float], str], float]] = {
    MEMORY: (lambda cost: cost.held, units.size, 0.0),
    BUBBLE: (lambda cost: cost.bubble, units.percent, 0.1),
    MFU: (lambda cost: cost.mfu, units.percent, 0.1),
}


class Curves:
    """Makes a figure wider and draws a curve per name there, one below the other, with the current degree ringed.

    over: a key of DRAWN -> the control that its curve goes over
    controls: control -> its label, and all values that it can have
    """

    def __init__(self, figure: Figure, over: Mapping[str, str], controls: Mapping[str, tuple[str, Sequence]]):
        wide, high = figure.get_size_inches()
        below = [*list(over.values())[1:], ""]  # the next curve's control; a curve above another one shares its axis
        labeled = [one != other for one, other in zip(over.values(), below, strict=True)]
        share, tall = wide / (wide + WIDE), (high - _BELOW * sum(labeled)) / len(over) - _ABOVE
        if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
            layout.set(rect=(0, 0, share, 1))
        else:
            for axes in figure.axes:
                left, bottom, across, up = axes.get_position(original=True).bounds
                axes.set_position((left * share, bottom, across * share, up))
        figure.set_size_inches(wide + WIDE, high)
        self.controls = {control: list(degrees) for control, (_, degrees) in controls.items()}
        self._curves, bottom = [], 0.0
        for (name, control), last in zip(reversed(over.items()), reversed(labeled), strict=True):
            bottom += _BELOW * last
            axes = figure.add_axes(np.divide((wide + _LEFT, bottom, WIDE - _LEFT - _RIGHT, tall), 2 * (wide + WIDE, high)))
            label, degrees = controls[control]
            self._curves.append((control, Curve(axes, name, label, [f"{degree:,}" for degree in degrees], last)))
            bottom += tall + _ABOVE

    @property
    def moving(self) -> list[Artist]:
        return [artist for _, curve in self._curves for artist in curve.moving]

    def parts(self) -> Iterator[Part]:
        """Yields one for each point of each curve."""
        return (part for _, curve in self._curves for part in curve.parts())

    def update(self, along: Callable[[str, Sequence], tuple[Sequence[Cost | None], Cost | None, object]]) -> None:
        """Shows the costs at all degrees, and rings the one now; a dotted line where it isn't on the curve.

        along: of a control and its values: the cost at each of them, the cost now, and the value now
        """
        for control, degrees in self.controls.items():
            costs, now, degree = along(control, degrees)
            at = degrees.index(degree) if degree in degrees else None
            for _, curve in (each for each in self._curves if each[0] == control):
                curve.update(costs, now, at)


class Curve:
    """A number of a step over equally wide places, one per degree."""

    def __init__(self, axes: Axes, name: str, label: str, degrees: Sequence[str], last: bool):
        self._axes, self._label, self._degrees, count = axes, label, degrees, len(degrees)
        self._name, (self._of, self._unit, self._least) = name, DRAWN[name]
        self._line = axes.plot(range(count), [0] * count, "o-", color=style.BLUE, markersize=3.5, linewidth=1.6, gid="curve")[0]
        look = {"color": style.INK, "linewidth": 1.4}
        self._room = axes.plot([-0.5, count - 0.5], [0, 0], linestyle="--", **look, gid="room")[0]
        self._level = axes.plot([-0.5, count - 0.5], [0, 0], linestyle=":", **look, gid="now")[0]
        self._ring = ring(axes, gid="ring")
        self._numbers = Labels(axes, _SIZE, left=1, outline=word, within=axes.transAxes, name="numbers")
        self._title = heading(axes, 9.5)
        axes.set(xlim=(-0.5, count - 0.5), ylim=(0, 1.1))
        axes.set_yticks([0, 0.5, 1], [""] * 3)
        shown = range(0, count, -(-count // _MOST))
        axes.set_xticks(shown, [degrees[k] for k in shown] if last else [""] * len(shown), fontsize=_SIZE)
        axes.tick_params(length=2)
        axes.set_xlabel(label if last else "", fontsize=9, labelpad=2)
        self.moving = [self._room, self._line, self._level, self._ring, self._numbers, self._title]

    def update(self, costs: Sequence[Cost | None], now: Cost | None, at: int | None, least: float = 0.0) -> None:
        """Shows costs, and rings the one now.

        at: its degree's place
        least: of the number that the axis shows at least
        """
        self._values = [nan if cost is None else self._of(cost) for cost in costs]
        known = [cost for cost in (*costs, now) if cost is not None]
        here = nan if now is None else self._of(now)
        room = known[0].room if known and self._name == MEMORY else inf
        most = max((self._of(cost) for cost in known), default=0.0)
        seen = max(min(most, 2 * room), 0.0 if here != here else here, self._least, least)
        shown = 4 * seen > room  # far below, the room would only press the curve down
        self._top = top = _round(max(seen, room if shown else 0.0) or 1.0)
        self._line.set_ydata(np.minimum(np.divide(self._values, top), 2))  # what leaves the axis is cut off
        on = at is not None and self._values[at] == here
        self._ring.set(data=([at if on else nan], [here / top]))
        self._level.set(ydata=[here / top] * 2, visible=not on and here == here)
        self._room.set(ydata=[min(room, 9 * top) / top] * 2, visible=shown)
        self._numbers.write([(-0.03, share / 1.1) for share in (0, 0.5, 1)], ["0", self._unit(top / 2), self._unit(top)])
        self._title.write([(0, 1)], [f"{self._name.split()[0]} (dashed: {units.size(room)})" if shown else self._name])

    def parts(self) -> Iterator[Part]:
        for k, value in enumerate(self._values):
            if value == value:
                y = min(value / self._top, 1.05)
                says = f"{self._label} = {self._degrees[k]}: {self._name} {self._unit(value)}"
                yield Part(self._axes, k - 0.3, k + 0.3, y - 0.08, y + 0.08, says)


def _round(least: float) -> float:
    """Returns a number from `least` on whose half is as round as it is."""
    ten = 10.0 ** floor(log10(least))
    return next(digit * ten for digit in (1, 2, 3, 4, 5, 6, 8, 10) if digit * ten >= least * (1 - 1e-9))
