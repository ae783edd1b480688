"""Chapter 08's pictures: where tokens go, how many rows travel, how even the load is; and the explorer."""

from manyranks.show.expert.charts import balancing, copies, parameters, waiting
from manyranks.show.expert.explorer import explorer
from manyranks.show.expert.pictures import dispatch, hops, routing

__all__ = ["balancing", "copies", "dispatch", "explorer", "hops", "parameters", "routing", "waiting"]
