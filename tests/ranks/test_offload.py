"""parallel.offload: the same steps bit for bit, with the states in files and not in memory."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel import boxes, saving
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.offload import OffloadedOptimizer
from manyranks.parallel.shard import local
from manyranks.parallel.zero import ZeroOptimizer
from tests.conftest import matrix

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
WIDTH = 48


def model_of(width: int = WIDTH, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def train(model, optimizer, steps: range = range(5), width: int = WIDTH) -> None:
    for step in steps:
        torch.manual_seed(100 * dist.get_rank() + step)
        optimizer.zero_grad()
        model(torch.randn(2, width)).float().square().mean().backward()
        if isinstance(model, FullyShardedDataParallel):
            model.finish()
        optimizer.step()


def equal(one, other) -> bool:
    return all(torch.equal(local(a), local(b)) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "masters"), matrix(product(OPTIMIZERS, [False, True]), zip(OPTIMIZERS, [True, False], strict=True))
)
def test_fully_sharded_training_is_the_same_bit_for_bit(shared_worlds, tmp_path, name, masters):
    def both():
        make, options = OPTIMIZERS[name]
        ours, plain = (FullyShardedDataParallel(model_of(), compute_dtype=torch.bfloat16) for _ in range(2))
        train(ours, OffloadedOptimizer(ours.parameters(), make, tmp_path, masters=masters, **options))
        train(plain, make(plain.parameters(), **options))
        return equal(ours, plain)

    assert all(shared_worlds.run(both))


@pytest.mark.parametrize("stage", [1, 2])
def test_so_it_is_with_the_optimizer_of_stages_1_and_2(shared_world, tmp_path, stage):
    def both():
        make, options = OPTIMIZERS["AdamW"]
        ours, plain = model_of().bfloat16(), model_of().bfloat16()
        offloaded = partial(OffloadedOptimizer, optimizer_class=make, folder=tmp_path, masters=True)
        for model, chosen in ((ours, offloaded), (plain, make)):
            optimizer = ZeroOptimizer(model.parameters(), chosen, stage=stage, **options)
            for step in range(5):
                torch.manual_seed(100 * dist.get_rank() + step)
                model(torch.randn(2, WIDTH).bfloat16()).float().square().mean().backward()
                optimizer.step()
        return equal(ours, plain)

    assert all(shared_world.run(both))


def test_states_and_masters_leave_memory(shared_world, tmp_path):
    """Each weight of 256² elements over 3 ranks has masters and two moments of 87 KB, in pages of 4 KiB."""

    def sizes():
        model = FullyShardedDataParallel(model_of(256), compute_dtype=torch.bfloat16)
        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, tmp_path, masters=True)
        train(model, optimizer, range(2), width=256)
        held = model.held(optimizer)
        inside = {tensor.data_ptr() for files in optimizer._files for _, tensor in files}
        assert all(local(t).data_ptr() in inside for t in (*held.masters, *held.states))
        left, files = optimizer.resident_bytes(), sum(t.nbytes for t in (*held.masters, *held.states))
        touched = sum(float(t.sum()) for t in held.states)
        return left, optimizer.resident_bytes() or 0, files, touched != 0

    for left, read, files, moved in shared_world.run(sizes)[:2]:  # the last one has less: no padding
        if left is None:
            pytest.skip("only Linux says what of a file is in memory")
        assert (left, moved) == (0, True)
        assert files == 3 * 3 * 4 * -(-256 * 257 // 3)
        assert read >= files * 2 // 3  # what is looked at comes back


def test_a_checkpoint_fills_the_files(shared_world, tmp_path):
    def both():
        wide = partial(OffloadedOptimizer, optimizer_class=torch.optim.AdamW, folder=tmp_path)
        models = [FullyShardedDataParallel(model_of()) for _ in range(2)]
        ours, other = (wide(model.parameters(), lr=1e-2) for model in models)
        train(models[0], ours, range(4))
        saving.save(tmp_path / "state", boxes.of_model(models[0], ours))
        train(models[0], ours, range(4, 6))
        saving.load(tmp_path / "state", boxes.of_model(models[1], other))
        train(models[1], other, range(4, 6))
        return equal(*models), other.resident_bytes()

    assert shared_world.run(both) == [(True, 0)] * 3


def test_what_cannot_be_mapped_is_said(tmp_path):
    with pytest.raises(ValueError, match="not yet iterated"):
        OffloadedOptimizer([], torch.optim.SGD, tmp_path)
    with pytest.raises(ValueError, match="on meta"):
        OffloadedOptimizer([nn.Parameter(torch.zeros(2, device="meta"))], torch.optim.SGD, tmp_path)
