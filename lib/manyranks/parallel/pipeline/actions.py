"""A pipeline schedule as data: for each rank, what it does, in order.

    F   forward of one micro-batch through one stage
    B   its whole backward, which is I and W together
    I   gradient of the stage's input, for the stage before it
    W   gradient of the stage's weights

A message is no action: an F needs the output of the stage before it, an I or B the gradient
from the stage after it, and whoever runs the schedule sends them.
"""

from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
PARTS = {kind: (kind,) for kind in KINDS} | {BACKWARD: (INPUT, WEIGHT)}

# What must be over before an action: a kind, and of which stage, counted from its own.
# A stage that does not exist is not waited for.
NEEDS = {
    FORWARD: ((FORWARD, -1),),
    BACKWARD: ((FORWARD, 0), (INPUT, +1)),
    INPUT: ((FORWARD, 0), (INPUT, +1)),
    WEIGHT: ((INPUT, 0),),
}


class Action(NamedTuple):
    """kind: one of KINDS; stage, microbatch: counted from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


class Pair(NamedTuple):
    """A forward and a backward that one rank computes side by side, as DualPipe does."""

    forward: Action
    backward: Action


def singles(item: Action | Pair) -> tuple[Action, ...]:
    """The actions of a cell: one, or the forward and the backward of a Pair."""
    return item if type(item) is Pair else (item,)


@dataclass(frozen=True)
class Schedule:
    """ranks[r]: the Actions (or Pairs) of rank r, in order.

    placement[s]: the rank of stage s; microbatches: m. Nothing is checked here: verify is.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action | Pair, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """The rank's, with pairs taken apart, the forward first."""
        return tuple(action for item in self.ranks[rank] for action in singles(item))


def forwards(placement: tuple[int, ...], m: int) -> Schedule:
    """m micro-batches, one after another through all stages, and no way back."""
    order = [Action(FORWARD, s, k) for k in range(m) for s in range(len(placement))]
    ranks = [
        tuple(action for action in order if placement[action.stage] == rank)
        for rank in range(max(placement) + 1)
    ]
    return Schedule("forwards", m, placement, tuple(ranks))
