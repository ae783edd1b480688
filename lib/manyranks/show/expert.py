"""Chapter 08: expert parallelism. Who goes to which expert, what travels, how even the load is; an explorer."""

from manyranks.show.expert_balance import balancing, waiting
from manyranks.show.expert_charts import copies, parameters, phases
from manyranks.show.expert_explorer import explorer
from manyranks.show.expert_hops import hops
from manyranks.show.expert_pictures import dispatch, routing

__all__ = ["balancing", "copies", "dispatch", "explorer", "hops", "parameters", "phases", "routing", "waiting"]
