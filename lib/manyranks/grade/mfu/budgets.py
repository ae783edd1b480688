"""The task time_budget: where each rank's step went, from its spans and the moments at which all ranks came to each call."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch.distributed as dist

from manyranks.grade.mfu import amounts
from manyranks.grade.mfu.amounts import SECONDS, Amounts, aspect
from manyranks.grade.mfu.given import Span
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.mfu.trace import (
    CALLS,
    COMMUNICATION,
    MATMUL,
    OTHER,
    PARTS,
    PYTHON,
    UNIT,
    WAIT,
    WAITING,
    Op,
    Python,
    Start,
    Trace,
    Wait,
    recorded,
)
from manyranks.grade.mfu.traffic import one_message
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

CALL = "time_budget(spans, arrived, step, zero)"
_NESTED = "nested operators are counted twice: a moment belongs to the innermost span that covers it, and to no other"
_OUTERMOST = "a moment belongs to the innermost span that covers it, not to the outermost one"
_CALLS = "'calls' spans are counted as operators: they only call others. What no operator inside them covers is Python's"
_IN_CALLS = 'what is inside a "calls" span is forgotten: its operators and waits count as any other'
_BEHIND = "communication is counted from when all had come, also while this rank computed: only what it waits for is exposed"
_ALL_OVERLAPPED = "communication is counted from when this rank came to the call: only what it waits for is exposed"
_NO_WAITING = (
    "waiting is counted as communication: until the last rank has come to the call nothing is on its way. That takes the "
    "others' moments, and of each call the largest, op=dist.ReduceOp.MAX"
)
_ALL_WAITING = (
    "communication is counted as waiting: when the last rank has come, the bytes are on their way. An all-reduce adds the "
    "moments unless op=dist.ReduceOp.MAX"
)
_OWN_ARRIVAL = (
    "waiting is counted from when this rank came to the call: an asynchronous call returns at once, and what the rank did "
    "before its wait is no waiting"
)
_NEGATIVE = "where the last rank had come before the wait began, there is no waiting: 0, not less"
_CLOCKS = (
    "the moments are on clocks that began at different times: `zero` of each is one and the same moment, so subtract it before "
    "moments are compared, and add it for your own clock"
)
_NOT_BACK = "the largest moments are counted from zero: add this rank's zero before you compare them with its spans"
_NO_PYTHON = "Python is forgotten: what no operator and no wait covers, between the step's begin and its end"
_PYTHON_WAITS = "the waits are in Python's part, too: it is what is left of the step when all others are subtracted"
_FROM_SPANS = "the step begins and ends as `step` says: what is before the first span and behind the last is Python's, too"
_LEFT = "what is wrong in the other parts is missing here, or too much: mend them first"
_NOT_ALL = "one number for each call is enough: the moment at which this rank came to it"
_UNEXPLAINED = (
    "each moment of the step belongs to the innermost span that covers it; of a wait, what is before the last rank's moment is "
    'waiting, the rest communication; "calls" and what is not covered is python'
)
_OPERATORS, _NETWORK = (MATMUL, OTHER), (COMMUNICATION, WAITING)


class Case(NamedTuple):
    """The ranks' traces, and where their time went. note: which calls there are."""

    n: int
    traces: list[Trace]
    parts: list[Amounts]
    what: str

    @property
    def count(self) -> int:
        """Numbers that a rank sends."""
        return len(self.traces[0].arrived)


class Rule(NamedTuple):
    """How a rank's budget is made; the defaults are right.

    covers: "innermost", "outermost" or "all" spans that a moment belongs to; calls: the part of the kind "calls", and whether
    what is inside counts; zeros: whether moments are sent from zero, and put back on the rank's own clock; choose: among the
    ranks' moments; begins: of waiting, by the wait and the rank's own moment; floor: whether waiting is 0 at least; ends: from
    when communication counts, of the wait's beginning, the last moment and the rank's own.
    """

    covers: str = "innermost"
    calls: str = PYTHON
    inside: bool = True
    sent: bool = True
    back: bool = True
    choose: Callable = max
    begins: Callable[[Span, float], float] = lambda wait, own: wait.started
    floor: bool = True
    exposed: Callable[[Span, float, float], float] | None = None


RIGHT = Rule()


def result(case: Case, rank: int, rule: Rule = RIGHT) -> Amounts:
    """This rank's."""
    trace = case.traces[rank]
    last = [rule.choose(moments) for moments in zip(*(_sent(one, rule) for one in case.traces), strict=True)]
    last = [moment + trace.zero * (rule.sent and rule.back) for moment in last]
    found = dict.fromkeys(PARTS, 0.0)
    for span in trace.spans:
        seconds = _seconds(trace, span, rule)
        if span.kind in _OPERATORS:
            found[span.kind] += seconds
        elif span.kind == CALLS and rule.calls != PYTHON:
            found[rule.calls] += seconds
        elif span.kind == WAIT and (seconds or span.started == span.finished):
            waiting = min(last[span.call], span.finished) - rule.begins(span, trace.arrived[span.call])
            waiting = max(0.0, waiting) if rule.floor else waiting
            found[WAITING] += waiting
            exposed = rule.exposed and rule.exposed(span, last[span.call], trace.arrived[span.call])
            found[COMMUNICATION] += span.finished - span.started - waiting if exposed is None else exposed
    found[PYTHON] = trace.step[1] - trace.step[0] - sum(found.values())
    return found


def _sent(trace: Trace, rule: Rule) -> list[float]:
    return [moment - trace.zero * rule.sent for moment in trace.arrived]


def _seconds(trace: Trace, span: Span, rule: Rule) -> float:
    """Of the span, as far as it is covered by no other that counts instead."""
    inner = [one for one in trace.spans if one is not span and span.started <= one.started and one.finished <= span.finished]
    outer = [one for one in trace.spans if one is not span and one.started <= span.started and span.finished <= one.finished]
    if rule.covers == "outermost" and any(one.kind != CALLS for one in outer):
        return 0.0
    if not rule.inside and any(one.kind == CALLS for one in outer):
        return 0.0
    if rule.covers != "innermost":
        return span.finished - span.started
    direct = [one for one in inner if not any(_within(one, other) for other in inner)]
    return span.finished - span.started - sum(one.finished - one.started for one in direct)


def _within(one: Span, other: Span) -> bool:
    return one is not other and other.started <= one.started and one.finished <= other.finished


def _after_last(wait: Span, last: float, own: float) -> float:
    return wait.finished - max(wait.started, last)


_OF_ONE: list[tuple[str, str, Rule]] = [
    (MATMUL, _NESTED, Rule(covers="all")),
    (OTHER, _NESTED, Rule(covers="all")),
    (OTHER, _CALLS, Rule(calls=OTHER)),
    (COMMUNICATION, _BEHIND, Rule(exposed=lambda wait, last, own: wait.finished - last)),
    (COMMUNICATION, _ALL_OVERLAPPED, Rule(exposed=lambda wait, last, own: wait.finished - own)),
    (COMMUNICATION, _NO_WAITING, Rule(choose=lambda moments: -1e9)),
    (WAITING, _OWN_ARRIVAL, Rule(begins=lambda wait, own: own)),
    (WAITING, _ALL_WAITING, Rule(choose=lambda moments: 1e9)),
]
_RULES: list[tuple[tuple[str, ...], str, Rule]] = [
    (_OPERATORS, _NESTED, Rule(covers="all")),
    (_OPERATORS, _OUTERMOST, Rule(covers="outermost")),
    (_OPERATORS, _CALLS, Rule(calls=OTHER)),
    (_OPERATORS, _IN_CALLS, Rule(inside=False)),
    (_NETWORK, _CLOCKS, Rule(sent=False)),
    (_NETWORK, _NOT_BACK, Rule(back=False)),
    (_NETWORK, _NO_WAITING, Rule(choose=lambda moments: -1e9)),
    (_NETWORK, _ALL_WAITING, Rule(choose=lambda moments: 1e9)),
    (_NETWORK, _OWN_ARRIVAL, Rule(begins=lambda wait, own: own)),
    (_NETWORK, _OWN_ARRIVAL, Rule(begins=lambda wait, own: own, exposed=_after_last)),
    (_NETWORK, _NEGATIVE, Rule(floor=False)),
    (_NETWORK, _NEGATIVE, Rule(floor=False, exposed=_after_last)),
    (_NETWORK, _BEHIND, Rule(exposed=lambda wait, last, own: wait.finished - last)),
    (_NETWORK, _ALL_OVERLAPPED, Rule(exposed=lambda wait, last, own: wait.finished - own)),
    (_NETWORK, _ALL_OVERLAPPED, Rule(choose=lambda moments: -1e9, exposed=lambda wait, last, own: wait.finished - own)),
    (_NETWORK, _IN_CALLS, Rule(inside=False)),
    *(((name,), hint, rule) for name, hint, rule in _OF_ONE),
]


def _wrong(case: Case) -> Iterator[tuple[str, list[Amounts]]]:
    """By operators, by waits, then by what is left."""
    for names, hint, rule in _RULES:
        found = [result(case, rank, rule) for rank in range(case.n)]
        yield hint, [{name: own[name] for name in names} for own in found]
    yield _NO_PYTHON, [{PYTHON: 0.0}] * case.n
    operators = [sum(own[name] for name in _OPERATORS) for own in case.parts]
    lengths = [trace.step[1] - trace.step[0] for trace in case.traces]
    yield _PYTHON_WAITS, [{PYTHON: length - busy} for length, busy in zip(lengths, operators, strict=True)]
    waits = [own[WAITING] for own in case.parts]
    lefts = [own[PYTHON] for own in case.parts]
    yield _PYTHON_WAITS, [{PYTHON: left + wait} for left, wait in zip(lefts, waits, strict=True)]
    ends = [max(span.finished for span in trace.spans) - trace.spans[0].started for trace in case.traces]
    shorter = [length - end for length, end in zip(lengths, ends, strict=True)]
    yield _FROM_SPANS, [{PYTHON: left - less} for left, less in zip(lefts, shorter, strict=True)]
    yield _CALLS, [{PYTHON: left - of_calls} for left, of_calls in zip(lefts, _of_calls(case), strict=True)]


def _of_calls(case: Case) -> list[float]:
    return [result(case, rank, Rule(calls=OTHER))[OTHER] - own[OTHER] for rank, own in enumerate(case.parts)]


def _run(case: Case, function: Callable, watch) -> Tensors:
    trace = case.traces[dist.get_rank()]
    with own():
        found = function(list(trace.spans), list(trace.arrived), trace.step, trace.zero)
    return amounts.named(found, PARTS, CALL)


@cache
def cases(n: int) -> list[Scene]:
    """Calls that are waited for at once; calls that run while the rank computes."""
    zeros = [UNIT * (11 + 14 * (3 * rank % (n + 1))) for rank in range(n)]
    begin = [8 + 3 * rank for rank in range(n)]
    plans = {"calls that are waited for at once": _plain, "asynchronous calls": _hidden}
    made = {what: recorded([plan(rank) for rank in range(n)], begin, zeros) for what, plan in plans.items()}
    return [_scene(Case(n, *both, what)) for what, both in made.items()]


def _plain(rank: int) -> tuple:
    """Operators in operators; the ranks come at different times, and each is the last one once."""
    slow = [40, 90, 65, 110][rank]
    linear = Op("linear", CALLS, 3, (Op("addmm", MATMUL, slow),), 2)
    layer = Op("layer", CALLS, 7, (linear, Python(4), Op("norm", OTHER, 9, (Op("mean", OTHER, 5),), 6)), 1)
    attention = Op("attention", OTHER, 6, (Op("bmm", MATMUL, 30 - 7 * (rank % 3)), Op("softmax", OTHER, 8)), 10)
    waits = (Start(0, 25), Wait(0), Python(3), layer, Start(1, 14), Op("sync", CALLS, 2, (Wait(1),), 1))
    late = 55 if rank == 0 else 5 + 2 * rank
    return (Python(11), layer, *waits, Op("update", OTHER, late), attention, Start(2, 31), Wait(2), Python(9))


def _hidden(rank: int) -> tuple:
    """Of three calls one ends behind what is computed, one is waited for too early, and for one a rank comes late."""
    late = [5, 190, 220, 33][rank]
    product = Op("mm", MATMUL, 60 + 10 * (rank % 2))
    block = Op("block", CALLS, 4, (Op("matmul", CALLS, 1, (product,), 2), Op("gelu", OTHER, 12)), 3)
    first = (Op("embedding", OTHER, late), Start(0, 20), block, Start(1, 150), Op("mm", MATMUL, 25))
    second = (Op("backward", CALLS, 2, (Wait(0), block, Start(2, 40), Python(6)), 2), Wait(1))
    return (Python(7), *first, *second, Op("add_", OTHER, 15 + 4 * rank), Wait(2), Python(13))


def _scene(case: Case) -> Scene:
    right, wrong = [amounts.exact(own) for own in case.parts], partial(_wrong, case)
    return Scene(case.n, partial(_run, case), right, lambda: amounts.mistakes(right, wrong()), case, f"with {case.what}")


def _adds_up(task: "TimeBudget", trial: Trial) -> Verdict:
    """The parts are the step."""
    for rank, seen in enumerate(trial.answers):
        begun, ended = trial.case.must.traces[rank].step
        parts = {name: seen.tensors[name].item() for name in PARTS}
        below = [f"rank {rank}: {name} is {SECONDS(part)}" for name, part in parts.items() if part < -UNIT / 1000]
        if below:
            return Verdict(False, below[0], "no part is below 0: what is too much in one of the others is missing here")
        if not abs(sum(parts.values()) - (ended - begun)) < UNIT / 1000:
            found = f"rank {rank}: the parts add up to {SECONDS(sum(parts.values()))}, the step took {SECONDS(ended - begun)}"
            return Verdict(False, found, "each moment of the step belongs to one part: none twice, none to nobody")
    return Verdict(True)


@dataclass(frozen=True)
class TimeBudget(MfuTask):
    measured: ClassVar[str] = "right is"
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("the operators' time is right", 0.3, _OPERATORS, SECONDS),
        aspect("communication and waiting are right", 0.3, _NETWORK, SECONDS),
        aspect("Python has what is left", 0.1, (PYTHON,), SECONDS),
        Aspect("the parts add up to the step", 0.1, _adds_up, each_world=True),
        one_message("sends the moments of its calls, once", 0.2, _NOT_ALL),
    )

    def otherwise(self, trial: Trial, name: str) -> str:
        """Python's part is wrong where another one is."""
        pairs = [(seen.tensors, right) for seen, right in zip(trial.answers, trial.case.expected, strict=True)]
        others = all(amounts.alike(got[other], right[other]) for got, right in pairs for other in PARTS[:-1])
        return "" if others or name != PYTHON else _LEFT
