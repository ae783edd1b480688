"""Buckets: what must leave, and when. Judged by the order of events on each rank, not by any clock."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.compare import sizes
from manyranks.grade.report import listed, size
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_SMALL = 4096  # bytes of examples and numbers
NOTHING = "nothing was sent: no rank can know what the others have"
_START = "start the all-reduce in the hook of the bucket's last gradient, with async_op=True"


class Travel(NamedTuple):
    """What a script's calls must be. names: of the parameters of each bucket; buckets: its bytes; rounds: how often they go.

    first: bytes that are broadcast before; model: bytes of parameters and buffers.
    """

    names: tuple[tuple[str, ...], ...]
    buckets: tuple[int, ...]
    rounds: int = 1
    first: int = 0
    model: int = 0


def traffic(task: "Task", trial: Trial) -> Verdict:
    """Every bucket once a round, and the first weights once."""
    must: Travel = trial.case.must
    for rank, seen in enumerate(trial.answers):
        if other := foreign(rank, seen.events, ("all_reduce", "broadcast")):
            return other
        if (sent := sum(seen.calls("broadcast"))) != must.first:
            return broadcasts(rank, sent, must.first)
        got, right = seen.calls("all_reduce"), list(must.buckets) * must.rounds
        if got != right:
            return Verdict(False, f"rank {rank} {_reduced(got, right)}", _bucket_hint(got, right, must))
    return Verdict(True)


def foreign(rank: int, events: list[Event], allowed: tuple[str, ...]) -> Verdict | None:
    """Where an operation was called that the task does not ask for."""
    for event in events:
        if event.kind == "call" and event.what not in allowed:
            return Verdict(False, f"rank {rank} called {event.what}", f"the task needs {listed(list(allowed))} only")
    return None


def broadcasts(rank: int, sent: int, right: int) -> Verdict:
    """Where other bytes were broadcast than there are."""
    if not sent:
        return Verdict(
            False, f"rank {rank} took part in no broadcast", "nothing was sent: no rank can know what the others have"
        )
    there, here = sizes(sent, right)
    hint = "is a tied parameter sent twice? parameters() and buffers() give each tensor once" if sent > right else ""
    return Verdict(False, f"rank {rank} broadcast {there}; parameters and buffers have {here}", hint)


def _reduced(got: list[int], right: list[int]) -> str:
    if sum(got) != sum(right):
        there, here = sizes(sum(got), sum(right))
        return f"all-reduced {there} in {len(got)} calls; right is {here} in {len(right)}"
    if len(got) != len(right):
        return f"made {len(got)} all-reduces; right are {len(right)}"
    k = next(k for k, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
    return f"gave all_reduce #{k} {got[k]:,} bytes; right are {right[k]:,}"


def _bucket_hint(got: list[int], right: list[int], must: Travel) -> str:
    if not got:
        return NOTHING
    if sum(got) == sum(right) and len(got) == sum(map(len, must.names)) * must.rounds:
        return "that is one call a parameter: put the gradients of a bucket into one tensor"
    if len(got) == must.rounds < len(right):
        return "that is one call for everything: make one a bucket"
    if sorted(got) == sorted(right):
        return "the right buckets in the wrong order"
    if sum(got) == 2 * sum(right):
        return "every gradient was sent twice"
    return f"in each step the buckets have {listed([f'{b:,}' for b in must.buckets])} bytes"


def order(task: "Task", trial: Trial) -> Verdict:
    """Each bucket leaves as soon as it is full and those before it have left; nobody waits while backward runs."""
    must: Travel = trial.case.must
    for rank, seen in enumerate(trial.answers):
        if not set(seen.calls("all_reduce")) <= set(must.buckets):
            return Verdict(False, f"rank {rank} has other buckets than the task")
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
        self._left = 0

    @property
    def _full(self) -> bool:
        """Whether a bucket waits that could have left."""
        buckets = self._must.names
        return self._left < len(buckets) and self._there.issuperset(buckets[self._left])

    def _mark(self, event: Event) -> Verdict | None:
        if self._place == "backward" and (late := self._late("backward was over")):
            return late
        if self._place == "finish" and self._left < len(self._must.names):
            return Verdict(False, f"{self._name(self._left)} did not leave in step {self._backward - 1}", "finish() sends it")
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
        return late

    def _late(self, when: str) -> Verdict | None:
        if self._full:
            found = f"{self._name(self._left)} was full, but had not left when {when}"
            return Verdict(False, found, _START)
        return None

    def _call(self, event: Event) -> Verdict | None:
        if event.what != "all_reduce":
            return None
        if self._place == "alone":
            return Verdict(False, "an all-reduce inside no_sync()", "in there, the hook has nothing to do")
        if self._place == "backward" and not self._full:
            found = (
                f"{self._name(self._left)} left before it was full" if self._left < len(self._must.names) else "one more left"
            )
            hint = "count the gradients of the bucket, and start when the last one is there and the buckets before it have left"
            return Verdict(False, found, hint)
        self._left += 1
        return None

    def _wait(self, event: Event) -> Verdict | None:
        if self._place in ("backward", "alone"):
            return Verdict(False, "waits for an all-reduce while backward runs", "use async_op=True, and wait in finish()")
        return None

    def _name(self, bucket: int) -> str:
        names = self._must.names[bucket]
        return f"bucket {bucket} ({names[0]}" + (f" to {names[-1]})" if len(names) > 1 else ")")


def memory(task: "Task", trial: Trial) -> Verdict:
    """Nothing but the buckets is kept from step to step, and no more from each step."""
    must: Travel = trial.case.must
    gradients = sum(must.buckets)
    for rank, seen in enumerate(trial.answers):
        kept, more = seen.held[-1] - must.model, seen.held[-1] - seen.held[-2]
        if more > 0:
            found = f"rank {rank} holds {size(more)} more after each step"
            return Verdict(False, found, "keep nothing of a step that is over: empty your lists in finish()")
        if kept > gradients + _SMALL:
            found = f"rank {rank} holds {size(kept)} beside the model; the gradients have {size(gradients)}"
            return Verdict(False, found, "one copy of the gradients is enough")
    return Verdict(True)


def peak(task: "Task", trial: Trial) -> Verdict:
    """Of the buckets' rows, no more than about one at a time."""
    must: Travel = trial.case.must
    largest = max(must.buckets)
    for rank, seen in enumerate(trial.answers):
        rows = seen.peak_bytes - must.model - sum(must.buckets)
        if rows > 2 * largest + _SMALL:
            found = f"rank {rank} held {size(rows)} beside the gradients; the largest bucket has {size(largest)}"
            hint = "make the row of one bucket, reduce it, write it back, and only then make the next"
            return Verdict(False, found, hint)
    return Verdict(True)
