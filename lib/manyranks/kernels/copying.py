"""Copying and transposing: kernels that only move memory, so the addresses a warp asks for are all that counts."""

import torch

from manyranks.kernels import checks
from manyranks.measure.interpreter import tl, triton


@triton.jit
def copy_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride, mask=i < n), mask=i < n)


@triton.jit
def transpose_kernel(x, out, rows, columns, x_strides, out_strides, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(x + i[:, None] * x_strides[0] + j[None, :] * x_strides[1], mask=inside)
    if TURNED:  # neighboring lanes write neighboring elements: the tile is turned in shared memory
        to = out + j[:, None] * out_strides[0] + i[None, :] * out_strides[1]
        tl.store(to, tl.trans(tile), mask=tl.trans(inside))
    else:  # neighboring lanes write elements that are a row apart
        tl.store(out + j[None, :] * out_strides[0] + i[:, None] * out_strides[1], tile, mask=inside)


def copy(x_N: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Copies a vector, whatever its stride, to a contiguous one.

    x_N: float32, bfloat16 or float16.
    block: elements per program, a power of two.
    Raises ValueError for another shape, dtype or block.
    """
    checks.same(x_N=x_N)
    checks.shape("x_N", x_N, None)
    checks.block(1, block=block)
    out_N = torch.empty(x_N.shape, dtype=x_N.dtype, device=x_N.device)
    if n := len(x_N):
        copy_kernel[(triton.cdiv(n, block),)](x_N, out_N, n, x_N.stride(0), block)
    return out_N


def transpose(x_RC: torch.Tensor, block: int = 32, turned: bool = True) -> torch.Tensor:
    """Writes a matrix's transpose, tile by tile.

    x_RC: float32, bfloat16 or float16; any strides.
    block: rows and columns of a tile, a power of two.
    turned: turn each tile in shared memory before it's written. Without it, as written, each lane of a warp writes into another
        row; Triton's compiler turns the tile then, too.
    Raises ValueError for another shape, dtype or block.
    """
    checks.same(x_RC=x_RC)
    checks.shape("x_RC", x_RC, None, None)
    checks.block(1, block=block)
    rows, columns = x_RC.shape
    out_CR = torch.empty((columns, rows), dtype=x_RC.dtype, device=x_RC.device)
    if x_RC.numel():
        grid = checks.grid(triton.cdiv(rows, block), triton.cdiv(columns, block))
        transpose_kernel[grid](x_RC, out_CR, rows, columns, x_RC.stride(), out_CR.stride(), block, turned)
    return out_CR
