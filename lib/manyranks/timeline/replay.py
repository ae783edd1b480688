"""Replay: runs a Program on a virtual clock, where each instruction takes what it costs, and returns what happened when."""

from collections.abc import Iterator
from itertools import chain

from manyranks.timeline.clock import Clock
from manyranks.timeline.costs import Costs
from manyranks.timeline.program import Program, Recv, Send, at
from manyranks.timeline.sharing import SharedClock
from manyranks.timeline.spans import Timeline
from manyranks.timeline.streams import Group, Lane, Messages


class Deadlock(ValueError):
    """The program cannot finish: the message names each rank that is stuck, where it stands and what it waits for."""


def replay(program: Program, costs: Costs, sharing: bool = False) -> Timeline:
    """Returns what each rank does when, if every instruction takes what `costs` says. Deterministic.

    sharing: False lets each transfer take the time that it takes alone; with True, transfers under way at the same time on one
    channel share its capacity equally. A transfer has a span on each rank that takes part, from its start to its end, latency
    included; what takes no time has none. Raises ValueError that shows the instruction for a bad one, Deadlock for a program
    that cannot finish, and for a transfer that never starts though nobody waits for it.
    """
    clock = SharedClock(program, costs) if sharing else Clock(program, costs)
    clock.run()
    for lane in _messages(clock):
        if lane.sent != lane.received:
            _check_sizes(program, lane)
    if stuck := _stuck(clock):
        raise Deadlock("\n  ".join(["the program cannot finish:", *stuck]))
    for pair in clock.pairs.values():
        pair.lanes.clear()  # they and the pair name each other: thousands that would wait for the garbage collector
    return Timeline(tuple(clock.spans))


def _messages(clock: Clock) -> Iterator[Messages]:
    return chain.from_iterable(pair.lanes.values() for pair in clock.pairs.values())


def _check_sizes(program: Program, lane: Messages) -> None:
    source, to = lane.stream.source, lane.stream.to
    for k, (sent, received) in enumerate(zip(lane.sent, lane.received, strict=False)):
        if sent != received:
            sends = [(i, s) for i, s in enumerate(program.ranks[source]) if type(s) is Send and (s.to, s.tag) == (to, lane.tag)]
            recvs = [
                (i, r) for i, r in enumerate(program.ranks[to]) if type(r) is Recv and (r.source, r.tag) == (source, lane.tag)
            ]
            raise ValueError(f"{at(to, *recvs[k])} gets what {at(source, *sends[k])} sends; their bytes must be equal")


def _stuck(clock: Clock) -> list[str]:
    """A line for each rank that is held; without any, one for each lane with an exchange that never takes place."""
    if clock.held:
        return [f"{clock.at(rank)}: waits for {_missing(clock, *clock.held[rank])}" for rank in sorted(clock.held)]
    never = [lane for lane in _messages(clock) if len(lane.ends) < max(len(lane.sent), len(lane.received))]
    never += [group.lane for group in clock.groups.values() if len(group.lane.ends) < len(group.issued)]
    return [f"{_described(lane)} never takes place: it waits for {_missing(clock, lane, len(lane.ends))}" for lane in never]


def _missing(clock: Clock, lane: Lane, k: int) -> str:
    """Says what the k-th exchange of the lane waits for."""
    stream = lane.stream
    if isinstance(stream, Group):
        return _ranks(clock, stream.issued[k].absent) + " to come to it"
    if k >= len(lane.sent):
        return _ranks(clock, {stream.source}) + " to send it"
    if (lane.tag, k) in stream.unmet:
        return _ranks(clock, {stream.to}) + " to receive it"
    before = f"the messages before it from rank {stream.source} to rank {stream.to}; the first of them"
    return f"{before} waits for {_ranks(clock, stream.queue[0].absent)} to receive it"


def _ranks(clock: Clock, ranks: set[int]) -> str:
    return ", ".join(f"rank {rank}" + ("" if rank in clock.held else " (which has ended)") for rank in sorted(ranks))


def _described(lane: Lane) -> str:
    """The first exchange of the lane that is not over."""
    if isinstance(lane.stream, Group):
        return str(lane.stream.issued[len(lane.ends)].instruction)
    return f"message {len(lane.ends)} from rank {lane.stream.source} to rank {lane.stream.to} with tag {lane.tag!r}"
