"""The task straggler: the rank that everybody waits for, and whether it computes or sends slowly."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from manyranks.grade.journal import Stopped
from manyranks.grade.nd import answers, clusters, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.clusters import COMPUTES, KINDS, SENDS
from manyranks.grade.nd.given import Call, Run
from manyranks.grade.nd.task import NdTask
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

CALL = "straggler(run)"
_RANK, _CAUSE = "the rank", "the cause"
_PAIR = f'it returns a pair: a rank, and "{COMPUTES}" or "{SENDS}"'
_VICTIM = (
    "that rank waits for others, and is the one that suffers: who makes others wait comes to each call last, and waits least"
)
_MOST_COMPUTE = (
    "that rank computes longest because its stage has more to do: compare it with ranks of the same stage, which have the same "
    "work"
)
_NOT_BY_COMPUTE = (
    "where all ranks of a stage compute equally long, none of them computes slowly: look at the calls between nodes"
)
_PARTNER = (
    "that is a partner of the slow rank: both are in a slow call. Only the slow one is slow in all its calls between nodes, "
    "along each axis"
)
_NOT_ITS_STAGE = (
    "that rank is on a stage with more work: compare its compute spans with ranks of its own stage, by the coordinate of pp; "
    "rank + 1 may be on another one"
)
_ADDED_UP = (
    "that rank has the most, or the longest, calls: do not add up their times. Compare each with the fastest of its op, axis "
    "and sent"
)
_INSIDE_TOO = "calls inside a node do not use the slow link: leave them out"
_WAITING_TOO = "a span has waiting in it: a call's own time is the shortest span among its ranks"
_NUMBER = "a call's number is not its place in the list: {c.number: c for c in run.calls[rank]} finds it"
_LEAST_WAIT = "a rank that waits little may still be as fast as the others: the time of its own work tells"
_FIRST = "that is what the first cluster had: read it off the spans"
_NEVER = "that is not rank 0: read it off the spans"
_SWAPPED = (
    f'"{COMPUTES}" where its compute spans are longer than those of ranks with the same work, "{SENDS}" where they are not'
)
_ALWAYS_COMPUTES = f'compute spans are equal within a stage in some clusters: the cause is "{SENDS}" there'
_ALWAYS_SENDS = f'compute spans of one rank are longer than its stage\'s in some clusters: the cause is "{COMPUTES}" there'
_UNEXPLAINED = (
    "first compare compute seconds within each stage. If these are equal: a call's own time is its ranks' shortest span, "
    "the last one's. Compare it with calls of the same axis and bytes; the slow rank is in no fast one between nodes"
)


def _seconds(run: Run, kind: str) -> list[float]:
    return [sum(span.finished - span.started for span in mine if span.kind == kind) for mine in run.spans]


def _own_time(run: Run) -> dict[int, float]:
    """Of each call, without waiting: the shortest of its ranks' spans."""
    found: dict[int, float] = {}
    for mine in run.spans:
        for span in mine:
            if span.call is not None:
                found[span.call] = min(found.get(span.call, float("inf")), span.finished - span.started)
    return found


def _in_slow_calls(run: Run) -> list[int]:
    """Ranks in a call between nodes that takes longer than others of its axis and size."""
    times, alike = _own_time(run), _fastest(run)
    calls = [call for mine in run.calls for call in mine if call.sent]
    return sorted({rank for call in calls for rank in call.ranks if times[call.number] > 1.2 * alike[_kind(call)]})


def _fastest(run: Run) -> dict[tuple, float]:
    """Kind of calls -> the shortest own time."""
    times, alike = _own_time(run), {}
    for call in (call for mine in run.calls for call in mine if call.sent):
        alike[_kind(call)] = min(alike.get(_kind(call), float("inf")), times[call.number])
    return alike


def _kind(call: Call) -> tuple:
    return call.op, call.axis, call.sent


def _far(run: Run, rank: int) -> list[Call]:
    """The rank's calls between nodes."""
    return [call for call in run.calls[rank] if len({one // run.node for one in call.ranks}) > 1]


def _link(find: Callable[[Run], int]) -> Callable[[Run], Parts]:
    """Right where a rank computes slowly, and by `find` where it sends slowly."""
    return lambda run: {_RANK: find(run) if _right(run)[_CAUSE] == SENDS else _right(run)[_RANK]}


def _by_sum(run: Run, far: bool) -> int:
    """The largest sum of calls' own times."""
    times = _own_time(run)
    return _at(max, [sum(times[c.number] for c in (_far(run, r) if far else mine)) for r, mine in enumerate(run.calls)])


def _by_any_call(run: Run) -> int:
    """The largest ratio in its fastest call, inside nodes too."""
    times, alike = _own_time(run), _fastest(run)
    return _at(max, [min(times[c.number] / alike[_kind(c)] for c in mine if c.sent) for mine in run.calls])


def _by_spans(run: Run) -> int:
    """The largest sum of its own spans of calls between nodes."""
    far = [{call.number for call in _far(run, rank)} for rank in range(len(run.calls))]
    return _at(
        max, [sum(s.finished - s.started for s in mine if s.call in own) for mine, own in zip(run.spans, far, strict=True)]
    )


def _beside_its_neighbour(run: Run) -> Parts:
    """Compares compute times of ranks 2k and 2k + 1."""
    times = _seconds(run, "compute")
    ratios = [mine / times[rank ^ 1] for rank, mine in enumerate(times)]
    return {_RANK: _at(max, ratios) if max(ratios) > 1.2 else _right(run)[_RANK]}


def _at(choose: Callable, values: list[float]) -> int:
    return values.index(choose(values))


def _partner(run: Run) -> int:
    """A rank in a slow call that is not the slow one."""
    rank = _right(run)[_RANK]
    return next((other for other in _in_slow_calls(run) if other != rank), rank)


def _tp_partner(run: Run) -> int:
    rank = _right(run)[_RANK]
    return next((other for other in layouts.group_of(rank, run.sizes, ("tp",)) if other != rank), rank)


def _right(run: Run) -> Parts:
    """It was made so."""
    sick = KINDS["C"][next(i for i, one in enumerate(clusters.kind("C")) if one.spans == run.spans)].slow
    return {_RANK: sick.rank, _CAUSE: sick.cause}


_SLIPS = (
    Slip(_WAITING_TOO, _link(_by_spans)),
    Slip(_INSIDE_TOO, _link(_by_any_call)),
    Slip(_ADDED_UP, _link(lambda run: _by_sum(run, far=True))),
    Slip(_ADDED_UP, _link(lambda run: _by_sum(run, far=False))),
    Slip(_NOT_ITS_STAGE, _beside_its_neighbour),
    Slip(_VICTIM, lambda run: {_RANK: _at(max, [mine[-1].finished for mine in run.spans])}),
    Slip(_VICTIM, lambda run: {_RANK: _at(max, _seconds(run, "call"))}),
    Slip(_MOST_COMPUTE, lambda run: {_RANK: _at(max, _seconds(run, "compute"))}),
    Slip(_NOT_BY_COMPUTE, lambda run: {_RANK: _at(min, _seconds(run, "compute"))}),
    Slip(_LEAST_WAIT, lambda run: {_RANK: _at(min, _seconds(run, "call"))}),
    Slip(_PARTNER, lambda run: {_RANK: _partner(run)}),
    Slip(_PARTNER, lambda run: {_RANK: min(_in_slow_calls(run), default=_right(run)[_RANK])}),
    Slip(_VICTIM, lambda run: {_RANK: _tp_partner(run)}),
    Slip(_FIRST, lambda run: {_RANK: KINDS["C"][0].slow.rank}),
    Slip(_NEVER, lambda run: {_RANK: 0}),
    Slip(_SWAPPED, lambda run: {_CAUSE: {COMPUTES: SENDS, SENDS: COMPUTES}[_right(run)[_CAUSE]]}),
    Slip(_ALWAYS_COMPUTES, lambda run: {_CAUSE: COMPUTES}),
    Slip(_ALWAYS_SENDS, lambda run: {_CAUSE: SENDS}),
)


def _asked(function: Callable, question: tuple) -> Parts:
    rank, cause = answers.pair(function(deepcopy(question[0])), CALL, _PAIR)
    if cause not in (COMPUTES, SENDS):
        raise Stopped(f"the cause is {cause!r:.60}", _PAIR)
    return {_RANK: answers.whole(rank, "the rank", _PAIR), _CAUSE: cause}


@cache
def cases(n: int) -> list[Scene]:
    """The cluster that learners have seen, and others."""
    questions = [(run,) for run in clusters.kind("C")]
    return [answers.of_clusters(Exam(questions, _asked, _right, _SLIPS, answers.same))]


@dataclass(frozen=True)
class Straggler(NdTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = ((r"IndexError|KeyError: \d", _NUMBER), *NdTask.advice)
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("finds the rank that everybody waits for", 0.7, _RANK),
        aspect("and whether it computes slowly, or sends slowly", 0.3, _CAUSE),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in question[0].sizes.items())
        return f"with {degrees} on nodes of {question[0].node}: {part} you have is {got}; right is {right}"
