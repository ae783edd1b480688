"""Chapter 09: utilisation. What was bought and what was used, the roofline, where a step's time goes; an explorer."""

from manyranks.show.mfu.explorer import explorer
from manyranks.show.mfu.figures import bought, conventions, published, rates, timings
from manyranks.show.mfu.roofline import Point, roofline
from manyranks.show.mfu.waterfall import over_degree, waterfall

__all__ = ["Point", "bought", "conventions", "explorer", "over_degree", "published", "rates"]
__all__ += ["roofline", "timings", "waterfall"]
