"""What a rank calls in forward and in backward: which operations, of how many bytes, among how many ranks, in which order."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.context.travel import BACKWARD, FORWARD, calls_in
from manyranks.grade.old.report import listed
from manyranks.grade.old.scripts import NOTHING, WAIT
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.old.expert.task import ExpertTask

_ROUNDED = "what is sent is {dtype}: float64 has to stay float64 on its way"
_MESSAGES = "an all-to-all is one call, dist.all_to_all_single with the numbers of rows, not a loop of messages"
_BARRIER = "a barrier is not needed: who waits for rows waits long enough"
_GATHERED = (
    "no rank needs what all others have: an all-to-all brings it the rows of its own experts, and sends each of them to one "
    "rank"
)
_REDUCED = (
    "nothing is summed over ranks here, and no rank needs the largest size: each row goes to one rank, and comes back from it"
)
_TOGETHER = "the same bytes in {more} calls where {count} {are} enough: each call costs its latency"
_PADDED = "more rows than there are: sizes of all-to-alls may differ from rank to rank, so nothing is filled up"
_TOO_MUCH = "more than is needed is sent"
_TOO_LITTLE = "less than is needed is sent"
_NOT_BACKWARD = "backward sends the gradients of the rows the same way back: as many bytes as came in forward"


class Sent(NamedTuple):
    """A call: its operation, the bytes that this rank puts in, their dtype, and how many ranks take part."""

    op: str
    bytes: int
    dtype: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.op} of {self.bytes:,} bytes of {self.dtype}" if self.dtype else self.op


class Must(NamedTuple):
    """By rank: its calls in forward and in backward, in order."""

    forward: list[list[Sent]]
    backward: list[list[Sent]]


def called(trial: Trial, rank: int, phase: str) -> list[Sent]:
    """What the rank called, but for calls of one rank alone, which send nothing."""
    calls = calls_in(trial, rank, phase)
    return [Sent(call.op, call.bytes, call.dtype, len(call.ranks)) for call in calls if len(call.ranks) > 1]


def messages(task: "ExpertTask", trial: Trial) -> Verdict:
    """Each rank calls what it must, and nothing else."""
    for phase in (FORWARD, BACKWARD):
        for rank, right in enumerate(getattr(trial.case.must, phase)):
            got = called(trial, rank, phase)
            if not task.accepts(got, right):
                there, here = (_described(calls, trial.case.n) for calls in (got, right))
                hint = task.why(trial, rank, phase, got, right)
                return Verdict(False, f"rank {rank} called {there} in {phase}; right is {here}", hint)
    if trial.unwaited:
        rank, op = trial.unwaited[0]
        return Verdict(False, f"rank {rank} did not wait for its {op}", WAIT)
    return Verdict(True)


def _described(calls: list[Sent], n: int) -> str:
    each = [f"{call}" + (f" among {call.ranks} ranks" if call.ranks != n else "") for call in calls[:4]]
    more = [f"{len(calls) - 4} more"] if len(calls) > 4 else []
    return listed([*each, *more]) if calls else "nothing"


def instead(known: dict[str, str], phase: str, got: list[Sent], right: list[Sent]) -> str:
    """Why a rank's calls are wrong, by their operations, dtypes, number and bytes; known: what to say of an operation."""
    ops = {call.op for call in right}
    for call in got:
        if call.op not in ops:
            return known.get(call.op) or _of_other(call.op)
    if not got:
        return NOTHING if phase == FORWARD else _NOT_BACKWARD
    dtypes = {call.dtype for call in right}
    for call in got:
        if call.dtype not in dtypes:
            return _ROUNDED.format(dtype=call.dtype)
    total, needed = (sum(call.bytes for call in calls) for calls in (got, right))
    if len(got) > len(right) and total == needed:
        return _TOGETHER.format(more=len(got), count=len(right) or "none", are="is" if len(right) == 1 else "are")
    if total > needed:
        return _PADDED if len(got) == len(right) else _TOO_MUCH
    return _NOT_BACKWARD if phase == BACKWARD else _TOO_LITTLE


def _of_other(op: str) -> str:
    if op in ("send", "recv"):
        return _MESSAGES
    if op == "barrier":
        return _BARRIER
    return _REDUCED if "reduce" in op else _GATHERED
