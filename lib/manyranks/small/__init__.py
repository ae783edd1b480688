"""Floor 5: what an explorer's "Measure it" runs: a chapter's technique, small, on real ranks, with theory beside it.

show.zero.explorer(measure=small.zero): one function for a chapter, each an OnRanks.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, OnRanks="ranks", data_parallel="chapter_02")
