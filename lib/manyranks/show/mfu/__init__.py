"""Chapter 09: utilization. What was bought and what was used, the roofline, where a step's time goes; an explorer."""

from manyranks.show.mfu.explorer import explorer
from manyranks.show.mfu.figures import Point, bought, conventions, over_degree, published, rates, roofline, timings, waterfall

__all__ = ["Point", "bought", "conventions", "explorer", "over_degree", "published", "rates"]
__all__ += ["roofline", "timings", "waterfall"]
