"""What must be sent for shared checkpoints, and when: one all-gather of a share for each, in backward."""

from typing import TYPE_CHECKING

import torch

from manyranks.grade.checkpointing import judges
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.checkpointing.sharing import Shared

GROUP = "gather within the group: dist.get_rank(group), dist.get_world_size(group), and group=group in the call"
REST = "elements // t leaves the last elements out: a share has ⌈elements / t⌉, the last one padded with zeros"
_FORWARD = "forward only takes the rank's own share: the gather belongs into backward, when x is needed"
_WHOLE = "each rank puts in its share, and gets all of them: yours is the whole x, or as large"
_ONCE = (
    "one gather for each checkpoint, when backward comes to it. Each look at ctx.saved_tensors calls unpack again: look once, "
    "x, state = ctx.saved_tensors"
)
_NOTHING = "nothing was gathered: if each rank keeps only its share, none has x in backward"
ONLY_X = "only x goes in shares: what else is saved, as a random state, comes through pack, too, and must pass as it is"
_HALF = "half the bytes: x keeps its dtype on its way"
_ALL = "one dist.all_gather_single brings all shares"
STATE = torch.get_rng_state().nbytes
_OTHER = {
    "all_reduce": "an all-reduce sends twice the bytes: dist.all_gather_single brings all shares at once",
    "broadcast": "if one rank keeps x for all, its memory is full first: each keeps a share, and one all-gather brings them",
}


def group_size(n: int) -> int:
    """Of the groups among n ranks: 4 are two pairs, which have different x."""
    return 2 if n == 4 else n


def traffic(task: "Shared", trial: Trial) -> Verdict:
    """One all-gather of a share for each checkpoint, in backward."""
    return next(filter(None, (_of_rank(trial, rank) for rank in range(trial.case.n))), Verdict(True))


def _of_rank(trial: Trial, rank: int) -> Verdict | None:
    t, right, place, got = group_size(trial.case.n), trial.case.must.gathers, "", []
    for call in trial.calls[rank]:
        if len(call.ranks) != t:
            return Verdict(False, f"rank {rank} made a call among {len(call.ranks)} ranks; its group has {t}", GROUP)
    for event in trial.answers[rank].events:
        place = event.what if event.what in ("forward", "backward") else place
        if event.kind == "call" and place == "forward":
            return Verdict(False, f"rank {rank} called {event.what} of {event.bytes:,} bytes in forward", _FORWARD)
        if event.kind == "call" and event.what != "all_gather":
            hint = _OTHER.get(event.what, _ALL)
            hint = _ALL if event.what == "broadcast" and right and event.bytes in right else hint
            return Verdict(False, f"rank {rank} called {event.what}", hint)
        got += [event.bytes] if event.kind == "call" else []
    if right is None or tuple(got) == right:
        return None
    found = f"rank {rank} put {sum(got):,} bytes into {len(got)} all-gathers; right are {sum(right):,} bytes in {len(right)}"
    return Verdict(False, found, _why(got, right))


def _why(got: list[int], right: tuple[int, ...]) -> str:
    if not got:
        return _NOTHING
    if len(got) != len(right):
        others = sorted(set(got) - set(right))
        return ONLY_X if others and others[-1] <= STATE and set(right) < set(got) else _ONCE
    if 2 * max(got) == max(right):
        return _HALF
    return _WHOLE if max(got) >= 2 * max(right) - 8 else REST


def order(task: "Shared", trial: Trial) -> Verdict:
    """The functions run as they must, and each after its gather."""
    verdict = judges.calls(task, trial)
    if not verdict.ok:
        return verdict
    for rank, seen in enumerate(trial.answers):
        gathered, start = 0, [event.what for event in seen.events].index("backward")
        for event in seen.events[start:]:
            gathered += event.kind == "call"
            if event.what.startswith("call "):
                if gathered != 1:
                    found = f"rank {rank}: {gathered} gathers before {event.what.removeprefix('call ')} ran again; right is one"
                    return Verdict(False, found, _ONCE)
                gathered = 0
    return Verdict(True)
