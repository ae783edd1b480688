"""Cases that the judge draws, so that no answer gets points for knowing numbers or sizes by heart."""

from random import Random

import pytest

from manyranks.grade import checkpointing, collectives, data_parallel


def test_the_numbers_of_examples_are_drawn():
    several = [[len(data_parallel.average.make("", rank, 4, seed)[1].x_BS) for rank in range(4)] for seed in range(10)]
    assert all(len(set(each)) == 4 for each in several), "each rank has another number"
    assert len({sum(each) for each in several}) > 5


@pytest.mark.parametrize(("which", "layers"), [(-2, 40), (-1, 24)])
def test_a_chain_that_is_too_long_to_try_all_choices_is_drawn(which, layers):
    one, other = (checkpointing.choose.more(Random(seed))[which] for seed in (1, 2))
    assert len(one.layers) == len(other.layers) == layers
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
