"""What the check hands to the learner's functions: they compute, and note what they are given."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.context import attention as right
from manyranks.grade.context.attention import Pair
from manyranks.grade.journal import Stopped

ATTENDED, MERGED = "scores ", "merged "  # marks
_ROWS = "queries, their o, lse and do, and their positions have the same length, and so have keys, values and their positions"
_PAIRS = "merge takes a list of pairs (o_SBAD, lse_SBA), of the same queries"
_SEQUENCE = "attention takes q_TBaD, k_TBgD and v_TBgD of the whole sequence, and g divides a"


def attend(watch, places: list[Tensor], weighed: set[int] | None, q, k, v, q_at, k_at) -> Pair:
    """As it is in the exercise. weighed: the blocks at which the bytes held were counted; None where they are not."""
    _fit("attend", (q, q_at), (k, v, k_at))
    source = _note(watch, places, q_at, k_at)
    if weighed is not None and source not in weighed:
        weighed.add(source)
        watch.weigh()
    return right.attend(q, k, v, q_at, k_at)


def attend_backward(watch, places: list[Tensor], q, k, v, o, lse, do, q_at, k_at) -> tuple[Tensor, Tensor, Tensor]:
    """As it is in the exercise."""
    _fit("attend_backward", (q, o, lse, do, q_at), (k, v, k_at))
    _note(watch, places, q_at, k_at)
    return right.attend_backward(q, k, v, o, lse, do, q_at, k_at)


def merge(watch, parts: Any) -> Pair:
    """As task 1 has it."""
    pairs = [part for part in parts if isinstance(part, tuple | list) and len(part) == 2]
    if len(pairs) < len(parts) or not all(isinstance(one, Tensor) for pair in pairs for one in pair):
        raise Stopped("merge was given something else than pairs of tensors", _PAIRS)
    if len({(pair[0].shape, pair[1].shape) for pair in pairs}) != 1:
        raise Stopped(f"merge was given {len(pairs)} parts of different shapes", _PAIRS)
    watch.mark(f"{MERGED}{len(pairs)}")
    return right.merge(pairs)


def attention(q, k, v) -> Tensor:
    """Of a whole sequence."""
    shapes = [getattr(one, "shape", ()) for one in (q, k, v)]
    if not all(len(shape) == 4 for shape in shapes) or shapes[1] != shapes[2] or shapes[0][:2] != shapes[1][:2]:
        raise Stopped(f"attention was given {', '.join(str(list(shape)) for shape in shapes)}", _SEQUENCE)
    if not shapes[1][2] or shapes[0][2] % shapes[1][2]:
        raise Stopped(f"attention was given {shapes[0][2]} query heads and {shapes[1][2]} key/value heads", _SEQUENCE)
    return right.whole(q, k, v)


def ring(q: Tensor, k: Tensor, v: Tensor, positions: list[Tensor]) -> Pair:
    """As task 3 has it, of two chunks a rank."""
    r, n = dist.get_rank(), dist.get_world_size()
    kv, total = torch.stack((k, v)), None
    for hop in range(n):
        coming = torch.empty_like(kv)
        works = [dist.isend(kv, (r - 1) % n), dist.irecv(coming, (r + 1) % n)] if hop < n - 1 else []
        part = right.attend(q, kv[0], kv[1], positions[r], positions[(r + hop) % n])
        total = right.merge([total, part]) if total else part
        for work in works:
            work.wait()
        kv = coming
    return total


def _fit(name: str, *together: tuple[Tensor, ...]) -> None:
    for group in together:
        lengths = [len(one) for one in group]
        if len(set(lengths)) != 1:
            raise Stopped(f"{name} was given tensors of {', '.join(map(str, lengths))} tokens, which belong together", _ROWS)


def _note(watch, places: list[Tensor], q_at: Tensor, k_at: Tensor) -> int:
    """Notes whose keys they are, and how many scores; returns whose."""
    source = next((s for s, own in enumerate(places) if len(k_at) and (own == k_at[0]).any()), -1)
    watch.mark(f"{ATTENDED}{source} {len(q_at) * len(k_at)}")
    return source
