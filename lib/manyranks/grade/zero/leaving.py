"""Gradients that leave while backward runs: judged by the order of events on each rank, not by any clock."""

from itertools import islice
from typing import TYPE_CHECKING

from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_TURN = "gradients leave in the reversed order of params, on all ranks: one that is there early waits for those before it"
_GETS = "does the hook get what you think? a lambda in a loop sees its last value: use functools.partial"
_HOOK = f"reduce it in the hook, register_post_accumulate_grad_hook; {_GETS}"
_EARLY = f"something left before .grad was there: which hook is it? register_hook calls before that; {_GETS}"
_QUIET = "what has left is with the shards already: step() reduces nothing"
_WHILE = "when one leaves, the next ones may be there already: while, not if"
_ANEW = "the first backward was right: finish() has to forget what it counted"
_REST = "finish() sends what has not left, with zeros where there is no gradient"


def order(task: "Task", trial: Trial) -> Verdict:
    """Each gradient leaves as soon as it is there and those before it have left; what is missing leaves in finish()."""
    for rank, seen in enumerate(trial.answers):
        follower = _Follower(trial.case.must.names)
        for k, event in enumerate(seen.events):
            if wrong := follower.meets(event, _following(seen.events, k)):
                return wrong._replace(found=f"rank {rank}: {wrong.found}")
    return Verdict(True)


def _following(events: list[Event], k: int) -> str:
    """The gradient that is made next, where nothing is called before."""
    rest = (event for event in islice(events, k + 1, None) if event.kind != "wait")
    after = next(rest, None)
    return after.what if after and after.kind == "gradient" else ""


class _Follower:
    """Goes through one rank's events and says where they are not as they should be."""

    def __init__(self, turns: tuple[tuple[str, int], ...]):
        self._turns, self._place, self._backward = turns, "", 0
        self._there: set[str] = set()
        self._left, self._just_left = len(turns), False

    def meets(self, event: Event, following: str) -> Verdict | None:
        """following: the gradient that comes right after it, if so."""
        if event.kind == "mark":
            return self._mark(event.what)
        if event.kind == "gradient":
            return self._gradient(event.what)
        return self._call(event, following) if event.kind == "call" and event.what == "reduce_scatter" else None

    def _mark(self, place: str) -> Verdict | None:
        late = self._late("backward was over") if self._place == "backward" else None
        if place == "finished" and self._left < len(self._turns):
            return Verdict(False, f"{self._turns[self._left][0]} did not leave after backward #{self._backward}", _REST)
        self._place = place
        if place == "backward":
            self._backward += 1
            self._there, self._left = set(), 0
        return late

    def _gradient(self, name: str) -> Verdict | None:
        late = self._late(f"that of {name} was made")
        self._there.add(name)
        self._just_left = False
        return late

    def _late(self, when: str) -> Verdict | None:
        if self._left < len(self._turns) and (name := self._turns[self._left][0]) in self._there:
            found = f"in backward #{self._backward}, the gradient of {name} was there, but had not left when {when}"
            return Verdict(False, found, self._why_late())
        return None

    def _why_late(self) -> str:
        if self._just_left:
            return _WHILE
        return _HOOK if self._backward == 1 else f"{_ANEW}; {_HOOK}"

    def _call(self, event: Event, following: str) -> Verdict | None:
        if self._place == "step":
            return Verdict(False, "something leaves in step()", _QUIET)
        if self._left == len(self._turns):
            found = f"in backward #{self._backward}, more left than there are gradients"
            return Verdict(False, found, "each gradient leaves once a backward" if self._backward == 1 else _ANEW)
        name, size = self._turns[self._left]
        if event.bytes != size:
            found = f"in backward #{self._backward}, {event.bytes:,} bytes left where it was the turn of {name} with {size:,}"
            return Verdict(False, found, _TURN)
        if self._place == "backward" and name not in self._there:
            found = f"in backward #{self._backward}, it was the turn of {name}, which was not there, and something left"
            if following == name:
                return Verdict(False, found, _EARLY)
            return Verdict(False, found, f"{_TURN}; {_GETS}" if self._backward == 1 else f"{_ANEW}; {_TURN}")
        self._left, self._just_left = self._left + 1, True
        return None
