"""Where a rank's time went, by its spans and the ranks' moments: the rule, what may be wrong in it, and its hints."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from manyranks.grade.mfu.amounts import Amounts
from manyranks.grade.mfu.given import Span
from manyranks.grade.mfu.trace import CALLS, COMMUNICATION, MATMUL, OTHER, PARTS, PYTHON, WAIT, WAITING, Trace

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
_WHICH = (
    "the last rank is the one that comes last, in each call another: take the largest of all moments, "
    "not the moment of the rank with the largest number"
)
_WHOLE_WAITS = "where the last rank comes in the middle of a wait, what is before is waiting, and what is after communication"
_CROSSED = "communication and waiting are swapped: until the last rank has come it is waiting"
_STEP = "moments are counted from the step's begin, which is not the same moment on all ranks: `zero` is"
_BETWEEN = "what no span covers is Python's, too, not only the own time of 'calls'"
_THROUGH = "time is taken away twice: a span's own time is what the spans directly in it leave"
_ORDER = "`call` says which collective a wait is for: ranks need not wait for them in their order"
_IN_OPERATORS = "a wait inside an operator is a wait: not the operator's time"
OPERATORS, NETWORK = (MATMUL, OTHER), (COMMUNICATION, WAITING)


class Case(NamedTuple):
    """The ranks' traces, and where their time went. what: which calls there are."""

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

    covers: "innermost", "outermost" or "all" spans that a moment belongs to, or "through": all inside are taken away; blind: a
    kind that nothing is taken away for; calls: the part of the kind "calls"; inside: whether what is in them counts; since:
    from when moments are sent; back: how often zero is added again; choose: among the ranks' moments; ordered: whether waits
    are for the calls in their order; begins: of waiting, by the wait and the rank's own moment; floor: whether waiting is 0 at
    least; whole: whether a wait is all waiting; exposed: communication, of the wait, the last moment and the rank's own.
    """

    covers: str = "innermost"
    blind: str = ""
    calls: str = PYTHON
    inside: bool = True
    since: Callable[[Trace], float] = lambda trace: trace.zero
    back: Callable[[Trace], float] = lambda trace: trace.zero
    choose: Callable = max
    ordered: bool = False
    begins: Callable[[Span, float], float] = lambda wait, own: wait.started
    floor: bool = True
    whole: bool = False
    exposed: Callable[[Span, float, float], float] | None = None


RIGHT = Rule()


def result(case: Case, rank: int, rule: Rule = RIGHT) -> Amounts:
    """This rank's."""
    trace = case.traces[rank]
    last = [rule.choose(moments) for moments in zip(*(_sent(one, rule) for one in case.traces), strict=True)]
    last = [moment + rule.back(trace) for moment in last]
    waits = [span for span in trace.spans if span.kind == WAIT]
    found = dict.fromkeys(PARTS, 0.0)
    for span in trace.spans:
        seconds = _seconds(trace, span, rule)
        if span.kind in OPERATORS:
            found[span.kind] += seconds
        elif span.kind == CALLS and rule.calls != PYTHON:
            found[rule.calls] += seconds
        elif span.kind == WAIT and (seconds or span.started == span.finished):
            moment = last[waits.index(span) if rule.ordered else span.call]
            waiting, exposed = _of_wait(span, moment, trace.arrived[span.call], rule)
            found[WAITING] += waiting
            found[COMMUNICATION] += exposed
    found[PYTHON] = trace.step[1] - trace.step[0] - sum(found.values())
    return found


def _of_wait(wait: Span, last: float, own: float, rule: Rule) -> tuple[float, float]:
    """Waiting and communication."""
    waiting = min(last, wait.finished) - rule.begins(wait, own)
    waiting = max(0.0, waiting) if rule.floor else waiting
    if rule.whole and waiting:
        waiting = wait.finished - wait.started
    return waiting, rule.exposed(wait, last, own) if rule.exposed else wait.finished - wait.started - waiting


def _sent(trace: Trace, rule: Rule) -> list[float]:
    return [moment - rule.since(trace) for moment in trace.arrived]


def _seconds(trace: Trace, span: Span, rule: Rule) -> float:
    """Of the span, as far as it is covered by no other that counts instead."""
    inner = [one for one in trace.spans if one is not span and span.started <= one.started and one.finished <= span.finished]
    outer = [one for one in trace.spans if one is not span and one.started <= span.started and span.finished <= one.finished]
    if rule.covers == "outermost" and any(one.kind != CALLS for one in outer):
        return 0.0
    if not rule.inside and any(one.kind == CALLS for one in outer):
        return 0.0
    if rule.covers in ("outermost", "all"):
        return span.finished - span.started
    if rule.covers == "through":
        return span.finished - span.started - sum(one.finished - one.started for one in inner)
    inner = [one for one in inner if one.kind != rule.blind]
    direct = [one for one in inner if not any(_within(one, other) for other in inner)]
    return span.finished - span.started - sum(one.finished - one.started for one in direct)


def _within(one: Span, other: Span) -> bool:
    return one is not other and other.started <= one.started and one.finished <= other.finished


def _never(trace: Trace) -> float:
    return 0.0


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
    (OPERATORS, _NESTED, Rule(covers="all")),
    (OPERATORS, _OUTERMOST, Rule(covers="outermost")),
    (OPERATORS, _CALLS, Rule(calls=OTHER)),
    (OPERATORS, _IN_CALLS, Rule(inside=False)),
    (OPERATORS, _OUTERMOST, Rule(covers="outermost", inside=False)),
    (OPERATORS, _THROUGH, Rule(covers="through")),
    (OPERATORS, _CALLS, Rule(blind=CALLS)),
    (OPERATORS, _IN_OPERATORS, Rule(blind=WAIT)),
    (NETWORK, _CLOCKS, Rule(since=_never, back=_never)),
    (NETWORK, _CLOCKS, Rule(since=lambda trace: -trace.zero, back=lambda trace: -trace.zero)),
    (NETWORK, _NOT_BACK, Rule(back=_never)),
    (NETWORK, _STEP, Rule(since=lambda trace: trace.step[0], back=lambda trace: trace.step[0])),
    (NETWORK, _WHICH, Rule(choose=lambda moments: moments[-1])),
    (NETWORK, _ORDER, Rule(ordered=True)),
    (NETWORK, _WHOLE_WAITS, Rule(whole=True)),
    (NETWORK, _NO_WAITING, Rule(choose=lambda moments: -1e9)),
    (NETWORK, _ALL_WAITING, Rule(choose=lambda moments: 1e9)),
    (NETWORK, _OWN_ARRIVAL, Rule(begins=lambda wait, own: own)),
    (NETWORK, _OWN_ARRIVAL, Rule(begins=lambda wait, own: own, exposed=_after_last)),
    (NETWORK, _NEGATIVE, Rule(floor=False)),
    (NETWORK, _NEGATIVE, Rule(floor=False, exposed=_after_last)),
    (NETWORK, _BEHIND, Rule(exposed=lambda wait, last, own: wait.finished - last)),
    (NETWORK, _ALL_OVERLAPPED, Rule(exposed=lambda wait, last, own: wait.finished - own)),
    (NETWORK, _ALL_OVERLAPPED, Rule(choose=lambda moments: -1e9, exposed=lambda wait, last, own: wait.finished - own)),
    (NETWORK, _IN_CALLS, Rule(inside=False)),
    *(((name,), hint, rule) for name, hint, rule in _OF_ONE),
]


def wrong(case: Case) -> Iterator[tuple[str, list[Amounts]]]:
    """By operators, by waits, then by what is left."""
    for names, hint, rule in _RULES:
        found = [result(case, rank, rule) for rank in range(case.n)]
        yield hint, [{name: own[name] for name in names} for own in found]
    yield _CROSSED, [{COMMUNICATION: own[WAITING], WAITING: own[COMMUNICATION]} for own in case.parts]
    yield _BETWEEN, [{PYTHON: of_calls} for of_calls in _of_calls(case)]
    yield _NO_PYTHON, [{PYTHON: 0.0}] * case.n
    operators = [sum(own[name] for name in OPERATORS) for own in case.parts]
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
