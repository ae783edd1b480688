"""What the judge draws, so that no answer that knows numbers or sizes by heart gets points for them."""

from random import Random
from types import SimpleNamespace

import pytest

from manyranks.given import data_parallel as given
from manyranks.grade import checkpointing, collectives, data_parallel
from manyranks.measure.watch import Watch


def test_the_numbers_of_examples_are_drawn(monkeypatch, tmp_path):
    def examples(seed: int, rank: int) -> int:
        for module in (data_parallel, given):
            monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 4))
        data_parallel._average("", lambda model, mine: found.append(mine), Watch(str(tmp_path), rank, seed))
        return found.pop()

    found: list[int] = []
    several = [[examples(seed, rank) for rank in range(4)] for seed in range(10)]
    assert all(len(set(each)) == 4 for each in several), "each rank has another number"
    assert len({sum(each) for each in several}) > 5


def test_a_chain_that_is_too_long_to_try_all_choices_is_drawn():
    one, other = (checkpointing.choose.more(Random(seed))[-1] for seed in (1, 2))
    assert len(one.layers) == len(other.layers) == 40
    assert one.layers != other.layers
    assert not one.nothing_fits


def test_numbers_of_layers_are_drawn_whose_roots_round_down_and_up():
    numbers = [[int(case.split()[1]) for case in checkpointing.checkpoint_sqrt.more(Random(seed))] for seed in range(50)]
    assert all(round(down**0.5) ** 2 < down and round(up**0.5) ** 2 > up for down, up in numbers)
    assert {round(n**0.5) for pair in numbers for n in pair} == {3, 4, 5, 6}


@pytest.mark.parametrize("task", ["tree_broadcast", "ring_all_gather", "ring_reduce_scatter", "pairwise_all_to_all"])
def test_lengths_and_roots_are_drawn(task):
    drawn = [getattr(collectives, task).more(Random(seed))[0] for seed in range(20)]
    assert len({case.elements for case in drawn}) > 10
    assert {case.root % 4 for case in drawn} == {0, 1, 2, 3}
