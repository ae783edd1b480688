"""Seconds of a collective on a torus, whose chips have two links an axis, one each way round."""

from collections.abc import Sequence
from math import prod

from manyranks.theory.hardware import Link
from manyranks.theory.names import one_of


def torus_seconds(op: str, bytes: float, dims: Sequence[int], link: Link) -> float:
    """Computes the seconds of one collective over all chips of a torus; 0 for one chip.

    bytes: of the whole tensor, as in sent_bytes
    dims: chips along each axis, e.g. (4, 4, 4); every axis closes to a ring, and one of a single chip has no links
    link: one link of one axis, one way

    all_gather, reduce_scatter: α·hops + (N−1)/N·bytes / (2β·axes), where hops are half of each ring. A chip receives (N−1)/N of
    the tensor over two links of each axis. Equal dims reach this: the tensor is cut into a part per axis, and part i takes the
    axes in the order i, i+1, …, so that all links are always busy. With unequal dims it's a lower bound.
    all_reduce: both, one after the other.
    all_to_all: α·hops + (D//2)(D−D//2)/2D·bytes/β, D the longest axis. Cut across it, the chips of one side send the
    other side (D//2)(D−D//2)/D² ·N·bytes over 2N/D links. For an even D that is bytes·D/8β.

    Raises ValueError for an unknown operation, a size below 0 or an axis below 1.
    Source: jax-ml/scaling-book, sharding.md. It leaves out (N−1)/N, counts an all-to-all's bytes of all chips together, and
    takes the larger of the hops' time and the bytes' time; we take the sum.
    """
    one_of(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), op=op)
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes}: must not be negative")
    if any(dim < 1 for dim in dims):
        raise ValueError(f"dims={tuple(dims)}: an axis has at least 1 chip")
    rings = [dim for dim in dims if dim > 1]
    if not rings:
        return 0.0
    chips, longest, hops = prod(rings), max(rings), sum(dim // 2 for dim in rings)  # hops to the furthest chip
    if op == "all_to_all":
        crossing = (longest // 2) * (longest - longest // 2) / (2 * longest)
        return hops * link.latency + crossing * bytes / link.bandwidth
    once = hops * link.latency + (chips - 1) / chips * bytes / (2 * len(rings) * link.bandwidth)
    return 2 * once if op == "all_reduce" else once


def cube(n: int) -> tuple[int, int, int]:
    """Finds the three axes of n chips that are nearest to a cube, longest first: 16 -> (4, 2, 2)."""
    sides = [d for d in range(1, n + 1) if n % d == 0]
    found = [(n // (b * c), b, c) for c in sides for b in sides if c <= b and n % (b * c) == 0 and b <= n // (b * c)]
    return min(found, key=sum)
