"""Chapter 08: expert parallelism. Who goes to which expert, what travels, how even the load is; an explorer."""

from manyranks.show.expert.charts import balancing, copies, parameters, phases, waiting
from manyranks.show.expert.explorer import explorer
from manyranks.show.expert.pictures import dispatch, hops, routing

__all__ = ["balancing", "copies", "dispatch", "explorer", "hops", "parameters", "phases", "routing", "waiting"]
