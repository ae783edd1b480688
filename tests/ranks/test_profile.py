"""world.measure(profile=True): where each rank's time went. Times are compared with each other, never with a clock."""

import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

import manyranks as mr
from manyranks.measure.flops import operators
from manyranks.measure.profile import profiled
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer
from manyranks.world.counted.programs import waits_of

LATE = 1.0  # seconds: longer than all else that a test's function does, also on a busy machine


@pytest.fixture(scope="module")
def alone():
    with mr.World(1, backend="gloo", timeout=60) as world:
        yield world


# One rank


def moments_of_two_operators():
    def run(x, power):
        before = time.perf_counter()
        torch.mm(x, x)
        time.sleep(0.05)
        between = time.perf_counter()
        x.pow(power)
        return before, between, time.perf_counter()

    return [profiled(run, torch.ones(200, 200), power=3) for _ in range(3)], os.environ.get("KINETO_LOG_LEVEL")


def test_spans_are_on_the_clock_of_perf_counter_and_the_environment_stays_as_it_was(alone):
    found, level = alone.run(moments_of_two_operators)[0]
    for (before, between, after), profile in found:
        product, power = profile.spans
        assert (product.name, product.kind, power.name, power.kind) == ("aten::mm", "matmul", "aten::pow", "other")
        assert profile.started <= before <= product.started < product.finished <= between <= power.started
        assert power.started < power.finished <= profile.finished
        assert after <= profile.finished + 0.05
    assert level is None


def a_profiler_of_its_own():
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3)


def a_profiler_left_on():
    torch.profiler.profile(activities=[ProfilerActivity.CPU]).start()


@pytest.mark.parametrize("function", [a_profiler_of_its_own, a_profiler_left_on])
def test_a_function_with_a_profiler_of_its_own_is_told_so_and_the_next_run_works(alone, function):
    with pytest.raises(mr.RankFailed, match=r"RuntimeError: the function runs its own torch\.profiler"):
        alone.measure(function, profile=True)
    assert alone.measure(torch.ones, 3, profile=True).profiles[0].operators == 3


def inside_another():
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as outer:
        with pytest.raises(RuntimeError, match=r"a torch\.profiler is on"):
            profiled(torch.ones, 3)
        torch.ones(4)
    return [event.name() for event in outer.profiler.kineto_results.events()].count("aten::ones")


def test_where_a_profiler_is_on_that_one_stays_on_and_no_other_starts(alone):
    assert alone.run(inside_another) == [1]


GPT = GPTConfig(layers=2, hidden=32, heads=4, seq=16)
TRAINING = TrainingConfig(steps=1, batch=2)
STEPS = {
    "grouped": (replace(GPT, kv_heads=2), TRAINING),
    "gpt2": (replace(GPT, style="gpt2"), TRAINING),
    "experts": (replace(GPT, experts=4, shared_experts=1), replace(TRAINING, bf16=True)),
    "selective": (replace(GPT, dropout=0.1), replace(TRAINING, recompute="selective")),
}
CALLS_OTHERS = {
    "linear", "matmul", "reshape", "flatten", "contiguous", "to", "cross_entropy_loss", "scaled_dot_product_attention",
    "layer_norm", "rms_norm", "embedding_backward", "nll_loss", "t", "transpose", "view", "unflatten", "_unsafe_view",
    "detach", "expand", "select", "slice", "split", "as_strided", "empty", "empty_like", "empty_strided", "item",
}  # fmt: skip


def profile_and_operators(gpt: GPTConfig, training: TrainingConfig):
    """Both of the same step: the same weights, tokens and masks."""
    profile = profiled(Trainer(gpt, training).run)[1]
    return profile, [(each.name, each.flops) for each in operators(Trainer(gpt, training).run)]


@pytest.mark.parametrize("which", STEPS)
@pytest.mark.few(2)
def test_each_operator_of_a_step_is_of_the_right_kind_and_products_are_as_many_as_were_counted(alone, which):
    profile, counted = alone.run(profile_and_operators, *STEPS[which])[0]
    products = Counter(name for name, flops in counted if flops)
    kinds = {span.name: span.kind for span in profile.spans}
    assert {name: count for name, (count, _) in profile.by_name().items() if kinds[name] == "matmul"} == products
    # While something counts, PyTorch takes scatter_add for scatter_add_.
    assert {name.rstrip("_") for name, _ in counted} <= {name.rstrip("_") for name in kinds}, "what moves bytes is work"
    assert not CALLS_OTHERS & {name.removeprefix("aten::") for name in kinds}
    assert all(name.startswith("aten::") for name in kinds)
    assert all(a.finished <= b.started for a, b in pairwise(profile.spans))
    assert len(profile.spans) <= 2 * profile.operators


# What a rank waits for


def step_of_all_parts():
    x = torch.ones(64, 64)
    for _ in range(3):
        y = x @ x
        dist.all_reduce(y)
    return y[0, 0].item()


def test_the_five_parts_are_the_run_and_all_else_is_as_without_a_profile(shared_world):
    plain, m = shared_world.measure(step_of_all_parts), shared_world.measure(step_of_all_parts, profile=True)
    assert m.results == plain.results == [64.0 * 3] * 3
    assert list(m.budgets) == list(m.profiles) == [0, 1, 2]
    for rank, parts in m.budgets.items():
        assert min(parts) >= 0
        assert parts.seconds == pytest.approx(m.profiles[rank].seconds, rel=1e-9)
        assert parts.matmul > 0
        assert parts.communication + parts.waiting > 0
        assert m.profiles[rank].by_name()["aten::mm"][0] == 3
    for rank, calls in m.calls.items():
        assert [(c.op, c.bytes, c.sequence, c.where) for c in calls] == [
            (c.op, c.bytes, c.sequence, c.where) for c in plain.calls[rank]
        ]
    assert plain.profiles is None
    with pytest.raises(ValueError, match="measure it with profile=True"):
        plain.budgets  # noqa: B018
    assert (m.payload_bytes, m.sent_bytes, m.flops, m.peak_bytes) == (plain.payload_bytes, plain.sent_bytes, None, None)
    assert m.timeline.spans[0].seconds <= m.profiles[0].seconds, "the profiler's own start is no part of it"


def the_last_is_late():
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(LATE)


def all_reduced():
    the_last_is_late()
    dist.all_reduce(torch.ones(10))


def waited_for_later():
    the_last_is_late()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    torch.ones(10).exp()
    work.wait()


def reduced_by_ddp():
    model = DistributedDataParallel(nn.Linear(8, 8))
    dist.barrier()
    out = model(torch.ones(2, 8)).sum()
    the_last_is_late()
    out.backward()


def gathered_by_fully_shard():
    model = fully_shard(nn.Linear(8, 8))
    dist.barrier()
    the_last_is_late()
    model(torch.ones(2, 8)).sum().backward()


def message(from_the_last: bool):
    """Between the last rank and each other one."""
    last = dist.get_world_size() - 1
    the_last_is_late()
    for other in range(last) if dist.get_rank() == last else [last]:
        if from_the_last == (dist.get_rank() == last):
            dist.isend(torch.ones(10), other).wait()
        else:
            dist.recv(torch.ones(10), other)


received, sent = partial(message, True), partial(message, False)


@pytest.mark.parametrize("function", [all_reduced, waited_for_later, reduced_by_ddp, gathered_by_fully_shard, received, sent])
@pytest.mark.few(2)
def test_who_comes_early_waits_and_who_comes_last_does_not(shared_world, function):
    m = shared_world.measure(function, profile=True)
    *early, late = m.budgets.values()
    for parts in early:
        assert parts.waiting > LATE / 2
        assert parts.waiting > parts.communication
    assert late.python >= LATE, "it slept, in no operator"
    assert late.waiting < LATE / 2


def in_a_group_whose_first_rank_is_late():
    group = dist.new_group([1, 2])
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(LATE)
    if dist.get_rank():
        dist.all_reduce(torch.ones(10), group=group)


def test_of_a_group_s_collective_only_its_ranks_count(shared_world):
    m = shared_world.measure(in_a_group_whose_first_rank_is_late, profile=True)
    assert m.budgets[1].waiting > LATE / 2
    came = m.calls[2][-1].started  # of the group's other rank, for which rank 1 waits
    arrivals = {rank: [wait.arrived for wait in waits] for rank, waits in waits_of(m.calls, m._recordings).items()}
    assert [rank for rank in arrivals if came in arrivals[rank]] == [1, 2]
    assert max(arrivals[0]) < came, "rank 0 waits for the barrier only"


def come_early_wait_late():
    """All call at once; then the last is busy, and nobody waits for it, for its call has been made."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    the_last_is_late()
    work.wait()


def test_a_rank_that_has_made_its_call_keeps_nobody_waiting(shared_world):
    parts = shared_world.measure(come_early_wait_late, profile=True).budgets
    assert max(part.waiting for part in parts.values()) < LATE / 2


# Refused, failed, printed


@pytest.mark.parametrize("also", [{"flops": True}, {"memory": True}, {"flops": True, "memory": True}])
def test_a_profile_with_counting_is_refused_before_any_rank_is_asked(shared_world, monkeypatch, also):
    monkeypatch.setattr(shared_world, "_run", None)
    with pytest.raises(ValueError, match="profile=True with flops or memory: counting takes time"):
        shared_world.measure(step_of_all_parts, profile=True, **also)


def one_fails():
    if dist.get_rank() == 1:
        raise KeyError("lost")


def test_a_rank_that_fails_under_a_profile_says_why_and_the_next_profile_works(shared_world, capfd):
    with pytest.raises(mr.RankFailed, match="lost"):
        shared_world.measure(one_fails, profile=True)
    for _ in range(2):
        m = shared_world.measure(step_of_all_parts, profile=True)
        assert all(parts.seconds > 0 for parts in m.budgets.values())
    assert capfd.readouterr() == ("", ""), "the profiler would print a line at its start and one at its end"


def on_gpus():
    x = torch.ones(1024, 1024, device="cuda")
    for _ in range(3):
        y = x @ x
        dist.all_reduce(y)
    return y[0, 0].item()


@pytest.mark.gpu(2)
def test_on_gpus_nccl_s_kernels_are_communication():
    with mr.World(2) as world:
        world.run(on_gpus)
        m = world.measure(on_gpus, profile=True)
    assert m.results == [2048.0, 2048.0]
    for rank, parts in m.budgets.items():
        assert m.profiles[rank].on_device
        assert min(parts.matmul, parts.communication) > 0
        assert parts.seconds == pytest.approx(m.profiles[rank].seconds, rel=1e-6)
