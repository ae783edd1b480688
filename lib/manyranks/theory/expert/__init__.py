"""Expert parallelism: what is sent, how full ranks are, what imbalance costs, and what a rank holds.

sends: every all-to-all from the routing itself; chances: copies on average, where the router chooses at random; load: counts,
imbalance, capacity, and the states of a rank.
"""

from manyranks.theory.expert.chances import Copies, Way, calls, one_hop_copies, travel, two_hops_copies, way
from manyranks.theory.expert.load import (
    Share,
    capacity,
    counts,
    dropped,
    imbalance,
    of_ranks,
    rank_states,
    shared_bytes,
)
from manyranks.theory.expert.sends import Exchange, Sends, Split, one_hop, rows, two_hops

__all__ = [
    "Copies",
    "Exchange",
    "Sends",
    "Share",
    "Split",
    "Way",
    "calls",
    "capacity",
    "counts",
    "dropped",
    "imbalance",
    "of_ranks",
    "one_hop",
    "one_hop_copies",
    "rank_states",
    "rows",
    "shared_bytes",
    "travel",
    "two_hops",
    "two_hops_copies",
    "way",
]
