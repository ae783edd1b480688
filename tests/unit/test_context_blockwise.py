"""parallel.context.blockwise: merged blocks are one softmax, whatever the scores, the mask, the tiles and the precision."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyranks.measure.flops import WorkCounter
from manyranks.parallel.context import blockwise_attention, merge
from tests.ranks.test_tensor_vocabulary import Largest
from tests.unit.attention_reference import draw, full, gap, mask_of

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
    o, lse = merge(ones, torch.tensor(1e4), threes, torch.tensor(-1e4))
    assert (o.tolist(), lse.item()) == ([1.0], 1e4)
    o, lse = merge(ones, torch.tensor(0.0), threes, torch.tensor(math.log(3)))  # weights 1/4 and 3/4
    assert o.item() == pytest.approx(2.5)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_block_of_which_nothing_is_seen_changes_nothing_and_two_are_still_none(dtype):
    o, lse = draw(2, 3).to(dtype), torch.tensor([1e4, -1e4], dtype=dtype)
    nothing = torch.full_like(o, 7.0), torch.full_like(lse, -math.inf)
    for found in (merge(o, lse, *nothing), merge(*nothing, o, lse)):
        assert all(torch.equal(*pair) for pair in zip(found, (o, lse), strict=True))
    none = merge(*nothing, *nothing)
    assert none[0].tolist() == [[0.0] * 3] * 2
    assert none[1].tolist() == [-math.inf] * 2


# Attention


DOCUMENTS = {"none": None, "one row": [[0] * 5 + [1] * 3 + [0] * 5], "each its own": [[0] * 13, [4] * 1 + [2] * 12]}


def both(shapes: list[tuple[int, ...]], make=lambda x: x, **how) -> list[tuple[Tensor, Tensor]]:
    """(ours, expected) of the output and of the gradients of q, k and v. make: of each input, what attention is given."""
    leaves = [[draw(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)] for _ in range(2)]
    outputs = [attend(*map(make, qkv), **how) for attend, qkv in zip((blockwise_attention, full), leaves, strict=True)]
    weights = draw(*outputs[1].shape, seed=9)
    gradients = [torch.autograd.grad((o * weights).sum(), qkv) for o, qkv in zip(outputs, leaves, strict=True)]
    return list(zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("causal", [True, False])
def test_output_and_gradients_are_those_of_full_attention(causal, documents):
    rows = DOCUMENTS[documents] and torch.tensor(DOCUMENTS[documents])
    for (heads, kv_heads), tile in product(((6, 2), (3, 3), (2, 1)), (1, 3, 13, 512)):
        shapes = [(2, heads, 13, 7), (2, kv_heads, 13, 7), (2, kv_heads, 13, 7)]
        assert gap(both(shapes, causal=causal, documents_BT=rows, tile=tile)) < 1e-12, (heads, kv_heads, tile)


def test_scores_of_ten_thousand_are_no_trouble():
    leaves = [(x * 100).requires_grad_() for x in (draw(1, 2, 9, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2))]
    assert (leaves[0] @ leaves[1].mT).abs().max() > 2e4
    found = [attend(*leaves, tile=2) for attend in (blockwise_attention, full)]
    gradients = [torch.autograd.grad(o.sum(), leaves) for o in found]
    assert gap(list(zip((found[0], *gradients[0]), (found[1], *gradients[1]), strict=True))) < 1e-8


def test_its_gradients_are_those_of_finite_differences():
    documents_BT = torch.tensor([[3, 3, 3, 1, 1]])
    qkv = [draw(1, heads, 5, 2, seed=k).requires_grad_() for k, heads in enumerate((2, 1, 1))]
    for causal in (True, False):
        assert torch.autograd.gradcheck(
            lambda *x, causal=causal: blockwise_attention(*x, causal=causal, documents_BT=documents_BT, tile=2), qkv
        )


STRIDES = {
    "as the GPT's": ((2, 13, 6, 7), lambda x: x.transpose(1, 2)),
    "cut from one product": ((2, 6, 13, 14), lambda x: x[..., 7:]),
    "expanded": ((1, 6, 13, 7), lambda x: x.expand(2, -1, -1, -1)),
    "backwards": ((7, 13, 6, 2), lambda x: x.permute(3, 2, 1, 0)),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_inputs_and_their_gradients_may_have_any_strides(strides):
    shape, make = STRIDES[strides]
    assert gap(both([shape] * 3, make, tile=4)) < 1e-12


def test_the_gradient_that_comes_in_may_have_any_strides():
    qkv = [draw(2, 3, 8, 4, seed=k).requires_grad_() for k in range(3)]
    for grad in (torch.ones((), dtype=DOUBLE).expand(2, 3, 8, 4), draw(2, 8, 3, 4, seed=7).transpose(1, 2)):
        found = [torch.autograd.grad(attend(*qkv, tile=3), qkv, grad) for attend in (blockwise_attention, full)]
        assert gap(list(zip(*found, strict=True))) < 1e-12


@pytest.mark.parametrize("learns", ["q", "k", "v", "qk", "kv"])
def test_only_what_needs_a_gradient_gets_one(learns):
    grads = []
    for attend in (blockwise_attention, full):
        qkv = {name: draw(1, 2, 6, 4, seed=k).requires_grad_(name in learns) for k, name in enumerate("qkv")}
        attend(*qkv.values(), tile=4).square().sum().backward()
        assert {name for name, x in qkv.items() if x.grad is not None} == set(learns)
        grads.append([qkv[name].grad for name in learns])
    assert gap(list(zip(*grads, strict=True))) < 1e-12


def test_without_gradients_nothing_is_kept_and_the_values_are_the_same():
    qkv = [draw(1, 2, 6, 4, seed=k).requires_grad_() for k in range(3)]
    with torch.no_grad():
        o = blockwise_attention(*qkv, tile=4)
    assert o.grad_fn is None
    assert torch.equal(o, blockwise_attention(*qkv, tile=4))
    with torch.inference_mode():
        assert torch.equal(o, blockwise_attention(*qkv, tile=4))


def test_backward_can_be_run_again_but_not_differentiated():
    qkv = [draw(1, 2, 6, 4, seed=k).requires_grad_() for k in range(3)]
    o = blockwise_attention(*qkv, tile=4)
    first, second = (torch.autograd.grad(o.sum(), qkv, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    (of_q,) = torch.autograd.grad(o.square().sum(), qkv[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_q.sum().backward()


# Precision


def rounded(dtype: torch.dtype, attend, seq: int = 400) -> list[Tensor]:
    """Output and gradients; many keys count alike, so that a sum of few bits would stop growing."""
    given = draw(1, 2, seq, 8) / 8, draw(1, 2, seq, 8, seed=1) / 8, draw(1, 2, seq, 8, seed=2) + 1
    qkv = [x.to(dtype).to(dtype if attend is blockwise_attention else DOUBLE).requires_grad_() for x in given]
    o = attend(*qkv, tile=64)
    return [o, *torch.autograd.grad(o.sum(), qkv)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_made_in_32_bits_or_more(dtype):
    """The output is off by no more than its own rounding; the gradients by that of the output that was saved, too."""
    eps = torch.finfo(dtype).eps
    (o, *grads), (expected, *expected_grads) = rounded(dtype, blockwise_attention), rounded(dtype, full)
    assert {x.dtype for x in (o, *grads)} == {dtype}
    if dtype == torch.float32:
        assert (o - expected).abs().max() < 8 * eps
    else:
        assert ((o - expected).abs() <= 0.505 * eps * expected.abs()).all()
    for got, right in zip(grads, expected_grads, strict=True):
        assert (got - right).abs().max() < (16 if dtype == torch.float32 else 4) * eps * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing_of_it(dtype):
    """Forward, and a backward inside of it."""
    qkv = [draw(1, 2, 40, 8, seed=k).to(dtype).requires_grad_() for k in range(3)]
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            o = blockwise_attention(*qkv, tile=16)
            found.append([o, *torch.autograd.grad(o.float().sum(), qkv)])
    assert all(map(torch.equal, *found))


# Work and memory


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_of_tiles_of_which_nothing_is_seen_cost_nothing(causal, documents):
    """Two products of each other pair forward, five backward."""
    rows = DOCUMENTS[documents] and torch.tensor(DOCUMENTS[documents])
    mask_SS = mask_of(13, causal, rows).any(0)[0]
    edges = [(0, 5), (5, 9), (9, 13)]  # three tiles of at most five tokens
    pairs = list(product(edges, edges))
    scores = sum((b - a) * (d - c) for (a, b), (c, d) in pairs if mask_SS[a:b, c:d].any())
    assert not (causal or documents == "one row") or scores < 13 * 13
    qkv = [draw(2, heads, 13, 7, seed=heads).requires_grad_() for heads in (6, 2, 2)]
    with WorkCounter() as forward:
        o = blockwise_attention(*qkv, causal=causal, documents_BT=rows, tile=5)
    with WorkCounter() as backward:
        o.sum().backward()
    product_flops = 2 * 7 * 2 * 6 * scores
    assert (forward.flops, backward.flops) == (2 * product_flops, 5 * product_flops)


def test_no_tensor_is_larger_than_the_scores_of_a_pair_of_tiles():
    """Of all heads: 4 of them, 32 × 32 numbers of 4 bytes. All queries, all keys and values, and their gradients have less."""
    qkv = [draw(1, heads, 256, 2).float().requires_grad_() for heads in (4, 1, 1)]
    for causal, documents in product((True, False), (None, torch.arange(256)[None] // 100)):
        with Largest() as largest:
            blockwise_attention(*qkv, causal=causal, documents_BT=documents, tile=32).sum().backward()
        assert largest.bytes == 4 * 32 * 32 * 4
    with Largest() as largest:
        full(*qkv)
    assert largest.bytes >= 256 * 256 * 4


# What is wrong


GOOD, DOCS = torch.zeros(2, 4, 6, 8), torch.zeros(2, 6, dtype=torch.long)
REFUSED = {
    "three dims": ((GOOD[0], GOOD, GOOD), {}, r"shapes \(4, 6, 8\), \(2, 4, 6, 8\) and .*: give \[B, heads, S, D\] each"),
    "no tokens": ((GOOD[:, :, :0],) * 3, {}, r"shapes \(2, 4, 0, 8\).*: give \[B, heads, S, D\]"),
    "v's size": ((GOOD, GOOD, GOOD[..., :4]), {}, r"k and v must be alike"),
    "k's tokens": ((GOOD, GOOD[:, :, :3], GOOD[:, :, :3]), {}, r"B, S and D the same in all"),
    "heads": ((GOOD, GOOD[:, :3], GOOD[:, :3]), {}, r"the heads of q a multiple of theirs"),
    "swapped": ((GOOD[:, :2], GOOD, GOOD), {}, r"the heads of q a multiple of theirs"),
    "dtypes": ((GOOD, GOOD.double(), GOOD), {}, r"are torch.float32, torch.float64, torch.float32: give one floating-point"),
    "integers": ((GOOD.long(),) * 3, {}, r"are torch.int64, .*: give one floating-point dtype"),
    "devices": ((GOOD, GOOD.to("meta"), GOOD), {}, r"q, k and v are on cpu, meta: give one device"),
    "tile": ((GOOD,) * 3, {"tile": 0}, r"tile=0: give a whole number of tokens, 1 or more"),
    "tile of a kind": ((GOOD,) * 3, {"tile": 2.0}, r"tile=2.0: give a whole number"),
    "few documents": ((GOOD,) * 3, {"documents_BT": DOCS[:, :5]}, r"\(2, 5\): .* whole sequence, \[2, 6\] or \[1, 6\]"),
    "many documents": ((GOOD,) * 3, {"documents_BT": DOCS[:, :1].expand(2, 7)}, r"documents of shape \(2, 7\)"),
    "no rows": ((GOOD,) * 3, {"documents_BT": DOCS[0]}, r"documents of shape \(6,\): give a number for each token"),
    "rows": ((GOOD,) * 3, {"documents_BT": DOCS.repeat(2, 1)}, r"documents of shape \(4, 6\)"),
    "a list": ((GOOD,) * 3, {"documents_BT": DOCS.tolist()}, r"documents are list: give a tensor of whole numbers"),
    "floats": ((GOOD,) * 3, {"documents_BT": DOCS.float()}, r"documents are torch.float32: give a tensor of whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_what_does(name):
    qkv, options, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        blockwise_attention(*qkv, **options)
