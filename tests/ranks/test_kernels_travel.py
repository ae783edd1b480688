"""A kernel that was defined in a notebook runs on a rank as it does in the notebook."""

import pytest

from manyranks import World
from manyranks.world import cells
from tests.conftest import TRITON

pytestmark = pytest.mark.skipif(not TRITON, reason="Triton exists for Linux only")

CELL = """
import torch
from manyranks.measure.interpreter import tl, triton

@triton.jit
def last(n):
    one = 1
    return n - one.to(tl.int32)

@triton.jit
def kernel(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    first = 2
    tl.store(out + i, tl.where((i >= first.to(tl.int32)) & (i < last(n)), i, -1), mask=i < n)

def numbers(n=6):
    out = torch.full((8,), 9, dtype=torch.int32)
    kernel[(1,)](out, n, 8)
    return out.tolist()
"""


def test_an_assignment_means_on_a_rank_what_it_means_here():
    """The interpreter reads a kernel's source to rewrite it; without the source, `one` is Python's 1, which has no `to`."""
    cells.remember("<cell 7>", CELL)
    names = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 7>", "exec"), names)
    assert names["numbers"]() == [-1, -1, 2, 3, 4, -1, 9, 9]
    with World(1) as world:
        assert world.run(names["numbers"]) == [[-1, -1, 2, 3, 4, -1, 9, 9]]
