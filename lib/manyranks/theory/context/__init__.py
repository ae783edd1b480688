"""Context parallelism: what one rank sends, computes, keeps and waits for in attention over a sequence that N ranks share.

sends: messages and bytes of each variant; masks: scores under a mask by layout, and balance; times: seconds of hops and of
every rank in every variant, and when messages hide; holds: bytes kept for backward, the most at once, the longest sequence.
"""

from manyranks.theory.context.holds import buffers, longest, of_others, peak, saved
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
    stops,
    surplus,
    totals,
    window_work,
    work,
)
from manyranks.theory.context.sends import (
    VARIANTS,
    all_gather,
    calls,
    latent_ring,
    ring,
    ring_ulysses,
    states,
    tensor_parallel,
    ulysses,
)
from manyranks.theory.context.times import hops, least_shard

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
    "latent_ring",
    "least_shard",
    "longest",
    "of_others",
    "owners",
    "peak",
    "ring",
    "ring_ulysses",
    "saved",
    "states",
    "stops",
    "surplus",
    "tensor_parallel",
    "totals",
    "ulysses",
    "window_work",
    "work",
]
