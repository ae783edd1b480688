"""1F1B with one micro-batch's all-to-all beside another one's compute.

    schedule = overlapped(p, m, v)
    whole = program(schedule, ranks=4, layers=2, bytes=65536)
    costs = Durations({"attention": 0.01, "experts": 0.02, …}, bandwidth=1e7)
    replayed = replay(whole, costs)
    measured = timeline(world.run(carried_out, whole, costs))

A layer of experts waits for messages twice forward and twice backward, and has nothing to
do meanwhile. But the forward of one micro-batch and the backward of another need nothing of
each other. So a rank takes them layer by layer, in turns:

    network    gradients    | tokens     | their rows' | results
    compute    attention, F | experts, B | experts, F  | attention, B

Source: Megatron-Core, megatron/core/models/common/model_chunk_schedule_plan.py;
DeepSeek-V3, arXiv 2412.19437, section 3.2.1, which pairs them in DualPipe.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from manyranks.parallel.pipeline.schedules import (
    FORWARD,
    Action,
    Pair,
    Schedule,
    interleaved,
    singles,
)
from manyranks.timeline import (
    Collective,
    Compute,
    Instruction,
    Program,
    Recv,
    Send,
    Wait,
)

WORK = ("attention", "experts", "attention's backward", "experts' backward")


def overlapped(p: int, m: int, v: int = 1) -> Schedule:
    """Makes 1F1B whose every forward, once warmed up, runs beside a backward.

    p, m, v: pipeline ranks, micro-batches, stages a rank

    The forward just done is the one that the last rank's backward needs. So each rank
    begins with one forward more than interleaved 1F1B has, and holds its activations.
    Raises ValueError for a degree below 1, and with v > 1 for m that p doesn't divide.
    """
    ranks, plain = [], interleaved(p, m, v)
    if v > 1 and m % p:
        raise ValueError(
            f"m={m} micro-batches with v={v} on p={p} ranks: p of them pass each stage in "
            f"turn; give a multiple of {p}"
        )
    for rank, actions in enumerate(plain.ranks):
        ahead = 2 * (p - 1 - rank) + (v - 1) * p + 1
        forward, backward = ([a for a in actions if a.kind == kind] for kind in "FB")
        both = list(map(Pair, forward[ahead:], backward))
        ranks.append((*forward[:ahead], *both, *backward[len(both) :]))
    return Schedule("1F1B beside all-to-alls", m, plain.placement, tuple(ranks))


def program(
    schedule: Schedule, ranks: int, layers: int, bytes: float, pairs: bool = True
) -> Program:
    """Lists what p·e ranks compute and send: e neighbors are one stage, and share experts.

    ranks: e
    layers: with experts, of each stage
    bytes: of one all-to-all, as the costs count them, and of a message to another stage
    pairs: False takes the two of a Pair one after the other, as 1F1B does

    Compute is charged by a word of WORK. Raises ValueError for a size below 1.
    """
    if min(ranks, layers) < 1 or not bytes >= 0:
        raise ValueError(
            f"ranks={ranks}, layers={layers}, bytes={bytes}: give 1 rank and layer or "
            "more, and 0 bytes or more"
        )
    places = [
        (stage, place) for stage in range(len(schedule.ranks)) for place in range(ranks)
    ]
    made = (_of_rank(schedule, *at, ranks, layers, bytes, pairs) for at in places)
    return Program(tuple(map(tuple, made)))


def _of_rank(
    schedule: Schedule,
    rank: int,
    place: int,
    e: int,
    layers: int,
    bytes: float,
    pairs: bool,
) -> Iterator[Instruction]:
    group = tuple(range(rank * e, (rank + 1) * e))

    def moved(what: str) -> Collective:
        return Collective("all_to_all", bytes, group, what, what)

    for item in schedule.ranks[rank]:
        actions = singles(item)
        together = pairs and len(actions) == 2
        for parts in [actions] if together else [(action,) for action in actions]:
            for action in parts:
                yield from _received(schedule, action, rank, place, e, bytes)
            ways = [_layer(action, moved) for action in parts]
            yield from chain.from_iterable((_merged if together else _alone)(*ways, layers))
            for action in parts:
                yield from _sent(schedule, action, rank, place, e, bytes)


def _received(
    schedule: Schedule, action: Action, rank: int, place: int, e: int, bytes: float
) -> Iterator[Recv]:
    """Yields the message from another rank that the action waits for, if there is one."""
    message = schedule.uses(action)
    if message is not None and (sender := schedule.sender(message)) != rank:
        yield Recv(sender * e + place, bytes, tag=message)


def _sent(
    schedule: Schedule, action: Action, rank: int, place: int, e: int, bytes: float
) -> Iterator[Send]:
    """Yields the message to another rank that the action makes, if there is one."""
    message = schedule.makes(action)
    if message is not None and (receiver := schedule.receiver(message)) != rank:
        yield Send(receiver * e + place, bytes, tag=message, handle=message)


def _layer(action: Action, moved) -> tuple[Instruction, ...]:
    """Two computations and two all-to-alls; each needs the one before it."""
    first, second = WORK[:2] if action.kind == FORWARD else WORK[:1:-1]
    names = [f"{action.kind}{action.microbatch} {work}" for work in (first, second)]
    computed = [
        Compute(name, work) for name, work in zip(names, (first, second), strict=True)
    ]
    what = ("tokens", "results") if action.kind == FORWARD else ("gradients", "their rows'")
    there, back = (moved(f"{action.kind}{action.microbatch} {word}") for word in what)
    if action.kind == FORWARD:
        return computed[0], there, computed[1], back
    return there, computed[0], back, computed[1]


def _alone(way: Sequence[Instruction], layers: int) -> Iterator[list[Instruction]]:
    """Nothing beside anything: each all-to-all is waited for."""
    for _ in range(layers):
        for one in way:
            yield [one, Wait(one.handle)] if isinstance(one, Collective) else [one]


def _merged(
    forward: Sequence, backward: Sequence, layers: int
) -> Iterator[list[Instruction]]:
    """Four turns a layer: in each, one all-to-all beside one computation of the other."""
    attention, tokens, experts, results = forward
    gradients, experts_back, rows, attention_back = backward
    turns = (
        (gradients, attention),
        (tokens, experts_back),
        (rows, experts),
        (results, attention_back),
    )
    for _ in range(layers):
        for moved, computed in turns:
            yield [moved, computed, Wait(moved.handle)]
