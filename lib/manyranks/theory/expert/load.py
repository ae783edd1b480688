"""The load of experts and their ranks: counts, imbalance, capacity; parameters and states of a rank."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from manyranks.theory import checks, memory, states
from manyranks.theory.architecture import ModelShape
from manyranks.theory.expert.sends import Routing, choices_of
from manyranks.theory.memory import Held, ModelStates
from manyranks.theory.plan import Plan


def counts(routing: Routing, experts: int) -> tuple[int, ...]:
    """Copies that each expert gets of all ranks' tokens; dropped ones are not counted. Raises ValueError as sends.one_hop."""
    found = [0] * experts
    for expert in choices_of(routing, experts):
        found[expert] += 1
    return tuple(found)


def of_ranks(counts: Sequence[float], ranks: int) -> tuple[float, ...]:
    """The sums of each rank's experts, which are dealt in blocks. Raises ValueError where the ranks do not divide them."""
    checks.whole(ranks=ranks)
    if len(counts) % ranks:
        raise ValueError(f"{len(counts)} experts on ranks={ranks}: choose a divisor of {len(counts)}")
    own = len(counts) // ranks
    return tuple(sum(counts[rank * own : (rank + 1) * own]) for rank in range(ranks))


def imbalance(counts: Sequence[float]) -> float:
    """The largest ÷ the mean; 1 where all are equal, or none has any. Raises ValueError for no counts at all."""
    if not counts:
        raise ValueError("counts is empty: give the copies of each expert, or of each rank")
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Copies that an expert takes of one rank's tokens: factor times the mean, rounded up.

    Raises ValueError for sizes below 1 and a factor that is not above 0. Source: GShard, arXiv 2006.16668, algorithm 1.
    """
    checks.whole(top_k=top_k, experts=experts)
    if not 0 < factor < math.inf or tokens < 0:
        raise ValueError(f"tokens={tokens}, factor={factor}: 0 tokens or more, and a factor above 0")
    return math.ceil(factor * tokens * top_k / experts)


def dropped(counts: Sequence[Sequence[int]], capacity: int) -> float:
    """The share of all copies that do not fit.

    counts: for each rank, what its tokens ask of each expert; every expert takes `capacity` of each rank's. 0 where nobody asks
    """
    asked = sum(map(sum, counts))
    over = sum(max(0, count - capacity) for own in counts for count in own)
    return over / asked if asked else 0.0


class Share(NamedTuple):
    """The share of the rank with the most.

    held: parameters, dense and of its routed experts
    dense, experts: bytes of their states
    """

    held: Held
    dense: ModelStates
    experts: ModelStates

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return self.dense.total + self.experts.total


def rank_states(shape: ModelShape, plan: Plan) -> Share:
    """Finds the states of the rank with the most, dense parts and experts apart.

    ZeRO-1 shards the optimizer's states of dense parameters over all N = dp·cp ranks, and an expert's over the edp ranks that
    have it: N/e, unless etp says otherwise.

    Raises ValueError where plan and shape do not fit.
    """
    kinds = dict.fromkeys(memory.rank_parameters(shape, plan))
    parts = {held: (held._replace(experts=0.0), held._replace(dense=0.0)) for held in kinds}
    shares = [Share(held, *(states.states_of(part, plan) for part in apart)) for held, apart in parts.items()]
    return max(shares, key=lambda share: share.total)


def shared_bytes(shape: ModelShape, plan: Plan, itemsize: int | None = None) -> float:
    """Bytes that a rank sends in a step to the edp ranks with the same part of the same experts, all layers together.

    Without ZeRO and with ZeRO-1 that's one sum of gradients: a reduce-scatter and an all-gather. ZeRO-3 gathers an expert
    forward and backward, and reduces its gradients, for each micro-batch; ZeRO-2 has the reduce-scatter for each.

    itemsize: bytes of a number, by default what plan.precision says

    Raises ValueError where plan and shape don't fit.
    """
    held = max(memory.rank_parameters(shape, plan), key=lambda rank: rank.experts)
    size = plan.recipe.parameters if itemsize is None else itemsize
    times = {3: 3 * plan.microbatches, 2: 1 + plan.microbatches}.get(plan.zero, 2)
    return times * held.experts * size * (plan.expert_shards - 1) / plan.expert_shards
