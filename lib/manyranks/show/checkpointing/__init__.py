"""Chapter 04's pictures: peaks over the number of layers, a plan as a grid, and activation memory against extra compute."""

from manyranks.show.checkpointing.explorer import explorer
from manyranks.show.checkpointing.figures import again, kept_by, peaks, plan, step

__all__ = ["again", "explorer", "kept_by", "peaks", "plan", "step"]
