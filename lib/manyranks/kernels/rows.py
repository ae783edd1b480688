"""Softmax of each row in one kernel: a program reads its row once, keeps it in registers, and writes it once."""

import torch

from manyranks.kernels import checks
from manyranks.kernels.interpreter import tl, triton

_LONGEST = 2**16  # elements of a row that one program keeps


@triton.jit
def softmax_kernel(x, out, columns, x_strides, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_strides[0] + j * x_strides[1], mask=j < columns, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + j, powers / tl.sum(powers, axis=0), mask=j < columns)


def softmax(x_RC: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of each row of a matrix, in float32 inside.

    x_RC: float32, bfloat16 or float16, at most 65,536 columns; any strides.
    Raises ValueError for another shape or dtype.
    """
    checks.same(x_RC=x_RC)
    checks.shape("x_RC", x_RC, None, None)
    rows, columns = x_RC.shape
    if columns > _LONGEST:
        raise ValueError(f"x_RC has {columns} columns: a program keeps its row in registers, at most {_LONGEST}")
    out_RC = torch.empty((rows, columns), dtype=x_RC.dtype, device=x_RC.device)
    if x_RC.numel():
        softmax_kernel[(rows,)](x_RC, out_RC, columns, x_RC.stride(), triton.next_power_of_2(columns))
    return out_RC
