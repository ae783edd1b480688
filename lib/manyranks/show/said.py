"""The words of an explorer on its setting: numbers, and a sentence for what limits."""

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes

from manyranks.show.scenario import Scenario


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
