"""Proves that a schedule can run: each action once, without deadlock, under a memory cap.

The messages, as a runtime posts them. Before an action a rank waits for its inputs; their
receives are posted in the order of the table, some of them ahead. After an action it starts
to send the output and goes on. A send is synchronous: it is over when it is received, and a
rank waits for its sends only at the end of its table, or where it knows that they are over.
The outputs that cross one boundary between two stages go one after another, and so do the
gradients: a lane each. (With tags one may overtake another; not every backend has tags.)

Then a table deadlocks in two cases only: ranks wait for each other in a circle, or a lane's
messages are received in another order than they are sent. `verify` refuses both.
"""

from collections.abc import Iterator
from itertools import product

from manyranks.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    PARTS,
    WEIGHT,
    Action,
    Pair,
    Schedule,
    singles,
)

# For F, I or W and a stage: by micro-batch, where in the row of its rank.
Positions = dict[tuple[str, int], dict[int, int]]
Done = dict[tuple[str, int], set[int]]  # of F, I or W and a stage: the micro-batches
Waiting = dict[Action, int]  # for what; which rank


def verify(schedule: Schedule, memory: int | None = None) -> None:
    """Raises ValueError for a schedule that cannot run, with the wrong cell of the table.

    memory: most activations that a rank may hold at once, each of one micro-batch in one
    stage, from its F to its B or W. See the top of this file for what is proved.
    """
    _check_placement(schedule)
    positions = _check_complete(schedule)
    _check_order(schedule, positions)
    _check_lanes(schedule, positions)
    if memory is not None:
        _check_memory(schedule, memory)


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """Most activations that each rank holds, each of one micro-batch in one stage."""
    ranks = range(len(schedule.ranks))
    return tuple(max(held(schedule, rank), default=0) for rank in ranks)


def held(schedule: Schedule, rank: int) -> Iterator[int]:
    """Counts the activations that the rank holds after each of its schedule.actions(rank).

    One comes with an F and goes with the B or W of the same micro-batch and stage.
    """
    count = 0
    for kind, _, _ in schedule.actions(rank):
        count += 1 if kind == FORWARD else -(WEIGHT in PARTS[kind])
        yield count


def _check_placement(schedule: Schedule) -> None:
    p, m, placement = len(schedule.ranks), schedule.microbatches, schedule.placement
    if type(m) is not int or m < 1:
        raise ValueError(f"microbatches={m!r}: must be a whole number, 1 or more")
    if not placement or not set(placement) <= set(range(p)):
        raise ValueError(f"placement={placement}: give each stage a rank from 0 to {p - 1}")


def _check_complete(schedule: Schedule) -> Positions:
    """Each F, I and W once, also in a B, on the rank of its stage. Returns where."""
    m = schedule.microbatches
    found = {step: {} for step in product((FORWARD, INPUT, WEIGHT), range(schedule.stages))}
    for rank in range(len(schedule.ranks)):
        for position, kind, stage, i in _parts(schedule, rank):
            at = found.get((kind, stage))
            known = at is not None and 0 <= i < m and schedule.rank_of(stage, i) == rank
            if not known or i in at:
                problem = _misplaced(schedule, rank, Action(kind, stage, i))
                raise _error(schedule, rank, position, problem)
            at[i] = position
    for (kind, stage), at in found.items():
        if missing := set(range(m)) - set(at):
            action = Action(kind, stage, min(missing))
            rank = schedule.rank_of(*action[1:])
            problem = f"{_as_written(schedule, action)} is missing"
            raise _error(schedule, rank, len(schedule.ranks[rank]), problem)
    return found


def _parts(schedule: Schedule, rank: int) -> Iterator[tuple[int, str, int, int]]:
    """The rank's F, I and W, each with its position first; a B is an I and a W."""
    for position, item in enumerate(schedule.ranks[rank]):
        for kind, stage, i in singles(item):
            for part in PARTS.get(kind, (kind,)):
                yield position, part, stage, i


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    """Says why the action cannot stand in this rank's table."""
    kind, stage, i = action
    if kind not in KINDS:
        return f"{action}: no such action; its kind must be one of {', '.join(KINDS)}"
    if not 0 <= stage < schedule.stages:
        return f"{action}: no such stage; there are 0 to {schedule.stages - 1}"
    if not 0 <= i < schedule.microbatches:
        return f"{action}: no such micro-batch; there are 0 to {schedule.microbatches - 1}"
    action, owner = _as_written(schedule, action, rank), schedule.rank_of(stage, i)
    if owner != rank:
        return f"{action} is not this rank's: the stage is on rank {owner}"
    return f"{action} is done twice"


def _check_order(schedule: Schedule, positions: Positions) -> None:
    """Lets every rank go on as far as it can. Those held in the end wait in a circle."""
    done: Done = {step: set() for step in positions}
    waiting: Waiting = {}
    running = list(range(len(schedule.ranks)))
    hosts = [_host(schedule, rank, done, waiting) for rank in running]
    while running:
        running += next(hosts[running.pop()], ())
    if waiting:
        raise _circle(schedule, positions, waiting, done)


def _host(schedule: Schedule, rank: int, done: Done, waiting: Waiting) -> Iterator[list]:
    """Goes through the rank's table. Where it is held, says whom it has set free."""
    freed: list[int] = []
    for position, item in enumerate(schedule.ranks[rank]):
        for need in _needs(schedule, item, done):
            if schedule.rank_of(*need[1:]) == rank:
                need = _as_written(schedule, need)
                problem = f"{_name(item)} comes before {need}, which it needs"
                raise _error(schedule, rank, position, problem)
            waiting[need] = rank
            yield freed
            freed = []
        for kind, stage, i in singles(item):
            for part in PARTS[kind]:
                done[part, stage].add(i)
                if (part, stage, i) in waiting:
                    freed.append(waiting.pop((part, stage, i)))
    yield freed


def _needs(schedule: Schedule, item: Action | Pair, done: Done) -> Iterator[Action]:
    """Yields what must be over before the item, and is not when it is asked for."""
    for action in singles(item):
        for need in schedule.needs(action):
            if need.microbatch not in done[need.kind, need.stage]:
                yield need


def _circle(schedule: Schedule, at: Positions, waiting: Waiting, done: Done) -> ValueError:
    """The error that names the ranks that wait for each other."""
    needed = {rank: need for need, rank in waiting.items()}
    path = [min(needed)]
    while (after := schedule.rank_of(*needed[path[-1]][1:])) not in path:
        path.append(after)
    circle = path[path.index(after) :]
    stuck = {rank: _reached(schedule, rank, done) for rank in circle}
    lines = ["deadlock:"]
    for rank, here in stuck.items():
        kind, stage, i = need = needed[rank]
        need = _as_written(schedule, need)
        waits = f"{_name(schedule.ranks[rank][here])}, waits for {need}"
        there = f"rank {schedule.rank_of(stage, i)} does at position {at[kind, stage][i]}"
        lines.append(f"  rank {rank} at position {here}, {waits}, which {there}")
    return _error(schedule, circle[0], stuck[circle[0]], "\n".join(lines))


def _reached(schedule: Schedule, rank: int, done: Done) -> int:
    """The position of the first of the rank's actions that is not done."""
    for position, kind, stage, i in _parts(schedule, rank):
        if i not in done[kind, stage]:
            return position
    return len(schedule.ranks[rank])


def _check_lanes(schedule: Schedule, at: Positions) -> None:
    """Raises where what crosses between stages isn't received in the order of sending."""
    for s in range(schedule.stages - 1):
        for kind, source, to in ((FORWARD, s, s + 1), (INPUT, s + 1, s)):
            before: dict[tuple[int, int], int] = {}  # by lane: its last micro-batch
            for i in at[kind, source]:
                lane = schedule.rank_of(source, i), schedule.rank_of(to, i)
                sent = before.get(lane, i)
                if lane[0] != lane[1] and at[kind, to][i] < at[kind, to][sent]:
                    raise _crossed(
                        schedule, at, Action(kind, source, sent), Action(kind, to, i)
                    )
                before[lane] = i


def _crossed(schedule: Schedule, at: Positions, sent: Action, wanted: Action) -> ValueError:
    sender, taker = (schedule.rank_of(*one[1:]) for one in (sent, wanted))
    here, later = (at[wanted[:2]][one.microbatch] for one in (wanted, sent))
    need = wanted._replace(stage=sent.stage)
    held, waits, first = (_as_written(schedule, one) for one in (wanted, need, sent))
    problem = (
        f"deadlock: {held} waits for {waits}, but\n"
        f"  rank {sender} first sends what {first} gives, which is taken\n"
        f"  later, at position {later}; no message overtakes another"
    )
    return _error(schedule, taker, here, problem)


def _check_memory(schedule: Schedule, memory: int) -> None:
    for rank, items in enumerate(schedule.ranks):
        counts = held(schedule, rank)
        for position, item in enumerate(items):
            count = max(next(counts) for _ in singles(item))
            if count > memory:
                problem = f"{_name(item)} makes {count} activations in flight; "
                raise _error(schedule, rank, position, f"{problem}the cap is {memory}")


def _as_written(schedule: Schedule, action: Action, rank: int | None = None) -> Action:
    """The B that the action is a part of, where the stage's row has no I and W for it."""
    rank = schedule.rank_of(*action[1:]) if rank is None else rank
    own = [a for a in schedule.actions(rank) if a.stage == action.stage]
    same = {a.kind for a in own if a.microbatch == action.microbatch} - {FORWARD}
    kinds = same or {a.kind for a in own}
    part = action.kind != FORWARD and BACKWARD in kinds and action.kind not in kinds
    return action._replace(kind=BACKWARD) if part else action


def _name(item: Action | Pair) -> str:
    return " with ".join(map(str, singles(item)))


def _error(schedule: Schedule, rank: int, position: int, problem: str) -> ValueError:
    where = f"{schedule.name}, rank {rank}, position {position}"
    return ValueError(f"{where}: {problem}\n{excerpt(schedule, rank, position)}")


def excerpt(schedule: Schedule, rank: int, position: int) -> str:
    """A cell of the table in brackets, with its neighbors; a row is a rank."""
    columns = range(max(0, position - 3), position + 4)
    rows = range(max(0, rank - 1), min(len(schedule.ranks), rank + 2))
    lines = [["position", *(f" {c} " for c in columns)]]
    for r in rows:
        cells = {c: _cell(schedule, r, c) for c in columns}
        row = {c: f" {cell} " for c, cell in cells.items()}
        if r == rank:
            row[position] = f"[{cells[position]}]"
        lines.append([f"rank {r}", *row.values()])
    width = max(len(cell) for line in lines for cell in line[1:])
    text = (f"{line[0]:>10}" + "".join(f"{c:>{width}}" for c in line[1:]) for line in lines)
    return "\n".join(line.rstrip() for line in text)


def _cell(schedule: Schedule, rank: int, position: int) -> str:
    """Writes an action, as F3; where ranks have several stages, F3s5 for stage 5."""
    items = schedule.ranks[rank]
    if position >= len(items):
        return "."
    form = "{0}{2}s{1}" if len(schedule.stages_of(rank)) > 1 else "{0}{2}"
    return "+".join(form.format(*action) for action in singles(items[position]))
