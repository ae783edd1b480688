"""The drawings of every lesson: who holds what, where pieces go, what happens when, how much memory over time."""

from manyranks.show.drawings.over_time import curves, memory_over_time, when
from manyranks.show.drawings.paper import KINDS
from manyranks.show.drawings.ranks import Block, pieces, who_holds

__all__ = ["KINDS", "Block", "curves", "memory_over_time", "pieces", "when", "who_holds"]
