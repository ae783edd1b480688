"""When units are gathered and freed: judged by the order of events on each rank, not by any clock."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.report import listed
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict
from manyranks.grade.watch import Event
from manyranks.grade.zero import models

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_MOST = 2
_NEXT = {
    "forward": "before_forward(k) starts unit k + 1, too, so that it comes while layer k computes",
    "backward": "in backward the next layer is k − 1: before_backward(k) starts it, so that it comes while layer k computes",
}
_FIRST = "start() and wait() for unit k before layer k computes"
_EARLY_WAIT = "start unit {}, and wait for it only when its own layer is next: now it could come while layer {} computes"
_WRAPS = "units[-1] is the last unit, which was started for nothing: layer 0 has none before it, so ask whether k > 0"
_STILL = "while layer {} computes in {}, unit {} is still there from before"
_FREE = "after_forward(k) frees unit k, but for the last one; after_backward(k) frees it when it is reduced"


class _State(NamedTuple):
    """At one event: what happens, with which unit; started, waited: the units that are; kept: those of an earlier pass."""

    what: str
    unit: int
    started: frozenset[int]
    waited: frozenset[int]
    kept: frozenset[int]


def ahead(task: "Task", trial: Trial) -> Verdict:
    """When a layer computes, its unit is there, and the next one is started and not waited for."""
    return _judged(trial, _ahead)


def few(task: "Task", trial: Trial) -> Verdict:
    """There are never more than two units; after forward there is the last one, after backward there is none."""
    return _judged(trial, _few)


def two(task: "Task", trial: Trial) -> Verdict:
    """As few, and the second one is there where it should be: one unit at a time is no schedule for two."""
    verdict = few(task, trial)
    return _judged(trial, _second) if verdict.ok else verdict


def slip(trial: Trial) -> str:
    """A hint, where backward started a unit that cannot be the next one: it explains whatever else is wrong."""
    last, computed = len(models.layers()) - 1, -1
    for event in trial.answers[0].events if trial.answers else ():
        what, _, number = event.what.partition(" ")
        if event.kind != "mark":
            continue
        if what == "backward":
            computed = int(number)
        elif what in ("forward", "step"):
            computed = last + 1 if number == str(last) else -1
        elif what == "start" and computed in (0, 1) and int(number) == last:
            return _WRAPS
        elif what == "start" and 0 < computed <= int(number):
            return _NEXT["backward"]
    return ""


def _judged(trial: Trial, judge: Callable[[_State, int], Verdict | None]) -> Verdict:
    last = len(models.layers()) - 1
    for rank, seen in enumerate(trial.answers):
        for state in _states(seen.events):
            if wrong := judge(state, last):
                return wrong._replace(found=f"rank {rank}: {wrong.found}")
    return Verdict(True)


def _states(events: list[Event]) -> Iterator[_State]:
    started: set[int] = set()
    waited: set[int] = set()
    kept: set[int] = set()
    last = len(models.layers()) - 1
    for event in events:
        what, _, number = event.what.partition(" ")
        if event.kind != "mark":
            continue
        unit = int(number or -1)
        if what == "start":
            started.add(unit)
        elif what == "wait" and unit in started:
            waited.add(unit)
        elif what == "free":
            for units in (started, waited, kept):
                units.discard(unit)
        yield _State(what, unit, frozenset(started), frozenset(waited), frozenset(kept))
        if what == "step" or (what, unit) == ("forward", last):
            kept = set(started)


def _ahead(state: _State, last: int) -> Verdict | None:
    if state.what not in _NEXT:
        return None
    k = state.unit
    if k not in state.waited:
        how = "started, but not waited for" if k in state.started else "not there"
        return Verdict(False, f"layer {k} computes in {state.what}, and unit {k} is {how}", _FIRST)
    following = k + 1 if state.what == "forward" else k - 1
    if not 0 <= following <= last:
        return None
    if following not in state.started:
        found = f"while layer {k} computes in {state.what}, unit {following} is not on its way"
        return Verdict(False, found, _NEXT[state.what])
    if following in state.kept:
        return Verdict(False, _STILL.format(k, state.what, following), _FREE)
    if following in state.waited:
        found = f"before layer {k} computes in {state.what}, unit {following} is waited for"
        return Verdict(False, found, _EARLY_WAIT.format(following, k))
    return None


def _second(state: _State, last: int) -> Verdict | None:
    wrong = _ahead(state, last)
    return wrong if wrong and wrong.hint == _NEXT.get(state.what) else None


def _few(state: _State, last: int) -> Verdict | None:
    if len(state.started) > _MOST:
        units = listed([str(k) for k in sorted(state.started)])
        found = (
            f"with {state.what} of {'unit' if state.what == 'start' else 'layer'} {state.unit}, units {units} are there at once"
        )
        return Verdict(False, found, f"two at a time: the one that computes and the next one. {_FREE}")
    if state.what == "backward" and state.unit == last and (rest := state.started - {last, last - 1}):
        return Verdict(False, f"unit {min(rest)} is still there after forward", _FREE)
    if state.what == "step" and state.started:
        return Verdict(False, f"unit {min(state.started)} is still there after backward", _FREE)
    return None
