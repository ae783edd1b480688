"""training.utilization on real ranks: their peaks together, and MFU of a run against the FLOPs that they counted."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from manyranks.measure import machine
from manyranks.theory import Plan
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer, train
from manyranks.training.utilization import Peak, peak_of_ranks

GPT = GPTConfig(layers=2, hidden=32, heads=4, kv_heads=2, seq=16)
TRAINING = TrainingConfig(steps=2, batch=7)  # 7: uneven shares


def peaks_of_1_10_and_100(dtype):
    """Peaks of all ranks, and of the first and the last, where rank r makes 10ʳ FLOP/s."""
    own, machine.peak = machine.peak, lambda dtype, device: 10.0 ** dist.get_rank()
    group = dist.new_group([0, 2])
    try:
        return peak_of_ranks(dtype=dtype), peak_of_ranks(dtype=dtype, group=group) if dist.get_rank() != 1 else None
    finally:
        machine.peak = own


def test_the_peak_of_ranks_is_the_sum_of_theirs(shared_world):
    for everyone, two in shared_world.run(peaks_of_1_10_and_100, torch.bfloat16):
        source = "measured: the best of a few large products"
        assert everyone == Peak(111.0, "3 × CPU with 1 thread", "bfloat16", source)
        assert two in (None, Peak(101.0, "2 × CPU with 1 thread", "bfloat16", source))


def trained_with_a_quick_look_at_the_peak(training, **options):
    sizes, machine.SIZES = machine.SIZES, (64,)
    try:
        return train(GPT, training, **options)
    finally:
        machine.SIZES = sizes


def test_a_run_says_what_it_used_where_that_is_asked(shared_world):
    training = replace(TRAINING, bf16=True, zero=3, recompute="full")
    m = shared_world.measure(lambda: Trainer(GPT, training).run(), flops=True)
    results = shared_world.run(trained_with_a_quick_look_at_the_peak, training, utilization=True)
    plain = shared_world.run(trained_with_a_quick_look_at_the_peak, training)
    for result, without in zip(results, plain, strict=True):
        used = result.utilization
        assert used.tokens_per_second == pytest.approx(2 * 7 * GPT.seq / result.seconds)
        assert (used.shape, used.seq, used.recompute, used.flash) == (GPT.shape(), GPT.seq, "full", True)
        assert (used.peak.device, used.peak.dtype) == ("3 × CPU with 1 thread", "bfloat16")
        assert used.peak == results[0].utilization.peak
        counted = sum(m.flops.values()) / result.seconds / used.peak.flops
        assert 0 < used.mfu("full") < used.hfu("full") == pytest.approx(counted, rel=0.005)
        assert without.utilization is None
        assert (without.losses, without.held_out) == (result.losses, result.held_out)


def test_a_plan_in_16_bits_is_measured_against_the_rate_of_16_bits(shared_world):
    plan = Plan(dp=3, seq=GPT.seq, batch=3, zero=0, recompute="none", precision="bf16")
    training = TrainingConfig(steps=1, plan=plan)
    results = shared_world.run(trained_with_a_quick_look_at_the_peak, training, utilization=True)
    assert {result.utilization.peak.dtype for result in results} == {"bfloat16"}
