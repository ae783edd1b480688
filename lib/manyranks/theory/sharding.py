"""Counts what a rank holds and sends if data parallelism shards its states, to the byte, and what offloading them needs.

    N     ranks of data parallelism
    K     shards, each on one rank: N, or fewer where M replicas of the shards train side by side (HSDP), N = M·K
    row   parameters end to end that are cut together: a tensor (stage 0), a bucket (stages 1 and 2), a unit (stage 3)

Stage 0 shards nothing: K = 1, and all ranks are replicas.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from manyranks.theory import checks
from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.names import one_of
from manyranks.theory.plan import RECIPES


def padded(elements: int, n: int) -> int:
    """Rounds a row's elements up so that n ranks can cut it evenly. Raises ValueError for elements below 0 and n below 1."""
    return n * shard(elements, n)


def shard(elements: int, n: int) -> int:
    """Counts elements that each of n ranks keeps of a row, padding included. Raises ValueError as padded does."""
    checks.whole(0, elements=elements)
    checks.whole(n=n)
    return -(-elements // n)


def owned(sizes: Sequence[int], n: int, rank: int = 0) -> list[int]:
    """Counts elements of each tensor in a row that one of n ranks keeps, without padding. Raises ValueError as shard does."""
    size, ends = shard(sum(sizes), n), [0, *accumulate(sizes)]
    inside = [min(max(end - rank * size, 0), size) for end in ends]
    return [stop - first for first, stop in pairwise(inside)]


def shards(n: int, stage: int, replicas: int = 1) -> int:
    """Returns K, the ranks over which one copy of the states is spread.

    Raises ValueError for a stage that is not 0 to 3, replicas that do not divide n, and replicas of stage 0.
    """
    checks.whole(n=n, replicas=replicas)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ValueError(f"stage={stage!r}: the stages are 0, 1, 2 and 3")
    if n % replicas:
        raise ValueError(f"replicas={replicas} does not divide n={n}: replicas × shards = n, so choose a divisor of {n}")
    if stage == 0 and replicas > 1:
        raise ValueError(f"replicas={replicas} with stage=0, where every rank is a replica: leave replicas=1")
    return n // replicas if stage else 1


class HeldBytes(NamedTuple):
    """Bytes on one rank.

    padding: those among them that stand for no element, on the last rank, which has the most
    """

    parameters: int
    gradients: int
    masters: int
    states: int
    counters: int
    padding: int

    @property
    def total(self) -> int:
        """Adds up all of them, padding included."""
        return sum(self) - self.padding


def held(
    rows: Sequence[int],
    n: int,
    stage: int,
    parameter: int = 2,
    gradient: int = 2,
    master: int = 4,
    states: Sequence[int] = (4, 4),
    counter: int = 0,
    replicas: int = 1,
    rank: int = 0,
    tensors: int | None = None,
) -> HeldBytes:
    """Counts what a rank holds after backward, before its optimizer steps.

    rows: elements of each
    parameter, gradient, master: bytes of one element, 0 where there is none: parameters in 32 bits have no masters, and units
        made of masters no other parameters
    states: bytes of one element of each of the optimizer's states
    counter: bytes of the optimizer's step counter, one for each tensor
    rank: which of the shards it has, 0 for the largest
    tensors: how many the optimizer steps, None for one per row

    In stages 1 and 2 parameters and gradients are padded, in stage 3 only gradients are. One row of Φ elements that n divides
    takes 16Φ, 4Φ + 12Φ/N, 2Φ + 14Φ/N and 16Φ/N bytes. Frozen rows: gradient=0, master=0, states=(), counter=0.
    Raises ValueError for negative sizes, and as shards does. Source: arXiv 1910.02054, section 5; HSDP: arXiv 2304.11277.
    """
    sizes = {"parameter": parameter, "gradient": gradient, "master": master, "counter": counter}
    for name, size in [*sizes.items(), *(("states", size) for size in states)]:
        checks.whole(0, **{name: size})
    k = shards(n, stage, replicas)
    own = sum(owned([e], k, rank)[0] for e in rows)
    count = len(rows) if tensors is None else tensors
    whole, row, part = sum(rows), sum(padded(e, k) for e in rows), sum(shard(e, k) for e in rows)
    if stage == 3:
        held = parameter * own, gradient * part, master * own, sum(states) * own, counter * count
        return HeldBytes(*held, padding=gradient * (part - own))
    empty = sum(min(padded(e, k) - e, shard(e, k)) for e in rows)
    return HeldBytes(
        parameters=parameter * row,
        gradients=gradient * (part if stage == 2 else whole),
        masters=master * own,
        states=sum(states) * own,
        counters=counter * count,
        padding=parameter * (row - whole) + (gradient * empty if stage == 2 else 0),
    )


def unit_sizes(shape: ModelShape) -> list[int]:
    """Counts parameters of a model's units in the order of forward: the embedding, each layer, the last norm with the head.

    A tied head counts with the embedding. Raises ValueError for what is no ModelShape.
    """
    checks.kinds(shape=shape)
    layers = [shape.layer_parameters(layer) for layer in range(shape.layers)]
    return [shape.embedding_parameters, *layers, parameters_of(shape.final_norm + shape.head)]


def gathered_peak(units: Sequence[int], n: int, itemsize: int, prefetch: int = 1) -> int:
    """Counts the most bytes of whole units at one time in a step of stage 3: prefetch + 1 neighbors, both passes.

    units: elements of each, in the order of forward
    n: ranks that share them
    itemsize: bytes of an element
    prefetch: units gathered ahead

    The last unit stays after forward, which adds nothing: no other is whole then. Gradients and shards are left out.
    Raises ValueError for negative numbers and n below 1. Source: arXiv 2304.11277, section 3.2.1.
    """
    checks.whole(0, itemsize=itemsize, prefetch=prefetch)
    sizes = [itemsize * padded(unit, n) for unit in units]
    return max((sum(sizes[first : first + prefetch + 1]) for first in range(len(sizes))), default=0)


def gradients_peak(units: Sequence[int], n: int, itemsize: int) -> int:
    """Counts the most bytes of whole gradients at one time in a step of FSDP, which waits for a reduce-scatter a unit later.

    When a unit's last gradient is ready, the gradients of the unit before it in backward are still on their way: a row that
    leaves, and one that arrives. Then they become shards, and this unit's gradients go into the next row.

    units: elements of each, in the order of forward
    n: ranks that share them
    itemsize: bytes of an element
    Raises ValueError for negative numbers and n below 1.
    """
    checks.whole(0, itemsize=itemsize)
    rows = [padded(unit, n) for unit in units]
    waiting = [unit + 2 * row for unit, row in zip(units, rows[1:], strict=False)]
    leaving = [max(unit + row, 2 * row) for unit, row in zip(units, rows, strict=True)]
    return itemsize * max([*waiting, *leaving], default=0)


class Sent(NamedTuple):
    """Bytes that a rank sends in a step.

    gather_forward: for forward, or in stages 1 and 2 after the step
    """

    gather_forward: int
    gather_backward: int
    reduce_scatter: int
    all_reduce: int

    @property
    def total(self) -> int:
        return sum(self)


def sent(
    units: Sequence[int],
    n: int,
    stage: int,
    gather_itemsize: int = 2,
    reduce_itemsize: int = 2,
    keep_last: bool = True,
    replicas: int = 1,
    replica: int = 0,
) -> Sent:
    """Counts what a rank sends around rings in a step of one forward and one backward, if each unit is used once and learns.

    units: elements of each row
    gather_itemsize, reduce_itemsize: bytes of an element of a parameter and of a gradient on their way
    keep_last: the last unit stays from forward to backward
    replica: which one this rank is in (in stage 0: the rank): an uneven all-reduce makes some send an element more

    2, 2, 2 and 3 times (N−1)/N·Φ elements, less the last unit's; between M replicas 2(M−1)/M·Φ/K.
    Raises ValueError for negative sizes, for a replica that isn't there, and as shards does.
    Source: arXiv 1910.02054, section 7; arXiv 2304.11277, section 3.2.2 (HSDP).
    """
    checks.whole(0, gather_itemsize=gather_itemsize, reduce_itemsize=reduce_itemsize)
    k = shards(n, stage, replicas)
    if type(replica) is not int or not 0 <= replica < n // k:
        raise ValueError(f"replica={replica!r}: there are {n // k}, counted from 0")
    away = [padded(unit, k) - shard(unit, k) for unit in units]  # all but its own shard
    again = (away[:-1] if keep_last else away) if stage == 3 else []
    across = [_all_reduced(shard(unit, k), n // k, replica) for unit in units]
    sizes = gather_itemsize, gather_itemsize, reduce_itemsize, reduce_itemsize
    return Sent(*(size * sum(part) for size, part in zip(sizes, (away, again, away, across), strict=True)))


def _all_reduced(elements: int, m: int, place: int) -> int:
    """Counts elements that one of m ranks sends in a ring's all-reduce: all chunks but its own, then all but its neighbor's."""
    chunk, longer = divmod(elements, m)
    return 2 * (elements - chunk) - (place < longer) - ((place + 1) % m < longer)


def largest(stage: int, n: int, memory: float, precision: str = "bf16", replicas: int = 1, model_parallel: int = 1) -> int:
    """Finds the largest number of parameters whose model states fit in each rank's memory, with no activations.

    n: ranks of data parallelism
    memory: bytes of a rank
    precision: a key of theory.plan.RECIPES
    model_parallel: ranks that split the model before it is sharded, so that n·model_parallel accelerators take part

    Raises ValueError for memory below 0, an unknown precision, and as shards does.
    Source: Table 2 of arXiv 1910.02054, with 32 GB of 10⁹ bytes and n=64. It multiplies its first row, rounded, by the degree
    of model parallelism.
    """
    checks.whole(model_parallel=model_parallel)
    one_of(RECIPES, precision=precision)
    if not 0 <= memory < float("inf"):
        raise ValueError(f"memory={memory!r}: give bytes, 0 or more")
    recipe = RECIPES[precision]

    def total(elements: int) -> int:
        each = recipe.parameters, recipe.gradients, 0, (recipe.optimizer,)
        return held([elements], n, stage, *each, replicas=replicas).total

    shards(n, stage, replicas)
    most, too_many = 0, int(memory) * n // recipe.total + 2  # N ranks hold each of them once at least
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if total(middle) <= memory else (most, middle)
    return most * model_parallel


class Intensity(NamedTuple):
    """FLOPs for each byte that moves between an accelerator and the memory where these are kept."""

    parameters: float  # and gradients
    optimizer: float
    activations: float


def intensity(tokens: float, hidden: int, interval: int = 1) -> Intensity:
    """Computes the intensity of training with recomputation, everything offloaded: bs, bs/4 and 24·h·interval.

    tokens: of an accelerator's batch, bs
    hidden: h
    interval: layers from one checkpoint of activations to the next

    A parameter has 8bs FLOPs per step (2 in forward, 2 again, 4 in backward). It is loaded three times and its gradient stored
    once, 2 bytes each: 8 bytes. 16 bytes of optimizer states are read and written: 32 bytes. A checkpoint of 2bsh bytes is
    written and read for `interval` layers of 12h² parameters. Raises ValueError for numbers that are not above 0.
    Source: ZeRO-Infinity, arXiv 2104.07857, section 4.1.
    """
    checks.positive(tokens=tokens, hidden=hidden, interval=interval)
    flops = 8 * tokens  # of one parameter
    return Intensity(flops / 8, flops / 32, flops * 12 * hidden**2 * interval / (2 * 2 * tokens * hidden))


def efficiency(intensity: float, bandwidth: float, flops: float) -> float:
    """Computes the share of time that computes where nothing that moves is hidden: a·β/(a·β + R).

    intensity: a, FLOPs per byte
    bandwidth: β, bytes/s: an accelerator's own for parameters, the sum of all ranks' for sharded optimizer states
    flops: R, FLOP/s reached without moving anything

    Raises ValueError for numbers that are not above 0. Source: arXiv 2104.07857, section 4.
    """
    checks.positive(intensity=intensity, bandwidth=bandwidth, flops=flops)
    return intensity * bandwidth / (intensity * bandwidth + flops)


def bandwidth_for(efficiency: float, intensity: float, flops: float) -> float:
    """Computes the bytes/s at which this efficiency, above 0 and below 1, is reached: the inverse of efficiency().

    Raises ValueError as efficiency does.
    """
    checks.positive(intensity=intensity, flops=flops)
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency={efficiency!r}: give a share above 0 and below 1, as 0.9")
    return efficiency / (1 - efficiency) * flops / intensity
