"""What the check hands to the learner's functions: an all-to-all with a way back, that sees what it is told."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.measure.journal import Stopped

_LISTS = "exchange(rows, sent, received): lists of N whole numbers, how many rows go to each rank, and how many come: .tolist()"
_ROWS = "exchange(rows, sent, received): rows has sum(sent) rows, those for rank 0 first"
_NO_OTHER = "what one rank sends, the other has to expect: the numbers are those of the copies that are not dropped"

Explain = Callable[[str, list[int]], str]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.splits
        return _Exchange.apply(grad, received, sent), None, None


def exchange(sent: list[int], received: list[int], explain: Explain) -> Callable:
    """exchange as task 3 has it, on a rank where these numbers are right.

    explain: of "sent" or "received" and what was given, which is wrong, the hint; "" for none.
    """

    def exchange(rows, going, coming) -> Tensor:
        if not isinstance(rows, Tensor):
            raise Stopped(f"exchange was given a {type(rows).__name__} as rows", _ROWS)
        for name, given, right in (("sent", going, sent), ("received", coming, received)):
            numbers = _numbers(given, len(right), name)
            if numbers != right:
                found = f"exchange was given {name} = {numbers}; right is {right}"
                raise Stopped(found, explain(name, numbers) or _NO_OTHER)
        if rows.ndim != 2 or len(rows) != sum(sent):
            raise Stopped(f"exchange was given rows of the shape {list(rows.shape)}, and {sum(sent)} to send", _ROWS)
        return _Exchange.apply(rows, sent, received)

    exchange.__qualname__ = "exchange"
    return exchange


def _numbers(given: Any, count: int, name: str) -> list[int]:
    if not isinstance(given, list | tuple) or len(given) != count:
        raise Stopped(f"exchange was given {_kind(given)} as {name}", _LISTS)
    if not all(type(one) is int for one in given):
        raise Stopped(f"exchange was given a list of {type(given[0]).__name__} as {name}", _LISTS)
    return list(given)


def _kind(given: Any) -> str:
    if isinstance(given, list | tuple):
        return f"a {type(given).__name__} of {len(given)}"
    return f"a {type(given).__name__}"
