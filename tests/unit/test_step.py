"""The time of a step: its parts, what can never make it shorter, and a simulated pipeline beside the closed form."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyranks.theory import ModelShape, Plan, clusters, flops, kernels, layer, memory, network, pace, replay_costs, step
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import CONTEXT, SCHEDULES
from manyranks.theory.shapes import models
from manyranks.theory.stages import Stage
from manyranks.timeline import Compute, Program, Recv, Send, replay
from tests.unit import exposed

DENSE = ModelShape("dense", 9, 512, 2048, 16, 1000, kv_heads=4)
BIG = ModelShape("big", 16, 8192, 28672, 64, 128000, kv_heads=8)
HEAVY_HEAD = ModelShape("heavy head", 8, 256, 512, 16, 200_000)
MIXTRAL = replace(models["mixtral-8x7b"], layers=10)
DEEPSEEK = replace(models["deepseek-v3"], layers=13)
SHAPES = (DENSE, BIG, HEAVY_HEAD, MIXTRAL, DEEPSEEK, models["megatron-22b"])
H100 = clusters["h100-dgx"]
CLUSTERS = [clusters[name] for name in ("h100-dgx", "v100-dgx", "h800", "llama3-cluster", "tpu-v4", "laptop")]
FACTORS = st.floats(-3, 1).map(lambda x: 10**x)  # of links and chips: most shapes are bound by each part on some


@st.composite
def runs(draw):
    """A shape, a plan that suits it and a cluster with any balance of its links and its chip."""
    schedule = draw(st.sampled_from(SCHEDULES))
    dp, microbatch = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    choices = {
        "cp": [1, 1, 2, 4],
        "tp": [1, 2, 4, 8, 16],
        "pp": [1, 2, 3, 4, 8],
        "ep": [1, 2, 4, 8],
        "seq": [256, 1024, 8192],
        "virtual": [1, 2] if schedule in ("1f1b", "interleaved") else [1],
        "sequence_parallel": [True, False],
        "zero": [0, 1, 2, 3],
        "dp_shard": [None, 1, 2],
        "reshard_after_forward": [True, False],
        "recompute": ["none", "selective", "full"],
        "precision": ["bf16", "fp8", "bf16-fp32-gradients"],
        "overlap": [True, True, False],
        "overlap_tensor": [True, False],
        "flash": [True, False],
        "context": CONTEXT,
        "embedding_slots": [True, False],
    }
    fields = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    batch = dp * microbatch * draw(st.sampled_from([1, 4, 16, 64]))
    shape, cluster = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(CLUSTERS))
    chip = cluster.accelerator
    chip = replace(chip, flops=chip.flops * draw(FACTORS), memory_bandwidth=chip.memory_bandwidth * draw(FACTORS))
    cluster = replace(cluster, accelerator=chip)
    for level in cluster.levels:
        bandwidth, latency = level.link.bandwidth * draw(FACTORS), level.link.latency * draw(FACTORS)
        cluster = cluster.with_link(level.name, bandwidth=bandwidth, latency=latency)
    try:
        plan = Plan(dp=dp, microbatch=microbatch, batch=batch, schedule=schedule, **fields)
        step.estimate(shape, plan, cluster)
    except ValueError:
        assume(False)
    return shape, plan, cluster


# What can never make a step shorter, or longer -------------------------------------------------------------------------


@given(runs(), st.sampled_from([1.01, 1.5, 10.0]), st.sampled_from([0, -1]), st.booleans())
def test_a_slower_link_never_makes_a_step_faster(run, factor, which, latency):
    shape, plan, cluster = run
    level = cluster.levels[which]
    slower = {"latency": level.link.latency * factor} if latency else {"bandwidth": level.link.bandwidth / factor}
    before, after = (step.estimate(shape, plan, c).seconds for c in (cluster, cluster.with_link(level.name, **slower)))
    assert after >= before * (1 - 1e-9)


@given(runs(), st.sampled_from([1.01, 1.5, 10.0]), st.sampled_from(["flops", "memory_bandwidth", "specials"]))
def test_a_faster_accelerator_never_makes_a_step_slower(run, factor, what):
    shape, plan, cluster = run
    chip, kinds = cluster.accelerator, ("flops", "flops_fp8") if what == "flops" else (what,)
    chip = replace(chip, **{kind: getattr(chip, kind) * factor for kind in kinds})
    before, after = (step.estimate(shape, plan, c).seconds for c in (cluster, replace(cluster, accelerator=chip)))
    assert after <= before * (1 + 1e-9)


@given(runs())
def test_the_parts_add_up_and_none_is_negative(run):
    shape, plan, cluster = run
    time = step.estimate(shape, plan, cluster)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert min(time.parts.values()) >= 0
    assert time.limit != "compute"
    assert time.parts[time.limit] == max(v for k, v in time.parts.items() if k != "compute")
    assert time.tokens_per_second == pytest.approx(plan.batch * plan.seq / time.seconds)


@given(runs(), st.sampled_from([2, 4]))
def test_more_replicas_with_as_many_more_sequences_never_make_a_step_faster(run, more):
    # Their only gain is that ZeRO spreads the optimizer over more ranks, and on a torus that a larger group has more links.
    shape, plan, cluster = run
    assume(not cluster.torus and more * plan.gpus <= cluster.levels[-1].size)
    # More replicas move stages further apart: a cluster whose outer links are the faster ones would reward that.
    links = [level.link for level in cluster.levels]
    assume(all(a.latency <= b.latency and a.bandwidth >= b.bandwidth for a, b in itertools.pairwise(links)))
    wider = replace(plan, dp=more * plan.dp, batch=more * plan.batch)
    before, after = (step.estimate(shape, p, cluster) for p in (plan, wider))
    assert after.seconds - after.optimizer >= (before.seconds - before.optimizer) * (1 - 1e-9)
    if plan.zero == 0:
        assert after.seconds >= before.seconds * (1 - 1e-9)


@pytest.mark.parametrize("shape", [BIG, MIXTRAL])
def test_a_degree_of_one_changes_nothing(shape):
    def seconds(**fields) -> float:
        return step.estimate(shape, Plan(seq=1024, batch=4, **fields), H100).seconds

    alone = seconds(zero=0)
    for fields in ({"zero": zero, "reshard_after_forward": keep} for zero in (1, 2, 3) for keep in (True, False)):
        assert seconds(**fields) == alone, fields
    for schedule in set(SCHEDULES) - {"dualpipe"}:  # which has two ends
        assert seconds(schedule=schedule) == pytest.approx(alone), schedule
    for fields in ({"context": "ulysses"}, {"context": "all-gather"}, {"sequence_parallel": False}, {"overlap": False}):
        assert seconds(**fields) == alone, fields
    time = step.estimate(shape, Plan(seq=1024, batch=4), H100)
    assert time.seconds == pytest.approx(time.compute + time.optimizer)


# Pipelines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [8, 16])
def test_uneven_stages_are_allowed_and_the_slowest_sets_the_time(pp):
    small = replace(BIG, vocab=1000)

    def each(layers: int) -> float:
        plan = Plan(pp=pp, batch=4096, seq=1024)
        return step.estimate(replace(small, layers=layers), plan, H100).seconds

    # With so many micro-batches, filling counts for little: all that is left is the stage with two layers.
    assert each(pp + 1) == pytest.approx(each(2 * pp), rel=0.02)
    assert each(pp + 1) > 1.8 * each(pp)


@pytest.mark.parametrize(("name", "ep"), [("llama3-405b", 1), ("deepseek-v3", 16)])
def test_126_and_61_layers_run_on_16_stages(name, ep):
    shape = models[name]
    plan = Plan(dp=16, pp=16, ep=ep, batch=2048, seq=4096)
    uneven = step.estimate(shape, plan, H100)
    even = step.estimate(replace(shape, layers=-(-shape.layers // 16) * 16), plan, H100)
    assert 0.8 * even.seconds < uneven.seconds <= even.seconds


def test_embedding_and_head_may_take_a_layers_place():
    # 126 layers and two ends fill 128 places: no stage has more than one layer.
    plan = Plan(tp=8, pp=16, virtual=8, batch=512, seq=8192)
    with pytest.raises(ValueError, match="126 layers of llama3-405b on 128 stages"):
        step.estimate(models["llama3-405b"], plan, H100)
    filled = step.estimate(models["llama3-405b"], replace(plan, embedding_slots=True), H100)
    layers = step.estimate(replace(models["llama3-405b"], layers=128, vocab=8), plan, H100)
    assert filled.compute == pytest.approx(layers.compute, rel=0.02)


def one_f_one_b(p: int, m: int, costs: list[tuple[list, list]], size: float) -> Program:
    """F goes up the stages, B down. costs: of each stage, the works of a forward and of a backward."""
    ranks = []
    for stage in range(p):
        ahead = min(m, p - 1 - stage)
        order = "F" * ahead + "FB" * (m - ahead) + "B" * ahead
        instructions = []
        for kind in order:
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= before < p:
                instructions.append(Recv(before, size, kind))
            instructions += [Compute(kind, work) for work in costs[stage][kind == "B"]]
            if 0 <= after < p:
                instructions.append(Send(after, size, kind, handle="sent"))
        ranks.append(tuple(instructions))
    return Program(tuple(ranks))


@pytest.mark.parametrize(("layers", "p", "m"), [(8, 4, 16), (8, 4, 4), (9, 4, 32), (8, 8, 8)])
def test_a_simulated_pipeline_agrees_with_the_closed_form(layers, p, m):
    shape = ModelShape("eight", layers, 4096, 16384, 32, 1000)
    plan = Plan(pp=p, batch=m, seq=2048, zero=0, flash=False)

    def works(each) -> list[float]:
        return [kernels.seconds(kernel, H100.accelerator, DEFAULT) for kernel in each]

    larger = [i for i in range(p) if layers % p and i == 1]  # the one stage with a layer more is not at an end
    costs = []
    for stage in range(p):
        count, head = layers // p + (stage in larger), layer.head(shape, plan) if stage == p - 1 else []
        backward = [gradient for kernel in head for gradient in layer.gradients(kernel, plan)]
        costs.append(
            (
                count * works(layer.forward(shape, plan, False)) + works(head),
                works(backward) + count * works(layer.backward(shape, plan, False)),
            )
        )
    simulated = replay(one_f_one_b(p, m, costs, 2 * 2048 * 4096), replay_costs.ClusterCosts(H100)).makespan
    time = step.estimate(shape, plan, H100)
    assert time.seconds - time.optimizer == pytest.approx(simulated, rel=0.02)


def test_messages_that_take_longer_than_the_work_between_them_hold_the_pipeline():
    slow = H100.with_link("node", bandwidth=1e6)
    plan = Plan(pp=4, batch=32, seq=1024)
    once = 2 * 1024 * DENSE.hidden / (0.79 * 1e6)
    assert step.estimate(DENSE, plan, slow).seconds == pytest.approx((2 * 32 + 2 * 3) * once, rel=0.05)


def test_half_of_dualpipes_communication_hides_behind_its_partner():
    plan = Plan(dp=8, pp=2, ep=8, seq=4096, batch=8 * 64)
    alone = step.estimate(DEEPSEEK, plan, H100)
    paired = step.estimate(DEEPSEEK, replace(plan, schedule="dualpipe"), H100)
    assert alone.expert > 0
    assert paired.expert == 0
    assert paired.seconds < alone.seconds


def test_weight_gradients_that_hide_communication_do_not_fill_the_bubble_too():
    hidden = exposed.of_stage(BIG, Plan(tp=8, seq=1024), H100, Stage(dense=1))
    shown = exposed.of_stage(BIG, Plan(tp=8, seq=1024, overlap_tensor=False), H100, Stage(dense=1))
    saved = shown.backward.tensor - hidden.backward.tensor
    assert saved > 0
    assert shown.weight - hidden.weight == pytest.approx(saved)


# Utilization, refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 4, 8])
@pytest.mark.parametrize("bandwidth", [1e9, 25e9, 1e15])
def test_offloaded_activations_show_what_a_pass_is_too_short_to_hide(layers, bandwidth):
    shape, cluster = replace(DENSE, layers=8), replace(H100, host=bandwidth)
    plan = Plan(seq=1024, batch=3, recompute="none")
    both = pace.of_ranks(shape, plan, cluster)[0]
    moving = layers * memory.layer_activations(shape, plan) / (bandwidth * DEFAULT.bandwidth)
    waits = sum(max(0.0, moving - each.seconds) for each in (both.forward, both.backward))
    kept, away = (step.estimate(shape, replace(plan, offload_layers=n), cluster) for n in (0, layers))
    assert away.seconds - kept.seconds == pytest.approx(3 * waits, rel=1e-9, abs=1e-12)
    assert away.compute - kept.compute == pytest.approx(3 * waits, rel=1e-9, abs=1e-12)
    assert (waits > 0) == (bandwidth == 1e9 or (layers, bandwidth) == (8, 25e9))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_activations_that_come_back_in_time_change_no_step(schedule):
    plan, cluster = Plan(pp=2, seq=256, batch=8, recompute="none", schedule=schedule), replace(H100, host=1e15)
    kept, away = (step.estimate(DENSE, replace(plan, offload_layers=n), cluster).seconds for n in (0, 2))
    assert away == pytest.approx(kept, rel=1e-9)


def test_utilization_is_that_of_flops():
    plan = Plan(dp=4, tp=8, seq=2048, batch=64, recompute="full")
    time = step.estimate(BIG, plan, H100)
    run = (BIG, 2048, 64 * 2048 / time.seconds, 32, 989e12)
    assert time.mfu == pytest.approx(flops.mfu(*run)) == time.utilization("causal")
    assert time.hfu == pytest.approx(flops.hfu(*run, "full"))
    assert time.utilization("full") == pytest.approx(flops.mfu(*run, "full"))
    assert 0 < time.mfu < time.utilization("full") < time.hfu < 1


@given(runs())
def test_no_step_passes_the_peak(run):
    assert 0 < step.estimate(*run).mfu <= 1 or run[1].precision == "fp8"  # the peak is that of 16 bits


REFUSED = [
    (BIG, {"dp": 2, "tp": 8}, 32, r"dp·cp·tp·pp = 2·1·8·1 = 16 ranks for 32 GPUs"),
    (BIG, {"tp": 3}, None, "tp=3 does not divide the 64 heads"),
    (BIG, {"pp": 8, "virtual": 3}, None, "16 layers of big on 24 stages"),
    (MIXTRAL, {"dp": 3, "ep": 3}, None, "ep=3 does not divide the 8 routed experts"),
    (BIG, {"dp": 2, "ep": 2}, None, "ep=2"),
    *((BIG, {"pp": 4, "schedule": name, "batch": 3}, None, "m=3") for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe")),
]


@pytest.mark.parametrize(("shape", "fields", "gpus", "message"), REFUSED)
def test_plans_that_do_not_fit_are_refused(shape, fields, gpus, message):
    with pytest.raises(ValueError, match=message):
        step.estimate(shape, Plan(**fields), H100, gpus=gpus)
    if gpus:
        with pytest.raises(ValueError, match=message):
            step.estimate(shape, Plan(**fields), H100.of(gpus))


def test_experts_that_do_not_divide_the_replicas_are_refused():
    with pytest.raises(ValueError, match=r"ep=8 does not divide dp·cp = 2·2 = 4"):
        Plan(dp=2, cp=2, ep=8)


def test_a_ring_hides_all_but_the_last_message_of_gradients():
    """The first block of keys and values travels under the own block; gradients come home when nothing is left to compute."""
    plan = Plan(cp=4, seq=4096)
    keys = 2 * 1024 * 2 * BIG.kv_heads * BIG.head_size
    block, gradients, both = (network.hop(H100.route(4), size, DEFAULT) for size in (keys, 2 * keys, 3 * keys))
    assert exposed.context(BIG, plan, H100, (1.0, 1.0)) == (0.0, gradients)
    shown = 3 * block, 2 * block + both + gradients + gradients
    assert exposed.context(BIG, plan, H100, (0.0, 0.0)) == pytest.approx(shown)
    other = replace(plan, overlap=False)
    assert exposed.context(BIG, other, H100, (1.0, 1.0)) == pytest.approx(shown)
    some = 4 * (block - 1e-6), 4 * (both - 1e-6)
    assert exposed.context(BIG, plan, H100, some) == pytest.approx((3e-6, 1e-6 + gradients))
