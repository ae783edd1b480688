"""What the check hands to the learner's functions: they compute, and note what they are given."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context import attention as right
from manyranks.grade.old.context.attention import Pair
from manyranks.measure.journal import Stopped

ATTENDED, MERGED = "scores ", "merged "  # marks: whose keys, scores and queries; parts and queries
_ROWS = "queries, their o, lse and do, and their positions have the same length, and so have keys, values and their positions"
_SHAPES = "q_SBAD, k_TBGD and v_TBGD, whose batch and whose size of a head are the same"
_PAIRS = "merge takes a list of pairs (o_SBAD, lse_SBA), of the same queries"
_SEQUENCE = "attention takes q_TBaD, k_TBgD and v_TBgD of the whole sequence, and g divides a"


def attend(watch, places: list[Tensor], weighs: bool) -> Callable:
    """attend as it is in the exercise. weighs: whether the bytes held are counted when a block is begun."""
    weighed = set()

    def attend(q, k, v, q_at, k_at) -> Pair:
        _fit("attend", (q, q_at), (k, v, k_at))
        source = _note(watch, places, q_at, k_at)
        if weighs and source not in weighed:
            weighed.add(source)
            watch.weigh()
        return right.attend(q, k, v, q_at, k_at)

    return _named(attend)


def attend_backward(watch, places: list[Tensor]) -> Callable:
    """attend_backward as it is in the exercise."""

    def attend_backward(q, k, v, o, lse, do, q_at, k_at) -> tuple[Tensor, Tensor, Tensor]:
        _fit("attend_backward", (q, o, lse, do, q_at), (k, v, k_at))
        _note(watch, places, q_at, k_at)
        return right.attend_backward(q, k, v, o, lse, do, q_at, k_at)

    return _named(attend_backward)


def merge(watch) -> Callable:
    """merge as task 1 has it."""

    def merge(parts) -> Pair:
        if not isinstance(parts, tuple | list) or not parts or not all(map(_is_pair, parts)):
            raise Stopped("merge was given something else than a list of pairs of tensors", _PAIRS)
        if len({(o.shape, lse.shape) for o, lse in parts}) != 1:
            raise Stopped(f"merge was given {len(parts)} parts of different shapes", _PAIRS)
        watch.mark(f"{MERGED}{len(parts)} {len(parts[0][0])}")
        return right.merge([(o, lse) for o, lse in parts])

    return _named(merge)


def _named(function: Callable) -> Callable:
    """With the name that Python's errors tell a learner."""
    function.__qualname__ = function.__name__
    return function


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(one, Tensor) for one in part)


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


def _fit(name: str, queries: tuple, keys: tuple) -> None:
    """Raises Stopped where they do not belong together: q, …, q_at and k, v, k_at."""
    if not all(isinstance(one, Tensor) for one in (*queries, *keys)):
        raise Stopped(f"{name} was given something else than tensors", _ROWS)
    for group in (queries, keys):
        lengths = [len(one) for one in group]
        if len(set(lengths)) != 1:
            raise Stopped(f"{name} was given tensors of {', '.join(map(str, lengths))} tokens, which belong together", _ROWS)
    q, k, v = queries[0], keys[0], keys[1]
    if {q.ndim, k.ndim} != {4} or k.shape != v.shape or q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(list(one.shape)) for one in (q, k, v))
        raise Stopped(f"{name} was given q, k and v of the shapes {shapes}", _SHAPES)


def _note(watch, places: list[Tensor], q_at: Tensor, k_at: Tensor) -> int:
    """Notes whose keys they are, how many scores, and of how many queries; returns whose."""
    source = next((s for s, own in enumerate(places) if len(k_at) and (own == k_at[0]).any()), -1)
    watch.mark(f"{ATTENDED}{source} {len(q_at) * len(k_at)} {len(q_at)}")
    return source
