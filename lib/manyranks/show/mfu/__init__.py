"""Chapter 09's pictures: what was bought and used, the roofline, where a step's time goes; an explorer."""

from manyranks.show.mfu.explorer import explorer
from manyranks.show.mfu.figures import Point, over_degree, published, roofline, waterfall

__all__ = ["Point", "explorer", "over_degree", "published", "roofline", "waterfall"]
