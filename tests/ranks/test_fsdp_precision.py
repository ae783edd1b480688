"""parallel.fsdp in 16 bits: the same bits as one process that casts, takes ranks' parts in turn, and adds in 32."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import manyranks as mr
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.precision import LossScaler, MasterOptimizer

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {"bf16": BF16, "fp16": F16}
WIDTH, ROWS, STEPS = 9, 4, 8
ADAM = {"lr": 1e-2, "weight_decay": 0.1}


class Toy(nn.Module):
    """Linear layers and a norm, one of them frozen; a float buffer that it adds, and one that counts."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.frozen, self.out = nn.Linear(WIDTH, 13), nn.Linear(13, 13), nn.Linear(13, WIDTH)
        self.norm = nn.LayerNorm(13)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(13))
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        into = self.into(x)
        self.seen = [x.dtype, into.dtype, self.shift.dtype]
        h = torch.tanh(into) + self.shift.to(x.dtype)
        self.count += 1 / 512  # in 16 bits it would stay at 1
        return self.out(self.norm(self.frozen(h)))


def data(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH)


def loss_of(model, x) -> torch.Tensor:
    return model(x).float().square().mean()


class Alone:
    """One process with masters in 32 bits, and a copy of them in `dtype` for each rank's part of the batch.

    units: add up as a ring does in each of these; without them, in the order of the ranks.
    """

    def __init__(self, dtype: torch.dtype, n: int, scale: float = 1.0, units=()):
        self.masters, self.dtype, self.n, self.scale, self.units = Toy(0), dtype, n, scale, units
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), **ADAM)
        self.skipped = 0

    def step(self, batches, most: float | None = None) -> None:
        learning = {name: p for name, p in self.masters.named_parameters() if p.requires_grad}
        of_ranks = [self._gradients(x) for x in batches]
        sums = {name: sum(grads[name] for grads in of_ranks) for name in learning}
        for unit in self.units:
            sums |= self._around_the_ring(unit, of_ranks)
        if not all(total.isfinite().all() for total in sums.values()):
            self.scale, self.skipped = self.scale / 2, self.skipped + 1
            return
        for name, p in learning.items():
            p.grad = sums[name].float() / self.scale
        if most is not None:
            nn.utils.clip_grad_norm_(learning.values(), most)
        self.optimizer.step()

    def _gradients(self, x) -> dict[str, torch.Tensor]:
        """One rank's share of the mean, in 32 bits."""
        model = Toy(0)
        model.load_state_dict(self.masters.state_dict())
        for p in model.parameters():
            p.data = p.data.to(self.dtype)
        (loss_of(model, x.to(self.dtype)) * self.scale).backward()
        return {name: p.grad.float() * (1 / self.n) for name, p in model.named_parameters() if p.requires_grad}

    def _around_the_ring(self, unit, of_ranks) -> dict[str, torch.Tensor]:
        """Shard c of the unit's row sets out at rank c + 1 and ends at rank c."""
        if not unit.parameters[0].requires_grad:
            return {}
        rows = torch.zeros(self.n, unit.row_E.numel(), dtype=of_ranks[0][unit.names[0]].dtype)
        for row, grads in zip(rows, of_ranks, strict=True):
            row[: unit.elements] = torch.cat([grads[name].flatten() for name in unit.names])
        shards = rows.view(self.n, self.n, -1)  # rank, shard
        sums = [sum(shards[(c + 1 + k) % self.n, c] for k in range(self.n)) for c in range(self.n)]
        return dict(zip(unit.names, unit.row.parts(torch.cat(sums)), strict=True))


def gap(model, alone: nn.Module) -> float:
    ours, theirs = model.full_state_dict(), dict(alone.named_parameters())
    return max((ours[name] - p).abs().max().item() for name, p in theirs.items())


def train(dtype: str, most: float | None = None, scale: float | None = None, shape=None) -> tuple[float, int]:
    """The largest difference of a master to one process's, and the steps that both skipped."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = None if shape is None else init_device_mesh("cpu", shape)
    model = FullyShardedDataParallel(Toy(rank), mesh=mesh, compute_dtype=TYPES[dtype], reduce_dtype=F32)
    optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, **ADAM)
    alone, skipped = Alone(TYPES[dtype], n, scale or 1.0), 0
    scaler = LossScaler(scale=scale) if scale else None
    clip = None if most is None else lambda shards: model.clip_grad_norm_(most)
    for step in range(STEPS):
        loss = loss_of(model, data(rank, step))
        (scaler.scaled(loss) if scaler else loss).backward()
        model.finish()
        if scaler:
            skipped += not scaler.step(optimizer, clip)
        else:
            optimizer.step(clip=clip)
        optimizer.zero_grad()
        alone.step([data(r, step) for r in range(n)], most)
    assert skipped == alone.skipped
    assert {p.dtype for p in model.parameters()} == {F32}
    return gap(model, alone.masters), skipped


@pytest.fixture(scope="module")
def two():
    with mr.World(2, backend="gloo", timeout=30) as world:
        yield world


@pytest.mark.parametrize("dtype", TYPES)
def test_on_two_ranks_masters_are_one_process_s_bit_for_bit(two, dtype):
    """A sum of two does not depend on its order."""
    assert two.run(train, dtype) == [(0, 0)] * 2


def test_so_they_are_with_a_loss_scale_that_must_shrink_first(two):
    assert two.run(train, "fp16", scale=2.0**19) == [(0, 2)] * 2


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("most", [None, 0.05])
@pytest.mark.few(1)
def test_so_they_are_on_more_ranks_but_for_rounding_where_a_norm_is_clipped(shared_worlds, dtype, most):
    scale = 2.0**19 if dtype == "fp16" else None
    gaps = {gap for gap, _ in shared_worlds.run(train, dtype, most, scale)}
    assert gaps == {0} if most is None else max(gaps) < 1e-4


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.few(1)
def test_so_they_do_with_replicas_of_shards(dtype):
    with mr.World(4, backend="gloo", timeout=30) as world:
        assert max(gap for gap, _ in world.run(train, dtype, shape=(2, 2))) < 1e-4


@pytest.mark.parametrize("dtype", TYPES)
def test_inputs_and_parameters_compute_in_the_compute_dtype_and_buffers_keep_theirs(shared_world, dtype):
    def seen():
        model = FullyShardedDataParallel(Toy(), compute_dtype=TYPES[dtype])
        out = model(data(0, 0))
        return [*model.module.seen, out.dtype, model.full_state_dict()["count"].dtype]

    kind = TYPES[dtype]
    assert shared_world.run(seen) == [[kind, kind, F32, kind, F32]] * 3


def test_integers_and_nested_inputs_go_through(shared_world):
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, batch, scale=None):
            return self.table(batch["tokens"]) * batch["weights"][0] * scale

    def picked():
        model = FullyShardedDataParallel(Picks(), compute_dtype=BF16)
        batch = {"tokens": torch.tensor([1, 2]), "weights": [torch.ones(2, 1)]}
        return model(batch, scale=torch.ones(())).dtype

    assert shared_world.run(picked) == [BF16] * 3


def test_a_model_of_16_bits_gets_shards_in_32(shared_world):
    def dtypes():
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)).to(BF16))
        model(torch.ones(2, 4, dtype=BF16)).float().sum().backward()
        model.finish()
        return [(p.dtype, p.grad.dtype) for p in model.parameters()]

    assert shared_world.run(dtypes) == [[(F32, F32)] * 2] * 3
