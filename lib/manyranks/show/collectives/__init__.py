"""Chapter 01's pictures: collectives before and after, round by round, and what they cost."""

from manyranks.show.collectives.explorer import explorer
from manyranks.show.collectives.holdings import before_after
from manyranks.show.collectives.steps import rounds, stepper

__all__ = ["before_after", "explorer", "rounds", "stepper"]
