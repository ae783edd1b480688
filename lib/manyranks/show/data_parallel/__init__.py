"""Chapter 02's pictures: what leaves when in a step, and what N replicas make of a step."""

from manyranks.show.data_parallel.explorer import explorer
from manyranks.show.data_parallel.figures import order, replicas, steps

__all__ = ["explorer", "order", "replicas", "steps"]
