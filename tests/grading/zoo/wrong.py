"""What the zoo is made of: a wrong answer with the words of its hint, and what learners' code has in common."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist


class Wrong(NamedTuple):
    """A wrong answer to a task. says: words that its report must have; right_values: whether only the way there is wrong."""

    task: str
    function: Callable
    says: str
    right_values: bool


def keeper(zoo: list[Wrong]):
    """A decorator that keeps the function below it in this zoo. cases: those in which it shows, where one is not enough."""

    def wrong(task: str, says: str, right_values: bool = False, cases: slice | None = None):
        def keep(function):
            if cases:
                function.cases = cases
            zoo.append(Wrong(task, function, says, right_values))
            return function

        return keep

    return wrong


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def exchange(outgoing, to, incoming, source):
    for message in [dist.isend(outgoing.contiguous(), to), dist.irecv(incoming, source)]:
        message.wait()


def reduce_ring(chunks, first=1, steps=None, up=False, adds=True):
    """A ring over chunks: what is right, with the knobs that learners turn the wrong way."""
    (rank, n), sign = me(), 1 if up else -1
    for step in range(n - 1 if steps is None else steps(n)):
        mine, target = chunks[(rank - sign * (step + first)) % n], chunks[(rank - sign * (step + first + 1)) % n]
        coming = torch.empty_like(target)
        exchange(mine, (rank + sign) % n, coming, (rank - sign) % n)
        target.copy_(target + coming if adds else coming)


def gather_ring(chunks, steps=None, up=False):
    reduce_ring(chunks, 0, steps, up, adds=False)


def sum_of_whole_tensors(x):
    (rank, n), total, passing = me(), x.clone(), x.clone()
    for _ in range(n - 1):
        coming = torch.empty_like(x)
        exchange(passing, (rank - 1) % n, coming, (rank + 1) % n)
        total, passing = total + coming, coming
    return total


def placed(shard, elements):
    whole = torch.zeros(elements, dtype=shard.dtype)
    whole.tensor_split(me()[1])[me()[0]].copy_(shard)
    return whole
