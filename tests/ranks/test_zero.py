"""parallel.zero: each stage trains as one process does, and holds and sends what the formulas say."""

import itertools
import math
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import manyranks as mr
from manyranks import theory
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import Zero3, ZeroOptimizer
from tests.conftest import matrix
from tests.ranks.test_data_parallel import Toy, difference, loss_of, tokens
from tests.ranks.test_precision import storage_bytes

ADAM = {"lr": 1e-2, "weight_decay": 0.1}
STAGES = ["1", "2", "3", "fsdp"]


def toy(seed: int, **kwargs) -> Toy:
    """With a frozen weight, a tied one, and none that nothing uses: stage 3 counts a missing gradient as zeros."""
    model = Toy(seed, **kwargs)
    model.nobody.requires_grad_(False)
    return model


class Trained:
    """A model with its optimizer at some stage. part: of the model's parameters, in separate groups."""

    def __init__(self, stage: str, model: nn.Module, optimizer=torch.optim.AdamW, **options):
        self.sharded = stage in ("3", "fsdp")
        if self.sharded:
            self.model = {"3": Zero3, "fsdp": FullyShardedDataParallel}[stage](model)
            self.optimizer = optimizer(self.model.parameters(), **(options or ADAM))
        else:
            self.model = model
            settings = {"stage": int(stage), "bucket_bytes": 300} | (options or ADAM)
            self.optimizer = ZeroOptimizer(model.parameters(), optimizer, **settings)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self.sharded:
            self.model.finish()

    def gap(self, alone: nn.Module) -> float:
        """The largest difference of any parameter or buffer to the other model's."""
        if not self.sharded:
            return difference(self.model, alone)
        ours, theirs = self.model.full_state_dict(), alone.state_dict()
        assert ours.keys() == theirs.keys()
        return max((ours[k] - theirs[k]).abs().max().item() for k in ours if ours[k].numel())


class Alone(NamedTuple):
    """One process that has trained on the whole batches: its weights, and the norm of each step's gradients."""

    weights: dict
    norms: list[float]


@cache
def alone(n: int, steps: int = 20, parts: int = 1, most: float | None = None) -> Alone:
    """most: the norm at which gradients are clipped."""
    model, norms = toy(0), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in range(step * parts, (step + 1) * parts):
            sum(loss_of(model, tokens(r, batch), True) / n for r in range(n)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), most or math.inf).item())
        optimizer.step()
    return Alone(model.state_dict(), norms)


def train(stage: str, other: Alone, steps: int = 20, parts: int = 1, most: float | None = None) -> float:
    """Each rank on its shard of the batch; the largest difference to one process on the whole batch."""
    ours = Trained(stage, toy(dist.get_rank()))
    for step in range(steps):
        ours.optimizer.zero_grad()
        for batch in range(step * parts, (step + 1) * parts):
            ours.backward(loss_of(ours.model, tokens(dist.get_rank(), batch), True))
        if most is not None:
            norm = (ours.model if stage in ("3", "fsdp") else ours.optimizer).clip_grad_norm_(most)
            assert abs(norm - other.norms[step]) < 1e-12
        ours.optimizer.step()
    theirs = toy(0)
    theirs.load_state_dict(other.weights)
    return ours.gap(theirs)


def gaps(world: mr.World, stage: str, **how) -> list[float]:
    return world.run(train, stage, alone(world.size, **how), **how)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.few(1)
def test_20_steps_are_those_of_one_process_on_the_whole_batch(shared_worlds, stage):
    assert max(gaps(shared_worlds, stage)) < 1e-10


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.few(1)
def test_gradients_of_several_backward_passes_add_up(shared_world, stage):
    assert max(gaps(shared_world, stage, steps=5, parts=3)) < 1e-10


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_all_shards_together_is_clipped(shared_world, stage):
    assert max(gaps(shared_world, stage, steps=5, most=0.05)) < 1e-10


@pytest.mark.parametrize(
    ("stage", "other"),
    matrix(
        itertools.product(["1", "2"], [torch.optim.AdamW, torch.optim.SGD]), [("1", torch.optim.SGD), ("2", torch.optim.AdamW)]
    ),
)
@pytest.mark.lenient
@pytest.mark.few(1)
def test_20_steps_are_those_of_zero_redundancy_optimizer(shared_world, stage, other):
    def both():
        rank = dist.get_rank()
        options = {"lr": 1e-2, "weight_decay": 0.1}
        ours = Trained(stage, toy(0), other, **options)
        ddp = nn.parallel.DistributedDataParallel(toy(0))
        theirs = ZeroRedundancyOptimizer(ddp.parameters(), other, **options)
        for step in range(20):
            for model, optimizer in ((ours.model, ours.optimizer), (ddp, theirs)):
                optimizer.zero_grad()
                loss_of(model, tokens(rank, step), True).backward()
                optimizer.step()
        return ours.gap(ddp.module)

    assert max(shared_world.run(both)) < 1e-10


@pytest.mark.parametrize("stage", ["3", "fsdp"])
@pytest.mark.few(1)
def test_20_steps_are_those_of_fully_shard(shared_world, stage):
    def both():
        rank = dist.get_rank()
        ours, theirs = Trained(stage, dense()), dense()
        for layer in theirs:
            fully_shard(layer)
        fully_shard(theirs)
        optimizer = torch.optim.AdamW(theirs.parameters(), **ADAM)
        for step in range(20):
            torch.manual_seed(100 * rank + step)
            x = torch.randn(3, 5, dtype=torch.float64)
            for model, stepper in ((ours.model, ours.optimizer), (theirs, optimizer)):
                stepper.zero_grad()
                loss = model(x).square().mean()
                ours.backward(loss) if model is ours.model else loss.backward()
                stepper.step()
        whole = ours.model.full_state_dict()
        return max((whole[k] - v.full_tensor()).abs().max().item() for k, v in theirs.state_dict().items())

    assert max(shared_world.run(both)) < 1e-10


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b).double() for a, b in itertools.pairwise([5, 7, 11, 3])))


def groups_of(model: nn.Module) -> list[dict]:
    """Biases do not decay; the head comes later."""
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not name.startswith("outer")]
    return [
        {"params": [p for name, p in learning if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for name, p in learning if not name.endswith("bias")], "weight_decay": 0.3, "lr": 3e-3},
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_keep_their_options_and_can_be_added_later(shared_world, stage):
    def both():
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = toy(0), toy(0)
        ours = ZeroOptimizer(groups_of(model), torch.optim.AdamW, stage=stage, bucket_bytes=200, **ADAM)
        theirs = torch.optim.AdamW(groups_of(alone), **ADAM)
        for step in range(8):
            if step == 3:
                for m, optimizer in ((model, ours), (alone, theirs)):
                    optimizer.add_param_group({"params": m.outer.parameters(), "lr": 1e-1})
            if step == 5:
                for group in (*ours.param_groups, *theirs.param_groups):
                    group["lr"] *= 0.1
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(model, tokens(rank, step), True).backward()
            ours.step()
            sum(loss_of(alone, tokens(r, step), True) / n for r in range(n)).backward()
            theirs.step()
        return difference(model, alone)

    assert max(shared_world.run(both)) < 1e-10


# What a rank holds.


def bits(dtype: torch.dtype) -> nn.Module:
    """Rows of odd sizes, and a unit that is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise([5, 7, 11, 3])))
    model[1].requires_grad_(False)
    return model.to(dtype)


def held(stage: int, dtype: torch.dtype, compute: torch.dtype | None = None, shape=None) -> tuple[list[int], ...]:
    """Bytes of each part after backward and between steps; elements of the rows that learn, and of the frozen ones."""
    model = bits(dtype)
    if stage == 3:
        mesh = None if shape is None else init_device_mesh("cpu", shape)
        model = FullyShardedDataParallel(model, mesh=mesh, compute_dtype=compute, reduce_dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        rows, see = model.units, partial(model.held, optimizer)
    else:
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, bucket_bytes=200)
        rows, see = optimizer.rows, optimizer.held
    seen = []
    for _ in range(2):
        model(torch.ones(2, 5, dtype=dtype)).float().sum().backward()
        if stage == 3:
            model.finish()
        seen = [storage_bytes(part) for part in see()]
        optimizer.step()
    optimizer.zero_grad()
    if stage == 3:
        learning, frozen = ([unit.row.elements for unit in rows if unit.learns == learns] for learns in (True, False))
    else:
        learning, frozen = [row.elements for row in rows], [7 * 11, 11]
    return seen, [storage_bytes(part) for part in see()], learning, frozen


def theirs(rows, frozen, n, stage, bytes, replicas=1, rank=0) -> list[int]:
    """theory.sharding's bytes: what learns, and what is frozen, without gradients and states."""
    parameter, gradient, master = bytes
    shards = {"replicas": replicas, "rank": rank}
    tensors = 2 * len(rows) if stage == 3 else 4
    of_rows = theory.sharding.held(rows, n, stage, parameter, gradient, master, (4, 4), 4, **shards, tensors=tensors)
    whole = parameter or master
    fixed = (
        theory.sharding.held(frozen, n, stage, whole, 0, 0, (), 0, **shards).parameters if stage == 3 else sum(frozen) * whole
    )
    at_masters = stage == 3 and not parameter
    total = list(of_rows[:5])
    total[2 if at_masters else 0] += fixed
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_the_theory_s_bytes(shared_worlds, stage, dtype):
    n, kind = shared_worlds.size, getattr(torch, dtype)
    wide = kind == torch.float32
    for rank, (after_backward, between, rows, frozen) in enumerate(shared_worlds.run(held, stage, kind)):
        size = (4, 4, 0) if wide else (0, 4, 4) if stage == 3 else (2, 2, 4)
        expected = theirs(rows, frozen, n, stage, size, rank=rank)
        assert after_backward == expected
        assert between == [expected[0], 0, *expected[2:]]


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_so_it_does_where_shards_have_replicas(four, shape, compute):
    for rank, (after_backward, between, rows, frozen) in enumerate(four.run(held, 3, torch.float32, compute, shape)):
        size = (4, 4, 0) if compute is None else (0, 4, 4)
        expected = theirs(rows, frozen, 4, 3, size, shape[0], rank % shape[1])
        assert after_backward == expected
        assert between == [expected[0], 0, *expected[2:]]
