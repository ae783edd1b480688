"""Chapter 09: utilisation. What was bought and what was used, the roofline, where a step's time goes; an explorer."""

from manyranks.show.mfu_charts import bought, conventions, published, rates, timings
from manyranks.show.mfu_explorer import explorer
from manyranks.show.mfu_roofline import Point, roofline
from manyranks.show.mfu_waterfall import waterfall

__all__ = ["Point", "bought", "conventions", "explorer", "published", "rates", "roofline", "timings", "waterfall"]
