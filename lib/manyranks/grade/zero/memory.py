"""What a rank may hold, judged by the bytes that were counted on it."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.compare import sizes
from manyranks.grade.report import size
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_SMALL = 6144  # bytes of examples, numbers and counters
_FULL = "an optimizer of whole parameters has whole states: give it shards, one Parameter for each parameter"
_TOO_MANY = "states of a frozen parameter are there, or of one twice: one shard for each parameter that learns"
_WHOLE = "set parameter.grad to None"


class Bytes(NamedTuple):
    """model: of all parameters; whole: of those that learn, padded; shards: a rank's; states: how many for each shard."""

    model: int
    whole: int
    shards: int
    states: int


class _Weight(NamedTuple):
    """live: all bytes; states: of the optimizer."""

    live: int
    states: int


def stage1(task: "Task", trial: Trial) -> Verdict:
    """After each step: the model, shards and their states."""
    for rank, seen in enumerate(trial.answers):
        if wrong := _after_steps(rank, _weights(seen.held), trial.case.must.held):
            return wrong
    return Verdict(True)


def stage2(task: "Task", trial: Trial) -> Verdict:
    """After backward, the shards' gradients beside these; while it runs, few whole ones; after a step, as in stage 1."""
    must: Bytes = trial.case.must.held
    for rank, seen in enumerate(trial.answers):
        weights = _weights(seen.held)
        wrong = _states(rank, weights[-1], must) or _after_backward(rank, weights[-2].live - must.model, must)
        wrong = wrong or _after_steps(rank, weights[1::2], must)
        if wrong := wrong or _peak(rank, seen.peak_bytes - must.model - (2 + must.states) * must.shards, must):
            return wrong
    return Verdict(True)


def _weights(held: list[int]) -> list[_Weight]:
    return [_Weight(*pair) for pair in zip(held[::2], held[1::2], strict=True)]


def _states(rank: int, weight: _Weight, must: Bytes) -> Verdict | None:
    if weight.states > (right := must.states * must.shards) + _SMALL:
        there, here = sizes(weight.states, right)
        found = f"rank {rank} holds {there} of optimizer states; those of its shards have {here}"
        return Verdict(False, found, _why_states(weight.states - right, must))
    return None


def _why_states(excess: int, must: Bytes) -> str:
    """What so many bytes too many may be, much less than all other ranks' or about as much."""
    return _TOO_MANY if excess < must.states * (must.whole - must.shards) * 3 // 4 else _FULL


def _after_steps(rank: int, weights: list[_Weight], must: Bytes) -> Verdict | None:
    if wrong := _states(rank, weights[-1], must):
        return wrong
    more, kept, right = weights[-1].live - weights[-2].live, weights[-1].live - must.model, (1 + must.states) * must.shards
    if more > _SMALL:
        return Verdict(False, f"rank {rank} holds {size(more)} more after each step", "keep nothing of a step that is over")
    if kept > right + _SMALL:
        there, here = sizes(kept, right)
        found = f"rank {rank} holds {there} beside the model after step() and zero_grad(); shards and their states take {here}"
        return Verdict(False, found, _why(kept - must.shards - weights[-1].states, must))
    return None


def _why(excess: int, must: Bytes) -> str:
    """What so many bytes too many may be."""
    if abs(excess - must.shards) <= _SMALL:
        return "the shards' gradients are still there: zero_grad() sets them to None, too"
    if excess > must.whole // 2:
        return f"is there a whole copy of the parameters that you keep? Or does zero_grad() keep gradients? {_WHOLE}"
    return "between steps a rank needs the model, its shards and their states, and nothing else"


def _after_backward(rank: int, kept: int, must: Bytes) -> Verdict | None:
    if kept > (right := (2 + must.states) * must.shards) + _SMALL:
        there, here = sizes(kept, right)
        found = f"rank {rank} holds {there} beside the model after backward; shards, their states and gradients take {here}"
        return Verdict(False, found, f"once a gradient has left, its shard is all that a rank keeps: {_WHOLE}")
    return None


def _peak(rank: int, held: int, must: Bytes) -> Verdict | None:
    """held: whole gradients, their padded copies and activations; with one gradient at a time, less than all gradients."""
    most = must.whole * 5 // 4
    if held > most:
        found = (
            f"rank {rank} held {size(held)} of gradients, copies and activations during backward; with one gradient at a time "
            f"they are less than {size(most)}"
        )
        return Verdict(False, found, f"a gradient is dropped at once when it has left, not at the end of backward: {_WHOLE}")
    return None
