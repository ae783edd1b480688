"""What must be sent: one call a parameter, of a shard in an all-gather and of the padded whole in a reduce-scatter."""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from manyranks.grade.compare import sizes
from manyranks.grade.report import size
from manyranks.grade.scripts import NOTHING
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_ALL_REDUCE = (
    "an all-reduce gives every rank the whole sum, for twice the bytes: dist.reduce_scatter_single gives each rank its shard"
)
_FOR_GATHERS = "an all-reduce sends twice the bytes: dist.all_gather_single brings all shards at once"
_OTHERS = {
    "all_reduce": _ALL_REDUCE,
    "reduce": _ALL_REDUCE,
    "broadcast": "one all-gather brings all shards at once; and all ranks begin with the same parameters",
}


class Must(NamedTuple):
    """What a script's calls must be, in any order. gathers, reduces: bytes that this rank puts into each of the calls.

    once, reduced: how often for each parameter, in words; gathers_anew: the hint for too many gathers; frozen: bytes
    of a frozen parameter's shard, each time; names: of the parameters, in the order in which their gradients leave, with the
    bytes of each; held: what the script's memory must be like; each: what else to know of a call; quiet: the method that
    reduces nothing.
    """

    gathers: tuple[int, ...]
    reduces: tuple[int, ...]
    once: str
    reduced: str = ""
    gathers_anew: str = ""
    frozen: int = 0
    names: tuple[tuple[str, int], ...] = ()
    held: Any = None
    each: str = "each parameter has its own, padded to a multiple of N"
    quiet: str = ""


def traffic(task: "Task", trial: Trial) -> Verdict:
    """Each shard is gathered, and each gradient reduced, as often as it must."""
    must: Must = trial.case.must
    for rank, seen in enumerate(trial.answers):
        for event in seen.events:
            if event.kind == "call" and event.what not in ("all_gather", "reduce_scatter"):
                hint = _OTHERS.get(event.what, "the task needs all-gathers and reduce-scatters only")
                hint = _FOR_GATHERS if hint == _ALL_REDUCE and not must.reduces else hint
                return Verdict(False, f"rank {rank} called {event.what}", hint)
        for op, right in (("reduce_scatter", must.reduces), ("all_gather", must.gathers)):
            got = seen.calls(op)
            if Counter(got) != Counter(right):
                hint = _hint(op, got, right, must, trial.case.n)
                there = _in_quiet(seen.events, must.quiet) if op == "reduce_scatter" and len(got) > len(right) else ""
                return Verdict(False, f"rank {rank} {_found(op, got, right)}", there + hint)
    return Verdict(True)


def _in_quiet(events: list[Event], quiet: str) -> str:
    """How many were reduced in the method that reduces nothing, in words."""
    place, count = "", 0
    for event in events:
        place = event.what if event.kind == "mark" else place
        count += place == quiet and event.what == "reduce_scatter"
    return f"{count} of them in {quiet}(); " if count else ""


def _found(op: str, got: list[int], right: tuple[int, ...]) -> str:
    there, here = sizes(sum(got), sum(right)) if sum(got) != sum(right) else (size(sum(got)), size(sum(right)))
    return f"gave {there} to {len(got)} {op} calls; right are {here} in {len(right)}"


def _hint(op: str, got: list[int], right: tuple[int, ...], must: Must, n: int) -> str:
    if not got:
        return NOTHING if op == "all_gather" else f"{NOTHING}: the gradients are the ranks' own"
    if len(got) == 2 * len(right):
        return _twice(op, must)
    if op == "all_gather" and sum(got) == n * sum(right):
        return "each rank gave its whole tensor: it puts in its shard, and N shards come out"
    if 2 * sum(got) == sum(right) and len(got) == len(right):
        return "float64 is sent as float64, and this had half the bytes"
    if _frozen_too(op, got, right, must, n):
        return "frozen parameters have no gradient and no shard in the optimizer: leave them out"
    if op == "all_gather" and len(got) > len(right):
        return must.gathers_anew or f"one all-gather {must.once}"
    if len(got) > len(right):
        return f"one reduce-scatter {must.reduced}"
    once = must.once if op == "all_gather" else must.reduced
    return f"one {op.replace('_', '-')} {once}: {must.each}"


def _twice(op: str, must: Must) -> str:
    if op == "all_gather":
        return must.gathers_anew or f"everything was gathered twice: one all-gather {must.once}"
    return f"every gradient was sent twice: one reduce-scatter {must.reduced}"


def _frozen_too(op: str, got: list[int], right: tuple[int, ...], must: Must, n: int) -> bool:
    surplus = Counter(got) - Counter(right)
    return (
        bool(must.frozen) and set(surplus) == {must.frozen * (n if op == "reduce_scatter" else 1)} and sum(surplus.values()) > 0
    )
