"""Parameters and states of one rank by the expert-parallel degree."""

from typing import NamedTuple

from manyranks.theory import memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.memory import Held, ModelStates
from manyranks.theory.plan import Plan


class Share(NamedTuple):
    """Of the rank with the most. held: parameters, dense and of its routed experts; dense, experts: bytes of their states."""

    held: Held
    dense: ModelStates
    experts: ModelStates

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return self.dense.total + self.experts.total


def rank_states(shape: ModelShape, plan: Plan) -> Share:
    """Of the rank with the most, as memory.model_states has them, apart: with ZeRO-1 the optimizer's states of dense parameters
    are sharded over all N = dp·cp ranks, those of an expert over the edp ranks that have it: N/e, unless etp says otherwise.

    Raises ValueError where plan and shape do not fit.
    """
    kinds = set(memory.rank_parameters(shape, plan))
    shares = [Share(held, *(memory.states_of(part, plan) for part in _apart(held))) for held in kinds]
    return max(shares, key=lambda share: share.total)


def _apart(held: Held) -> tuple[Held, Held]:
    return Held(held.dense, 0.0), Held(0.0, held.experts)
