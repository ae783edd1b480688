"""parallel.context.layouts: each rank's tokens by hand, the way back, lengths without equal shards, and whom a window needs."""

import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel.context import LAYOUTS, Mask, layouts, positions, shard, unshard
from tests.unit.attention_reference import mask_of

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


@pytest.mark.parametrize("how", BY_HAND)
def test_each_rank_has_the_tokens_that_a_hand_gives_it(how):
    assert [places_CL.tolist() for places_CL in positions(*how)] == BY_HAND[how]


@given(LAYOUT, RANKS, RANKS, st.integers(1, 3), st.integers(-3, 2))
def test_shards_of_any_dim_have_every_token_once_and_make_the_whole_again(layout, rings, sharing, times, dim):
    n, sizes = rings * sharing, [2, 3, 4]
    sizes[dim] = times * layouts.multiple(layout, n, sharing)
    whole, places = torch.arange(torch.Size(sizes).numel()).view(sizes), positions(layout, sizes[dim], n, sharing)
    assert torch.equal(torch.cat(places).flatten().sort().values, torch.arange(sizes[dim]))
    assert all((places_CL.diff(dim=1) > 0).all() for places_CL in places)
    parts = [shard(whole, layout, rank, n, dim, sharing) for rank in range(n)]
    assert torch.equal(unshard(parts, layout, dim, sharing), whole)
    for part, places_CL in zip(parts, places, strict=True):
        assert torch.equal(part.movedim(dim, 0), whole.movedim(dim, 0)[places_CL.flatten()])
        assert part.untyped_storage().nbytes() == part.nbytes  # its own, not a view that keeps the whole


def test_gradients_go_through_both():
    whole, weights = torch.zeros(2, 12, requires_grad=True), torch.randn(2, 12)
    again = unshard([shard(whole, "zigzag", rank, 3) for rank in range(3)], "zigzag")
    assert torch.equal(torch.autograd.grad((again * weights).sum(), whole)[0], weights)


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
    ("layout", "seq", "n", "sharing", "said"),
    [
        ("contiguous", 10, 4, 1, r"10 tokens on 4 ranks: the contiguous layout needs a multiple of 4, .* are 8 and 12: pad or"),
        ("zigzag", 5, 4, 1, "multiple of 8, and the nearest are 8: pad"),
        ("contiguous", -4, 4, 1, "-4 tokens"),
        ("zig-zag", 8, 2, 1, "layout='zig-zag': choose one of 'contiguous', 'striped', 'zigzag'"),
        (None, 8, 2, 1, "layout=None: choose one of"),
        ("zigzag", 8, 0, 1, "n=0 ranks: give a whole number, 1 or more"),
        ("zigzag", 8, 2.0, 1, "n=2.0 ranks: give a whole number"),
        ("zigzag", 8, 2, 0, "sharing=0 ranks: give a whole number"),
        ("striped", 12, 4, 3, "sharing=3: must divide the 4 ranks"),
    ],
)
def test_what_has_no_equal_shards_is_refused(layout, seq, n, sharing, said):
    with pytest.raises(ValueError, match=said):
        positions(layout, seq, n, sharing)


def nearest(layout: str, seq: int, n: int, sharing: int) -> list[int]:
    """The lengths that the error names, where there is one."""
    with suppress(ValueError):
        positions(layout, seq, n, sharing)
        return [seq]
    with pytest.raises(ValueError) as error:
        positions(layout, seq, n, sharing)
    return [int(number) for number in re.search("nearest are (.*): pad", str(error.value))[1].split(" and ")]


@given(LAYOUT, st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_the_nearest_lengths_that_an_error_names_fit_and_none_between_does(layout, seq, rings, sharing):
    n = rings * sharing
    named = nearest(layout, seq, n, sharing)
    fit = [length for length in range(1, seq + 2 * n + 1) if nearest(layout, length, n, sharing) == [length]]
    below, above = [f for f in fit if f <= seq], [f for f in fit if f >= seq]
    assert named == sorted({*below[-1:], above[0]})


def test_other_ranks_and_parts_are_refused():
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"rank={rank}: must be one of the 4 ranks, 0 to 3"):
            shard(torch.zeros(1, 8), "zigzag", rank, 4)
    with pytest.raises(ValueError, match=r"parts of \[3, 5\] tokens: give all ranks' parts, alike"):
        unshard([torch.zeros(1, 3), torch.zeros(1, 5)], "contiguous")
