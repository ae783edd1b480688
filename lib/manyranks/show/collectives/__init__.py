"""Chapter 01's pictures: collectives before and after, round by round, and what they cost."""

from manyranks.show.collectives.explorer import explorer
from manyranks.show.collectives.figures import before_after, rounds, stepper

__all__ = ["before_after", "explorer", "rounds", "stepper"]
