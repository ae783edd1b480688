"""The parts of every explorer: a Setting, which says what the controls mean, and a Board, which draws it.

A chapter's Setting is a tuple of its controls' values with names. It makes a Scenario of them, and says the chapter's numbers
and what limits. Its ways out are found here: another value of one control that makes a step faster, or makes it fit in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyranks.show.scenario import MEMORY, MFU, SHARED, Cost, Scenario

BETTER = 0.97  # of the cost: what takes no more of it helps
MUCH = 0.1  # of the time: what takes more of it limits
S = TypeVar("S", bound="Setting")


class Said(NamedTuple):
    """The words that a plot returns.

    where: the setting in a few words
    numbers: the chapter's own, name -> text
    limit: what limits, without a full stop, and what would help
    fits: whether it fits in memory
    scenario: whose cost the strip shows, if the chapter has one
    note: what else holds of that cost
    """

    where: str = ""
    numbers: Mapping[str, str] = {}
    limit: str = ""
    fits: bool = True
    scenario: Scenario | None = None
    note: str = ""

    @property
    def sentence(self) -> str:
        """Says what limits, for the line above the picture."""
        limit = f"Limit: {self.limit}." if self.limit else ""
        return limit if self.fits else f"Does not fit. {limit}"

    def __str__(self) -> str:
        """Everything in one line, for readers who don't see the tiles."""
        numbers = "; ".join(f"{name} {text}" for name, text in self.numbers.items())
        return " ".join(filter(None, (": ".join(filter(None, (self.where, numbers))) + ".", self.sentence)))


class Part(NamedTuple):
    """A box on the scales of `axes` that shows its number when the mouse is over it or has selected it."""

    axes: Axes
    left: float
    right: float
    bottom: float
    top: float
    says: str


class Setting:
    """Holds what the controls say; a chapter's is a namedtuple, too.

    choices: control -> the values to try, where they aren't all that it offers
    remedies: what limits -> the controls that may help
    room: the controls that may make room in memory, those to be tried first first
    words: control -> how its value is written in a sentence, where that isn't as in SHARED
    note: what else holds of the step
    """

    choices: ClassVar[Mapping[str, Sequence]] = {}
    remedies: ClassVar[Mapping[str, Sequence[str]]] = {}
    room: ClassVar[Sequence[str]] = ()
    words: ClassVar[Mapping[str, str]] = {}
    note = ""

    @property
    def scenario(self) -> Scenario | None:
        """Returns the step that is meant; None where a chapter has none."""
        return None

    @property
    def possible(self) -> bool:
        """Says whether the model and the cluster allow it."""
        return tried(lambda: self.scenario) is not None

    @property
    def fits(self) -> bool:
        return self.scenario is None or self.scenario.fits

    @property
    def cost(self) -> float:
        """Returns what to minimize: the seconds of a step, unless a chapter has its own."""
        return self.scenario.time.seconds

    def where(self) -> str:
        """Returns the setting in a few words."""
        return ""

    def numbers(self) -> Mapping[str, str]:
        """Returns the chapter's own numbers, name -> text."""
        return {}

    def limits(self) -> str:
        """Says what limits, without a full stop, and what would help."""
        return "compute" if self.fits else self.memory("no single control helps: change two of them")

    def code(self) -> str:
        """Returns Python that prints what is shown."""
        return self.scenario.code()

    def said(self) -> Said:
        """Returns all that is said. Raises ValueError for a setting that can't be."""
        limits = self.limits()  # refuses what can't be
        return Said(self.where(), self.numbers(), limits, self.fits, self.scenario, self.note)

    def others(self: S, name: str) -> Iterator[S]:
        """Yields the other values of this control that can be."""
        values = self.choices.get(name) or list(SHARED[name][1])
        each = (self._replace(**{name: value}) for value in values if value != getattr(self, name))
        return (other for other in each if other.possible)

    def faster(self: S, limit: str) -> S | None:
        """Returns another value of one control that costs less, and fits if this does; None where none is worth it."""
        names = self.remedies.get(limit, ())
        others = (each for name in names for each in self.others(name) if each.fits or not self.fits)
        best = min(others, key=lambda each: each.cost, default=self)
        return best if best.cost <= BETTER * self.cost else None

    def fitting(self: S) -> S | None:
        """Returns another value of one control that fits in memory: of the first control that has some, the nearest."""
        for name in self.room:
            values = list(self.choices.get(name) or SHARED[name][1])
            at, near = getattr(self, name), [other for other in self.others(name) if other.fits]
            if near:
                here = values.index(at) if at in values else 0
                return min(near, key=lambda other: (abs(values.index(getattr(other, name)) - here), other.cost))
        return None

    def memory(self, else_helps: str) -> str:
        """Returns what is said where memory limits: a change that fits, or what helps where there is none."""
        other = self.fitting()
        return f"memory; {self.change(other)} fits" if other else f"memory; {else_helps}"

    def takes(self, limit: str, unit: Callable[[float], str]) -> str:
        """Returns what is said after another limit: "; with TP 4: 8 s", or nothing where no change is worth it."""
        other = self.faster(limit)
        return f"; with {self.change(other)}: {unit(other.cost)}" if other else ""

    def change(self, other: Any) -> str:
        """Names the value that changed: "TP 4"."""
        name = next(name for name in self._fields if getattr(self, name) != getattr(other, name))
        return self.words.get(name, SHARED[name][2] if name in SHARED else "{}").format(getattr(other, name))


def tried(find: Callable, *args):
    """Returns what `find` returns, or None for a setting that can't be."""
    try:
        return find(*args)
    except ValueError:
        return None


class Panels:
    """A plot that an explorer drives.

    figure: with artists that are made once
    panels: the parts of it that move, in the order they're drawn in; each has its artists in `moving`, and may have parts()
    others: artists over them that move, too
    over: the control that the curves beside it go over; without one there are none
    """

    figure: Figure
    panels: Sequence = ()
    others: Sequence[Artist] = ()
    over = ""

    def update(self, **values) -> Said:
        """Moves what moves. Raises ValueError for a setting that it can't show: its text becomes the sentence."""
        raise NotImplementedError

    def code(self, **values) -> str:
        """Returns Python that prints what is shown; "" for none."""
        return ""

    def idle(self, **values) -> Mapping[str, bool]:
        """Returns for a control whether it does nothing right now; then it's switched off."""
        return {}

    @property
    def moving(self) -> list[Artist]:
        return [*(artist for panel in self.panels for artist in panel.moving), *self.others]

    def parts(self) -> Iterator[Part]:
        """Yields a Part for each thing that shows its number under the mouse."""
        return (part for panel in self.panels if hasattr(panel, "parts") for part in panel.parts())


class Board(Panels):
    """Draws a chapter's Setting. An explorer draws the curves beside it, of what the strip says of a step.

    figure: 6.45 inches wide; `draw` moves its artists
    setting: the chapter's Setting
    curves: names of the strip's numbers, such as "MFU"
    apart: a curve's name -> the control that it goes over, where that's another one
    """

    setting: type[Setting]
    curves: Sequence[str] = (MEMORY, MFU)
    apart: ClassVar[Mapping[str, str]] = {}

    def draw(self, now: Any) -> None:
        """Moves the panels to this setting."""
        raise NotImplementedError

    def update(self, **values) -> Said:
        now = self.setting(**values)
        said = now.said()
        self.draw(now)
        return said

    def code(self, **values) -> str:
        return self.setting(**values).code()

    def along(self, control: str, degrees: Sequence, **values) -> tuple[list[Cost | None], Cost | None, object]:
        """Returns the cost at each value of the control, None where it can't be; the cost now; and the value now."""
        now = self.setting(**values)
        return [self.at(now, control, each) for each in degrees], tried(lambda: now.scenario.cost), self.degree(now, control)

    def at(self, now: Any, control: str, degree: Any) -> Cost | None:
        """Returns the cost with this value of the control; None where it can't be."""
        other = now._replace(**{control: degree})
        return tried(lambda: other.scenario.cost) if other.possible else None

    def degree(self, now: Any, control: str) -> object:
        return getattr(now, control)
