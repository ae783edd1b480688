"""Context parallelism: what one rank sends, computes, keeps and waits for in attention over a sequence that N ranks share.

sends: messages and bytes of each variant; masks: scores under a mask by layout, and balance; times: seconds of hops and of
every rank in every variant, and when messages hide; holds: bytes kept for backward, the most at once, the longest sequence.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
