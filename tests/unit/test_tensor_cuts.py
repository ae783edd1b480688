"""parallel.tensor.cuts: every element of a parameter is on a rank, and comes back from there."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel.tensor import Column, cuts

COUNTS = st.integers(1, 6)


def all_ranks(kind, t: int, *sizes, **options) -> list[cuts.Cut]:
    return [kind(*sizes, t, place, **options) for place in range(t)]


def parameter(size: int, dim: int) -> torch.Tensor:
    """Numbers that are all different, and none of them zero."""
    shape = (size, 3) if dim == 0 else (2, size)
    return torch.arange(1.0, 1 + size * (3 if dim == 0 else 2)).view(shape)


def comes_back(kind, t: int, size: int, dim: int, *more) -> list[cuts.Cut]:
    found, whole = all_ranks(kind, t, size, *more, dim=dim), parameter(size, dim)
    shards = [cut.own(whole) for cut in found]
    for cut, shard in zip(found, shards, strict=True):
        assert shard.shape[dim] == cut.longest
        assert shard.untyped_storage().nbytes() == shard.nbytes  # its own, not a view that keeps the whole
        assert torch.equal(cut.whole(shards), whole)
    return found


@given(COUNTS, COUNTS, st.integers(0, 1))
def test_equal_parts_make_the_whole(t, each, dim):
    found = comes_back(cuts.equal, t, t * each, dim)
    assert {cut.longest for cut in found} == {each}
    assert [cut.copies for cut in found] == [(r,) for r in range(t)]


@given(COUNTS, COUNTS, st.sampled_from([1, 2, 3, 5]), st.booleans())
def test_heads_stay_whole_and_where_there_are_few_neighbors_have_copies(ranks, factor, each, several):
    """factor: heads a rank, or, where several ranks have one, ranks a head."""
    t, heads = (ranks * factor, ranks) if several else (ranks, ranks * factor)
    for dim in (0,) if several and factor > 1 else (0, 1):
        found = comes_back(cuts.by_heads, t, heads * each, dim, heads)
        for place, cut in enumerate(found):
            assert cut.longest == each * max(1, heads // t)
            assert all(end % each == 0 for end in cut.span)
            assert cut.copies == tuple(r for r in range(t) if found[r].spans[r] == cut.spans[place])
            assert len(cut.copies) == max(1, t // heads)


@given(st.integers(1, 12), st.integers(1, 16), COUNTS)
def test_the_key_value_head_of_each_query_head_is_on_its_rank(t, heads, each):
    """Query head q reads key/value head q // (heads / kv), wherever both can be cut."""
    heads *= t
    for kv in (k for k in range(1, heads + 1) if heads % k == 0 and (k % t == 0 or t % k == 0)):
        queries, keys = all_ranks(cuts.by_heads, t, heads * each, heads), all_ranks(cuts.by_heads, t, kv * each, kv)
        for r in range(t):
            (a, b), (c, d) = (found[r].span for found in (queries, keys))
            assert {q * kv // heads for q in range(a // each, b // each)} == set(range(c // each, d // each))


@given(COUNTS, st.lists(COUNTS, min_size=1, max_size=3))
def test_parts_are_cut_each_and_a_rank_s_slices_stand_side_by_side(t, sizes):
    whole, style = parameter(t * sum(sizes), 0), Column(tuple(t * n for n in sizes))
    found = all_ranks(style.cut, t, t * sum(sizes), what="features")
    shards = [cut.own(whole) for cut in found]
    assert torch.equal(found[0].whole(shards), whole)
    parts = [part.chunk(t) for part in whole.split([t * n for n in sizes])]
    for r, (cut, shard) in enumerate(zip(found, shards, strict=True)):
        assert torch.equal(shard, torch.cat([part[r] for part in parts]))
        assert cut.copies == (r,)


@given(st.integers(1, 20), COUNTS, st.integers(0, 1))
def test_a_padded_cut_gives_each_rank_as_much_and_its_zeros_do_not_come_back(size, t, dim):
    found, whole = comes_back(cuts.padded, t, size, dim), parameter(size, dim)
    assert {cut.longest for cut in found} == {-(-size // t)}
    for r, cut in enumerate(found):
        start, stop = cut.span
        assert torch.equal(cut.own(whole).narrow(dim, 0, stop - start), whole.narrow(dim, start, stop - start))
        assert not cut.own(whole).narrow(dim, stop - start, cut.longest - stop + start).any()
        assert cut.copies == (r,)  # nothing but filling is no copy


def test_a_shard_has_the_dtype_of_the_whole_and_follows_no_graph_of_it():
    whole = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
    shard = cuts.equal(4, 2, 1).own(whole.detach())
    assert shard.dtype == torch.bfloat16
    assert not shard.requires_grad
    shard.zero_()
    assert whole.all()
