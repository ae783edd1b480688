"""Layers of parallel.tensor are used as nn.Linear is: any dims of the input, and what they give changed in place."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.tensor import Column, ColumnParallelLinear, How, Row, RowParallelLinear, parallelize
from manyranks.parallel.tensor.cuts import own_part
from tests.ranks.test_tensor import DEGREES, WAYS, gaps, lively, off, random, single

SHAPES = (2, 12), (2, 12, 3), (0, 12)  # before the features; dim 1 is the sequence


def in_place(way: str, bias: bool) -> float:
    """Callers change what the layers give, as nn.ReLU(inplace=True) and += do; x may have more dims between."""
    t, found = dist.get_world_size(), []
    for shape in SHAPES:
        whole = lively(nn.Sequential(nn.Linear(5, 12, bias), nn.ReLU(inplace=True), nn.Linear(12, 7, bias)))
        x, grad = random(*shape, 5).requires_grad_(), random(*shape, 7, seed=1)
        (y := whole(x)).add_(1).backward(grad)
        ours = parallelize(copy.deepcopy(whole), None, {"0": Column(), "2": Row()}, **WAYS[way])
        for p in ours.parameters():
            p.grad = None
        own = own_part if WAYS[way] else torch.clone
        x_own = own(x.detach()).requires_grad_()
        y_own = ours(x_own)
        if t > 1:  # alone a shard is the whole, and what comes back may be x's own memory
            y_own.add_(1)
        else:
            y_own = y_own + 1
        y_own.backward(own(grad))
        ours.finish()
        found += [off(y_own, own(y)), off(x_own.grad, own(x.grad)), *gaps(ours, whole)]
    return max(found)


@DEGREES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_layer_gives_may_be_changed_in_place_and_have_any_dims(shared_worlds, way, bias):
    assert max(shared_worlds.run(in_place, way, bias)) < 1e-12


def of_one_vector() -> list[float]:
    whole, found = lively(nn.Linear(12, 24)), []
    for made in (ColumnParallelLinear, RowParallelLinear):
        found += single(made.of(copy.deepcopy(whole), How()), copy.deepcopy(whole), ())
    return found


@DEGREES
def test_one_vector_is_multiplied_as_by_nn_linear(shared_worlds):
    assert max(max(found) for found in shared_worlds.run(of_one_vector)) < 1e-12
