"""Checks of exercise 01_collectives. Each takes the learner's function and returns a Report.

Tensors are named x_E (E elements); chunk r is that of torch.tensor_split(x_E, N), and a shard is one chunk. The rings run
downwards and the tree sends far first, unlike those of the chapter and of theory.
"""

import torch

from manyranks.grade.check import check
from manyranks.grade.messages import Case, Detour, MessageTask, Missing, Mistake
from manyranks.grade.report import Line, Report
from manyranks.grade.trial import Trial
from manyranks.theory.collectives import Message, Round, chunk_sizes, rounds

Tensors = list[torch.Tensor]
_LARGE, _SMALL = 250_007, 7  # elements: odd, and neither can be cut into 3 equal chunks
_SEED = 20
_TREE = "in the round of distance d, each place that is a multiple of 2d sends to place + d, where that exists"
_RING = "in this ring, rank r sends to rank r − 1 only, modulo N"
_UPWARDS = "this ring runs upwards: rank 0 sent to rank 1; here rank r sends to r − 1"
_PAIRS = "each chunk goes straight to the rank it is meant for, in one message"
_ROOM = "every chunk that a rank receives is as long as its own chunk, chunk r: make the room like that one"
_OFF = "each chunk is one place off: check which chunk rank r sends first and which it holds at the end"
_NO_GATHER = "only the rank's own chunk is summed: the all-gather is missing"


def tree_broadcast(function) -> Report:
    """Checks tree_broadcast(x_E, root) -> E: the root's x_E, by a binomial tree that sends far first."""
    return check(MessageTask("tree_broadcast", 3, _broadcast_cases, "this tree", _TREE), function)


def ring_all_gather(function) -> Report:
    """Checks ring_all_gather(shard, elements) -> E: all ranks' shards, by a ring that runs downwards."""
    return check(MessageTask("ring_all_gather", 4, _gather_cases, "this ring", _RING, argument="shard"), function)


def ring_reduce_scatter(function) -> Report:
    """Checks ring_reduce_scatter(x_E) -> chunk r of the sum on rank r, by a ring that runs downwards."""
    return check(MessageTask("ring_reduce_scatter", 5, _scatter_cases, "this ring", _RING), function)


def ring_all_reduce(function) -> Report:
    """Checks ring_all_reduce(x_E) -> E: the mean of all ranks' x_E, by two rings that run downwards."""
    return check(MessageTask("ring_all_reduce", 4, _reduce_cases, "this ring", _RING, remark=_divisions), function)


def pairwise_all_to_all(function) -> Report:
    """Checks pairwise_all_to_all(x_E) -> on rank r, chunk r of every rank's x_E, that of rank 0 first."""
    return check(
        MessageTask("pairwise_all_to_all", 4, _exchange_cases, "a pairwise exchange", _PAIRS, in_order=False, room=_ROOM),
        function,
    )


def _inputs(n: int, elements: int, dtype: torch.dtype) -> Tensors:
    """Whole numbers, so that sums are exact in any order; those of two ranks or places are never alike by chance alone."""
    generator = torch.Generator().manual_seed(_SEED + n + elements)
    return [torch.randint(1, 1000, (elements,), generator=generator).to(dtype) for _ in range(n)]


def _downwards(op: str, elements: int, n: int) -> list[Round]:
    """Theory's ring mirrored: rank r and chunk c take the places of −r and −c, modulo n."""
    sizes = chunk_sizes(elements, n)

    def mirrored(message: Message) -> Message:
        chunk = -message.start % n  # of a tensor of n elements, `start` is the chunk's number
        return Message(-message.source % n, -message.destination % n, sum(sizes[:chunk]), sizes[chunk], message.adds)

    return [tuple(map(mirrored, messages)) for messages in rounds(op, n, n, "ring")]


def _upwards(op: str, elements: int, n: int) -> tuple[Detour, ...]:
    return (Detour(_UPWARDS, rounds(op, elements, n, "ring")),)


def _far_first(elements: int, n: int, root: int) -> list[Round]:
    """Theory's tree scatter, with the whole tensor in each message."""
    tree = rounds("scatter", elements, n, "tree", root)
    return [tuple(m._replace(start=0, count=elements) for m in messages) for messages in tree]


def _all_but(r: int, n: int) -> set[int]:
    return set(range(n)) - {r}


def _broadcast_cases(n: int) -> list[Case]:
    return [_broadcast(_inputs(n, _SMALL, torch.int64), n - 1), _broadcast(_inputs(n, _LARGE, torch.float32), 0)]


def _broadcast(inputs: Tensors, root: int) -> Case:
    n, elements = len(inputs), inputs[0].numel()
    mistakes = (
        Mistake("the other ranks still have their own x: each must return what it received", tuple(inputs)),
        Mistake("that is rank 0's x: the root may be another rank", (inputs[0],) * n),
    )
    tree = _far_first(elements, n, root)
    arguments = tuple((x, root) for x in inputs)
    return Case(arguments, (inputs[root],) * n, tree, mistakes, _other_trees(elements, n, root), f"root = {root}")


def _other_trees(elements: int, n: int, root: int) -> tuple[Detour, ...]:
    tree = _far_first(elements, n, root)
    return (
        Detour(
            "this tree sends near first: here the root sends to the farthest place first, and distances halve",
            rounds("broadcast", elements, n, "tree", root),
        ),
        Detour(
            "each rank that has the tensor passes it on, not the root alone", rounds("broadcast", elements, n, "naive", root)
        ),
        Detour("that is the tree of root 0: count places from the root, place = (rank - root) % N", _far_first(elements, n, 0)),
        Detour("a round is missing: there are ⌈log₂ N⌉, and the last one has distance 1", tree[:-1]),
        Detour("a round is missing: the first distance is the largest power of two below N", tree[1:]),
    )


def _gather_cases(n: int) -> list[Case]:
    return [_gather(_inputs(n, e, dtype)[0], n) for e, dtype in ((_SMALL, torch.int64), (_LARGE, torch.float32))]


def _gather(whole: torch.Tensor, n: int) -> Case:
    shards, elements = whole.tensor_split(n), whole.numel()
    alone = tuple(_placed(whole, n, r) for r in range(n))
    others = tuple(_all_but(r, n) for r in range(n))
    mistakes = (
        Mistake("that is the rank's own shard: the other shards are missing", shards),
        Mistake("only the rank's own shard is in its place: no other one was received", alone),
        Mistake("the shards stand in the order of their arrival; shard r belongs at place r", _by_arrival(shards)),
        Mistake(_OFF, tuple(torch.cat([shards[(i - 1) % n] for i in range(n)]) for _ in range(n))),
        Mistake(_OFF, tuple(torch.cat([shards[(i + 1) % n] for i in range(n)]) for _ in range(n))),
        Missing("the rank's own shard is missing: copy it to place r", tuple({r} for r in range(n))),
        Missing("the last shard is missing: a ring of N ranks has N − 1 steps", tuple({(r - 1) % n} for r in range(n))),
        Missing("only the rank's own shard is right: in each step pass on the shard that came last", others),
    )
    arguments = tuple((shard, elements) for shard in shards)
    ring, upwards = _downwards("all_gather", elements, n), _upwards("all_gather", elements, n)
    return Case(arguments, (whole,) * n, ring, mistakes, upwards)


def _by_arrival(shards) -> tuple[torch.Tensor, ...]:
    n = len(shards)
    return tuple(torch.cat([shards[(r + step) % n] for step in range(n)]) for r in range(n))


def _placed(whole: torch.Tensor, n: int, r: int) -> torch.Tensor:
    """The whole tensor with zeros for all chunks but one."""
    return torch.cat([chunk if i == r else torch.zeros_like(chunk) for i, chunk in enumerate(whole.tensor_split(n))])


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
        Mistake("what comes must be added to the rank's own terms, not replace them", _unadded(inputs)),
        Mistake("one term is missing: a ring of N ranks has N − 1 steps", _partial(inputs, -1)),
        Mistake("the rank's own terms are missing: add what comes to the rank's own chunk", _partial(inputs, 0)),
    )
    ring, upwards = (make("reduce_scatter", total.numel(), n) for make in (_downwards, _upwards))
    return Case(tuple((x,) for x in inputs), chunks, ring, mistakes, upwards)


def _partial(inputs: Tensors, missing: int) -> tuple[torch.Tensor, ...]:
    """Chunk r of the sum without the terms of rank r + missing; rank r − 1 is the first whose terms travel."""
    n, total = len(inputs), sum(inputs)
    return tuple((total - inputs[(r + missing) % n]).tensor_split(n)[r] for r in range(n))


def _unadded(inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """What the last step brings when chunks replace instead of adding."""
    n = len(inputs)
    return tuple(inputs[(r - 1) % n].tensor_split(n)[r] for r in range(n))


def _reduce_cases(n: int) -> list[Case]:
    return [_reduce(_inputs(n, e, dtype)) for e, dtype in ((_SMALL, torch.float64), (_LARGE, torch.float32))]


def _reduce(inputs: Tensors) -> Case:
    n, total = len(inputs), sum(inputs)
    mistakes = (
        Mistake("that is the sum: the mean is asked for, so divide by N", (total,) * n),
        Mistake("that is rounded down: divide with /, not with //", (total // n,) * n),
        Mistake("that is the rank's own x: nothing was added to it", tuple(inputs)),
        Mistake("that is the rank's own x / N: nothing was added to it", tuple(x / n for x in inputs)),
        Mistake("that is divided by N twice", (total / n / n,) * n),
        Mistake(_NO_GATHER, tuple(_placed(total, n, r) for r in range(n))),
        Missing("the rank's own chunk is missing: the all-gather must put it in its place", tuple({r} for r in range(n))),
        Missing(_NO_GATHER, tuple(_all_but(r, n) for r in range(n))),
    )
    ring, upwards = (make("all_reduce", total.numel(), n) for make in (_downwards, _upwards))
    return Case(tuple((x,) for x in inputs), (total / n,) * n, ring, mistakes, upwards)


def _divisions(trial: Trial) -> Line:
    """The answer to the task's question: where is the cheapest place to divide by N?"""
    elements, shard = trial.case.expected[0].numel(), chunk_sizes(trial.case.expected[0].numel(), trial.case.n)[0]
    divided = max(answer.scaled for answer in trial.answers)
    if divided <= shard:
        return Line(True, "divides at the cheapest place", f"{trial.case}, each rank divided its shard only")
    found = f"{trial.case}, a rank divided {divided:,} of them, where {shard:,} are enough"
    times = "N times as many" if divided == elements else "more"
    than = "as" if divided == elements else "than"
    return Line(True, "divides", found, f"{times} divisions {than} needed: divide the shard, between the two rings")


def _exchange_cases(n: int) -> list[Case]:
    return [_exchange(_inputs(n, e, dtype)) for e, dtype in ((_SMALL, torch.int64), (_LARGE, torch.float32))]


def _exchange(inputs: Tensors) -> Case:
    n, cuts = len(inputs), [x.tensor_split(len(inputs)) for x in inputs]
    right = tuple(torch.cat([cuts[s][r] for s in range(n)]) for r in range(n))
    mistakes = (
        Mistake("that is the rank's own x: nothing was exchanged", tuple(inputs)),
        Mistake("every rank has chunk r of all ranks, but in the order of their arrival", _arriving(cuts, 1)),
        Mistake("every rank has chunk r of all ranks, but in the order of their arrival", _arriving(cuts, -1)),
        Missing("the rank's own chunk is missing: it stays, and belongs at place r", tuple({r} for r in range(n))),
        Mistake("that is every rank's own chunk, an all-gather: rank s sends chunk r to rank r", _own_to_all(cuts)),
        Mistake("the chunks stand in reverse order: that of rank 0 comes first", _reversed(cuts)),
    )
    return Case(tuple((x,) for x in inputs), right, rounds("all_to_all", inputs[0].numel(), n, "pairwise"), mistakes)


def _arriving(cuts: list, sign: int) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[(r - sign * k) % n][r] for k in range(n)]) for r in range(n))


def _own_to_all(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[s][s] for s in range(n)]) for _ in range(n))


def _reversed(cuts: list) -> tuple[torch.Tensor, ...]:
    n = len(cuts)
    return tuple(torch.cat([cuts[s][r] for s in reversed(range(n))]) for r in range(n))
