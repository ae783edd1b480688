"""parallel.context in one process: merged blocks are one softmax, no tensor has all scores; each rank's tokens, whom a window
needs, and lengths without equal shards."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyranks.parallel.context import LAYOUTS, Mask, blockwise_attention, layouts, merge, positions, shard, unshard
from tests.ranks.test_tensor_vocabulary import Largest
from tests.unit.attention_reference import draw, full, mask_of

DOUBLE = torch.float64
RANKS, LAYOUT = st.integers(1, 6), st.sampled_from(LAYOUTS)

BY_HAND = {
    ("contiguous", 4, 1): [[[0, 1, 2, 3]]],
    ("zigzag", 4, 1): [[[0, 1], [2, 3]]],
    ("contiguous", 8, 2): [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    ("striped", 6, 3): [[[0, 3]], [[1, 4]], [[2, 5]]],
    ("zigzag", 12, 3): [[[0, 1], [10, 11]], [[2, 3], [8, 9]], [[4, 5], [6, 7]]],
    ("zigzag", 8, 4): [[[0], [7]], [[1], [6]], [[2], [5]], [[3], [4]]],
    # Ranks that share the shard of one, two or three of them
    ("striped", 8, 4, 2): [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]],
    ("zigzag", 8, 4, 2): [[[0, 1]], [[6, 7]], [[2, 3]], [[4, 5]]],
    ("zigzag", 12, 6, 3): [[[0, 1]], [[2, 9]], [[10, 11]], [[3, 4]], [[5, 6]], [[7, 8]]],
}


# Blocks


def of_block(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a block: (o, lse), of no keys too."""
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


def test_scores_of_ten_thousand_are_no_trouble():
    leaves = [(x * 100).requires_grad_() for x in (draw(1, 2, 9, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2))]
    assert (leaves[0] @ leaves[1].mT).abs().max() > 2e4
    found = [attend(*leaves, tile=2) for attend in (blockwise_attention, full)]
    grads = [torch.autograd.grad(o.sum(), leaves) for o in found]
    torch.testing.assert_close((found[0], *grads[0]), (found[1], *grads[1]), rtol=0, atol=1e-8)


def test_no_tensor_is_larger_than_the_scores_of_a_pair_of_tiles():
    """Scores of all 4 heads, 32 × 32 numbers of 4 bytes. All queries, keys and values, and their gradients have
    less."""
    qkv = [draw(1, heads, 256, 2).float().requires_grad_() for heads in (4, 1, 1)]
    for causal, documents in product((True, False), (None, torch.arange(256)[None] // 100)):
        with Largest() as largest:
            blockwise_attention(*qkv, causal=causal, documents_BT=documents, tile=32).sum().backward()
        assert largest.bytes == 4 * 32 * 32 * 4


# Which tokens a rank has


@pytest.mark.parametrize("how", BY_HAND)
def test_each_rank_has_the_tokens_that_a_hand_gives_it(how):
    assert [places_CL.tolist() for places_CL in positions(*how)] == BY_HAND[how]


@given(LAYOUT, RANKS, RANKS, st.integers(1, 3), st.integers(-3, 2))
def test_shards_of_any_dim_have_every_token_once_and_make_the_whole_again(layout, rings, sharing, times, dim):
    n, sizes = rings * sharing, [2, 3, 4]
    sizes[dim] = times * layouts.multiple(layout, n, sharing)
    places = positions(layout, sizes[dim], n, sharing)
    whole = torch.arange(torch.Size(sizes).numel(), dtype=DOUBLE).view(sizes).requires_grad_()
    assert torch.equal(torch.cat(places).flatten().sort().values, torch.arange(sizes[dim]))
    assert all((places_CL.diff(dim=1) > 0).all() for places_CL in places)
    parts = [shard(whole, layout, rank, n, dim, sharing) for rank in range(n)]
    assert torch.equal(again := unshard(parts, layout, dim, sharing), whole)
    assert torch.equal(*torch.autograd.grad((again * whole.detach()).sum(), whole), whole)
    for part, places_CL in zip(parts, places, strict=True):
        assert torch.equal(part.movedim(dim, 0), whole.movedim(dim, 0)[places_CL.flatten()])
        assert part.untyped_storage().nbytes() == part.nbytes  # its own, not a view that keeps the whole


@given(LAYOUT, st.integers(1, 5), st.integers(1, 4), st.integers(1, 50), st.booleans(), st.integers(1, 20), st.booleans())
def test_a_ring_stops_where_some_rank_sees_something(layout, n, times, window, causal, length, packed):
    """Striped shards, which reach from one end to the other, are taken as a whole."""
    seq = times * layouts.multiple(layout, n)
    places = positions(layout, seq, n)
    rows = torch.arange(seq)[None] // length if packed else None
    seen_TT = mask_of(seq, causal, rows, window)[0, 0]
    own = [places_CL.flatten() for places_CL in places]
    needed = [s for s in range(n) if any(seen_TT[own[r]][:, own[r - s]].any() for r in range(n))]
    found = Mask(causal, layout, rows, window=window).stops(places)
    assert set(found) >= set(needed) if layout == "striped" else found == needed


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: positions("contiguous", 10, 4), r"10 tokens on 4 ranks: .* needs a multiple of 4, .* are 8 and 12: pad or"),
        (lambda: positions("zigzag", 5, 4), "multiple of 8, and the nearest are 8: pad"),
        (lambda: positions("zigzag", 30, 6, 3), "multiple of 12, and the nearest are 24 and 36: pad"),
        (lambda: positions("contiguous", -4, 4), "-4 tokens"),
        (lambda: positions("zig-zag", 8, 2), "layout='zig-zag': choose one of 'contiguous', 'striped', 'zigzag'"),
        (lambda: positions(None, 8, 2), "layout=None: choose one of"),
        (lambda: positions("zigzag", 8, 0), "n=0 ranks: give a whole number, 1 or more"),
        (lambda: positions("zigzag", 8, 2.0), "n=2.0 ranks: give a whole number"),
        (lambda: positions("zigzag", 8, 2, 0), "sharing=0 ranks: give a whole number"),
        (lambda: positions("striped", 12, 4, 3), "sharing=3: must divide the 4 ranks"),
        (lambda: shard(torch.zeros(1, 8), "zigzag", -1, 4), "rank=-1: must be one of the 4 ranks, 0 to 3"),
        (lambda: shard(torch.zeros(1, 8), "zigzag", 4, 4), "rank=4: must be one of the 4 ranks, 0 to 3"),
        (
            lambda: unshard([torch.zeros(1, k) for k in (3, 5)], "contiguous"),
            r"parts of \[3, 5\] tokens: give all ranks' parts",
        ),
    ],
)
def test_what_has_no_equal_shards_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
