"""Expert parallelism: many feed-forward parts, of which a token uses a few, on many ranks.

    routing     which experts a token goes to, and how much of each it takes
    capacity    how many copies an expert takes, and which are dropped
    balance     two ways to keep the experts equally busy
    experts     experts side by side, and rows sorted for them
    dispatch    rows to the ranks of their experts, and back
    two_hops    one copy to each node, then inside it
    apply       a whole model from outside
    families    experts of some models of transformers

Source: GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961; DeepSeek-V3,
arXiv 2412.19437, sections 2.1.2 and 3.2.2.
"""

from manyranks.parallel.expert.apply import ExpertParallel
from manyranks.parallel.expert.balance import (
    auxiliary_loss,
    move_biases,
    new_bias,
    take_counts,
)
from manyranks.parallel.expert.capacity import capacity, drop
from manyranks.parallel.expert.dispatch import one_hop
from manyranks.parallel.expert.experts import Experts, by_expert, grouped, here
from manyranks.parallel.expert.families import take_over
from manyranks.parallel.expert.routing import Router, Routing, choose
from manyranks.parallel.expert.two_hops import two_hops

__all__ = [
    "ExpertParallel",
    "Experts",
    "Router",
    "Routing",
    "auxiliary_loss",
    "by_expert",
    "capacity",
    "choose",
    "drop",
    "grouped",
    "here",
    "move_biases",
    "new_bias",
    "one_hop",
    "take_counts",
    "take_over",
    "two_hops",
]
