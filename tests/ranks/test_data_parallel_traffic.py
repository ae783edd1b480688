"""parallel.data_parallel: what the ranks send, call by call, and when; how a bucket lies in memory."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manyranks.parallel import data_parallel as dp
from manyranks.parallel.buckets import cut
from manyranks.theory.collectives import sent_bytes
from manyranks.timeline.program import Collective, Compute

VARIANTS = [dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel, dp.OverlappedDataParallel]
WIDTH, DEPTH = 13, 6
SEND, RECEIVE = 96, 48  # gloo's framing a send and a receive, tests/ranks/test_measure.py


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH)))


def one_step(variant, dtype=torch.float32, bucket_bytes=2 * (WIDTH + 1) * WIDTH * 4, steps=1) -> None:
    model = variant(layers(dtype), bucket_bytes=bucket_bytes)
    dist.barrier()
    for _ in range(steps):
        model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        model.finish()


def reduces(calls) -> list:
    return [call for call in calls if call.op == "all_reduce"]


@pytest.mark.lenient
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_sends_the_theory_s_bytes_in_as_many_calls_as_there_are_buckets(shared_worlds, variant, dtype):
    n, itemsize = shared_worlds.size, dtype.itemsize
    elements = DEPTH * (WIDTH + 1) * WIDTH
    bucket_bytes = 2 * (WIDTH + 1) * WIDTH * itemsize
    start, m = (shared_worlds.measure(one_step, variant, dtype, bucket_bytes, steps) for steps in (0, 1))
    calls = dict(zip(VARIANTS, (2 * DEPTH, 1, DEPTH // 2, DEPTH // 2), strict=True))[variant]
    for rank in range(n):
        reduced = reduces(m.calls[rank])
        assert len(reduced) == calls
        assert len(m.calls[rank]) == len(start.calls[rank]) + calls
        assert sum(call.bytes for call in reduced) == elements * itemsize
        assert {call.dtype for call in reduced} == {str(dtype).removeprefix("torch.")}
        assert all(call.is_async == (variant is dp.OverlappedDataParallel) for call in reduced)
    in_step = [m.payload_bytes[r] - start.payload_bytes[r] for r in range(n)]
    if calls == 1:
        assert in_step == sent_bytes("all_reduce", elements, itemsize, n)
    # Each call is cut into n chunks of whole elements.
    assert in_step == pytest.approx([2 * (n - 1) / n * elements * itemsize] * n, abs=2 * itemsize * calls)
    if m.sent_bytes is not None and variant is dp.FlatDataParallel:
        on_sockets = [m.sent_bytes[r] - start.sent_bytes[r] for r in range(n)]
        framing = 4 * (n - 1) * (SEND + RECEIVE)  # gloo's ring sends each chunk in two parts
        assert on_sockets == pytest.approx([bytes + framing for bytes in in_step], abs=2 * itemsize)


def transposed() -> nn.Module:
    module = nn.Linear(6, 5)
    module.weight = nn.Parameter(torch.randn(6, 5).t())
    return module


SHAPES = {
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 5, 5)),
    "transposed": (transposed, (2, 6)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_have_their_parameters_strides_for_a_fused_optimizer_takes_that_for_granted(shared_world, variant, kind):
    def steps():
        build, shape = SHAPES[kind]
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        alone = build()
        model = variant(copy.deepcopy(alone))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, alone)]
        for step in range(3):
            x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(step))
            model(x[rank]).square().mean().backward()
            model.finish()
            sum(alone(part).square().mean() / n for part in x).backward()
            strides = model.module.weight.grad.stride() == model.module.weight.stride()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return strides, (model.module.weight - alone.weight).abs().max().item() < 1e-5

    assert shared_world.run(steps) == [(True, True)] * 3


def test_a_parameter_with_gaps_in_memory_has_a_gradient_without(shared_world):
    def step():
        weight = nn.Parameter(torch.zeros(4, 10)[:, ::2])
        model = dp.OverlappedDataParallel(nn.ParameterList([weight]))
        (weight * torch.arange(20.0).view(4, 5)).sum().backward()
        model.finish()
        return weight.stride(), weight.grad.stride(), weight.grad.flatten().tolist()

    for strides, of_grad, grad in shared_world.run(step):
        assert (strides, of_grad) == ((10, 2), (5, 1))
        assert grad == pytest.approx(list(range(20)))


def test_buckets_hold_parameters_from_the_last_on(shared_world):
    def buckets():
        model = layers()
        model[3].weight = model[0].weight
        model[4].weight.requires_grad_(False)
        return [variant(model, bucket_bytes=2 * WIDTH * (WIDTH + 1) * 4).buckets for variant in VARIANTS]

    naive, flat, bucketed, overlapped = shared_world.run(buckets)[0]
    order = ("5.bias", "5.weight", "4.bias", "3.bias", "2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight")
    assert flat == (order,)
    assert naive == tuple((name,) for name in order)
    assert bucketed == overlapped == (order[:5], order[5:9], order[9:])


parameters = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))


@given(parameters, st.sampled_from([0, 1, 100, 500, math.inf]))
def test_each_parameter_is_in_one_bucket_of_its_dtype_and_no_bucket_is_too_large(kinds, most):
    named = {f"p{i}": nn.Parameter(torch.ones(size, dtype=dtype)) for i, (size, dtype) in enumerate(kinds)}
    buckets = cut(named, most)
    order = list(reversed(named))
    names = [bucket.names for bucket in buckets]
    assert sorted(name for bucket in names for name in bucket) == sorted(named)
    assert all(list(bucket) == sorted(bucket, key=order.index) for bucket in names)
    assert [bucket[-1] for bucket in names] == sorted((bucket[-1] for bucket in names), key=order.index)
    for bucket in buckets:
        assert {p.dtype for p in bucket.parameters} == {bucket.row_E.dtype}
        assert bucket.row_E.nbytes <= most or sum(p.numel() > 0 for p in bucket.parameters) == 1
        assert bucket.row_E.nbytes == sum(p.nbytes for p in bucket.parameters)


@pytest.mark.lenient
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_overlapped_one_s_buckets_leave_before_backward_ends(shared_worlds, variant):
    """By the order of what the ranks issue: products of matrices after the first all-reduce are backward's."""
    shared_worlds.run(one_step, variant)
    program = shared_worlds.measure(one_step, variant, flops=True).program
    for instructions in program.ranks:
        kinds = [
            ("reduce" if i.op == "all_reduce" else i.op) if isinstance(i, Collective) else type(i).__name__
            for i in instructions
        ]
        first = kinds.index("reduce")
        after = sum(i.work.flops for i in instructions[first:] if isinstance(i, Compute))
        one_layer = 2 * 2 * 2 * WIDTH**2  # backward of 2 rows: two products
        overlapped = variant is dp.OverlappedDataParallel
        assert after == ((DEPTH - 2) * one_layer - 2 * 2 * WIDTH**2 if overlapped else 0)
        assert kinds.count("reduce") == 1 or (kinds[first + 1] != "Wait") == overlapped


def test_with_a_parameter_unused_on_one_rank_all_issue_the_same_buckets_in_the_same_order(shared_world):
    def step():
        model = dp.OverlappedDataParallel(layers(), bucket_bytes=1)
        h = torch.ones(2, WIDTH)
        for number, layer in enumerate(model.module):
            h = h if number == 4 and dist.get_rank() == 1 else layer(h)
        h.sum().backward()
        left = len(model._works)
        model.finish()
        return left

    m = shared_world.measure(step)
    assert m.results == [2 * DEPTH, 2, 2 * DEPTH]
    assert m.divergence is None
    assert len({tuple(call.bytes for call in reduces(m.calls[r])) for r in range(3)}) == 1


class UpTo(nn.Module):
    """Layers; a forward pass may use the first few only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = layers(torch.float64)

    def forward(self, x, depth: int = DEPTH):
        return torch.tanh(self.layers[:depth](x))


def penalty(model, x):
    (grad,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
    return grad.square().mean() + model(x).mean()


SEVERAL = {
    "two losses": lambda model, x: model(x).square().mean() + model(2 * x).square().mean(),
    "the first comes late": lambda model, x: model(x, 3).square().mean() + model(x).square().mean(),
    "penalty": penalty,
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_forward_passes_before_one_backward_are_one_step_that_sends_each_bucket_once(shared_world, case):
    def step():
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = dp.OverlappedDataParallel(UpTo(), bucket_bytes=1), UpTo()
        x = torch.randn(n, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            model.module.zero_grad()
            SEVERAL[case](model, x[rank].clone()).backward()
            model.finish()
        sum(SEVERAL[case](alone, part.clone()) / n for part in x).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return max((a.grad - b.grad).abs().max().item() for a, b in pairs)

    m = shared_world.measure(step)
    assert max(m.results) < 1e-14
    assert len(reduces(m.calls[0])) == 2 * 2 * DEPTH
