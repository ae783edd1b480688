"""Which tokens of a sequence a rank has.

    contiguous   rank r has the r-th N-th of the sequence
    striped      tokens r, r + N, r + 2N, …
    zigzag       of 2N chunks the chunks r and 2N − 1 − r: one early, one late

Under a causal mask a late token sees many others and an early one few. Striped and zigzag
give each rank both. Sources: Striped Attention, arXiv 2311.09431; zigzag: Llama 3, arXiv
2407.21783, section 3.3.2.

    N ranks   C chunks of a rank   L tokens of a chunk
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "striped", "zigzag")


def positions(layout: str, seq: int, n: int, sharing: int = 1) -> list[Tensor]:
    """For each rank the places of its tokens in the whole sequence, on the CPU.

    Each is positions_CL; they rise inside a chunk.

    sharing: ranks next to each other that share the shard of one rank of n/sharing, as they
    do where Ulysses is inside a ring; C is then 1.
    Raises ValueError for an unknown layout, and for a seq that has no such equal shards.
    """
    check(layout, seq, n, sharing)
    all_S, rings = torch.arange(seq, device="cpu"), n // sharing
    if sharing > 1:
        whole = positions(layout, seq, rings)
        return [
            part_S[None] for places in whole for part_S in places.flatten().chunk(sharing)
        ]
    if layout == "contiguous":
        return [shard_S[None] for shard_S in all_S.chunk(n)]
    if layout == "striped":
        return [all_S[rank::n][None] for rank in range(n)]
    chunks = all_S.chunk(2 * n)
    return [torch.stack((chunks[rank], chunks[-1 - rank])) for rank in range(n)]


def shard(
    whole: Tensor, layout: str, rank: int, n: int, dim: int = 1, sharing: int = 1
) -> Tensor:
    """One rank's part of what all tokens of a sequence have, along that dim.

    Raises ValueError as positions does, and for a rank that is none of the n.
    """
    places = positions(layout, whole.shape[dim], n, sharing)
    if not 0 <= rank < n:
        raise ValueError(f"rank={rank}: must be one of the {n} ranks, 0 to {n - 1}")
    own_S = places[rank].flatten()
    return whole.index_select(dim, own_S.to(whole.device))


def unshard(parts: Sequence[Tensor], layout: str, dim: int = 1, sharing: int = 1) -> Tensor:
    """The whole from all ranks' parts, in rank order: the inverse of shard.

    Raises ValueError as positions does, and for parts of several lengths.
    """
    if len(lengths := {part.shape[dim] for part in parts}) != 1:
        raise ValueError(f"parts of {sorted(lengths)} tokens: give all ranks' parts, alike")
    together = torch.cat(list(parts), dim)
    places = positions(layout, together.shape[dim], len(parts), sharing)
    order_S = torch.cat([places_CL.flatten() for places_CL in places]).argsort()
    return together.index_select(dim, order_S.to(together.device))


def multiple(layout: str, n: int, sharing: int = 1) -> int:
    """What a sequence's length must be a multiple of.

    Raises ValueError for a layout or a number of ranks that cannot be.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout={layout!r}: choose one of {', '.join(map(repr, LAYOUTS))}"
        )
    for name, value in (("n", n), ("sharing", sharing)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} ranks: give a whole number, 1 or more")
    if n % sharing:
        raise ValueError(f"sharing={sharing}: must divide the {n} ranks")
    return math.lcm(n, 2 * n // sharing) if layout == "zigzag" else n


def check(layout: str, seq: int, n: int, sharing: int = 1) -> None:
    """Raises ValueError where a sequence has no equal shards in this layout."""
    step = multiple(layout, n, sharing)
    if seq < 1 or seq % step:
        below, above = seq // step * step, (seq // step + 1) * step
        nearest = f"{below} and {above}" if below > 0 else f"{above}"
        raise ValueError(
            f"a sequence of {seq} tokens on {n} ranks: the {layout} layout needs a "
            f"multiple of {step}, and the nearest are {nearest}: pad or cut the sequence"
        )
