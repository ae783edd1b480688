"""parallel.zero in 16 bits with a loss scale: all ranks skip what overflows on one; else the steps of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.precision import LossScaler
from manyranks.parallel.shard import local
from manyranks.parallel.zero import ZeroOptimizer
from tests.ranks.test_fsdp_precision import ADAM, STEPS, Alone, Toy, data, loss_of

F16, F32 = torch.float16, torch.float32
AT = 4  # the step in which the last rank alone overflows


def in_float16(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data = p.data.to(F16)
    return model


def weight(rank: int, n: int, step: int) -> float:
    """The weight of a loss."""
    return 2.0**30 if (rank, step) == (n - 1, AT) else 1.0


class AloneInFloat16(Alone):
    """Its masters begin with what float16 has of the weights; it averages gradients in float16."""

    def __init__(self, n: int, scale: float, rows):
        super().__init__(F16, n, scale, rows)
        for p in self.masters.parameters():
            p.data = p.data.to(F16).float()

    def _gradients(self, batch) -> dict[str, torch.Tensor]:
        x, times = batch
        model = in_float16(Toy(0))
        model.load_state_dict(self.masters.state_dict())
        (loss_of(model, x.to(F16)) * times * self.scale).backward()
        return {name: p.grad * (1 / self.n) for name, p in model.named_parameters() if p.requires_grad}


def gap(zero: ZeroOptimizer, alone: nn.Module) -> float:
    """The largest difference of this rank's masters, and of the model's parameters, to one process's."""
    named, gaps = dict(alone.named_parameters()), []
    for row in zero.rows:
        whole_E = torch.zeros(row.row_E.numel())
        whole_E[: row.elements] = torch.cat([named[name].detach().flatten() for name in row.names])
        gaps += [
            (row.row.join(row.shards, whole_E.new_zeros(row.row.size)) - row.row.own(whole_E)).abs().max(),
            (row.row_E - whole_E.to(F16)).abs().max(),
        ]
    return max(gaps).item()


def train(stage: int, most: float | None) -> tuple[float, list[tuple[bool, float]], list[bool]]:
    """The difference to one process; of each step whether it was taken and the scale; whether gradients here were finite."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = in_float16(Toy(0))
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=stage, bucket_bytes=200, **ADAM)
    scaler = LossScaler(scale=2.0**19)
    alone, seen, finite = AloneInFloat16(n, scaler.scale, zero.rows), [], []
    clip = None if most is None else lambda shards: zero.clip_grad_norm_(most)
    for step in range(STEPS):
        scaler.scaled(loss_of(model, data(rank, step).to(F16)) * weight(rank, n, step)).backward()
        if stage == 1:
            finite.append(all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None))
        seen.append((scaler.step(zero, clip), scaler.scale))
        zero.zero_grad()
        alone.step([(data(r, step), weight(r, n, step)) for r in range(n)], most)
        assert alone.scale == scaler.scale
    return gap(zero, alone.masters), seen, finite


@pytest.mark.parametrize("most", [None, 0.05])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.few(1)
def test_fp16_takes_and_skips_the_steps_of_one_process(shared_worlds, stage, most):
    """Without clipping bit for bit; the norm is a sum in another order."""
    results = shared_worlds.run(train, stage, most)
    for rank, (difference, seen, finite) in enumerate(results):
        assert difference <= (0 if most is None else 1e-4)
        taken = [step for step, _ in seen]
        assert seen == results[0][1]
        assert taken == [False, False, True, True, False, True, True, True]
        assert [scale for _, scale in seen] == [2.0**18, *[2.0**17] * 3, *[2.0**16] * 4]
        if stage == 1:
            assert finite[AT] == (rank < shared_worlds.size - 1), "the overflow is on one rank"


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_that_one_rank_made_and_another_s_shard_has_skips_the_step_on_all(shared_worlds, stage):
    n = shared_worlds.size

    def steps():
        rank, seen = dist.get_rank(), []
        parameter = nn.Parameter(torch.ones(2 * n, dtype=F16))
        zero, scaler = ZeroOptimizer([parameter], torch.optim.SGD, stage=stage, lr=0.5), LossScaler(scale=1024.0)
        for step in range(3):
            factors = torch.full((2 * n,), 2.0**-12)
            factors[0] = 1e5 if (step, rank) == (1, n - 1) else 2.0**-12  # rank 0 has the shard
            scaler.scaled((parameter.float() * factors).sum()).backward()
            finite = all(local(grad).isfinite().all() for grad in zero.gradients())
            seen.append((finite, scaler.step(zero), scaler.scale, parameter.unique().tolist()))
            zero.zero_grad()
        return seen, [x for shard in zero.shards() for x in local(shard).tolist()]

    one, two = ([torch.tensor(1 - k * 2.0**-13).half().item()] for k in (1, 2))
    m = shared_worlds.measure(steps)
    for rank, result in enumerate(m.results):
        expected = [(True, True, 1024.0, one), (rank > 0, False, 512.0, one), (True, True, 512.0, two)]
        assert result == (expected, [1 - 2 * 2.0**-13] * 2)
    assert [call.bytes for call in m.calls[0] if call.op == "all_reduce"] == [4] * 3


def test_clipping_sees_unscaled_gradients_of_all_ranks(shared_world):
    def norms():
        parameter, seen = nn.Parameter(torch.zeros(7, dtype=F16)), []
        zero, scaler = ZeroOptimizer([parameter], torch.optim.SGD, stage=2, lr=1.0), LossScaler(scale=2.0**10)
        scaler.scaled((parameter.float() * torch.arange(7.0)).sum()).backward()
        assert scaler.step(zero, lambda shards: seen.append(zero.clip_grad_norm_(1.0).item()))
        return seen, parameter.float().norm().item()

    length = torch.arange(7.0).norm().item()
    for seen, moved in shared_world.run(norms):
        assert seen == [pytest.approx(length, rel=1e-3)]
        assert moved == pytest.approx(1, rel=1e-3)
