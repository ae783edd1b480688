"""Cells of a notebook see no process group; groups that they make are gone afterwards, and the rank's is as it was."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from manyranks.grade.absent import without_a_group


def alone(ends: bool) -> list:
    pair = dist.new_group([0, 1])
    with without_a_group():
        found = [dist.is_initialized()]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        found += [dist.get_world_size(), dist.all_reduce(ones := torch.ones(2)), int(ones.sum())]
        if ends:
            dist.destroy_process_group()
    named = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)
    dist.all_reduce(ones)
    return [*found, dist.get_world_size(), dist.get_process_group_ranks(pair), int(named.sum()), int(ones.sum())]


def test_a_rank_is_alone_for_a_while(shared_world):
    for ends in (True, False):
        assert shared_world.run(alone, ends) == 3 * [[False, 1, None, 2, 3, [0, 1], 6, 6]]


def raises() -> int:
    try:
        with without_a_group():
            dist.get_world_size()
    except ValueError:
        return dist.get_world_size()
    return 0


def test_the_group_comes_back_after_an_error(shared_world):
    assert shared_world.run(raises) == [3, 3, 3]
