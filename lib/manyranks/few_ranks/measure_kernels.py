"""A warp's sectors and a small tiled product, counted on a rank under Triton's interpreter."""

from importlib.util import find_spec

import torch

from manyranks.few_ranks.ranks import OnRanks
from manyranks.measure.compared import Compared, SmallRun
from manyranks.theory import blocks

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_MOST = 64  # rows and columns of a tile that the interpreter runs quickly


@OnRanks
def kernels(values, ranks, say):
    """The explorer's stride and element size, 2 or 4 bytes, for one warp, and a product of 2 × 2 tiles, at most 64 wide."""
    if find_spec("triton") is None:
        raise ValueError("kernels need Triton, which exists for Linux only: what you see is theory")
    stride, itemsize, tile = values["stride"], max(2, values["itemsize"]), min(values["tile"], _MOST)
    say(0.2, "running two kernels under Triton's interpreter")
    sectors, moved = ranks(1).run(_count, stride, itemsize, tile)[0]
    n = 2 * tile
    rows = (
        Compared("sectors of a warp", blocks.sectors(stride, itemsize=itemsize), sectors, "number"),
        Compared("bytes of the product", blocks.product_bytes(n, n, n, tile, itemsize=itemsize), moved),
    )
    return SmallRun(f"a warp, and a product of {n} × {n} in tiles of {tile}, with {itemsize} bytes per element", rows)


def _count(stride: int, itemsize: int, tile: int) -> tuple[int, int]:
    from manyranks import kernels
    from manyranks.measure import kernel

    dtype, n = _DTYPES[itemsize], 2 * tile
    copied = kernel.count(kernels.copy, torch.zeros(32 * stride, dtype=dtype)[::stride], block=32)
    square = torch.zeros(n, n, dtype=dtype)
    return copied.sectors("x"), kernel.count(kernels.product, square, square.clone(), tile, tile, 16).requested_bytes()
