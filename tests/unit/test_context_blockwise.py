"""parallel.context on one process: merged blocks are one softmax, gradients are right, no tensor has all scores."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyranks.parallel.context import blockwise_attention, merge
from tests.ranks.test_tensor_vocabulary import Largest
from tests.unit.attention_reference import draw, full

DOUBLE = torch.float64


# Merging


def of_block(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What a block gives: (o, lse), of no keys too."""
    if not scores.numel():
        return torch.zeros(values.shape[-1], dtype=DOUBLE), torch.tensor(-math.inf, dtype=DOUBLE)
    return scores.softmax(0) @ values, scores.logsumexp(0)


SCORES = st.lists(st.floats(-1e4, 1e4), max_size=4)


@given(st.tuples(SCORES, SCORES, SCORES))
def test_blocks_merge_in_any_order_to_the_softmax_of_all(drawn):
    scores = [torch.tensor(each, dtype=DOUBLE) for each in drawn]
    values = draw(sum(map(len, scores)), 3).split([len(each) for each in scores])
    a, b, c = (of_block(*pair) for pair in zip(scores, values, strict=True))
    whole = of_block(torch.cat(scores), torch.cat(values))
    for found in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*merge(*c, *a), *b)):
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-11)


def test_by_hand_of_scores_that_no_exponential_can_hold():
    """Shares add up to 1 also where a large lse is rounded to 1/1024."""
    ones, threes = torch.tensor([1.0]), torch.tensor([3.0])
    for score in (0.0, 1e4, -1e4):
        o, lse = merge(ones, torch.tensor(score), threes, torch.tensor(score))
        assert o.tolist() == [2.0]
        assert lse.item() == pytest.approx(score + math.log(2), abs=1e-2)
    o, lse = merge(ones, torch.tensor(0.0), threes, torch.tensor(math.log(3)))  # weights 1/4 and 3/4
    assert (o.item(), lse.item()) == pytest.approx((2.5, math.log(4)))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_block_of_which_nothing_is_seen_changes_nothing_and_two_are_still_none(dtype):
    o, lse = draw(2, 3).to(dtype), torch.tensor([1e4, -1e4], dtype=dtype)
    nothing = torch.full_like(o, 7.0), torch.full_like(lse, -math.inf)
    for found in (merge(o, lse, *nothing), merge(*nothing, o, lse)):
        assert all(torch.equal(*pair) for pair in zip(found, (o, lse), strict=True))
    none = merge(*nothing, *nothing)
    assert (none[0].tolist(), none[1].tolist()) == ([[0.0] * 3] * 2, [-math.inf] * 2)


# Attention: test_context.py compares it to one process under every mask


def test_its_gradients_are_those_of_finite_differences():
    documents_BT = torch.tensor([[3, 3, 3, 1, 1]])
    qkv = [draw(1, heads, 5, 2, seed=k).requires_grad_() for k, heads in enumerate((2, 1, 1))]
    for mask in ({}, {"causal": False}, {"window": 2}):
        look = {"documents_BT": documents_BT, "tile": 2} | mask
        assert torch.autograd.gradcheck(lambda *x, look=look: blockwise_attention(*x, **look), qkv)


def test_scores_of_ten_thousand_are_no_trouble():
    leaves = [(x * 100).requires_grad_() for x in (draw(1, 2, 9, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2))]
    assert (leaves[0] @ leaves[1].mT).abs().max() > 2e4
    found = [attend(*leaves, tile=2) for attend in (blockwise_attention, full)]
    grads = [torch.autograd.grad(o.sum(), leaves) for o in found]
    torch.testing.assert_close((found[0], *grads[0]), (found[1], *grads[1]), rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_made_in_32_bits_or_more(dtype):
    """Many keys count alike, so that a sum of few bits would stop growing: the output is off by its own rounding only."""
    eps, both = torch.finfo(dtype).eps, []
    given = [x.to(dtype) for x in (draw(1, 2, 400, 8) / 8, draw(1, 2, 400, 8, seed=1) / 8, draw(1, 2, 400, 8, seed=2) + 1)]
    for attend, kind in ((blockwise_attention, dtype), (full, DOUBLE)):
        qkv = [x.to(kind).requires_grad_() for x in given]
        o = attend(*qkv, tile=64)
        both.append([o, *torch.autograd.grad(o.sum(), qkv)])
    (o, *grads), (expected, *expected_grads) = both
    assert {x.dtype for x in (o, *grads)} == {dtype}
    assert ((o - expected).abs() <= (8 if dtype == torch.float32 else 0.505) * eps * expected.abs().clamp_min(0.5)).all()
    for got, right in zip(grads, expected_grads, strict=True):
        assert (got - right).abs().max() < (16 if dtype == torch.float32 else 4) * eps * right.abs().max()


def test_no_tensor_is_larger_than_the_scores_of_a_pair_of_tiles():
    """Of all heads: 4 of them, 32 × 32 numbers of 4 bytes. All queries, all keys and values, and their gradients have less."""
    qkv = [draw(1, heads, 256, 2).float().requires_grad_() for heads in (4, 1, 1)]
    for causal, documents in product((True, False), (None, torch.arange(256)[None] // 100)):
        with Largest() as largest:
            blockwise_attention(*qkv, causal=causal, documents_BT=documents, tile=32).sum().backward()
        assert largest.bytes == 4 * 32 * 32 * 4


# What is wrong: tests/ranks/test_context_refusals.py has the rest, which all of them say


GOOD, DOCS = torch.zeros(2, 4, 6, 8), torch.zeros(2, 6, dtype=torch.long)
REFUSED = {
    "shapes": ((GOOD, GOOD[:, :, :3], GOOD[:, :, :3]), {}, r"B, S and D the same in all"),
    "few documents": ((GOOD,) * 3, {"documents_BT": DOCS[:, :5]}, r"\(2, 5\): .* whole sequence, \[2, 6\] or \[1, 6\]"),
    "no rows": ((GOOD,) * 3, {"documents_BT": DOCS[0]}, r"documents of shape \(6,\): give a number for each token"),
    "a list": ((GOOD,) * 3, {"documents_BT": DOCS.tolist()}, r"documents are list: give a tensor of whole numbers"),
    "tile": ((GOOD,) * 3, {"tile": None}, r"tile=None: give a whole number of tokens, 1 or more"),
    "window": ((GOOD,) * 3, {"window": 0}, r"window=0: give a whole number of tokens, 1 or more"),
    "window of a kind": ((GOOD,) * 3, {"window": 2.0}, r"window=2\.0: give a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_what_does(name):
    qkv, options, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        blockwise_attention(*qkv, **options)
