"""Chapter 07's pictures: who has which tokens, what each rank computes of a masked attention, what travels; an explorer."""

from manyranks.show.context.explorer import Shared, explorer
from manyranks.show.context.figures import all_to_all, balance, hops, layouts, mask, ring

__all__ = ["Shared", "all_to_all", "balance", "explorer", "hops", "layouts", "mask", "ring"]
