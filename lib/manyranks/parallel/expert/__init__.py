"""Expert parallelism: many feed-forward parts on many ranks; a token uses a few.

    dispatch    a layer, from tokens to outputs: route, sort, send, compute, send home
    router      scores and gates; what is dropped, and how experts stay equally busy
    two_hops    one copy to each node, then inside it
    apply       a whole model from outside
    families    experts of some models of transformers
    checks      what is refused

Source: GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961; DeepSeek-V3,
arXiv 2412.19437, sections 2.1.2 and 3.2.2.
"""

from manyranks.parallel.expert.apply import ExpertParallel
from manyranks.parallel.expert.dispatch import (
    Experts,
    Routing,
    by_expert,
    choose,
    grouped,
    here,
    in_slices,
    one_hop,
)
from manyranks.parallel.expert.families import take_over
from manyranks.parallel.expert.router import (
    Router,
    auxiliary_loss,
    capacity,
    communication_loss,
    device_loss,
    drop,
    move_biases,
    new_bias,
    take_counts,
)
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
    "communication_loss",
    "device_loss",
    "drop",
    "grouped",
    "here",
    "in_slices",
    "move_biases",
    "new_bias",
    "one_hop",
    "take_counts",
    "take_over",
    "two_hops",
]
