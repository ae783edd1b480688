"""Checks of exercise 01_collectives. Each takes the learner's function and returns a Report.

Tensors are named x_E (E elements); chunk r is that of torch.tensor_split(x_E, N), and a shard is one chunk.
"""

import torch

from manyranks.grade.check import Task, check
from manyranks.grade.report import Report
from manyranks.grade.trial import Case, Mistake
from manyranks.theory.collectives import rounds

Tensors = list[torch.Tensor]
_LARGE, _SMALL = 250_007, 7  # elements: odd, and neither can be cut into 3 equal chunks
_SEED = 20
_TREE = "in round k each of the 2ᵏ ranks that have the tensor sends it 2ᵏ places on, not the root alone"
_RING = "in a ring, rank r sends to rank r + 1 only, modulo N"
_PAIRS = "each chunk goes straight to the rank it is meant for, in one message"
_OFF = "each chunk is one place off: check which chunk rank r sends first and which it holds at the end"


def tree_broadcast(function) -> Report:
    """Checks tree_broadcast(x_E, root) -> E: the root's x_E, by a binomial tree."""
    return check(Task("tree_broadcast", 3, "a binomial tree", _broadcast_cases, _TREE), function)


def ring_all_gather(function) -> Report:
    """Checks ring_all_gather(shard, elements) -> E: all ranks' shards, by a ring."""
    return check(Task("ring_all_gather", 4, "a ring", _gather_cases, _RING), function)


def ring_reduce_scatter(function) -> Report:
    """Checks ring_reduce_scatter(x_E) -> chunk r of the sum on rank r, by a ring."""
    return check(Task("ring_reduce_scatter", 5, "a ring", _scatter_cases, _RING), function)


def ring_all_reduce(function) -> Report:
    """Checks ring_all_reduce(x_E) -> E: the mean of all ranks' x_E, by two rings."""
    return check(Task("ring_all_reduce", 4, "a ring", _reduce_cases, _RING), function)


def pairwise_all_to_all(function) -> Report:
    """Checks pairwise_all_to_all(x_E) -> on rank r, chunk r of every rank's x_E, that of rank 0 first."""
    return check(Task("pairwise_all_to_all", 4, "a pairwise exchange", _exchange_cases, _PAIRS, in_order=False), function)


def _inputs(n: int, elements: int, dtype: torch.dtype) -> Tensors:
    """Whole numbers, so that sums are exact in any order; those of two ranks or places are never alike by chance alone."""
    generator = torch.Generator().manual_seed(_SEED + n + elements)
    return [torch.randint(1, 1000, (elements,), generator=generator).to(dtype) for _ in range(n)]


def _broadcast_cases(n: int) -> list[Case]:
    return [_broadcast(_inputs(n, _SMALL, torch.int64), n - 1), _broadcast(_inputs(n, _LARGE, torch.float32), 0)]


def _broadcast(inputs: Tensors, root: int) -> Case:
    n = len(inputs)
    mistakes = (
        Mistake("the other ranks still have their own x: each must return what it received", tuple(inputs)),
        Mistake("that is rank 0's x: the root may be another rank", (inputs[0],) * n),
    )
    steps = rounds("broadcast", inputs[0].numel(), n, "tree", root)
    return Case(tuple((x, root) for x in inputs), (inputs[root],) * n, steps, mistakes)


def _gather_cases(n: int) -> list[Case]:
    return [_gather(_inputs(n, e, dtype)[0], n) for e, dtype in ((_SMALL, torch.int64), (_LARGE, torch.float32))]


def _gather(whole: torch.Tensor, n: int) -> Case:
    shards = whole.tensor_split(n)
    alone = tuple(_placed(whole, n, {r}) for r in range(n))
    mistakes = (
        Mistake("that is the rank's own shard: the other shards are missing", shards),
        Mistake("only the rank's own shard is in its place: no other one was received", alone),
        Mistake("the shards stand in the order of their arrival; shard r belongs at place r", _by_arrival(shards)),
        Mistake("the last shard is missing: a ring of N ranks has N − 1 steps", _short_gather(whole, n)),
        Mistake(_OFF, tuple(torch.cat([shards[(i - 1) % n] for i in range(n)]) for _ in range(n))),
        Mistake(_OFF, tuple(torch.cat([shards[(i + 1) % n] for i in range(n)]) for _ in range(n))),
    )
    steps = rounds("all_gather", whole.numel(), n, "ring")
    return Case(tuple((shard, whole.numel()) for shard in shards), (whole,) * n, steps, mistakes)


def _by_arrival(shards) -> tuple[torch.Tensor, ...]:
    n = len(shards)
    return tuple(torch.cat([shards[(r - step) % n] for step in range(n)]) for r in range(n))


def _short_gather(whole: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """What a ring has after N − 2 steps."""
    return tuple(_placed(whole, n, {(r - step) % n for step in range(n - 1)}) for r in range(n))


def _placed(whole: torch.Tensor, n: int, present: set[int]) -> torch.Tensor:
    """The whole tensor with zeros for the chunks that are not present."""
    return torch.cat([chunk if i in present else torch.zeros_like(chunk) for i, chunk in enumerate(whole.tensor_split(n))])


def _scatter_cases(n: int) -> list[Case]:
    return [_scatter(_inputs(n, e, dtype)) for e, dtype in ((_SMALL, torch.int64), (_LARGE, torch.float32))]


def _scatter(inputs: Tensors) -> Case:
    n, total = len(inputs), sum(inputs)
    chunks, own = total.tensor_split(n), [x.tensor_split(n)[r] for r, x in enumerate(inputs)]
    means = tuple(chunk / n for chunk in chunks)
    mistakes = (
        Mistake("that is the rank's own chunk: nothing was added to it", tuple(own)),
        Mistake("that is the rank's own x: return chunk r of the sum", tuple(inputs)),
        Mistake("that is the whole sum: return only the rank's chunk of it", (total,) * n),
        Mistake("that is the mean: a reduce-scatter here sums", means),
        Mistake(_OFF, tuple(chunks[(r + 1) % n] for r in range(n))),
        Mistake(_OFF, tuple(chunks[(r - 1) % n] for r in range(n))),
        Mistake("one term is missing: a ring of N ranks has N − 1 steps", _partial(inputs, 1)),
        Mistake("what comes must be added to the rank's own terms, not replace them", _unadded(inputs)),
    )
    return Case(tuple((x,) for x in inputs), chunks, rounds("reduce_scatter", total.numel(), n, "ring"), mistakes)


def _partial(inputs: Tensors, missing: int) -> tuple[torch.Tensor, ...]:
    """Chunk r of the sum without that of the `missing`-th rank after r, the first whose term travels."""
    n, total = len(inputs), sum(inputs)
    return tuple((total - inputs[(r + missing) % n]).tensor_split(n)[r] for r in range(n))


def _unadded(inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """What the last step brings when chunks replace instead of adding."""
    n = len(inputs)
    return tuple(inputs[(r + 1) % n].tensor_split(n)[r] for r in range(n))


def _reduce_cases(n: int) -> list[Case]:
    return [_reduce(_inputs(n, e, dtype)) for e, dtype in ((_SMALL, torch.float64), (_LARGE, torch.float32))]


def _reduce(inputs: Tensors) -> Case:
    n, total = len(inputs), sum(inputs)
    mistakes = (
        Mistake("that is the sum: the mean is asked for, so divide by N", (total,) * n),
        Mistake("that is the rank's own x: nothing was added to it", tuple(inputs)),
        Mistake("that is the rank's own x / N: nothing was added to it", tuple(x / n for x in inputs)),
        Mistake("that is divided by N twice", (total / n / n,) * n),
        Mistake("only the rank's own chunk is summed: the all-gather is missing", _one_chunk(inputs, 1)),
        Mistake("only the rank's own chunk is summed: the all-gather is missing", _one_chunk(inputs, n)),
    )
    return Case(tuple((x,) for x in inputs), (total / n,) * n, rounds("all_reduce", total.numel(), n, "ring"), mistakes)


def _one_chunk(inputs: Tensors, divisor: int) -> tuple[torch.Tensor, ...]:
    n, total = len(inputs), sum(inputs)
    return tuple(_placed(total / divisor, n, {r}) for r in range(n))


def _exchange_cases(n: int) -> list[Case]:
    return [_exchange(_inputs(n, e, dtype)) for e, dtype in ((_SMALL, torch.int64), (_LARGE, torch.float32))]


def _exchange(inputs: Tensors) -> Case:
    n, cuts = len(inputs), [x.tensor_split(len(inputs)) for x in inputs]
    right = tuple(torch.cat([cuts[s][r] for s in range(n)]) for r in range(n))
    mistakes = (
        Mistake("that is the rank's own x: nothing was exchanged", tuple(inputs)),
        Mistake("every rank has chunk r of all ranks, but in the order of their arrival", _arriving(cuts)),
        Mistake("the rank's own chunk is missing: it stays, and belongs at place r", _lacking_own(cuts)),
        Mistake("that is every rank's own chunk, an all-gather: rank s sends chunk r to rank r", _own_to_all(cuts)),
        Mistake("the chunks stand in reverse order: that of rank 0 comes first", _reversed(cuts)),
    )
    return Case(tuple((x,) for x in inputs), right, rounds("all_to_all", inputs[0].numel(), n, "pairwise"), mistakes)


def _arriving(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[(r - k) % n][r] for k in range(n)]) for r in range(n))


def _lacking_own(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([torch.zeros_like(cuts[s][r]) if s == r else cuts[s][r] for s in range(n)]) for r in range(n))


def _own_to_all(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[s][s] for s in range(n)]) for _ in range(n))


def _reversed(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[s][r] for s in reversed(range(n))]) for r in range(n))
