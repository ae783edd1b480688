"""Tells a deadlock from a slow run: the ranks' calls prove it, and where they can't, the ranks must stand still for long.

A busy machine can hold up a rank anywhere and for seconds, even between the end of a call and the line that notes it. So a
rank that stands still may yet go on. Calls tell the two apart: messages of a pair and collectives of a group are numbered,
and a call whose counterpart was issued ends as soon as its process gets a processor.
"""

from enum import IntEnum
from typing import NamedTuple

from manyranks.measure.calls import Call
from manyranks.measure.divergence import signature
from manyranks.measure.operators import POINT_TO_POINT
from manyranks.world.rank.reply import Reply
from manyranks.world.rank.watch import Whereabouts

_ALIKE = {"reduce_scatter": "all_reduce"}  # gloo makes the first of the second, so they may meet
_IDLE = 0.1  # a process that waits uses less than this share of a processor
_LATE = 0.05  # where threads wait longer than this share of the time for a processor, the machine is busy
Looks = dict[int, Whereabouts]
Issued = dict[int, Whereabouts | Reply]  # rank -> what it has issued; both types have counts, members and recent calls


class Wait(IntEnum):
    """Says how a rank waits that hasn't replied. The highest value of all ranks decides."""

    FOR_EVER = 0  # in a call that its peers haven't met, and only they could end it
    UNCLEAR = 1  # in something that isn't a call, or in a call that may end or not
    MET = 2  # in a call that its peers have issued, too, so it ends unless something is broken
    NOT = 3  # it computes


# Seconds without any movement that count as a proof: on a quiet machine, and on a busy one.
_STILL = {Wait.UNCLEAR: (1.4, 10.0), Wait.MET: (10.0, 25.0)}
_TURNS = 3  # how often each thread with work must have had a processor in that time


class _Round(NamedTuple):
    when: float
    looks: Looks


class Case:
    """Gathers the evidence for a deadlock, one round of looks after the other."""

    def __init__(self):
        self._last: _Round | None = None
        self._since: _Round | None = None  # nothing has moved since
        self._turn: _Round | None = None  # since then, some threads wait for their turn
        self._turns = 0

    def proved(self, looks: Looks, when: float, ended: dict[int, Reply]) -> bool:
        """Returns whether the ranks wait forever. Two rounds must show the same calls: then all ranks were in these calls at
        one moment between the rounds.

        looks: detailed looks at all ranks that haven't replied, asked for after the last round was complete
        when: seconds
        ended: the replies of the others
        """
        last, now = self._last, _Round(when, looks)
        self._last = now
        same = last is not None and {r: _calls(each) for r, each in last.looks.items()} == {r: _calls(looks[r]) for r in looks}
        if not same or not _still(last, now):
            self._since, self._turn, self._turns = now, now, 0
        elif all(_had_its_turn(self._turn.looks[rank], looks[rank]) for rank in looks):
            self._turn, self._turns = now, self._turns + 1
        if not same:
            return False
        wait = max(waits(looks, ended).values())
        if wait in _STILL:
            return self._turns >= _TURNS and when - self._since.when >= _STILL[wait][_busy(self._since, now)]
        return wait is Wait.FOR_EVER


def waits(looks: Looks, ended: dict[int, Reply]) -> dict[int, Wait]:
    """Returns how each rank waits that hasn't replied, judged by its own call and by what all others have issued."""
    issued: Issued = {**ended, **looks}
    return {rank: _wait(rank, seen, issued) for rank, seen in looks.items()}


def _wait(rank: int, seen: Whereabouts, issued: Issued) -> Wait:
    if seen.blocked is None or not seen.running or seen.debugged:
        return Wait.NOT
    if not isinstance(seen.blocked, Call):
        return Wait.UNCLEAR
    if seen.issues:
        return Wait.MET
    find = _message if seen.blocked.op in POINT_TO_POINT else _collective
    wait = find(rank, seen.blocked, issued)
    return wait if seen.certain else max(wait, Wait.UNCLEAR)


def _message(rank: int, call: Call, issued: Issued) -> Wait:
    """Matches messages: those between two ranks with one tag meet in order, whatever their sizes."""
    if call.peer is None:
        return Wait.UNCLEAR  # it receives from anyone, and another receive may have taken the message
    other = issued.get(call.peer)
    counts = (other and other.counts) or {}
    counterpart = "recv" if call.op == "send" else "send"
    issued_there = counts.get((call.group, counterpart, rank, call.tag), 0)
    if call.op == "send":
        issued_there += counts.get((call.group, "recv", None, call.tag), 0)  # one from anyone may take it
    return Wait.MET if issued_there > call.sequence else Wait.FOR_EVER


def _collective(rank: int, call: Call, issued: Issued) -> Wait:
    """Matches collectives: a member meets one with its call of the same number, if that's the same operation."""
    if any((one.members or {}).get(call.group, call.ranks) != call.ranks for one in issued.values()):
        return Wait.UNCLEAR  # another group of this name
    others = [member for member in call.ranks if member != rank]
    theirs = {member: _counterpart(call, issued.get(member)) for member in others}
    joined = [member for member, call_there in theirs.items() if call_there]
    if len(joined) == len(others):
        return Wait.MET if all(signature(there) == signature(call) for there in theirs.values()) else Wait.UNCLEAR
    return Wait.UNCLEAR if _may_end(call, rank, joined) else Wait.FOR_EVER


def _may_end(call: Call, rank: int, joined: list[int]) -> bool:
    """Returns whether the call may end for this rank before all members have issued it."""
    if call.op in ("broadcast", "scatter"):
        return bool(joined) if rank == call.peer else call.peer in joined
    return call.op in ("reduce", "gather") and rank != call.peer and bool(joined)


def _counterpart(call: Call, other: Whereabouts | Reply | None) -> Call | None:
    """Returns a member's call of the same number, if it's of the same kind. A forgotten call is assumed to be."""
    if other is None or (other.counts or {}).get(call.group, 0) <= call.sequence:
        return None
    same = [there for there in other.recent or () if (there.group, there.sequence) == (call.group, call.sequence)]
    same = [there for there in same if there.op not in POINT_TO_POINT]
    return (same[-1] if _kind(same[-1]) == _kind(call) else None) if same else call


def _kind(call: Call) -> str:
    return _ALIKE.get(call.op, call.op)


def _calls(seen: Whereabouts) -> tuple:
    blocked = seen.blocked.number if isinstance(seen.blocked, Call) else seen.blocked
    return seen.running, seen.certain, seen.issued, blocked


def _still(before: _Round, now: _Round) -> bool:
    """Returns whether no rank has made progress: its bytes and its Python haven't moved, and it didn't compute."""
    most = _IDLE * (now.when - before.when)
    pairs = [(before.looks[rank], seen) for rank, seen in now.looks.items()]
    return all(old.progress() == new.progress() and new.cpu - old.cpu < most for old, new in pairs)


def _had_its_turn(before: Whereabouts, now: Whereabouts) -> bool:
    """Returns whether all threads of a rank with work have had a processor since, and its main thread went back to sleep."""
    old, new = before.processor, now.processor
    if old is None or new is None:
        return True
    return not set(old.ready) & set(new.ready) and (new.state == "S" or (new.state == "R" and new.rests > old.rests))


def _busy(since: _Round, now: _Round) -> bool:
    """Returns whether ranks waited for processors. If the system doesn't say, assumes that they did."""
    for rank, seen in now.looks.items():
        before, after = since.looks[rank].processor, seen.processor
        if before is None or after is None or after.delayed - before.delayed > _LATE * (now.when - since.when):
            return True
    return False
