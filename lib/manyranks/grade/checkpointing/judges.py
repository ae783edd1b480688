"""What was called when, and what was held: judged by a script's marks."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from manyranks.grade.compare import same, sizes
from manyranks.grade.report import listed
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.checkpointing.task import CheckpointTask
    from manyranks.grade.scripts import Seen

SMALL = 20_480  # bytes of random states, 5 kB each, and losses; an input has more

AFTER_BACKWARD = "after backward"  # a mark
RESTORE = (
    "backward's run draws other random numbers than forward's: keep torch.get_rng_state() from before the first run, and set "
    "it before the second"
)
_TOLERANCE = 1e-9
_FIRST = (
    "what backward's run computes is not used: the gradients come from what forward has kept somewhere, in tensors, arrays or "
    "files. Go backward through the second run's graph, and keep x only"
)
_OTHER_X = "the function's second x is not the first one: leave x as it is, and run the function on the same values again"


class Hold(NamedTuple):
    """What may be held at a mark beside what was held at the mark "before". words: of both numbers, {there} and {here}.

    gone: bytes that the script itself has let go since.
    """

    mark: str
    right: int
    words: str
    hint: str
    gone: int = 0


class Must(NamedTuple):
    """forward, backward: the calls that each must make, in order, None where any are right; holds: in order; peak: the most
    bytes beside those at "before", 0 for any; gathers: bytes that a rank puts into each all-gather, None for any; first: the
    results where gradients are those of forward's run, if the second one's are others."""

    forward: tuple[str, ...] | None
    backward: tuple[str, ...] | None
    holds: tuple[Hold, ...] = ()
    peak: int = 0
    gathers: tuple[int, ...] | None = ()
    first: dict[str, torch.Tensor] | None = None


def bytes_at(seen: "Seen", mark: str) -> int:
    """What was held when the script first came to this mark."""
    return next(event.bytes for event in seen.events if event.what == mark)


def held(task: "CheckpointTask", trial: Trial) -> Verdict:
    """When forward is over, no more than must be."""
    return _too_much(trial, lambda hold: hold.mark != AFTER_BACKWARD)


def given_back(task: "CheckpointTask", trial: Trial) -> Verdict:
    """When backward is over, nothing of it; where no more was held than must be."""
    if not held(task, trial).ok:
        return Verdict(False, "more than that was kept")
    return _too_much(trial, lambda hold: hold.mark == AFTER_BACKWARD)


def _too_much(trial: Trial, when: Callable[[Hold], bool]) -> Verdict:
    for rank, seen in enumerate(trial.answers):
        for hold in filter(when, trial.case.must.holds):
            kept = bytes_at(seen, hold.mark) - bytes_at(seen, "before") + hold.gone
            if kept > hold.right + SMALL:
                there, here = sizes(kept, hold.right)
                return Verdict(False, _who(trial, rank) + hold.words.format(there=there, here=here), hold.hint)
    return Verdict(True)


def calls_in(seen: "Seen", phase: str) -> list[str]:
    """The functions that were called between the marks `phase` and `phase over`."""
    names, inside = [], False
    for event in seen.events:
        inside = (inside or event.what == phase) and event.what != f"{phase} over"
        names += [event.what.removeprefix("call ")] if inside and event.what.startswith("call ") else []
    return names


def why_values(seen: "Seen") -> str:
    """The hint where a function's second call is not the first one again."""
    for what, hint in (("x of ", _OTHER_X), ("state of ", RESTORE)):
        prints: dict[str, list[int]] = {}
        for event in seen.events:
            if event.what.startswith(what):
                prints.setdefault(event.what, []).append(event.bytes)
        if any(len(two) > 1 and two[0] != two[1] for two in prints.values()):
            return hint
    return ""


def calls(task: "CheckpointTask", trial: Trial) -> Verdict:
    """What forward and backward call, and in which order."""
    for rank, seen in enumerate(trial.answers):
        for phase in ("forward", "backward"):
            must, got = getattr(trial.case.must, phase), calls_in(seen, phase)
            if must is not None and tuple(got) != must:
                found = f"{_who(trial, rank)}{phase} called {_called(got)}; right is {_called(must)}"
                return Verdict(False, found, task.why_calls(phase, got, trial.case.must))
    return Verdict(True)


def second_run(trial: Trial) -> Verdict:
    """The gradients are those of backward's run, where they differ from those of forward's."""
    for name, first in (trial.case.must.first or {}).items():
        for got, right in zip(trial.answers, trial.case.expected, strict=True):
            if same(got.tensors[name], first, _TOLERANCE) and not same(right[name], first, _TOLERANCE):
                return Verdict(False, f"{name} is that of the function as it was in forward", _FIRST)
    return Verdict(True)


def _who(trial: Trial, rank: int) -> str:
    return f"rank {rank}: " if trial.case.n > 1 else ""


def _called(names) -> str:
    """ "function once", or the order of several."""
    counts = Counter(names)
    if not names:
        return "nothing"
    if len(counts) == 1:
        name, often = next(iter(counts.items()))
        return f"{name} {'once' if often == 1 else f'{often} times'}"
    return listed(list(names)) if len(names) <= 12 else f"{', '.join(names[:12])}, …"
