"""A matrix product in tiles: a program makes one tile of the result, and reads the rows and columns that it needs."""

import torch

from manyranks.kernels import checks
from manyranks.measure.interpreter import tl, triton

OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def product_kernel(a, b, out, M, N, K, a_strides, b_strides, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    i = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    j = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP).to(tl.int64)
        across, down = k[None, :], k[:, None]
        a_tile = tl.load(a + i * a_strides[0] + across * a_strides[1], mask=(i < M) & (across < K), other=0.0)
        b_tile = tl.load(b + down * b_strides[0] + j * b_strides[1], mask=(down < K) & (j < N), other=0.0)
        sums = tl.dot(a_tile, b_tile, sums, input_precision="ieee")
    tl.store(out + i * N + j, sums.to(out.dtype.element_ty), mask=(i < M) & (j < N))


def product(a_MK: torch.Tensor, b_KN: torch.Tensor, rows: int = 64, columns: int = 64, step: int = 32) -> torch.Tensor:
    """Multiplies two matrices, with sums in float32.

    a_MK, b_KN: float32, bfloat16 or float16, both the same; any strides.
    rows, columns: of the tile that a program makes, powers of two from 16.
    step: elements of K that it reads at a time, a power of two from 16.
    Raises ValueError for other shapes, dtypes or tiles.
    """
    checks.same(a_MK=a_MK, b_KN=b_KN)
    checks.shape("a_MK", a_MK, None, None)
    checks.shape("b_KN", b_KN, a_MK.shape[1], None)
    checks.block(rows=rows, columns=columns, step=step)
    (m, k), n = a_MK.shape, b_KN.shape[1]
    out_MN = torch.empty((m, n), dtype=a_MK.dtype, device=a_MK.device)
    if out_MN.numel():
        grid = checks.grid(triton.cdiv(m, rows), triton.cdiv(n, columns))
        strides = a_MK.stride(), b_KN.stride()
        product_kernel[grid](a_MK, b_KN, out_MN, m, n, k, *strides, rows, columns, step, **OPTIONS)
    return out_MN
