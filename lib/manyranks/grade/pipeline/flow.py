"""What happened in the course of a step: in which order a rank computed, what it held, what it sent."""

from collections import Counter
from typing import TYPE_CHECKING

from manyranks.grade.pipeline import tables
from manyranks.grade.pipeline.stages import UNKNOWN, Step
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.pipeline.training import Training
    from manyranks.grade.scripts import Seen

_TABLE = "go through `actions` from front to back, and do what each one says before you come to the next"
_NAMED = (
    "an action names its micro-batch: take the output of that one, neither the oldest nor the newest, and follow `actions`, "
    "not a table of your own"
)
_OWN = "follow `actions`, not a table of your own: the check gives other tables than 1F1B's, too"
_STRANGE = "a ? is a micro-batch that the check does not know: its input was not what the stage before it gives"
_AGAIN = "each micro-batch goes through the stage once: keep its output, and go back from that"
_ONCE = "one backward a micro-batch brings the gradients of its input and of the weights"
_KEEPS = (
    "a graph lives as long as something leads to it: after a micro-batch's backward, no list or dict may have its output or "
    "loss (pop it, and detach what is summed up), and without retain_graph backward itself lets its tensors go"
)
_INPUTS = (
    "after a micro-batch's backward its input is not needed any more: make a buffer when its message comes, pop it with the "
    "output, and keep for the sends only what is sent: y.detach(), for y itself leads to its graph, and that to the input"
)
_SUMMED = (
    "the last rank needs a micro-batch's input, output and loss until its backward: pop them there, and sum loss.detach(), for "
    "the loss itself leads to its graph, and that to the input"
)
_BATCH = "one message for each micro-batch, as soon as it is computed: that is what lets the next rank begin"
_NOTHING = "a forward's output goes to rank + 1, the gradient of the input to rank − 1"
_MORE = "`shapes` says what to receive, and gradients of weights stay where they are: nothing else is sent"


def computed(seen: "Seen") -> list[str]:
    """ "F 0", "B 0", … as the stage has seen them."""
    return [event.what for event in seen.events if event.kind == "mark" and event.what[:2] in ("F ", "B ")]


def order(task: "Training", trial: Trial) -> Verdict:
    """As the tables say, each action once."""
    step: Step = trial.case.must
    for rank, seen in enumerate(trial.answers):
        got, right = computed(seen), [f"{kind} {i}" for kind, i in step.tables[rank]]
        if got != right:
            found = f"rank {rank} computed {_listed(got)}; its table is {_listed(right)}"
            return Verdict(False, found, _OWN if _of_its_own(step, trial) else _why_order(got, right))
    return Verdict(True)


def _of_its_own(step: Step, trial: Trial) -> bool:
    """Whether a rank has done what its table says, each once, but not where a forward or a backward stands there."""
    for table, seen in zip(step.tables, trial.answers, strict=True):
        got, right = computed(seen), [f"{kind} {i}" for kind, i in table]
        if sorted(got) == sorted(right) and [a[0] for a in got] != [a[0] for a in right]:
            return True
    return False


def _listed(actions: list[str]) -> str:
    short = [action.replace(" ", "") for action in actions]
    return " ".join(short[:14] + ["…"] * (len(short) > 14)) or "nothing"


def _why_order(got: list[str], right: list[str]) -> str:
    if any(action.endswith(UNKNOWN) for action in got):
        return _STRANGE
    if Counter(got) == Counter(right) and [a for a in got if a[0] == "F"] == [a for a in right if a[0] == "F"]:
        return _NAMED if [a[0] for a in got] == [a[0] for a in right] else _TABLE
    most = Counter(got).most_common(1)
    if most and most[0][1] > 1:
        return _AGAIN if most[0][0].startswith("F") else _ONCE
    return _TABLE


def memory(task: "Training", trial: Trial) -> Verdict:
    """As many graphs, and inputs, as the table's F less its B."""
    step: Step = trial.case.must
    for rank, seen in enumerate(trial.answers):
        right = step.in_flight(rank)
        if not computed(seen):
            return Verdict(False, f"rank {rank} computed nothing")
        if (got := _most(seen, "F ")) > right:
            return Verdict(False, f"rank {rank} holds {tables.batches(got)}; with this table it holds {right}", _KEEPS)
        if (got := _most(seen, "inputs")) > right + 1:  # the last one's output may still be a local variable
            found = f"rank {rank} holds the inputs of {tables.batches(got)}; with this table it holds {right}"
            return Verdict(False, found, _INPUTS if rank < step.n - 1 else _SUMMED)
    return Verdict(True)


def _most(seen: "Seen", what: str) -> int:
    return max((event.bytes for event in seen.events if event.kind == "mark" and event.what.startswith(what)), default=0)


def traffic(task: "Training", trial: Trial) -> Verdict:
    """One message a micro-batch and boundary, each way."""
    step: Step = trial.case.must
    for rank, calls in trial.calls.items():
        for call in calls:
            if call.op not in ("send", "recv"):
                return Verdict(False, f"rank {rank} called {call.op} of {call.bytes:,} bytes", f"{_NOTHING}. {_MORE}")
        for peer in {call.peer for call in calls if call.op == "send"} | _neighbours(rank, step.n):
            got = sorted(call.bytes for call in calls if (call.op, call.peer) == ("send", peer))
            right = sorted(step.bytes) if peer in _neighbours(rank, step.n) else []
            if got != right:
                found = f"rank {rank} sent {_messages(got)} to rank {peer}; right is {_messages(right)}"
                return Verdict(False, found, _why_traffic(got, right))
    return Verdict(True)


def _neighbours(rank: int, n: int) -> set[int]:
    return {peer for peer in (rank - 1, rank + 1) if 0 <= peer < n}


def _messages(sizes: list[int]) -> str:
    if not sizes:
        return "nothing"
    return f"{len(sizes)} message{'s' * (len(sizes) != 1)} of {sum(sizes):,} bytes in all"


def _why_traffic(got: list[int], right: list[int]) -> str:
    if sum(got) == sum(right):
        return _BATCH
    return _NOTHING if sum(got) < sum(right) else f"{_NOTHING}, once. {_MORE}"
