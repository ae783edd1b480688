"""The collectives, by hand.

Every one is made of sends and receives between two ranks, and of nothing else.

    n       ranks of the group
    rank    this rank's place in the group, 0 to n − 1 (not its global number)
    root    a place in the group
    row     a tensor's elements, flat
    chunk   row.tensor_split(n)[r]: of E elements E // n, and one more where r < E % n
    shard   the chunk that a rank keeps
    piece   a part of a chunk, where a ring cuts it further

A function is named algorithm_operation and takes the group last but for its options;
`group` is a ProcessGroup, None for the default one. All ranks of the group call the same
function with tensors of one size and dtype, which may have any shape and strides.
Reductions are sums. There are two kinds:

    in place, returns x:
        broadcast, all_reduce, reduce (it changes the root's x only)
    returns a new flat tensor and leaves x as it is:
        scatter, gather, reduce_scatter, all_gather, all_to_all

Gradients do not flow through. Wrong arguments raise ValueError before any message is sent;
that the ranks agree on size, dtype and root cannot be seen on one rank and is up to the
caller.

naive: the root does everything; tree: whoever has it helps; ring: everyone talks to a
neighbor; pairs: partners exchange.
"""

from manyranks.parallel.collectives.naive import (
    naive_all_reduce,
    naive_broadcast,
    naive_gather,
    naive_reduce,
    naive_scatter,
)
from manyranks.parallel.collectives.pairs import (
    halving_doubling_all_reduce,
    pairwise_all_to_all,
    recursive_doubling_all_reduce,
)
from manyranks.parallel.collectives.ring import (
    hierarchical_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce,
    ring_reduce_scatter,
)
from manyranks.parallel.collectives.tree import (
    tree_all_reduce,
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
)

__all__ = [
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "naive_broadcast",
    "naive_gather",
    "naive_reduce",
    "naive_scatter",
    "pairwise_all_to_all",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_broadcast",
    "ring_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_gather",
    "tree_reduce",
    "tree_scatter",
]
