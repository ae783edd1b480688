"""Chapter 06's pictures: cut products, heads, collectives; what a layer keeps; an explorer."""

from manyranks.show.tensor.explorer import explorer
from manyranks.show.tensor.figures import VARIANTS, saved
from manyranks.show.tensor.pictures import collectives, cut, heads

__all__ = ["VARIANTS", "collectives", "cut", "explorer", "heads", "saved"]
