"""Softmax of each row in one kernel: a program reads its row once, keeps it in registers, and writes it once."""

import torch

from manyranks.kernels import checks
from manyranks.measure.interpreter import tl, triton

_LONGEST = 2**15  # elements of a row: with 32 warps, 32 per thread


@triton.jit
def softmax_kernel(x, out, columns, x_strides, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_strides[0] + j * x_strides[1], mask=j < columns, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + j, powers / tl.sum(powers, axis=0), mask=j < columns)


def softmax(x_RC: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of each row of a matrix, in float32 inside.

    x_RC: float32, bfloat16 or float16, at most 32,768 columns; any strides.
    Raises ValueError for another shape or dtype.
    """
    checks.same(x_RC=x_RC)
    checks.shape("x_RC", x_RC, None, None)
    rows, columns = x_RC.shape
    if columns > _LONGEST:
        raise ValueError(f"x_RC has {columns} columns: a program keeps its row in registers, at most {_LONGEST}")
    out_RC = torch.empty((rows, columns), dtype=x_RC.dtype, device=x_RC.device)
    if x_RC.numel():
        block = triton.next_power_of_2(columns)
        warps = min(32, max(4, block // 512))  # 16 elements of the row per thread, up to half of what is allowed
        softmax_kernel[(rows,)](x_RC, out_RC, columns, x_RC.stride(), block, num_warps=warps)
    return out_RC
