"""Buckets that leave while backward runs: judged by the order of events on each rank, not by any clock."""

from typing import TYPE_CHECKING

from manyranks.grade.old.data_parallel.traffic import Travel
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.old.check import Task

_COUNT = "count the gradients of the bucket, and start when the last one is there and the buckets before it have left"
_OVER = "all-reduces are matched by their order, and this one meets another bucket's: a full bucket waits for those before it"
_ANEW = "step 1 was right: finish() must forget what it counted"
_WHILE = "two buckets can leave at once: while, not if"


def order(task: "Task", trial: Trial) -> Verdict:
    """Each bucket leaves as soon as it is full and those before it have left; nobody waits while backward runs."""
    must: Travel = trial.case.must
    for rank, seen in enumerate(trial.answers):
        if sorted(seen.calls("all_reduce")) != sorted(must.calls):
            return Verdict(False, f"rank {rank} made other all-reduces than those of the buckets")
        follower = _Follower(must)
        for event in seen.events:
            if wrong := follower.meets(event):
                return wrong._replace(found=f"rank {rank}: {wrong.found}")
    return Verdict(True)


class _Follower:
    """Goes through one rank's events and says where they are not as they should be."""

    def __init__(self, must: Travel):
        self._must, self._place, self._backward = must, "", 0
        self._start()

    def meets(self, event: Event) -> Verdict | None:
        return getattr(self, f"_{event.kind}")(event)

    def _start(self) -> None:
        self._there: set[str] = set()
        self._left, self._just_left = 0, False

    @property
    def _full(self) -> bool:
        """Whether a bucket waits that could have left."""
        buckets = self._must.names
        return self._left < len(buckets) and self._there.issuperset(buckets[self._left])

    def _mark(self, event: Event) -> Verdict | None:
        if self._place == "backward" and (late := self._late("backward was over")):
            return late
        if self._place == "finish" and self._left < len(self._must.names):
            return Verdict(
                False, f"{self._name(self._left)} did not leave in step {self._backward}", "finish() sends what has not left"
            )
        self._place = event.what
        if event.what == "backward":
            self._backward += 1
            self._start()
        return None

    def _gradient(self, event: Event) -> Verdict | None:
        if self._place != "backward":
            return None
        late = self._late(f"the gradient of {event.what} was made")
        self._there.add(event.what)
        self._just_left = False
        return late

    def _late(self, when: str) -> Verdict | None:
        if self._full:
            found = f"in step {self._backward}, {self._name(self._left)} was full, but had not left when {when}"
            return Verdict(False, found, self._why_late())
        return None

    def _why_late(self) -> str:
        if self._just_left:
            return _WHILE
        return self._must.late if self._backward == 1 else _ANEW

    def _call(self, event: Event) -> Verdict | None:
        if event.what != "all_reduce":
            return None
        if self._place == "alone":
            return Verdict(False, "an all-reduce inside no_sync()", "in there, the hook has nothing to do")
        if self._place == "backward" and not self._full:
            return self._early()
        self._left, self._just_left = self._left + 1, True
        return None

    def _early(self) -> Verdict:
        if self._left == len(self._must.names):
            hint = _COUNT if self._backward == 1 else _ANEW
            return Verdict(False, f"in step {self._backward}, more left than there are buckets", hint)
        name, missing = self._name(self._left), set(self._must.names[self._left]) - self._there
        full = [k for k in range(self._left + 1, len(self._must.names)) if self._there.issuperset(self._must.names[k])]
        if full:
            return Verdict(False, f"in step {self._backward}, {self._name(full[0])} overtook {name}", _OVER)
        found = f"in step {self._backward}, {name} left before it was full, without {' and '.join(sorted(missing))}"
        return Verdict(False, found, self._why_early(len(missing)))

    def _why_early(self, missing: int) -> str:
        if self._backward > 1:
            return _ANEW
        return f"{_COUNT}; {self._must.early}" if missing == 1 else _COUNT

    def _wait(self, event: Event) -> Verdict | None:
        if self._place in ("backward", "alone"):
            return Verdict(False, "waits for an all-reduce while backward runs", "use async_op=True, and wait in finish()")
        return None

    def _name(self, bucket: int) -> str:
        names = self._must.names[bucket]
        return f"bucket {bucket} ({names[0]}" + (f" to {names[-1]})" if len(names) > 1 else ")")
