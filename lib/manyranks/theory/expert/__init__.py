"""Expert parallelism: what is sent, how full ranks are, what imbalance costs, and what a rank holds.

sends: every all-to-all from the routing itself; chances: copies on average, where the router chooses at random; load: counts,
imbalance, capacity; pace: seconds of a layer whose fullest rank the others wait for; states: parameters and states of a rank.
"""

from manyranks.theory.expert.chances import Copies, Way, one_hop_copies, two_hops_copies, way
from manyranks.theory.expert.load import Full, capacity, counts, dropped, fullest, imbalance, of_ranks, worst
from manyranks.theory.expert.pace import Paced, layer_seconds
from manyranks.theory.expert.sends import Exchange, Sends, Split, inside_rows, node_rows, one_hop, rows, two_hops
from manyranks.theory.expert.states import Share, rank_states

__all__ = [
    "Copies",
    "Exchange",
    "Full",
    "Paced",
    "Sends",
    "Share",
    "Split",
    "Way",
    "capacity",
    "counts",
    "dropped",
    "fullest",
    "imbalance",
    "inside_rows",
    "layer_seconds",
    "node_rows",
    "of_ranks",
    "one_hop",
    "one_hop_copies",
    "rank_states",
    "rows",
    "two_hops",
    "two_hops_copies",
    "way",
    "worst",
]
