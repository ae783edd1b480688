"""parallel.context.layouts: each rank's tokens by hand, the way back, and lengths that have no equal shards."""

import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel.context import LAYOUTS, layouts, positions, shard, unshard

RANKS = st.integers(1, 6)

BY_HAND = {
    ("contiguous", 4, 1): [[[0, 1, 2, 3]]],
    ("striped", 4, 1): [[[0, 1, 2, 3]]],
    ("zigzag", 4, 1): [[[0, 1], [2, 3]]],
    ("contiguous", 8, 2): [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    ("striped", 8, 2): [[[0, 2, 4, 6]], [[1, 3, 5, 7]]],
    ("zigzag", 8, 2): [[[0, 1], [6, 7]], [[2, 3], [4, 5]]],
    ("contiguous", 6, 3): [[[0, 1]], [[2, 3]], [[4, 5]]],
    ("striped", 6, 3): [[[0, 3]], [[1, 4]], [[2, 5]]],
    ("zigzag", 12, 3): [[[0, 1], [10, 11]], [[2, 3], [8, 9]], [[4, 5], [6, 7]]],
    ("zigzag", 8, 4): [[[0], [7]], [[1], [6]], [[2], [5]], [[3], [4]]],
}
SHARED = {  # two ranks share the shard of one of two, or of one
    ("contiguous", 8, 4): [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
    ("striped", 8, 4): [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]],
    ("zigzag", 8, 4): [[[0, 1]], [[6, 7]], [[2, 3]], [[4, 5]]],
    ("zigzag", 4, 2): [[[0, 1]], [[2, 3]]],
}


@pytest.mark.parametrize(
    ("given", "sharing", "expected"),
    [(key, 1, value) for key, value in BY_HAND.items()] + [(key, 2, value) for key, value in SHARED.items()],
)
def test_each_rank_has_the_tokens_that_a_hand_gives_it(given, sharing, expected):
    found = positions(*given, sharing)
    assert [places_CL.tolist() for places_CL in found] == expected
    assert {(places_CL.dtype, places_CL.device.type) for places_CL in found} == {(torch.int64, "cpu")}


def test_three_ranks_that_share_have_a_part_of_both_chunks():
    assert torch.cat(positions("zigzag", 12, 3, 3)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.cat(positions("zigzag", 12, 6, 3)).tolist() == [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]


@given(st.sampled_from(LAYOUTS), RANKS, RANKS, st.integers(1, 3))
def test_every_token_is_on_one_rank_and_chunks_rise(layout, rings, sharing, times):
    n = rings * sharing
    found = positions(layout, times * layouts.multiple(layout, n, sharing), n, sharing)
    assert len(found) == n
    assert len({places_CL.shape for places_CL in found}) == 1
    assert torch.equal(torch.cat(found).flatten().sort().values, torch.arange(len(torch.cat(found).flatten())))
    assert all((places_CL.diff(dim=1) > 0).all() for places_CL in found)


@given(st.sampled_from(LAYOUTS), RANKS, RANKS, st.integers(1, 3), st.integers(-3, 2))
def test_shards_of_any_dim_make_the_whole_again(layout, rings, sharing, times, dim):
    n, sizes = rings * sharing, [2, 3, 4]
    sizes[dim] = times * layouts.multiple(layout, n, sharing)
    whole = torch.arange(torch.Size(sizes).numel()).view(sizes)
    parts = [shard(whole, layout, rank, n, dim, sharing) for rank in range(n)]
    assert torch.equal(unshard(parts, layout, dim, sharing), whole)
    for part, places_CL in zip(parts, positions(layout, sizes[dim], n, sharing), strict=True):
        assert torch.equal(part.movedim(dim, 0), whole.movedim(dim, 0)[places_CL.flatten()])
        assert part.untyped_storage().nbytes() == part.nbytes  # its own, not a view that keeps the whole


def test_gradients_go_through_both():
    whole, weights = torch.zeros(2, 12, requires_grad=True), torch.randn(2, 12)
    again = unshard([shard(whole, "zigzag", rank, 3) for rank in range(3)], "zigzag")
    assert torch.equal(torch.autograd.grad((again * weights).sum(), whole)[0], weights)


@pytest.mark.parametrize(
    ("layout", "seq", "n", "sharing", "said"),
    [
        ("contiguous", 10, 4, 1, r"10 tokens on 4 ranks: the contiguous layout needs a multiple of 4, .* are 8 and 12: pad or"),
        ("striped", 7, 3, 1, "the striped layout needs a multiple of 3, and the nearest are 6 and 9"),
        ("zigzag", 12, 4, 1, "12 tokens on 4 ranks: the zigzag layout needs a multiple of 8, and the nearest are 8 and 16"),
        ("zigzag", 5, 4, 1, "multiple of 8, and the nearest are 8: pad"),
        ("zigzag", 0, 2, 1, "0 tokens on 2 ranks: .* nearest are 4: pad"),
        ("contiguous", -4, 4, 1, "-4 tokens"),
        ("zigzag", 10, 4, 2, "multiple of 4, and the nearest are 8 and 12"),  # two chunks each of two, of which two get halves
        ("zigzag", 9, 3, 3, "multiple of 6, and the nearest are 6 and 12"),
        ("zig-zag", 8, 2, 1, "layout='zig-zag': choose one of 'contiguous', 'striped', 'zigzag'"),
        (None, 8, 2, 1, "layout=None: choose one of"),
        ("zigzag", 8, 0, 1, "n=0 ranks: give a whole number, 1 or more"),
        ("zigzag", 8, 2.0, 1, "n=2.0 ranks: give a whole number"),
        ("zigzag", 8, 2, 0, "sharing=0 ranks: give a whole number"),
        ("striped", 12, 4, 3, "sharing=3: must divide the 4 ranks"),
    ],
)
def test_what_has_no_equal_shards_is_refused_with_the_nearest_lengths_that_have(layout, seq, n, sharing, said):
    with pytest.raises(ValueError, match=said):
        positions(layout, seq, n, sharing)
    if seq > 0:
        with pytest.raises(ValueError, match=said):
            shard(torch.zeros(1, seq), layout, 0, n, sharing=sharing)


def nearest(layout: str, seq: int, n: int, sharing: int) -> list[int]:
    """The lengths that the error names, where there is one."""
    with suppress(ValueError):
        positions(layout, seq, n, sharing)
        return [seq]
    with pytest.raises(ValueError) as error:
        positions(layout, seq, n, sharing)
    return [int(number) for number in re.search("nearest are (.*): pad", str(error.value))[1].split(" and ")]


@given(st.sampled_from(LAYOUTS), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_the_nearest_lengths_that_an_error_names_fit_and_none_between_does(layout, seq, rings, sharing):
    n = rings * sharing
    named = nearest(layout, seq, n, sharing)
    fit = [length for length in range(1, seq + 2 * n + 1) if nearest(layout, length, n, sharing) == [length]]
    below, above = [f for f in fit if f <= seq], [f for f in fit if f >= seq]
    assert named == sorted({*below[-1:], above[0]})


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_of_them_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank={rank}: must be one of the 4 ranks, 0 to 3"):
        shard(torch.zeros(1, 8), "zigzag", rank, 4)


def test_parts_of_other_lengths_are_no_whole():
    with pytest.raises(ValueError, match=r"parts of \[3, 5\] tokens: give all ranks' parts, alike"):
        unshard([torch.zeros(1, 3), torch.zeros(1, 5)], "contiguous")
    with pytest.raises(ValueError, match=r"10 tokens on 2 ranks: .* multiple of 4, and the nearest are 8 and 12"):
        unshard([torch.zeros(1, 5), torch.zeros(1, 5)], "zigzag")
