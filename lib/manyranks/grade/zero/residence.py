"""What is whole, and when: the memory of units, and the order in which they are gathered."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.report import size
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_SMALL = 6144  # bytes of examples, numbers and counters
_AUTOGRAD = (
    "the parameters look empty, but autograd has saved what they were and keeps its memory: take that memory away with "
    "storage.resize_(0), instead of giving the parameter other data"
)
_KEEPS = "the memory of a parameter is parameter.untyped_storage(): free() takes it away with resize_(0)"
_VIEW = "a shard that is a view keeps the whole tensor: it needs memory of its own, as `shard` gives it"
_ASYNC = "use async_op=True, keep what it returns, and call its wait() in wait()"
_AFTER = "reduce() drops the whole gradients, parameter.grad = None, and free() frees after backward, too"
_COPY = "the parameters are empty, so something else of yours holds whole copies: keep no tensor from start() or __init__ alive"


class Bytes(NamedTuple):
    """shards, and their states and gradients, of a rank; whole: all parameters; unit: the largest; activations: of forward."""

    shards: int
    states: int
    gradients: int
    whole: int
    unit: int
    activations: int


class Weight(NamedTuple):
    """live: all bytes; own: those of the storages that the parameters have."""

    live: int
    own: int


class _Moment(NamedTuple):
    """When it was weighed, and what may be there then."""

    what: str
    weight: Weight
    right: int


def memory(task: "Task", trial: Trial) -> Verdict:
    """Between its uses a unit takes its shards' bytes; during a pass, one unit is whole at a time."""
    for rank, seen in enumerate(trial.answers):
        if wrong := _of_rank(rank, seen.held, seen.peak_bytes, trial.case.must.held):
            return wrong
    return Verdict(True)


def _of_rank(rank: int, held: list[int], peak: int, must: Bytes) -> Verdict | None:
    made, *weights = [Weight(*pair) for pair in zip(held[::2], held[1::2], strict=True)]
    if wrong := _made(rank, made, must):
        return wrong
    moments = _moments(weights, must)
    for moment, following in zip(moments, [*moments[1:], moments[-1]], strict=True):
        if moment.weight.live > moment.right + must.unit // 2:
            here, there = size(moment.right), size(moment.weight.live)
            found = f"rank {rank} holds {there} after {moment.what}; shards, states, gradients{_also(moment)} take {here}"
            return Verdict(False, found, _why(moment, following, must))
    return _peak(rank, peak, must)


def _also(moment: _Moment) -> str:
    return " and activations" if moment.what == "forward" else ""


def _moments(weights: list[Weight], must: Bytes) -> list[_Moment]:
    """Of two steps, the second with two passes. States are there from the first step on, gradients from backward to step."""
    whats = ("forward", "backward", "step", "forward", "backward", "forward", "backward", "step")
    stepped, reduced, moments = False, False, []
    for what, weight in zip(whats, weights, strict=True):
        stepped, reduced = stepped or what == "step", what == "backward" or (reduced and what == "forward")
        right = must.shards + must.states * stepped + must.gradients * reduced + must.activations * (what == "forward")
        moments.append(_Moment(what, weight, right))
    return moments


def _made(rank: int, made: Weight, must: Bytes) -> Verdict | None:
    if made.live > must.shards + must.unit // 2:
        found = f"rank {rank} holds {size(made.live)} when the units are made; the shards take {size(must.shards)}"
        if made.own:
            return Verdict(False, found, f"a unit is free at first: call self.free() at the end of __init__. {_KEEPS}")
        return Verdict(False, found, f"{_COPY}. {_VIEW}")
    return None


def _why(moment: _Moment, following: _Moment, must: Bytes) -> str:
    if moment.weight.own > must.unit // 2:
        return _KEEPS
    if moment.what != "forward":
        return _AFTER
    return _COPY if following.weight.live > following.right + must.unit // 2 else _AUTOGRAD


def _peak(rank: int, peak: int, must: Bytes) -> Verdict | None:
    """One unit with its gradients and their padded copies, and as much again: gloo lets go of what arrived a little late."""
    most = must.shards + must.states + must.gradients + must.activations + 6 * must.unit
    if peak > most:
        found = f"rank {rank} held {size(peak)} at one time; with one unit at a time, less than {size(most)} are enough"
        return Verdict(False, found, "gather a unit in its start() and nothing else; free() frees it")
    return None


def asynchronous(task: "Task", trial: Trial) -> Verdict:
    """All of a unit's gathers are issued in start(), and nobody waits there."""
    for rank, seen in enumerate(trial.answers):
        place = ""
        for event in seen.events:
            place = event.what if event.kind == "mark" else place
            if event.kind == "wait" and place.startswith("start"):
                return Verdict(
                    False, f"rank {rank} waits in start()", "use async_op=True, keep what it returns, wait in wait()"
                )
            if event.kind == "call" and event.what == "all_gather" and not place.startswith("start"):
                where = f"{place.split()[0]}()" if place not in ("", "over") else "no method of the unit that gathers"
                return Verdict(False, f"rank {rank} gathers in {where}", "gathers are issued in start(), and only there")
            if event.kind == "call" and event.what == "reduce_scatter" and not place.startswith("reduce"):
                return Verdict(False, f"rank {rank} reduces outside of reduce()", "reduce-scatter in reduce(), and only there")
    return Verdict(True)
