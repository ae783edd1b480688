"""Sick clusters: steps that ran on real ranks, the times that a cluster of small nodes takes for them, and what ails it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from manyranks.grade.nd import cluster, layouts
from manyranks.grade.nd.cluster import DATA, Forgotten, Work
from manyranks.grade.nd.given import Call, Run, Span
from manyranks.theory.charges import ClusterCosts
from manyranks.theory.cluster import Cluster, Level
from manyranks.theory.hardware import Accelerator, Link
from manyranks.timeline import Program, Timeline, replay
from manyranks.timeline.costs import Transfer
from manyranks.timeline.program import Collective, Compute, Recv, Send
from manyranks.timeline.program import Work as Charged
from manyranks.timeline.spans import COMMUNICATION, COMPUTE
from manyranks.world.measurement import Measurement, payload
from manyranks.world.programs import key_of
from manyranks.world.world import World

COMPUTES, SENDS = "computes", "sends"
_RANKS = 8
_COMMUNICATE = (Send, Recv, Collective)
_SOURCE = "round numbers: a layer of the small step takes as long as its messages"
_CHIP = Accelerator("small", 20e6, 1e9, 1e9, 20e6, 4e6, _SOURCE)


class Slow(NamedTuple):
    """A rank that computes, or sends and receives between nodes, so many times slower."""

    rank: int
    cause: str
    times: float


class Sick(NamedTuple):
    """A cluster of up to 8 ranks. sizes: the outermost axis first; node: GPUs in one; forgotten, slow: what ails it."""

    sizes: tuple[tuple[str, int], ...]
    node: int
    work: Work = Work()
    forgotten: Forgotten | None = None
    slow: Slow | None = None


@dataclass(frozen=True)
class _Costs(ClusterCosts):
    """With a slow rank."""

    slow: Slow | None = None

    def compute(self, rank: int, work) -> float:
        return super().compute(rank, work) * self._times(COMPUTES, rank, rank)

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        return self._slowed(super().message(source, destination, bytes), (source, destination))

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer:
        return self._slowed(super().collective(op, bytes, ranks), ranks)

    def _slowed(self, transfer: Transfer, ranks: tuple[int, ...]) -> Transfer:
        times = self._times(SENDS, *ranks) if self.cluster.level_of(min(ranks), max(ranks)) else 1.0
        return transfer._replace(latency=transfer.latency * times, amount=transfer.amount * times)

    def _times(self, cause: str, *ranks: int) -> float:
        return self.slow.times if self.slow and self.slow.cause == cause and self.slow.rank in ranks else 1.0


@cache
def recorded(sicks: tuple[Sick, ...]) -> tuple[Run, ...]:
    """What was recorded of one step of each: all on the same ranks, one after the other."""
    ran: dict[Sick, Measurement] = {}
    with World(_RANKS, backend="gloo", timeout=60) as world:
        for sick in dict.fromkeys(one._replace(slow=None) for one in sicks):
            ran[sick] = world.measure(cluster.step, dict(sick.sizes), sick.work, sick.forgotten)
    return tuple(_run(sick, ran[sick._replace(slow=None)]) for sick in sicks)


def _run(sick: Sick, measured: Measurement) -> Run:
    numbers, done, sizes = _numbers(measured), measured.results, dict(sick.sizes)
    ranks = range(layouts.count(sizes))
    calls = [[_call(call, rank, done[rank].names, numbers, sizes) for call in measured.calls[rank]] for rank in ranks]
    program = _with_compute(measured.program, [one.flops for one in done])
    timeline = replay(program, _Costs(_small(sick.node), slow=sick.slow))
    spans = [list(_spans(program, timeline, rank, mine)) for rank, mine in enumerate(calls)]
    return Run(sizes, sick.node, calls, spans, [done[rank].weights for rank in ranks])


def _small(node: int) -> Cluster:
    levels = Level("node", node, Link("near", 5e-6, _CHIP.scale_up)), Level("network", 1024, Link("far", 20e-6, _CHIP.nic))
    return Cluster("small", _CHIP, levels, source=_SOURCE)


def _numbers(measured: Measurement) -> dict[tuple, int]:
    """Call -> a number, the same for all ranks that take part."""
    keys = (key_of(call, rank) for rank, issued in measured.calls.items() for call in issued)
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def _call(call, rank: int, names: dict[str, str], numbers: dict[tuple, int], sizes: dict[str, int]) -> Call:
    number = numbers[key_of(call, rank)]
    if call.op in ("send", "recv"):
        ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        return Call(number, call.op, "pp", ends, payload(call, rank))
    axis = names[call.group]
    axis = "dp" if axis == DATA and "cp" not in sizes else axis
    return Call(number, call.op, axis, call.ranks, payload(call, rank))


def _with_compute(program: Program, flops: list[list[int]]) -> Program:
    """With the products before each call, which is waited for at once."""
    ranks = []
    for instructions, before in zip(program.ranks, flops, strict=True):
        calls = [one._replace(handle=None) for one in instructions if isinstance(one, _COMMUNICATE)]
        pairs = zip(before, calls, strict=True)
        ranks.append([one for done, call in pairs for one in (Compute("compute", Charged(done)), call)])
    return Program(ranks)


def _spans(program: Program, timeline: Timeline, rank: int, calls: list[Call]) -> Iterator[Span]:
    """What the rank did: a call lasts from when the rank came to it."""
    computed, sent = iter(timeline.of(rank, COMPUTE)), iter(timeline.of(rank, COMMUNICATION))
    now, issued = 0.0, iter(calls)
    for instruction in program.ranks[rank]:
        if type(instruction) is Compute and instruction.work.flops:
            span = next(computed)
            yield Span("compute", now, span.finished)
            now = span.finished
        elif isinstance(instruction, _COMMUNICATE):
            end = max(now, next(sent).finished)
            yield Span("call", now, end, next(issued).number)
            now = end


def mesh(**degrees: int) -> tuple[tuple[str, int], ...]:
    """The outermost axis first."""
    return tuple(degrees.items())


def traffic(run: Run) -> dict[str, float]:
    """Bytes that a rank sends along each axis, in the mean over ranks."""
    sent = dict.fromkeys(run.sizes, 0.0)
    for call in (call for mine in run.calls for call in mine):
        sent[call.axis] += call.sent / len(run.calls)
    return sent


def first(letter: str) -> Run:
    """The first cluster of each kind, which learners see; "A", "B" or "C". Raises ValueError for another letter."""
    if letter not in KINDS:
        raise ValueError(f"sick({letter!r}): there are {', '.join(map(repr, KINDS))}")
    return kind(letter)[0]


def kind(letter: str) -> list[Run]:
    """All of one kind."""
    runs = recorded(tuple(one for sicks in KINDS.values() for one in sicks))
    before = sum(len(KINDS[other]) for other in KINDS if other < letter)
    return list(runs[before : before + len(KINDS[letter])])


# A: axes that lie across nodes; B: an axis that is forgotten when gradients are averaged; C: a slow rank.
KINDS: dict[str, list[Sick]] = {
    "A": [
        Sick(mesh(tp=2, pp=2, dp=2), 4, Work(tokens=64)),
        Sick(mesh(pp=2, dp=2, tp=2), 2, Work(tokens=4, width=64)),
        Sick(mesh(tp=4, dp=2), 4, Work(tokens=48)),
        Sick(mesh(dp=2, tp=2, pp=2), 2, Work(tokens=24, head=224)),
        Sick(mesh(dp=2, pp=2, tp=2), 4, Work(tokens=24)),
        Sick(mesh(tp=2, dp=2, pp=2), 2, Work(tokens=24, head=120)),
        Sick(mesh(tp=2, dp=4), 2, Work(tokens=24)),
        Sick(mesh(dp=2, pp=3), 3, Work(tokens=64, width=16, layers=1, more=(0, 5, 0))),
    ],
    "B": [
        Sick(mesh(dp=2, cp=2, tp=2), 4, forgotten=Forgotten("cp")),
        Sick(mesh(cp=2, tp=2, dp=2), 4, forgotten=Forgotten("dp")),
        Sick(mesh(pp=2, dp=2, cp=2), 4, forgotten=Forgotten("cp", stage=1)),
        Sick(mesh(tp=2, cp=2, dp=2), 2, Work(head=32), Forgotten("cp")),
        Sick(mesh(pp=2, dp=2, cp=2), 4, forgotten=Forgotten("cp", stage=0)),
        Sick(mesh(cp=2, pp=2, dp=2), 4, forgotten=Forgotten("dp", stage=0)),
        Sick(mesh(cp=2, pp=2, dp=2), 4, forgotten=Forgotten("dp", stage=1)),
    ],
    "C": [
        Sick(mesh(pp=2, dp=2, tp=2), 2, slow=Slow(5, COMPUTES, 1.5)),
        Sick(mesh(dp=2, pp=2, tp=2), 2, slow=Slow(3, SENDS, 4.0)),
        Sick(mesh(dp=2, tp=2, pp=2), 4, Work(head=64), slow=Slow(2, COMPUTES, 1.4)),
        Sick(mesh(pp=2, tp=2, dp=2), 2, slow=Slow(6, SENDS, 3.0)),
        Sick(mesh(pp=3, dp=2), 2, slow=Slow(0, SENDS, 3.0)),
    ],
}
