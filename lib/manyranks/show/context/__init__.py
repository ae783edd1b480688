"""Chapter 07's pictures: who has which tokens, what each rank computes of a masked attention, what travels; an explorer."""

from manyranks.show.context.explorer import explorer
from manyranks.show.context.figures import all_to_all, balance, layouts, ring
from manyranks.show.context.masks import hops, mask
from manyranks.show.context.setting import Setting

__all__ = ["Setting", "all_to_all", "balance", "explorer", "hops", "layouts", "mask", "ring"]
