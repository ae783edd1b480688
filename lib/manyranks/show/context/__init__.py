"""Chapter 07's pictures: who has which tokens, what each rank computes of a masked attention, what travels; an explorer."""

from manyranks.show.context.explorer import Shared, explorer
from manyranks.show.context.figures import all_to_all, balance, behind_attention, homeward, hops, layouts, mask, ring

__all__ = ["Shared", "all_to_all", "balance", "behind_attention", "explorer", "homeward", "hops", "layouts", "mask", "ring"]
