"""Floor 5: what an explorer's "Measure it" runs: a small version of a chapter's technique on real ranks, next to theory.

show.zero.explorer(measure=small.zero): one function for a chapter, each an OnRanks.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(
    __name__,
    OnRanks="ranks",
    collectives="chapter_01",
    data_parallel="chapter_02",
    zero="chapter_03",
    pipeline="chapter_05",
    tensor="chapter_06",
    context="chapter_07",
    expert="chapter_08",
    nd="chapter_10",
)
