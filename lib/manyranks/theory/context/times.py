"""Seconds of a layer's attention on every rank: what each computes, and waits for, in every variant."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from manyranks.theory import network
from manyranks.theory.calls import HALF, SUMS
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import masks, overlap
from manyranks.theory.context.sends import Sizes
from manyranks.theory.kernels import DEFAULT, Constants


class Pass(NamedTuple):
    """Forward or backward, in seconds.

    own: of each rank in each hop; under: what travels under each hop; hops: of the slowest rank in each; late: how much longer
    its message takes; before: what travels before all else. computing: of the mean rank; slower: what that waits for slower
    ones; messages: what nothing hides; seconds: all of it
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
        """after: what travels when all is computed."""
        hops, computing = [max(each) for each in zip(*own, strict=True)], sum(map(sum, own)) / len(own)
        late = [max(0.0, message - hop) for message, hop in zip(under, hops, strict=True)]
        slower = sum(hop - mine for row in own for hop, mine in zip(hops, row, strict=True)) / len(own)  # 0 where all are alike
        messages = before + sum(late) + after
        return cls(own, under, hops, late, before, computing, slower, messages, computing + slower + messages)


class Times(NamedTuple):
    """One layer's attention."""

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
) -> Times:
    """Attention in 16 bits on one.n ranks that are each `stride` after the one before. variant: of VARIANTS, or ring-ulysses.

    together: ranks of one all-to-all, 1 for a ring or an all-gather. Raises ValueError as hops does.
    """
    given = one, cluster, variant, together, (layout, causal, tile), stride, constants
    return Times(*(_pass(*given, backward) for backward in (False, True)))


def _pass(
    one: Sizes, cluster: Cluster, variant: str, together: int, mask: tuple, stride: int, constants: Constants, backward: bool
) -> Pass:
    ring = inner(one, variant, together)
    seconds = overlap.hops(*ring, cluster, *mask, backward, stride * together, constants=constants)
    if variant == "all-gather":  # each attends to all gathered keys at once: its share of the whole, and a kernel's start
        scores = masks.totals(masks.work(one.seq, one.n, *mask))
        whole = seconds.compute[0] - constants.overhead
        numbers, route = 2 * one.n * one.keys, cluster.route(one.n, stride)
        sizes = (HALF, SUMS)[: 1 + backward]  # keys and values before, and backward their gradients after
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
