"""Chapter 09's pictures: what was bought and used, the roofline, where a step's time goes; an explorer."""

from manyranks.show.mfu.explorer import explorer
from manyranks.show.mfu.figures import (
    Point,
    bought,
    conventions,
    over_degree,
    published,
    rates,
    roofline,
    timings,
    waterfall,
)

__all__ = [
    "Point",
    "bought",
    "conventions",
    "explorer",
    "over_degree",
    "published",
    "rates",
    "roofline",
    "timings",
    "waterfall",
]
