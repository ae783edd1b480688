"""parallel.boxes in one process: ranges of elements as boxes, parts without filling, and folders of any number of writers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel.boxes import Box, of_range, rectangles
from manyranks.parallel.saving import facts, load, save
from manyranks.parallel.tensor.cuts import by_heads, equal, padded, side_by_side

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_rectangles_are_the_elements_of_a_range_in_order(shape, data):
    whole = torch.arange(math.prod(shape)).view(shape)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    found = [torch.empty(0, dtype=torch.int64)]
    for offsets, sizes in rectangles(shape, first, stop):
        box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes
        found.append(box.flatten())
    assert torch.equal(torch.cat(found), torch.arange(first, stop))
    assert len(found) - 1 <= 2 * len(shape) - 1


CUTS = {
    "columns": lambda place: equal(12, 4, place),
    "rows": lambda place: equal(6, 3, place, dim=1),
    "filled up, one with nothing": lambda place: padded(7, 5, place),
    "two parts, side by side": lambda place: side_by_side([equal(4, 4, place), by_heads(8, 4, 4, place)]),
    "heads that two have": lambda place: by_heads(8, 2, 4, place),
}


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_all_ranks_shards_of_all_parts_fill_the_whole_and_no_filling_is_in_it(kind, shards):
    """Tensor-parallel parts, each of them in shards of a row, as ZeRO has them."""
    cut, ranks = CUTS[kind](0), len(CUTS[kind](0).spans)
    shape = [12, 6]
    shape[cut.dim] = cut.size
    whole, found = torch.arange(math.prod(shape)).view(shape), torch.full(shape, -1)
    for place in range(ranks):
        cut = CUTS[kind](place)
        part = cut.own(whole)
        at = 0
        for values_E in part.flatten().tensor_split(shards):
            for box in of_range("x", values_E, at, part.shape, cut):
                assert box.shape == tuple(shape)
                there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.tensor.shape, strict=True))
                assert ((found[there] == -1) | (found[there] == box.tensor)).all(), "copies are the same"
                found[there] = box.tensor
            at += len(values_E)
    assert torch.equal(found, whole)


def test_what_was_written_in_parts_is_read_in_others(tmp_path):
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    parts = [box for at in (0, 17) for box in of_range("w", whole.view(-1)[at : at + (17 if at == 0 else 18)], at, whole.shape)]
    save(tmp_path, parts, step=3, words="any")
    assert facts(tmp_path) == {"step": 3, "words": "any"}
    for place in range(2):
        cut, read = padded(7, 2, place, dim=1), torch.zeros(20)
        load(tmp_path, of_range("w", read, 0, (5, 4), cut))
        assert torch.equal(read.view(5, 4), cut.own(whole))


@pytest.mark.parametrize("box", [Box("v", (2,), (0,), torch.ones(2)), Box("w", (3,), (0,), torch.ones(3))])
def test_a_tensor_that_the_folder_has_not_is_refused(tmp_path, box):
    save(tmp_path, [Box("w", (2,), (0,), torch.ones(2))])
    said = (
        rf"{box.name} has the shape \({len(box.tensor)},\) and .* here, and (none|the shape \(2,\).*) in .*: load a checkpoint"
    )
    with pytest.raises(ValueError, match=said):
        load(tmp_path, [box])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        for call in (lambda: facts(folder), lambda: load(folder, [])):
            with pytest.raises(ValueError, match="has no checkpoint: give a folder that save"):
                call()
