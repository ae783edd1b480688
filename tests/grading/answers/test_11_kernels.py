"""Exercise 11."""

import pytest
import torch
from torch.nn import functional as F

from tests.conftest import TRITON
from tests.grading import answered
from tests.grading.answered import *  # noqa: F403

pytestmark = pytest.mark.skipif(not TRITON, reason="Triton exists for Linux only")


@pytest.fixture(scope="module")
def solved():
    return answered.definitions("11_kernels", "solutions")


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def close(got, right):
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_the_solutions_compute_what_pytorch_does(solved):
    x, a, b = drawn((23, 41), (33, 20), (50, 20))
    close(solved["copy_rows"](x.T), x.T)
    close(solved["softmax_columns"](x), x.softmax(0))
    close(solved["product"](a, b, 10**9, 10**5), a @ b.T)
    targets, logits = torch.arange(33) % 50, a @ b.T
    right = F.cross_entropy(logits, targets, reduction="none") + 0.1 * logits.logsumexp(1) ** 2
    close(solved["loss"](a, b, targets, 0.1), right)


@pytest.mark.parametrize("window", [1, 7, 100])
def test_a_window_of_the_solution_is_pytorchs_with_a_mask(solved, window):
    q, k, v = drawn(*[(2, 37, 8)] * 3)
    i, j = torch.arange(37)[:, None], torch.arange(37)
    seen = (j <= i) & (j > i - window)
    out, lse = solved["attend"](q, k, v, window)
    close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    close(lse, (q @ k.mT / 8**0.5).masked_fill(~seen, -float("inf")).logsumexp(-1))


def test_both_passes_of_the_solution_are_pytorchs(solved):
    given = drawn(*[(2, 37, 8)] * 4, dtype=torch.float64)
    grads = []
    for attend in (
        lambda q, k, v: solved["Attention"].apply(q, k, v, 16),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ):
        leaves = [each.clone().requires_grad_() for each in given[:3]]
        (out := attend(*leaves)).backward(given[3])
        grads.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*grads)
