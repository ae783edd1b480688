"""parallel.tensor: what a comparison with the whole model and a kept shard leave as they were."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import Column, ColumnParallelLinear, How, column_parallel, parallelize
from manyranks.parallel.tensor.cuts import own_part
from tests.ranks.test_tensor import WAYS, Counts, D, heads, lively, off, random


def as_it_was() -> list[bool]:
    """What a comparison leaves: mode, buffers, gradients, the common random numbers, and what the first pass is to show."""
    t = dist.get_world_size()
    model, x = lively(Counts(t)), random(2, 5, 2 * t * D)
    model.out.bias.grad = grad = torch.ones_like(model.out.bias)
    model.drop.eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    tp = parallelize(model, None, heads(t), example={"x_BSH": x})
    unchanged = [model.training, not model.drop.training, model.passes.item() == 0, model.num_heads == 2]
    unchanged += [model.out.bias.grad is grad, bool((grad == 1).all()), torch.equal(torch.get_rng_state(), state)]
    unchanged += [p is model.out.bias or p.grad is None for p in tp.parameters()]
    return [*unchanged, all(tp._looks), tp._frozen is None]


def test_a_comparison_leaves_nothing_changed(shared_worlds):
    assert all(map(all, shared_worlds.run(as_it_was)))


def others() -> list[bool]:
    """A model beside, one that was dropped, an example that is not wanted."""
    t, model, x = dist.get_world_size(), nn.Linear(12, 24), torch.ones(2, 3, 12)
    whole = weakref.ref(model.weight)
    kept = copy.deepcopy(model)
    cut = parallelize(nn.Sequential(model), None, {"0": Column()})
    (kept(x).sum() + cut(x).sum()).backward()
    torch.optim.SGD([*kept.parameters(), *cut.parameters()], 0.1).step()
    del model
    gc.collect()
    counts = parallelize(Counts(t), None, heads(t), example=False)
    return [whole() is None, counts.module.num_heads == 2 * t]


def test_what_is_right_is_not_refused_and_a_dropped_weight_is_gone(shared_worlds):
    assert all(map(all, shared_worlds.run(others)))


# A shard that is kept instead of the whole


def again(way: str) -> list[float]:
    """Two backward passes of one graph, one result unused, under a checkpoint, and with an input that needs no gradient."""
    t, found = dist.get_world_size(), []
    for changed in ("plain", "checkpoint", "no gradient"):
        alone = lively(nn.Sequential(nn.Tanh(), nn.Linear(5, 6 * t), nn.Linear(5, 6 * t, bias=False)))
        first, second = (ColumnParallelLinear.of(copy.deepcopy(alone[k]), How(**WAYS[way])) for k in (1, 2))
        both = nn.ModuleList([first, second])
        both.forward = lambda x: column_parallel(x.tanh(), first, second)
        if changed == "checkpoint":
            checkpoint_modules(nn.ModuleList([both]), lambda module: module is both)
        x = random(2, 12, 5).requires_grad_(changed != "no gradient")
        x_own = own_part(x.detach()).requires_grad_(changed != "no gradient")
        y, (ours, _) = alone[1](x.tanh()), both(x_own)
        for k in range(1 if changed == "checkpoint" else 2):
            y.square().sum().backward(retain_graph=not k)
            ours.square().sum().backward(retain_graph=not k)
        found.append(off(first.weight.grad, first.cut.own(alone[1].weight.grad)))
        found += [] if x.grad is None else [off(x_own.grad, own_part(x.grad))]
    return found


@pytest.mark.parametrize("way", ["sequence", "kept", "overlap"])
def test_a_graph_may_be_used_twice_and_in_part(shared_worlds, way):
    assert max(max(found) for found in shared_worlds.run(again, way)) < 1e-12
