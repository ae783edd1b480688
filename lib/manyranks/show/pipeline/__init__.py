"""Chapter 05's pictures: schedules under each other, what ranks hold, and an explorer of two schedules."""

from manyranks.show.pipeline.explorer import explorer
from manyranks.show.pipeline.figures import compare, in_flight

__all__ = ["compare", "explorer", "in_flight"]
