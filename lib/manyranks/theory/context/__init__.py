"""Context parallelism: what one rank sends, computes, keeps and waits for in attention over a sequence that N ranks share.

sends: messages and bytes of each variant; masks: scores under a mask by layout, and balance; overlap: seconds of a hop, and
when messages hide behind it; holds: bytes kept for backward, and the most at once; room: the longest sequence that fits;
times: seconds of every rank in every variant.
"""

from manyranks.theory.context.holds import buffers, peak, saved
from manyranks.theory.context.masks import (
    LAYOUTS,
    Work,
    balance,
    chunks,
    contiguous_balance,
    document_work,
    flops,
    in_step,
    owners,
    striped_balance,
    surplus,
    totals,
    work,
)
from manyranks.theory.context.overlap import hops, least_shard
from manyranks.theory.context.room import longest
from manyranks.theory.context.sends import VARIANTS, all_gather, calls, ring, ring_ulysses, tensor_parallel, ulysses

__all__ = [
    "LAYOUTS",
    "VARIANTS",
    "Work",
    "all_gather",
    "balance",
    "buffers",
    "calls",
    "chunks",
    "contiguous_balance",
    "document_work",
    "flops",
    "hops",
    "in_step",
    "least_shard",
    "longest",
    "owners",
    "peak",
    "ring",
    "ring_ulysses",
    "saved",
    "striped_balance",
    "surplus",
    "tensor_parallel",
    "totals",
    "ulysses",
    "work",
]
