"""parallel.boxes: a checkpoint of 4 ranks goes on on 2 and on 3 as if nothing had happened."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel import boxes, saving
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.precision import make_states
from manyranks.parallel.shard import local
from manyranks.parallel.zero import Zero3, ZeroOptimizer
from tests.conftest import matrix
from tests.ranks.test_data_parallel import difference, loss_of, tokens
from tests.ranks.test_zero import toy

KINDS = ["stage 1", "stage 2", "Zero3", "FSDP", "HSDP"]
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
}
ROWS = 12  # of every batch: 2, 3 and 4 ranks take as many each


def built(kind: str, optimizer: str, seed: int):
    """The model to run, the one to compare, who reduces after backward, who steps, and the arguments of boxes.of_model."""
    make, options = OPTIMIZERS[optimizer]
    module = counting(toy(seed))
    if kind.startswith("stage"):
        zero = ZeroOptimizer(module.parameters(), make, stage=int(kind[-1]), bucket_bytes=300, **options)
        return module, zero, (zero,)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if kind == "HSDP" else None
    model = Zero3(module) if kind == "Zero3" else FullyShardedDataParallel(module, mesh=mesh)
    stepper = make(model.parameters(), **options)
    return model, stepper, (model, stepper)


def counting(module: nn.Module) -> nn.Module:
    """With a buffer that each forward pass changes."""
    module.register_buffer("passes", torch.zeros(2, dtype=torch.float64))

    def count(module, inputs) -> None:
        module.passes += 1

    module.register_forward_pre_hook(count)
    return module


def train(model, optimizer, steps: range, rank: int = 0, n: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, tokens(0, step, ROWS).tensor_split(n)[rank], True).backward()
        if isinstance(model, Zero3):
            model.finish()
        optimizer.step()


def interrupted(kind: str, optimizer: str, steps: range, folder: str, ends: bool) -> float:
    """Goes on from the folder, unless it begins; saves there, or compares with one process that was never interrupted."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model, stepper, of_state = built(kind, optimizer, seed=0 if steps.start == 0 else 77)
    if steps.start:
        saving.load(Path(folder), boxes.of_model(*of_state))
        if isinstance(stepper, ZeroOptimizer):
            stepper.spread()
    train(model, stepper, steps, rank, n)
    if not ends:
        saving.save(Path(folder), boxes.of_model(*of_state))
        return 0.0
    alone, (make, options) = counting(toy(0)), OPTIMIZERS[optimizer]
    train(alone, make(alone.parameters(), **options), range(steps.stop))
    if isinstance(stepper, ZeroOptimizer):
        return difference(model, alone)
    whole = model.full_state_dict()
    plain = counting(toy(5))
    plain.load_state_dict(whole)
    assert plain.passes.tolist() == [steps.stop] * 2
    return max(difference(plain, alone), (plain.passes - alone.passes).abs().max().item())


@pytest.mark.parametrize(("kind", "optimizer"), matrix(product(KINDS, OPTIMIZERS), zip(KINDS, cycle(OPTIMIZERS))))
@pytest.mark.few(2)
def test_what_4_ranks_save_others_go_on_with_as_if_nothing_had_happened(sizes, tmp_path, kind, optimizer):
    sizes[4].run(interrupted, kind, optimizer, range(4), str(tmp_path), ends=False)
    for n in (2, 3) if kind != "HSDP" else (2, 4):
        gaps = sizes[n].run(interrupted, kind, optimizer, range(4, 8), str(tmp_path), ends=True)
        assert max(gaps) < 1e-10, (n, gaps)


def test_shards_of_replicas_are_read_without_replicas(sizes, tmp_path):
    sizes[4].run(interrupted, "HSDP", "AdamW", range(4), str(tmp_path), ends=False)
    assert max(sizes[3].run(interrupted, "FSDP", "AdamW", range(4, 8), str(tmp_path), ends=True)) < 1e-10


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_before_the_first_step_changes_nothing(sizes, tmp_path, optimizer):
    def both():
        model, stepper, of_state = built("FSDP", optimizer, 0)
        saving.save(tmp_path, boxes.of_model(*of_state))
        other, plain, _ = built("FSDP", optimizer, 0)
        train(model, stepper, range(3))
        train(other, plain, range(3))
        return all(torch.equal(local(a), local(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    assert all(sizes[2].run(both))


def test_states_made_before_the_first_step_are_zeros_and_gradients_stay():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 5.0)
    optimizer = torch.optim.Adam([p], lr=0.1, weight_decay=0.5)
    make_states(optimizer)
    assert p.tolist() == [1, 1, 1]
    assert p.grad.tolist() == [5, 5, 5]
    assert all(not value.any() for value in optimizer.state[p].values())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.5)
