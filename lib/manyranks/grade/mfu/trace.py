"""Steps of several ranks that never ran: programs on a virtual clock, with what a profiler would note of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from manyranks.grade.mfu.given import Span

MATMUL, OTHER, COMMUNICATION, WAITING, PYTHON = PARTS = ("matmul", "other", "communication", "waiting", "python")
CALLS, WAIT = "calls", "wait"  # kinds of spans besides MATMUL and OTHER
UNIT = 2.0**-10  # seconds; sums of such times are exact


class Op(NamedTuple):
    """An operator, or a module: works for `before` units, then does what is inside, then works for `after` units."""

    name: str
    kind: str
    before: int
    inside: tuple = ()
    after: int = 0


class Python(NamedTuple):
    """Units in no operator."""

    units: int


class Start(NamedTuple):
    """A collective begins: it takes so many units once all ranks have come to it."""

    call: int
    units: int


class Wait(NamedTuple):
    """The rank waits for its end."""

    call: int


class Trace(NamedTuple):
    """A rank's. spans: in the order of their beginnings; arrived: when it came to each call; step: from, to; zero: what its
    clock showed when all ranks left a barrier together.
    """

    spans: list[Span]
    arrived: list[float]
    step: tuple[float, float]
    zero: float


@dataclass
class _Rank:
    now: float
    zero: float
    spans: list[Span] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def works(self, part: str, units: float) -> None:
        self.parts[part] += units * UNIT
        self.now += units * UNIT


def recorded(programs: list[tuple], begin: list[int], zeros: list[float]) -> tuple[list[Trace], list[dict[str, float]]]:
    """What each rank's profiler notes, and where its time went. begin: units from the barrier to the step; zeros: of clocks."""
    ranks = [_Rank(units * UNIT, zero) for units, zero in zip(begin, zeros, strict=True)]
    durations: dict[int, int] = {}
    running = [_run(rank, program, ranks, durations) for rank, program in zip(ranks, programs, strict=True)]
    left = list(running)
    while left:
        left = [one for one in left if next(one, "over") != "over"]
    traces = []
    for rank, units in zip(ranks, begin, strict=True):
        spans = sorted(rank.spans, key=lambda span: (span.started, -span.finished))
        arrived = [rank.zero + rank.arrived[call] for call in sorted(rank.arrived)]
        traces.append(Trace(spans, arrived, (rank.zero + units * UNIT, rank.zero + rank.now), rank.zero))
    return traces, [rank.parts for rank in ranks]


def _run(rank: _Rank, program: tuple, ranks: list[_Rank], durations: dict[int, int]) -> Iterator[None]:
    """Goes on as far as it can; yields where it has to wait for a rank that has not come so far."""
    for item in program:
        if type(item) is Python:
            rank.works(PYTHON, item.units)
        elif type(item) is Start:
            rank.arrived[item.call] = rank.now
            durations[item.call] = item.units
        elif type(item) is Wait:
            while any(item.call not in one.arrived for one in ranks):
                yield
            _waits(rank, item.call, ranks, durations)
        else:
            started = rank.now
            own = PYTHON if item.kind == CALLS else item.kind
            rank.works(own, item.before)
            yield from _run(rank, item.inside, ranks, durations)
            rank.works(own, item.after)
            rank.spans.append(_span(rank, item.name, item.kind, started))


def _waits(rank: _Rank, call: int, ranks: list[_Rank], durations: dict[int, int]) -> None:
    started, last = rank.now, max(one.arrived[call] for one in ranks)
    done = max(started, last + durations[call] * UNIT)
    rank.parts[WAITING] += max(0.0, last - started)
    rank.parts[COMMUNICATION] += done - max(started, last)
    rank.now = done
    rank.spans.append(_span(rank, "wait", WAIT, started, call))


def _span(rank: _Rank, name: str, kind: str, started: float, call: int | None = None) -> Span:
    return Span(name, kind, rank.zero + started, rank.zero + rank.now, call)
