"""A measured run as a Program: what each rank issued and waited for, what it computed in between; and who came late."""

from collections.abc import Hashable, Iterator

from manyranks.measure.budget import Wait as Waiting
from manyranks.measure.calls import Call, Event
from manyranks.timeline import replay
from manyranks.timeline.costs import Transfer
from manyranks.timeline.program import Collective, Compute, Instruction, Program, Recv, Send, Wait, Work
from manyranks.world.rank.recording import Recording

Calls = dict[int, list[Call]]
Message = tuple[int, int, int]  # source, destination, bytes


def program(calls: Calls, recordings: dict[int, Recording]) -> Program:
    """Rank r of the world is rank r of the program; a rank that did not run has no instructions."""
    sizes = _sizes(calls)
    members = {rank for issued in calls.values() for call in issued for rank in call.ranks}
    ranks = range(max(members | recordings.keys()) + 1)
    return Program(tuple(tuple(_instructions(calls[r], recordings[r], r, sizes)) if r in calls else () for r in ranks))


def rounds(program: Program) -> list[tuple[Message, ...]]:
    """The program's messages on a clock on which each takes one round, and starts when both its ranks have come to it."""
    met = Program(tuple(tuple(i._replace(rendezvous=True) if type(i) is Send else i for i in r) for r in program.ranks))
    clock = replay(met, _Rounds())
    found: list[list[Message]] = [[] for _ in range(round(clock.makespan))]
    for rank, instructions in enumerate(met.ranks):
        sends = [i for i in instructions if type(i) is Send]
        # The messages of one pair go one after another, in the order they were issued in.
        for to in {send.to for send in sends}:
            spans = [span for span in clock.of(rank) if span.name == f"send → {to}"]
            for send, span in zip([s for s in sends if s.to == to], spans, strict=True):
                found[round(span.started)].append((rank, to, send.bytes))
    return [tuple(sorted(messages)) for messages in found]


class _Rounds:
    """Costs: a message takes 1, all else nothing."""

    def compute(self, rank: int, work: Hashable) -> float:
        return 0.0

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        return Transfer(1.0)

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer:
        return Transfer(0.0)


def whole_bytes(call: Call) -> int:
    """Bytes of a collective's whole tensor, where this rank puts in a part of it.

    An all_to_all counts what the rank sends or what it receives, whichever is more.
    """
    parts = len(call.ranks) if call.op in ("all_gather", "gather") else 1
    return max(call.bytes * parts, call.received)


def _sizes(calls: Calls) -> dict[tuple, int]:
    """Bytes of each message, which its sender knows, and of each collective: the most that one of its ranks says."""
    sizes: dict[tuple, int] = {}
    for rank, issued in calls.items():
        for call in issued:
            if call.op != "recv":
                sizes[key_of(call, rank)] = max(sizes.get(key_of(call, rank), 0), whole_bytes(call))
    return sizes


def key_of(call: Call, rank: int) -> tuple:
    """Returns a key: the same for every rank of a collective, and for both ends of a message."""
    if call.op in ("send", "recv"):
        source, to = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        return source, to, call.group, call.tag, call.sequence
    return call.group, call.sequence


def _instructions(issued: list[Call], recording: Recording, rank: int, sizes: dict[tuple, int]) -> Iterator[Instruction]:
    """Yields instructions in the order of the rank's main thread. Each call is a handle, which later events wait for."""
    done, open_ = (0, 0), {}
    end = Event(True, None, recording.finished, recording.finished, *recording.work)
    for event in [*recording.journal, end]:
        flops, moved = event.flops - done[0], event.bytes - done[1]
        if flops or moved:
            yield Compute("compute", Work(flops, moved))
        done = event.flops, event.bytes
        if not event.waits:
            open_[event.number] = issued[event.number]
            yield _issue(issued[event.number], rank, sizes)
        elif event.number in open_:
            del open_[event.number]
            yield Wait(event.number)
        elif event.number is None and event is not end:  # which call it was for is not known: all collectives under way
            waited = [number for number, call in open_.items() if call.op not in ("send", "recv")]
            for number in waited:
                del open_[number]
                yield Wait(number)


def _issue(call: Call, rank: int, sizes: dict[tuple, int]) -> Instruction:
    if call.op in ("send", "recv") and call.peer is None:
        raise ValueError(f"{call.op} #{call.sequence} of rank {rank} may come from any rank: name its source to replay it")
    size = sizes.get(key_of(call, rank), call.bytes)
    if call.op == "send":
        return Send(call.peer, size, (call.group, call.tag), call.number)
    if call.op == "recv":
        return Recv(call.peer, size, (call.group, call.tag), call.number)
    return Collective(call.op, size, call.ranks, call.number)


def waits_of(calls: Calls, recordings: dict[int, Recording]) -> dict[int, list[Waiting]]:
    """Each rank's waits, in order. One for which it is not known what was waited for is for all collectives under way; of a
    receive from any rank it is not known who had not come, so that nobody counts as late."""
    came: dict[tuple, float] = {}
    for rank, issued in calls.items():
        for call in issued:
            key = key_of(call, rank)
            came[key] = max(came.get(key, call.started), call.started)
    return {rank: list(_waits(rank, calls[rank], recording, came)) for rank, recording in recordings.items()}


def _waits(rank: int, issued: list[Call], recording: Recording, came: dict[tuple, float]) -> Iterator[Waiting]:
    under_way: dict[int, Call] = {}
    for event in recording.journal:
        if not event.waits:
            under_way[event.number] = issued[event.number]
            continue
        if event.number is None:
            waited = [call for call in under_way.values() if call.op not in ("send", "recv")]
        else:
            waited = [issued[event.number]]
        for call in waited:
            under_way.pop(call.number, None)
        last = max((came[key_of(call, rank)] for call in waited), default=event.started)
        yield Waiting(event.started, event.finished, last)
