"""A pipeline schedule as data: for each rank, what it does, in order. And the known ones.

    F   forward of one micro-batch through one stage
    B   its whole backward, which is I and W together
    I   gradient of the stage's input, for the stage before it
    W   gradient of the stage's weights

A message is no action: an F needs the output of the stage before it, an I or B the gradient
from the stage after it, and whoever runs the schedule sends them.

Each schedule is a pure function of p ranks, m micro-batches and v stages a rank. A rank's
table is written as a list of steps, such as [F] * warm_up + [F, B] * m. A step says what is
done, for which stage; `_numbered` adds the micro-batch. Every schedule allows any m ≥ 1:
with few micro-batches it is the same table without those that there are not.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
PARTS = {kind: (kind,) for kind in KINDS} | {BACKWARD: (INPUT, WEIGHT)}

# What must be over before an action, first in its own stage. Then in the stage that its
# message comes from: an F hands its output one stage on, a B or I its gradient one back.
NEEDS = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}
HANDS_ON = {FORWARD: +1, BACKWARD: -1, INPUT: -1}


class Action(NamedTuple):
    """The work of one micro-batch in one stage, both counted from 0.

    kind: one of KINDS
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


class Message(NamedTuple):
    """An output for the stage after, or a gradient for the stage before.

    kind: F for an output, I for a gradient
    source, target: the stages that make it and use it
    microbatch: counted from 0
    """

    kind: str
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind == FORWARD else "gradient"
        return f"the {what} {self.microbatch} of stage {self.source}"


class Pair(NamedTuple):
    """A forward and a backward that one rank computes side by side, as DualPipe does."""

    forward: Action
    backward: Action


def singles(item: Action | Pair) -> tuple[Action, ...]:
    """The actions of a cell: one, or the forward and the backward of a Pair."""
    return item if type(item) is Pair else (item,)


@dataclass(frozen=True)
class Schedule:
    """A table of what each rank does.

    microbatches: m
    placement: of each stage, its rank
    ranks: of each rank, its Actions and Pairs, in order

    Nothing is checked here: verify is.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action | Pair, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that does a stage's part of a micro-batch; in DualPipe there are two."""
        return self.placement[stage]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that have a copy of the stage."""
        return (self.placement[stage],)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if rank in self.ranks_of(stage)]

    def uses(self, action: Action) -> Message | None:
        """The message that the action waits for, None at the model's ends and for a W."""
        step = HANDS_ON.get(action.kind, 0)
        return self._message(action, action.stage - step, action.stage)

    def makes(self, action: Action) -> Message | None:
        """The message that the action makes, None at the model's ends and for a W."""
        step = HANDS_ON.get(action.kind, 0)
        return self._message(action, action.stage, action.stage + step)

    def sender(self, message: Message) -> int:
        """The rank of the stage that makes the message."""
        return self.rank_of(message.source, message.microbatch)

    def receiver(self, message: Message) -> int:
        """The rank of the stage that uses the message."""
        return self.rank_of(message.target, message.microbatch)

    def needs(self, action: Action) -> Iterator[Action]:
        """Yields the F, I and W that must be over before the action."""
        if action.kind in NEEDS:
            yield action._replace(kind=NEEDS[action.kind])
        if (message := self.uses(action)) is not None:
            yield Action(message.kind, message.source, message.microbatch)

    def _message(self, action: Action, source: int, target: int) -> Message | None:
        stages = range(self.stages)
        if source == target or source not in stages or target not in stages:
            return None
        kind = FORWARD if action.kind == FORWARD else INPUT
        return Message(kind, source, target, action.microbatch)

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


Step = tuple[str, int | None]  # kind and stage
Steps = Iterable[Step | tuple[Step, Step]]
W: Step = (WEIGHT, None)  # the oldest one that waits, of any of the rank's stages


def naive(p: int, m: int) -> Schedule:
    """Micro-batches one by one, through all stages and back: one rank works at a time.

    Bubble (p − 1) m (F + B); one micro-batch in flight.
    Raises ValueError for p or m below 1.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, B = (FORWARD, rank), (BACKWARD, rank)
        ranks.append(_numbered([F, B] * m, m))
    return Schedule("naive", m, one_stage_a_rank(p), tuple(ranks))


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble (p − 1)(F + B); m micro-batches in flight. Backwards run in the order of the
    forwards, so that gradients add up in the same order as in the other schedules; the
    paper's figure 2 reverses it, which takes the same time. Raises ValueError for p or m
    below 1. Source: GPipe, arXiv 1811.06965, section 2.3.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, B = (FORWARD, rank), (BACKWARD, rank)
        ranks.append(_numbered([F] * m + [B] * m, m))
    return Schedule("gpipe", m, one_stage_a_rank(p), tuple(ranks))


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B: p − 1 − rank forwards to warm up, then one forward and one backward in turn.

    Bubble (p − 1)(F + B); min(m, p − rank) micro-batches in flight on a rank. Raises
    ValueError for p or m below 1. Source: PipeDream-Flush, arXiv 2006.09503; arXiv
    2104.04473, section 2.2.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, B = (FORWARD, rank), (BACKWARD, rank)
        ranks.append(_numbered([F] * (p - 1 - rank) + [F, B] * m, m))
    return Schedule("1f1b", m, one_stage_a_rank(p), tuple(ranks))


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B, stage s on rank s % p; p micro-batches pass each of a rank's stages in turn.

    Bubble (p − 1)(F + B) / v where p divides m, F and B being the times of a rank's v
    stages. Where it does not, which the paper does not allow, it is the table for the next
    multiple of p without the micro-batches that there are not. Raises ValueError for p, m
    or v below 1. Source: arXiv 2104.04473, section 2.2, figure 4.
    """
    check_degrees(p=p, m=m, v=v)
    turns = [turn for _ in range(0, m, p) for turn in range(v) for _ in range(p)]
    ranks = []
    for rank in range(p):
        forward = [(FORWARD, turn * p + rank) for turn in turns]
        backward = [(BACKWARD, (v - 1 - turn) * p + rank) for turn in turns]
        ahead = 2 * (p - 1 - rank) + (v - 1) * p if v > 1 else p - 1 - rank
        both = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
        rest = backward[max(0, len(forward) - ahead) :]
        ranks.append(_numbered([*forward[:ahead], *both, *rest], m))
    return Schedule("interleaved", m, looped(p, v), tuple(ranks))


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with the backward split: rank r does each W r rounds late, in what was bubble.

    Bubble (p − 1)(F + I − W) for m ≥ p and W ≤ F; p micro-batches in flight, each until its
    weight gradient. Raises ValueError for p or m below 1.
    Source: ZB-H1, arXiv 2401.10241, section 2.1.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, I = (FORWARD, rank), (INPUT, rank)  # noqa: E741 the field's name of it
        ranks.append(_numbered([F] * (p - 1 - rank) + [F, I] * rank + [F, I, W] * m, m))
    return Schedule("zb-h1", m, one_stage_a_rank(p), tuple(ranks))


def zb_h2(p: int, m: int) -> Schedule:
    """ZB-H1 with twice the warm-up: no rank waits for its first backward either.

    Bubble (p − 1)(F + I − 2W), or 0, for m ≥ 2p − 1, W ≤ F; 2p − 1 micro-batches in flight.
    Raises ValueError for p or m below 1. Source: ZB-H2, arXiv 2401.10241, section 2.2.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, I = (FORWARD, rank), (INPUT, rank)  # noqa: E741
        below = p - 1 - rank
        ranks.append(_numbered([F] * 2 * below + [F, I] * 2 * rank + [F, I, W] * m, m))
    return Schedule("zb-h2", m, one_stage_a_rank(p), tuple(ranks))


def zb_v(p: int, m: int) -> Schedule:
    """Two stages a rank, the second ones in reverse: a V, both ends of it on rank 0.

    No bubble where F = I = W and m ≥ 2p; 2p stages' activations in flight, as much as
    1F1B's first rank holds. Raises ValueError for p or m below 1.
    Source: ZB-V, arXiv 2401.10241, section 6; arXiv 2405.15362.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, I = (FORWARD, rank), (INPUT, rank)  # noqa: E741
        f, i = (FORWARD, 2 * p - 1 - rank), (INPUT, 2 * p - 1 - rank)
        warm_up = [F] * (2 * (p - rank) - 1) + [f, F] * rank + [f, i, W] * (p - rank)
        steady = [F, I, W, f, i, W] * (max(m, 2 * p) - p)
        cool_down = [I, i] * rank + [I, W] * (p - rank) + [W] * 2 * rank
        ranks.append(_numbered(warm_up + steady + cool_down, m))
    return Schedule("zb-v", m, v_shape(p), tuple(ranks))


def dualpipe_v(p: int, m: int) -> Schedule:
    """A V as ZB-V's; a forward of one stage runs side by side with a backward of the other.

    A Pair hides the messages of one under the computing of the other. Bubble, in times of
    one stage, (p − 1)(F&B + B − 3W) for m ≥ 2p where a pair's F&B is F + B, and less where
    it takes less; 2p + 1 stages' activations in flight.
    Raises ValueError for p or m below 1. Source: DualPipe, arXiv 2412.19437, section 3.2.1,
    cut in half as in the DualPipe repository; dualpipe.py has it whole.
    """
    check_degrees(p=p, m=m)
    ranks = []
    for rank in range(p):
        F, f = (FORWARD, rank), (FORWARD, 2 * p - 1 - rank)
        B, b = (BACKWARD, rank), (BACKWARD, 2 * p - 1 - rank)
        I, i = (INPUT, rank), (INPUT, 2 * p - 1 - rank)  # noqa: E741
        below = p - 1 - rank
        warm_up = [F] * 2 * below + [F, f] * (rank + 1) + [i, W, f] * below
        steady = [(F, b), (f, B)] * (max(m, 2 * p) - 2 * p + rank + 1)
        if rank == p - 1:  # its first gradient should not wait for a forward
            steady[:1] = [F, b]
        drain = [b, (f, B)] * below
        whole, split = [b, B] * (rank + 1), [i, I] * (rank + 1)
        cool_down = whole[: rank + 1] + split[rank + 1 :]
        end = [W, I] * below + [W] * (rank + 1)
        ranks.append(_numbered(warm_up + steady + drain + cool_down + end, m))
    return Schedule("dualpipe-v", m, v_shape(p), tuple(ranks))


def named(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule of this name, such as "1f1b".

    v: stages a rank, of "interleaved" alone

    Raises ValueError for another name, and as the schedule does.
    """
    makers = {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": partial(interleaved, v=v),
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "dualpipe-v": dualpipe_v,
    }
    if name not in makers:
        raise ValueError(f"schedule {name!r}: choose from {', '.join(makers)}")
    return makers[name](p, m)


def one_stage_a_rank(p: int) -> tuple[int, ...]:
    """The placement of p stages on p ranks."""
    return tuple(range(p))


def looped(p: int, v: int) -> tuple[int, ...]:
    """The placement of v p stages, dealt in turn: stage s on rank s % p."""
    return tuple(range(p)) * v


def v_shape(p: int) -> tuple[int, ...]:
    """The placement of 2p stages, dealt there and back: rank 0 has the ends."""
    return (*range(p), *reversed(range(p)))


def _numbered(steps: Steps, m: int) -> tuple[Action | Pair, ...]:
    """Adds micro-batches: forwards and backwards of a stage take 0, 1, … m − 1 in order.

    Two steps side by side are a Pair. A step with no micro-batch left is dropped.
    """
    forwards, backwards, waiting = Counter(), Counter(), deque()

    def take(kind: str, stage: int | None) -> list[Action]:
        if kind == WEIGHT:
            return [waiting.popleft()] if waiting else []
        taken = forwards if kind == FORWARD else backwards
        microbatch = taken[stage]
        taken[stage] += 1
        if microbatch >= m:
            return []
        if kind == INPUT:
            waiting.append(Action(WEIGHT, stage, microbatch))
        return [Action(kind, stage, microbatch)]

    actions: list[Action | Pair] = []
    for step in steps:
        if isinstance(step[0], str):
            actions += take(*step)
        else:
            both = take(*step[0]) + take(*step[1])
            actions += [Pair(*both)] if len(both) == 2 else both
    return tuple(actions)


def check_degrees(**degrees: int) -> None:
    """Raises ValueError for one that is not a whole number, 1 or more."""
    for name, value in degrees.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number, 1 or more")
