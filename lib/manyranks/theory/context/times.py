"""Seconds of a layer's attention on every rank, in every variant: hops, what each computes, and waits for.

Whether a ring's messages hide behind its attention, arXiv 2310.01889, section 3: a block of c tokens takes 4·c²·a·D FLOPs, and
4·c·g·D bytes of keys and values travel under it in 16 bits, so that c ≥ R/β with as many key/value heads as heads. R is the
FLOP/s, β the bytes/s of one rank's messages.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from manyranks.theory import calls, checks, kernels, network
from manyranks.theory.calls import BACKWARD, FORWARD, HALF, SUMS
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import masks, sends
from manyranks.theory.context.sends import Sizes
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.layer import FLASH_BACKWARD, Kernel
from manyranks.theory.network import Hops


def least_shard(
    rate: float,
    bandwidth: float,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = False,
    layout: str = "zigzag",
    backward: bool = False,
    itemsize: int = 2,
    accumulating: int | None = None,
) -> float:
    """The fewest tokens per rank, s/N, that let a hop compute for as long as its message travels, in a long sequence.

    Full attention, forward, 16 bits: (R/β)·(g/a). A causal mask lets half of a hop through, zigzag or striped, which doubles
    it; contiguous chunks are whole on the ranks that do not idle. Backward computes 5 products instead of 2 and moves keys and
    values, and their gradients in `accumulating` bytes. Raises ValueError for a rate or a bandwidth that is not above 0.
    """
    if not (rate > 0 and bandwidth > 0):
        raise ValueError(f"rate={rate}, bandwidth={bandwidth}: both must be above 0")
    one = sends.sizes_of(1, 2, heads, kv_heads, 1, 2)
    masks.chunk_length(4, 2, layout)  # raises
    flops = masks.flops(1, 1, one.heads, 1, backward) / (2 if causal and layout != "contiguous" else 1)
    moved = 2 * one.kv_heads * (itemsize + (sends.gradient_size(itemsize, accumulating) if backward else 0))
    return rate / bandwidth * moved / flops


def hops(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    n: int,
    cluster: Cluster,
    layout: str = "zigzag",
    causal: bool = True,
    tile: int | None = 1,
    backward: bool = False,
    stride: int = 1,
    itemsize: int = 2,
    accumulating: int | None = None,
    constants: Constants = DEFAULT,
) -> Hops:
    """Ring attention, forward or backward, on ranks that are each `stride` after the one before.

    compute: of the slowest rank in each hop, which is one kernel of flash attention. A message goes from one rank to the next
    by that rank's own share of the slowest link on the way. Raises ValueError as work and ring do, and for a group that the
    cluster has no room for.
    """
    checks.kinds(cluster=cluster)
    one = sends.sizes_of(batch, seq, heads, kv_heads, head_size, n)
    counts = masks.in_step(masks.work(seq, n, layout, causal, tile)).hops
    compute = {scores: _kernel_seconds(one, scores, backward, itemsize, cluster, constants) for scores in set(counts)}
    sums, route = sends.gradient_size(itemsize, accumulating), cluster.route(n, stride)
    sent = calls.attention("ring", n, one.queries, 2 * one.keys, one.keys, itemsize, sums)
    sent = [call for call in sent if call.when == (BACKWARD if backward else FORWARD)]
    return Hops(tuple(compute[scores] for scores in counts), network.hops(sent, route, constants))


def _kernel_seconds(
    one: sends.Sizes, scores: int, backward: bool, itemsize: int, cluster: Cluster, constants: Constants
) -> float:
    flops = masks.flops(scores, one.batch, one.heads, one.head_size)
    rate = "fp32" if itemsize >= 4 else "bf16"
    kernel = Kernel("core", flops, 2 * itemsize * (one.queries + one.keys), rate, specials=one.batch * one.heads * scores)
    if backward:
        kernel = kernel._replace(flops=FLASH_BACKWARD * flops, bytes=2 * kernel.bytes, specials=2 * kernel.specials)
    return kernels.seconds(kernel, cluster.accelerator, constants, cluster.reserved)


class Pass(NamedTuple):
    """Forward or backward, in seconds.

    own: of each rank in each hop
    under: what travels under each hop
    hops: of the slowest rank in each
    late: how much longer its message takes
    before: what travels before all else
    computing: of the mean rank
    slower: what that waits for slower ones
    messages: what nothing hides
    seconds: all of it
    """

    own: Sequence[Sequence[float]]
    under: Sequence[float]
    hops: Sequence[float]
    late: Sequence[float]
    before: float
    computing: float
    slower: float
    messages: float
    seconds: float

    @classmethod
    def of(
        cls, own: Sequence[Sequence[float]], under: Sequence[float] = (0.0,), before: float = 0.0, after: float = 0.0
    ) -> Self:
        """Adds up hops.

        after: what travels when all is computed
        """
        hops, computing = [max(each) for each in zip(*own, strict=True)], sum(map(sum, own)) / len(own)
        late = [max(0.0, message - hop) for message, hop in zip(under, hops, strict=True)]
        slower = sum(hop - mine for row in own for hop, mine in zip(hops, row, strict=True)) / len(own)  # 0 where all are equal
        messages = before + sum(late) + after
        return cls(own, under, hops, late, before, computing, slower, messages, computing + slower + messages)


class AttentionTimes(NamedTuple):
    """The times of one layer's attention."""

    forward: Pass
    backward: Pass

    def both(self, part: str) -> float:
        """The sum of a field: "seconds"."""
        return getattr(self.forward, part) + getattr(self.backward, part)


def inner(one: Sizes, variant: str, together: int = 1) -> Sizes:
    """The sizes of the ring inside: some heads of more tokens if Ulysses deals them out to `together` ranks; n: its ranks."""
    n = 1 if variant in ("all-gather", "ulysses") else one.n // together
    return one._replace(heads=one.heads // together, kv_heads=max(1, one.kv_heads // together), n=n)


def of_ranks(
    one: Sizes,
    cluster: Cluster,
    variant: str,
    together: int = 1,
    layout: str = "zigzag",
    causal: bool = True,
    tile: int | None = 1,
    stride: int = 1,
    constants: Constants = DEFAULT,
) -> AttentionTimes:
    """Attention in 16 bits on one.n ranks that are each `stride` after the one before. variant: of VARIANTS, or ring-ulysses.

    together: ranks of one all-to-all, 1 for a ring or an all-gather. Raises ValueError as hops does.
    """
    given = one, cluster, variant, together, (layout, causal, tile), stride, constants
    return AttentionTimes(*(_pass(*given, backward) for backward in (False, True)))


def _pass(
    one: Sizes, cluster: Cluster, variant: str, together: int, mask: tuple, stride: int, constants: Constants, backward: bool
) -> Pass:
    ring = inner(one, variant, together)
    seconds = hops(*ring, cluster, *mask, backward, stride * together, constants=constants)
    if variant == "all-gather":  # each attends to all gathered keys at once: its share of the whole, and a kernel's start
        scores = masks.totals(masks.work(one.seq, one.n, *mask))
        whole = seconds.compute[0] - constants.overhead
        numbers, route = 2 * one.n * one.keys, cluster.route(one.n, stride)
        sizes = (HALF, SUMS) if backward else (HALF,)  # keys and values before, and backward their gradients after
        gathers = [network.gather(route, size * numbers, constants) for size in sizes]
        return Pass.of([[constants.overhead + whole * each / sum(scores)] for each in scores], (0.0,), *gathers)
    scores = masks.work(ring.seq, ring.n, *mask)
    most = [max(each) for each in zip(*scores, strict=True)]
    own = [[each / top * hop for each, top, hop in zip(row, most, seconds.compute, strict=True)] for row in scores]
    *under, home = seconds.messages
    before, after = _exchanges(one, cluster, together, stride, constants)[:: -1 if backward else 1]
    return Pass.of([row for row in own for _ in range(together)], under, before, home + after)


def _exchanges(one: Sizes, cluster: Cluster, together: int, stride: int, constants: Constants) -> tuple[float, float]:
    """Ulysses' all-to-alls forward: queries, keys and values before, the output after."""
    if together == 1:
        return 0.0, 0.0
    route, head = cluster.route(together, stride), HALF * one.shard * one.head_size
    heads = one.heads, max(one.kv_heads, together)
    queries, keys = (network.exchange(route, head * each, constants) for each in heads)
    return queries + 2 * keys, queries
