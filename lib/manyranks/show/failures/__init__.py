"""Chapter 12's figures, and its explorer."""

from manyranks.show.failures.explorer import explorer
from manyranks.show.failures.figures import heat, history, interruptions, intervals, lost

__all__ = ["explorer", "heat", "history", "interruptions", "intervals", "lost"]
