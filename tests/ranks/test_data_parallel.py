"""parallel.data_parallel: training on real ranks is training in one process, whatever parameters are used, frozen or tied."""

import contextlib
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyranks as mr
from manyranks.parallel import data_parallel as dp

VARIANTS = [dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel, dp.OverlappedDataParallel]
VOCAB, HIDDEN = 11, 5
F64 = torch.float64


class Toy(nn.Module):
    """Odd sizes, a tied weight, a frozen one, a layer that only some examples use, a bias that nothing uses, a scalar."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = F64):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.inner, self.frozen, self.outer = nn.Linear(HIDDEN, 7), nn.Linear(7, 7), nn.Linear(7, HIDDEN)
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.nobody = nn.Parameter(torch.ones(3))
        self.scalar, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(0, 4))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.weight.requires_grad_(False)
        self.to(dtype)

    def forward(self, x_BS, detour: bool = False):
        h = self.embedding(x_BS)
        h = h + self.outer(torch.tanh(self.frozen(self.inner(h)))) + self.nothing.sum()
        h = h + self.sometimes(h) if detour else h
        return self.head(self.scalar * h)


def tokens(rank: int, step: int, rows: int = 3):
    torch.manual_seed(1000 * rank + step)
    return torch.randint(VOCAB, (rows, 6))


def loss_of(model, x_BS, detour: bool = False):
    return nn.functional.cross_entropy(model(x_BS, detour)[:, :-1].reshape(-1, VOCAB), x_BS[:, 1:].reshape(-1))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def difference(model, reference) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((a - b).abs().max().item() for a, b in pairs if a.numel()), default=0.0)


def grads(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


def detours(rank: int, step: int) -> bool:
    """Some steps on no rank, some on rank 1 only, some on all."""
    return (step % 3 == 1 and rank == 1) or step % 3 == 2


class Alone(NamedTuple):
    """One process that has trained on the whole batches: its weights, and the parameters without a gradient in each step."""

    weights: dict
    unused: list[set[str]]


@functools.cache
def alone(n: int, steps: int = 20, set_to_none: bool = True) -> Alone:
    model, unused = Toy(seed=0), []
    optimizer = adam(model)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        sum(loss_of(model, tokens(r, step), detours(r, step)) / n for r in range(n)).backward()
        optimizer.step()
        unused.append(without_gradient(model))
    return Alone(model.state_dict(), unused)


def without_gradient(model) -> set[str]:
    return {name for name, gradient in grads(model).items() if gradient is None}


def train(variant, other: Alone, bucket_bytes: int = 300, set_to_none: bool = True) -> float:
    """Each rank on its shard; the largest difference to one process on all of them."""
    rank = dist.get_rank()
    model, theirs = variant(Toy(seed=rank), bucket_bytes=bucket_bytes), Toy(seed=0)
    optimizer = adam(model)
    for step, unused in enumerate(other.unused):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, tokens(rank, step), detours(rank, step)).backward()
        model.finish()
        optimizer.step()
        assert without_gradient(model.module) == unused
    theirs.load_state_dict(other.weights)
    return difference(model.module, theirs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(1)
def test_20_steps_are_those_of_one_process_on_the_whole_batch(shared_worlds, variant):
    assert max(shared_worlds.run(train, variant, alone(shared_worlds.size))) < 1e-10


@pytest.mark.parametrize("bucket_bytes", [1, 25_000_000, float("inf")])
def test_so_they_are_with_buckets_of_any_size(shared_world, bucket_bytes):
    for variant in (dp.BucketedDataParallel, dp.OverlappedDataParallel):
        assert max(shared_world.run(train, variant, alone(3, steps=6), bucket_bytes=bucket_bytes)) < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_they_are_with_gradients_set_to_zero_in_place(shared_world, variant):
    assert max(shared_world.run(train, variant, alone(3, steps=6, set_to_none=False), set_to_none=False)) < 1e-10


@pytest.mark.lenient
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.few(1)
def test_20_steps_are_those_of_distributed_data_parallel(shared_world, variant):
    def both():
        rank = dist.get_rank()
        ours = variant(Toy(seed=rank), bucket_bytes=300)
        theirs = nn.parallel.DistributedDataParallel(Toy(seed=rank), find_unused_parameters=True)
        for step, (model, optimizer) in itertools.product(range(20), [(m, adam(m)) for m in (ours, theirs)]):
            optimizer.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
            if model is ours:
                model.finish()
            optimizer.step()
        return difference(ours.module, theirs.module)

    assert max(shared_world.run(both)) < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_uneven_batch_needs_a_loss_weighted_by_the_shards(shared_world, variant):
    def uneven():
        rank, n = dist.get_rank(), dist.get_world_size()
        rows = [r + 1 for r in range(n)]
        model, alone = variant(Toy()), Toy()
        (loss_of(model, tokens(rank, 0, rows[rank])) * rows[rank] * n / sum(rows)).backward()
        model.finish()
        loss_of(alone, torch.cat([tokens(r, 0, rows[r]) for r in range(n)])).backward()
        return (model.module.inner.weight.grad - alone.inner.weight.grad).abs().max().item()

    assert max(shared_world.run(uneven)) < 1e-14


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_sync_accumulates_and_the_next_finish_sends_the_sum(shared_world, variant):
    """Also of what only the first micro-batch used, and where no backward comes after no_sync."""

    def accumulate(last_in_no_sync):
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = variant(Toy(), bucket_bytes=300), Toy()
        micro_batches = [(0, True), (1, False), (2, False)]
        with model.no_sync():
            with model.no_sync():
                pass
            model.finish()
        for number, detour in micro_batches:
            local = last_in_no_sync or number < 2
            with model.no_sync() if local else contextlib.nullcontext():
                loss_of(model, tokens(rank, number), detour).backward()
                if local:
                    model.finish()
        model.finish()
        for number, detour in micro_batches:
            (sum(loss_of(alone, tokens(r, number), detour) for r in range(n)) / n).backward()
        theirs = grads(alone)
        return max((g - theirs[k]).abs().max().item() for k, g in grads(model.module).items() if g is not None and g.numel())

    for last_in_no_sync in (False, True):
        m = shared_world.measure(accumulate, last_in_no_sync)
        assert max(m.results) < 1e-13
        calls = [call for call in m.calls[0] if call.op == "all_reduce"]
        assert len({call.sequence for call in calls}) == len(calls) == buckets_of(shared_world, variant)


def buckets_of(world, variant) -> int:
    return world.run(lambda: len(variant(Toy(), bucket_bytes=300).buckets))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_step_without_clearing_adds_to_the_mean(shared_world, variant):
    def twice():
        rank = dist.get_rank()
        model = variant(nn.Linear(1, 1, bias=False))
        seen = []
        for _ in range(2):
            model(torch.tensor([[float(rank)]])).sum().backward()
            model.finish()
            seen.append(model.module.weight.grad.item())
        return seen

    assert shared_world.run(twice) == [[1.0, 2.0]] * 3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("factor", [0.0, -0.0])
def test_a_gradient_of_zero_on_one_rank_is_a_gradient_on_all(shared_world, variant, factor):
    def zero():
        model = variant(nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(2)}))
        loss = model.module["a"].sum()
        if dist.get_rank() == 1:
            loss = loss + (model.module["b"] * factor).sum()
        loss.backward()
        model.finish()
        return model.module["b"].grad.tolist()

    assert shared_world.run(zero) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_gradient_stays_none_and_a_tiny_one_does_not_in_every_dtype(shared_worlds, dtype):
    """The smallest negative number divided by the ranks is −0.0, which must not read as no gradient."""

    def tiny():
        model = dp.OverlappedDataParallel(nn.ParameterDict({k: torch.ones(2, dtype=dtype) for k in "abc"}))
        loss = model.module["a"].sum()
        if dist.get_rank() == 0:
            loss = loss + (model.module["b"] * -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).sum()
        loss.backward()
        model.finish()
        return [None if p.grad is None else p.grad.dtype for p in model.module.values()]

    assert shared_worlds.run(tiny) == [[dtype, dtype, None]] * shared_worlds.size


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_several_dtypes_keep_theirs(shared_world, variant):
    def mixed():
        rank = dist.get_rank()
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3))
        model = variant(module)
        for parameter in module.parameters():
            (parameter * (rank + 1)).sum().backward()
        model.finish()
        kinds = [{module.get_parameter(name).dtype for name in names} for names in model.buckets]
        return all(len(kind) == 1 for kind in kinds), {
            p.grad.dtype == p.dtype and p.grad[0].max().item() for p in module.parameters()
        }

    assert shared_world.run(mixed) == [(True, {2.0})] * 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_works_in_any_group_and_in_two_at_the_same_time(variant):
    def on_halves():
        rank = dist.get_rank()
        groups = dist.new_group([0, 3]), dist.new_group([1, 2, 4])
        mine = groups[rank in (1, 2, 4)]
        model = variant(nn.Linear(1, 1, bias=False), mine)
        start = model.module.weight.item()
        model(torch.tensor([[float(rank)]])).sum().backward()
        model.finish()
        return start, model.module.weight.grad.item()

    with mr.World(5, backend="gloo", timeout=60) as world:
        results = world.run(on_halves)
    assert [round(grad, 5) for _, grad in results] == [1.5, 2.33333, 2.33333, 1.5, 2.33333]
    assert results[0][0] == results[3][0] != results[1][0] == results[2][0] == results[4][0]


def test_one_rank_is_a_world_too():
    with mr.World(1, backend="gloo", timeout=30) as world:
        assert all(world.run(train, variant, alone(1, steps=4))[0] < 1e-12 for variant in VARIANTS)


def test_parameters_and_buffers_start_as_those_of_rank_0(shared_world):
    def start():
        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
        module.register_buffer("mask", torch.rand(5) > 0.5)
        module[1].running_mean.normal_()
        dp.NaiveDataParallel(module)
        return [t.double().sum().item() for t in module.state_dict().values()], module[0].weight.stride()

    results = shared_world.run(start)
    assert results[1] == results[0] == results[2]


def test_buffers_stay_in_step_where_asked_to_and_not_in_no_sync_or_eval(shared_world):
    def means(broadcast_buffers):
        model = dp.BucketedDataParallel(nn.BatchNorm1d(1), broadcast_buffers=broadcast_buffers)
        x = torch.full((4, 1), float(dist.get_rank()))
        for _ in range(2):
            model(x)
        seen = [model.module.running_mean.item()]
        with model.no_sync():
            model(x)
        model.eval()
        model(x)
        return [*seen, model.module.running_mean.item()]

    apart, kept = shared_world.run(means, False), shared_world.run(means, True)
    assert [pytest.approx(pair) for pair in apart] == [[0, 0], [0.19, 0.271], [0.38, 0.542]]
    assert [pytest.approx(pair) for pair in kept] == [[0, 0], [0.1, 0.19], [0.2, 0.38]]
