"""What a rank calls: one all-reduce of a few numbers, and nothing else."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.report import listed
from manyranks.grade.old.scripts import NOTHING, WAIT
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

if TYPE_CHECKING:
    from manyranks.grade.mfu.task import MfuTask

_GATHERED = "no rank needs each of the others' numbers, only the largest of each: one all-reduce, op=dist.ReduceOp.MAX"
_MANY = "one call for each number, or more: put all numbers into one tensor, for each call costs its latency"
_BARRIER = "a barrier is not needed: an all-reduce waits for all ranks"
_ROUNDED = "what is sent is {dtype}: torch.tensor of Python's floats is float32, so say dtype=torch.float64"
_MESSAGES = "an all-reduce is one call, dist.all_reduce, not a loop of messages"


class Sent(NamedTuple):
    """A call. bytes: that a rank puts in."""

    op: str
    bytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} of {self.bytes:,} bytes of {self.dtype}" if self.dtype else self.op


def one_message(what: str, share: float, more: str) -> Aspect:
    """The aspect. The case has the `count` of numbers; more: what to say of more numbers than these."""

    def judge(task: "MfuTask", trial: Trial) -> Verdict:
        right = Sent("all_reduce", 8 * trial.case.must.count, "float64")
        for rank, calls in trial.calls.items():
            got = [Sent(call.op, call.bytes, call.dtype) for call in calls]
            if got != [right]:
                there = listed([str(call) for call in got[:4]] + ["others"] * (len(got) > 4)) if got else "nothing"
                return Verdict(False, f"rank {rank} called {there}; right is one {right}", _why(got, right, more))
        if trial.unwaited:
            rank, op = trial.unwaited[0]
            return Verdict(False, f"rank {rank} did not wait for its {op}", WAIT)
        return Verdict(True)

    return Aspect(what, share, judge)


def _why(got: list[Sent], right: Sent, more: str) -> str:
    ops = [call.op for call in got]
    if not got:
        return NOTHING
    if "barrier" in ops:
        return _BARRIER
    if "send" in ops or "recv" in ops:
        return _MESSAGES
    if {*ops} != {right.op}:
        return _GATHERED
    if wrong := next((call.dtype for call in got if call.dtype != right.dtype), ""):
        return _ROUNDED.format(dtype=wrong)
    return _MANY if len(got) > 1 else more
