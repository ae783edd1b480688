"""parallel.precision: 16 bytes per parameter, masters that keep what 16 bits lose, steps that all ranks skip."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks import theory
from manyranks.parallel.data_parallel import BucketedDataParallel, OverlappedDataParallel
from manyranks.parallel.precision import LossScaler, MasterOptimizer

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def model_of(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.LayerNorm(5)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(6, 7).to(dtype)


def storage_bytes(tensors) -> int:
    """Bytes of the memory that the tensors lie in, shared memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", [BucketedDataParallel, OverlappedDataParallel])
def test_a_live_model_holds_the_theory_s_16_bytes_a_parameter(shared_worlds, dtype, variant):
    kind = {"bf16": BF16, "fp16": F16}[dtype]

    def held():
        model = variant(model_of(kind))
        optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW)
        model(batch(dist.get_rank(), 0, kind)).float().square().sum().backward()
        model.finish()
        optimizer.step()
        held = optimizer.held()
        return [storage_bytes(part) for part in held], len(held.parameters), sum(p.numel() for p in held.parameters)

    for sizes, tensors, elements in shared_worlds.run(held):
        states = theory.memory.model_states(elements, theory.Plan(dp=shared_worlds.size, zero=0, precision=dtype))
        parameters, gradients, masters, moments, counters = sizes
        assert (parameters, gradients, masters + moments) == (states.parameters, states.gradients, states.optimizer)
        assert sum(sizes) - counters == states.total == 16 * elements
        assert counters == 4 * tensors


def test_nothing_in_32_bits_but_masters_and_states_outlives_a_step(shared_world):
    def left():
        model = BucketedDataParallel(model_of(BF16))
        optimizer = MasterOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(batch(0, 0, BF16)).sum().backward()
        model.finish()
        optimizer.step()
        return [m.grad for m in optimizer.masters], {p.dtype for p in model.parameters()}

    assert shared_world.run(left) == [([None] * 6, {BF16})] * 3


def test_masters_take_the_steps_of_32_bits_and_parameters_are_theirs_rounded(shared_worlds):
    """The reference has the same gradients, and its weights in 32 bits."""

    def steps():
        rank, n = dist.get_rank(), dist.get_world_size()
        model = OverlappedDataParallel(model_of(BF16, seed=rank))
        optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        masters = [p.detach().float().requires_grad_() for p in model_of(BF16, seed=0).parameters()]
        reference = torch.optim.AdamW(masters, lr=1e-3)
        for step in range(10):
            optimizer.zero_grad()
            model(batch(rank, step, BF16)).float().square().mean().backward()
            model.finish()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float()
            optimizer.step()
            reference.step()
        exact = all(torch.equal(a, b) for a, b in zip(optimizer.masters, masters, strict=True))
        rounded = all(torch.equal(p, m.bfloat16()) for p, m in zip(model.parameters(), masters, strict=True))
        return exact, rounded, n

    assert shared_worlds.run(steps) == [(True, True, shared_worlds.size)] * shared_worlds.size


def test_steps_too_small_for_bfloat16_add_up_in_the_masters():
    plain, mixed = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    optimizers = torch.optim.SGD([plain], lr=1e-3), MasterOptimizer([mixed], torch.optim.SGD, lr=1e-3)
    for _ in range(100):
        plain.grad, mixed.grad = torch.ones(3, dtype=BF16), torch.ones(3, dtype=BF16)
        for optimizer in optimizers:
            optimizer.step()
    assert plain.tolist() == [1.0] * 3
    assert mixed.tolist() == pytest.approx([0.9] * 3, rel=1 / 256)


def test_groups_schedules_and_parameters_in_32_bits():
    narrow, wide, unused = nn.Parameter(torch.ones(2, dtype=BF16)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [narrow], "lr": 1.0}, {"params": wide}, {"params": [unused]}]
    optimizer = MasterOptimizer(groups, torch.optim.SGD, lr=0.5, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        narrow.grad, wide.grad = torch.zeros(2, dtype=BF16), torch.zeros(2)
        optimizer.step()
        schedule.step()
    assert narrow.tolist() == [0.5 * 0.75] * 2
    assert wide.tolist() == [0.75 * 0.875] * 2
    assert unused.tolist() == [1.0] * 2
    assert optimizer.masters[1] is wide
    assert storage_bytes(optimizer.held().masters) == 8


def test_weights_loaded_later_become_the_masters(shared_world):
    """Also those that rank 0 sends when the model is wrapped after the optimizer was made."""

    def late():
        module = model_of(BF16, seed=dist.get_rank())
        optimizer = MasterOptimizer(module.parameters(), torch.optim.SGD, lr=0.0)
        model = BucketedDataParallel(module)
        model(batch(0, 0, BF16)).sum().backward()
        model.finish()
        optimizer.step()
        broadcast = [p.detach().clone() for p in module.parameters()]
        module.load_state_dict(model_of(BF16, seed=9).state_dict())
        optimizer.step()
        loaded = all(torch.equal(a, b) for a, b in zip(module.parameters(), model_of(BF16, seed=9).parameters(), strict=True))
        return [p.float().sum().item() for p in broadcast], loaded

    first, *others = shared_world.run(late)
    assert others == [first] * 2
    assert first[1]


CHANGES = {
    "in place": lambda p, new: p.copy_(new),
    "data": lambda p, new: setattr(p, "data", new.clone()),
    "in place, by data": lambda p, new: p.data.copy_(new),
    "one element, by data": lambda p, new: p.data[0].copy_(new[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_parameter_changes_its_master_and_leaves_what_it_did_not_change(shared_world, change):
    def changed():
        parameter, new = nn.Parameter(torch.ones(2, dtype=BF16)), torch.full((2,), 5.0, dtype=BF16)
        optimizer = MasterOptimizer([parameter], torch.optim.SGD, lr=2.0**-10)
        parameter.grad = torch.ones(2, dtype=BF16)
        optimizer.step()
        with torch.no_grad():
            CHANGES[change](parameter, new)
        optimizer.zero_grad()
        optimizer.step()
        return parameter.tolist(), optimizer.masters[0].tolist()

    last = 1 - 2.0**-10 if "one" in change else 5.0
    rounded = torch.tensor(last).bfloat16().item()
    assert shared_world.run(changed) == [([5.0, rounded], [5.0, last])] * 3


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_masters_and_their_gradients_have_the_parameters_strides(shared_world, dtype):
    """For a fused optimizer takes that for granted; also where gradients come from elsewhere."""

    def steps():
        torch.manual_seed(0)
        plain = nn.Conv2d(3, 4, 3).to(dtype)
        strided, elsewhere = (copy.deepcopy(plain).to(memory_format=torch.channels_last) for _ in range(2))
        model = OverlappedDataParallel(strided)
        optimizers = [
            MasterOptimizer(m.parameters(), torch.optim.AdamW, lr=0.1, fused=True) for m in (plain, strided, elsewhere)
        ]
        for step in range(3):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
            for each in (plain, model):
                each.zero_grad()
                each(x).square().mean().backward()
            model.finish()
            if dtype == BF16:
                for p, other in zip(plain.parameters(), elsewhere.parameters(), strict=True):
                    other.grad = p.grad.clone()
            for optimizer in optimizers:
                optimizer.step(2.0)
        of_bf16 = [elsewhere] if dtype == BF16 else []
        return max((plain.weight - other.weight).abs().max().item() for other in (strided, *of_bf16))

    assert max(shared_world.run(steps)) < 1e-2


def test_training_goes_on_from_a_state_dict_as_if_it_had_not_stopped():
    def run(stop: bool) -> list:
        model = model_of(BF16)
        optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for step in range(8):
            if stop and step == 4:
                saved = optimizer.state_dict()
                model = model_of(BF16, seed=5)
                optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(batch(0, step, BF16)).float().square().mean().backward()
            optimizer.step()
        return [m.tolist() for m in optimizer.masters]

    assert run(stop=True) == run(stop=False)


def test_an_overflow_on_one_rank_skips_the_step_on_all(shared_worlds):
    """Each rank has different gradients, so that only the flag can tell the others."""
    n = shared_worlds.size

    def steps():
        rank, parameter = dist.get_rank(), nn.Parameter(torch.ones(4, dtype=F16))
        optimizer, scaler = MasterOptimizer([parameter], torch.optim.SGD, lr=0.5), LossScaler(scale=1024.0, interval=3)
        seen = []
        for step in range(9):
            optimizer.zero_grad()
            bad = step in (1, 2) and rank == n - 1
            scaler.scaled((parameter.float() * (1e5 if bad else 2**-12)).sum()).backward()
            seen.append((scaler.step(optimizer), scaler.scale))
        return seen, parameter.tolist(), optimizer.masters[0].tolist()

    m = shared_worlds.measure(steps)
    taken = [True, False, False, True, True, True, True, True, True]
    scales = [1024.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 1024.0]
    master = 1 - 7 * 0.5 * 2**-12
    rounded = torch.tensor(master).half().item()
    assert m.results == [(list(zip(taken, scales, strict=True)), [rounded] * 4, [master] * 4)] * n
    assert [(call.op, call.bytes) for call in m.calls[0]] == [("all_reduce", 4)] * 9


def test_what_clips_gets_the_masters_with_gradients_divided_by_the_scale():
    parameter, norms = nn.Parameter(torch.zeros(2, dtype=BF16)), []
    optimizer = MasterOptimizer([parameter], torch.optim.SGD, lr=1.0)
    parameter.grad = torch.tensor([12.0, 16.0], dtype=BF16)
    optimizer.step(4.0, lambda masters: norms.append(nn.utils.clip_grad_norm_(masters, 1.0).item()))
    assert norms == [5]
    assert optimizer.masters[0].tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert parameter.grad.tolist() == [12, 16]


def test_only_the_group_s_ranks_skip(shared_world):
    def in_groups():
        rank = dist.get_rank()
        pair, alone = dist.new_group([0, 2]), dist.new_group([1])
        parameter = nn.Parameter(torch.ones(1, dtype=F16))
        parameter.grad = torch.full((1,), float("nan") if rank == 2 else 1.0, dtype=F16)
        optimizer = MasterOptimizer([parameter], torch.optim.SGD, lr=0.5)
        return LossScaler(alone if rank == 1 else pair).step(optimizer)

    assert shared_world.run(in_groups) == [False, True, False]


def test_a_rank_without_gradients_takes_part_in_the_decision(shared_world):
    def without():
        parameter = nn.Parameter(torch.ones(1, dtype=F16))
        if dist.get_rank() == 0:
            parameter.grad = torch.full((1,), float("inf"), dtype=F16)
        return LossScaler().step(MasterOptimizer([parameter], torch.optim.SGD, lr=0.5)), parameter.item()

    assert shared_world.run(without) == [(False, 1.0)] * 3


def test_gradients_too_small_for_float16_survive_with_a_scale(shared_world):
    def in_master(scale: float):
        parameter = nn.Parameter(torch.zeros(1, dtype=F16))
        optimizer, scaler = MasterOptimizer([parameter], torch.optim.SGD, lr=1.0), LossScaler(scale=scale)
        scaler.scaled((parameter * 1.0).float().sum() * 1e-9).backward()
        scaler.step(optimizer)
        return -optimizer.masters[0].item()

    assert shared_world.run(in_master, 2.0**16) == [pytest.approx(1e-9, rel=1e-3)] * 3
    assert shared_world.run(in_master, 1.0) == [0.0] * 3


def test_gradients_that_no_scale_saves_are_an_error_on_all_ranks(shared_world):
    def hopeless():
        parameter = nn.Parameter(torch.ones(1, dtype=F16))
        optimizer, scaler = MasterOptimizer([parameter], torch.optim.SGD, lr=0.5), LossScaler(scale=3.0)
        parameter.grad = torch.full((1,), float("nan") if dist.get_rank() == 1 else 0.0, dtype=F16)
        seen = [(scaler.step(optimizer), scaler.scale) for _ in range(2)]
        with pytest.raises(FloatingPointError, match="not finite at a loss scale of 1: no scale will help"):
            scaler.step(optimizer)
        return seen

    assert shared_world.run(hopeless) == [[(False, 1.5), (False, 1.0)]] * 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LossScaler(scale=0.5), "scale=0.5"),
        (lambda: LossScaler(growth=0.5), "growth=0.5"),
        (lambda: LossScaler(backoff=1.0), "backoff=1.0"),
        (lambda: LossScaler(interval=0), "interval=0"),
        (lambda: MasterOptimizer([torch.ones(1, dtype=torch.complex64)], torch.optim.SGD), "a parameter of torch.complex64"),
        (lambda: MasterOptimizer([], torch.optim.SGD), "params is empty"),
    ],
)
def test_wrong_arguments_are_value_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
