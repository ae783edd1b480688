"""Floor 5: what an explorer's "Measure it" runs: a small version of a chapter's technique on a few real ranks, next to theory.

show.zero.explorer(measure=few_ranks.zero): one function for a chapter, each an OnRanks. It's in a module measure_zero, for a
module `zero` would hide the function `zero`.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
