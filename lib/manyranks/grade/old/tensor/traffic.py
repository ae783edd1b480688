"""Which collectives a rank may call when it is made, in forward and in backward, and of how many bytes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.report import listed
from manyranks.grade.old.scripts import judge_values
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.old.tensor.task import TensorTask

PHASES = {"made": "when it was made", "forward": "in forward", "backward": "in backward"}
AGAIN = "again"  # a mark: what is called from there on does not count
GROUP = (
    "the ranks are those of `group`: dist.get_rank(group), dist.get_world_size(group), and group=group in each call; "
    "None means all of them"
)
_WRONG_WAY = (
    "that is the wrong direction: f is silent in forward and sums the gradient, g sums in forward and is silent in backward"
)
_BOTH_WAYS = "that is done in both directions: f is silent in forward, g in backward"
_TOGETHER = "one call for all: put them into one flat row, and cut it again afterwards"
_ONCE = "once is enough: where one tensor has several uses, one f stands in front of them all"
_OTHERS = {  # than all-reduces, where these are all that it takes
    "all_gather": "no rank needs what the others have, only the sum: each computes with its part, and an all-reduce adds up",
    "reduce": "dist.reduce gives the sum to one rank only, and the others need it, too: dist.all_reduce",
    "broadcast": "nothing has to be handed out: what is whole is on all ranks already",
}
_SUM = "an all-reduce is all that it takes: every rank gets the sum, and sends no more than it must"
_MISSING = {
    "forward": "g is missing: what each rank has a part of is summed in forward",
    "backward": "f is missing: what all ranks have alike and use for different things has its gradients summed in backward",
}
_NOTHING = "nothing was exchanged here"
_UNSEEN = (
    f"{_NOTHING}. Calls are torch.distributed's own, dist.all_reduce and its like: DTensor's, and functional "
    "collectives, do not count"
)
_MOST_SUMS = (
    "a sum is exchanged where each rank has a part of it, and only there. Is this one a part of a sum, or is it whole on every "
    "rank already?"
)

Sent = tuple[str, int, int]  # operation, bytes, ranks of the call


class Phases(NamedTuple):
    """What a rank calls in each: one of the tuples, in any order."""

    forward: tuple[tuple[Sent, ...], ...]
    backward: tuple[tuple[Sent, ...], ...]
    made: tuple[tuple[Sent, ...], ...] = ((),)


def reduced(bytes_: int, t: int) -> Sent:
    """An all-reduce."""
    return "all_reduce", bytes_, t


def called(trial: Trial, rank: int, phase: str) -> list[Sent]:
    """What the rank called in this phase, but for calls among one rank, which send nothing."""
    return sorted(sent for at, sent in _calls(trial, rank) if at == phase and sent[2] > 1)


def _calls(trial: Trial, rank: int) -> Iterator[tuple[str, Sent]]:
    phase, calls = "made", iter(trial.calls[rank])
    for event in trial.answers[rank].events:
        phase = event.what if event.kind == "mark" and event.what in (*PHASES, AGAIN) else phase
        if event.kind == "call":
            call = next(calls, None)
            yield phase, (_name(event.what), event.bytes, len(call.ranks) if call else 0)


def _name(op: str) -> str:
    """An all-to-all whose parts are added is as good as a reduce-scatter, and sends as much."""
    return "reduce_scatter" if op == "all_to_all" else op


def traffic(task: "TensorTask", trial: Trial) -> Verdict:
    """Each rank calls what it must."""
    return next(filter(None, (_of_rank(task, trial, rank) for rank in range(trial.case.n))), Verdict(True))


def _of_rank(task: "TensorTask", trial: Trial, rank: int) -> Verdict | None:
    layout, phases = trial.case.must.layout, trial.case.must.phases
    own = next(set(ranks) for ranks in layout.groups if rank in ranks)
    for call in trial.calls[rank]:
        if not set(call.ranks) <= own:
            found = f"rank {rank} called {call.op} among {len(call.ranks)} ranks; its group has {len(own)}"
            return Verdict(False, found, GROUP)
    got = {phase: called(trial, rank, phase) for phase in PHASES}
    for phase in PHASES:
        right = getattr(phases, phase)
        if got[phase] not in [sorted(way) for way in right]:
            there, here = (_described(calls, len(own)) for calls in (got[phase], right[0]))
            found = f"rank {rank} called {there} {PHASES[phase]}; right is {here}"
            return Verdict(False, found, _hint(task, trial, rank, phase, got))
    return None


def _hint(task: "TensorTask", trial: Trial, rank: int, phase: str, got: dict[str, list[Sent]]) -> str:
    """A question that fits any call is left out where the values say what is wrong."""
    noted = sum(event.kind == "call" for event in trial.answers[rank].events)
    if not got[phase] and noted < len(trial.calls[rank]):  # the world counts what does not come by torch.distributed's names
        return _UNSEEN
    hint = task.why_traffic(phase, got, trial.case.must.phases)
    return "" if hint == _MOST_SUMS and judge_values(task, trial).hint else hint


def _described(calls: Iterable[Sent], t: int) -> str:
    each = []
    for (op, size, ranks), often in Counter(sorted(calls)).items():
        among = f" among {ranks} ranks" if ranks != t else ""
        each.append(f"{op} of {size:,} bytes{among}" + (f" {often} times" if often > 1 else ""))
    return listed(each) if each else "nothing"


def why(phase: str, got: dict[str, list[Sent]], phases: Phases) -> str:
    """The hint for what a rank called in this phase and, perhaps, in the other one."""
    other = "backward" if phase == "forward" else "forward"
    mine, right, theirs = got[phase], list(getattr(phases, phase)[0]), getattr(phases, other)[0]
    if phase == "made":
        return _OTHERS["broadcast"]
    if strange := {op for op, _, _ in mine} - {op for op, _, _ in [*right, *theirs]}:
        return _OTHERS.get(min(strange), _SUM)
    if not right and mine:
        return _BOTH_WAYS if got[other] == sorted(theirs) else _WRONG_WAY
    if not mine:
        sums = {op for op, _, _ in right} == {"all_reduce"}
        return _WRONG_WAY if len(got[other]) > len(theirs) else _MISSING[phase] if sums else _NOTHING
    if len(mine) > len(right) and sum(size for _, size, _ in mine) == sum(size for _, size, _ in right):
        return _TOGETHER
    if len(mine) > len(right) and set(mine) <= set(right):
        return _ONCE
    return _MOST_SUMS
