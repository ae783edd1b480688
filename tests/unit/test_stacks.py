"""Stacks: what a framework does changes a prediction the way its structure says."""

from dataclasses import replace

import pytest

from manyranks.theory import Plan, calls, clusters, flops, kernels, layer, memory, models, planner, published, step
from manyranks.theory.stacks import ATTENTION, STACKS
from tests.unit import exposed

SHAPE, H100, A100 = models["llama3-8b"], clusters["h100-dgx"], clusters["a100-dgx"]
PLAN = Plan(dp=64, zero=3, seq=8192, microbatch=2)


def estimate(stack, plan=PLAN, cluster=H100, **changes):
    return step.estimate(SHAPE, replace(plan, stack=stack, **changes), cluster)


def attention(name, cluster, head=128, seq=2**20):
    """Share of the chip's peak that a kernel reaches, forward and backward together."""
    shape = replace(SHAPE, heads=SHAPE.hidden // head, head_size=head, kv_heads=SHAPE.hidden // head)
    stack = next(each for each in STACKS if STACKS[each].attention == name)
    plan = Plan(seq=seq, stack=stack)
    forward = layer.core(shape, plan, head, head)
    backward = [gradient for kernel in forward for gradient in layer.gradients(kernel, plan)]
    work = [*forward, *backward]
    chip = cluster.accelerator
    rate = chip.flops * chip.ampere
    seconds = sum(kernel.flops / (rate * kernel.reach) + kernel.specials / chip.specials for kernel in work)
    return sum(kernel.flops for kernel in work) / seconds / chip.flops


def test_kernels_reach_what_their_papers_print():
    # arXiv 2307.08691: the first 30-50 % and 25-35 %, the second up to 73 % and 63 %; arXiv 2407.08608: 35 % on H100.
    assert attention("flash-2", A100) == pytest.approx(3.5 / (1 / 0.73 + 2.5 / 0.63), rel=0.01)
    assert 3.5 / (1 / 0.5 + 2.5 / 0.35) > attention("flash-1", A100) > 3.5 / (1 / 0.3 + 2.5 / 0.25)
    assert attention("flash-2", H100) == pytest.approx(0.35, abs=0.005)


def test_small_heads_and_short_sequences_are_slower():
    assert attention("flash-2", H100, head=64) < 0.9 * attention("flash-2", H100)
    short, long = (layer.core(SHAPE, Plan(seq=seq, stack="torchtitan"), 128, 128)[0] for seq in (512, 65536))
    assert short.flops / 512**2 == pytest.approx(long.flops / 65536**2 * (1 + 128 / 512) / (1 + 128 / 65536))


def test_what_is_not_fused_takes_longer_and_changes_nothing_else():
    compiled, eager = estimate("torchtitan"), estimate("torchtitan-eager")
    assert eager.compute > 1.1 * compiled.compute
    assert (eager.data, eager.optimizer) == (compiled.data, compiled.optimizer)


def test_every_other_product_runs_again_between_none_and_all():
    none, some, every = (estimate("torchtitan", recompute=each) for each in ("none", "selective", "full"))
    assert none.compute < some.compute < every.compute
    assert none.hfu < none.mfu * 1.1
    # Of queries, keys and values, output, gate and up, down it's the output and down: 36 % of their parameters.
    again = layer.again_flops(SHAPE, some.plan)
    assert again == pytest.approx(2 * SHAPE.layers * SHAPE.hidden * (SHAPE.hidden + SHAPE.ffn))
    assert some.hfu / some.mfu == pytest.approx(1 + again / flops.per_token(SHAPE, PLAN.seq))


def test_without_a_prefetch_backward_waits_for_every_gather(monkeypatch):
    """With long passes a prefetch hides all gathers but the first one of a layer."""
    (held,) = memory.rank_parameters(SHAPE, PLAN)
    plan = replace(PLAN, stack="fsdp1")
    (waits,) = exposed.data(SHAPE, plan, H100, [(held, 1e3, 1e3)])
    monkeypatch.setitem(STACKS, "fsdp1", replace(STACKS["fsdp1"], prefetch=True))
    (hidden,) = exposed.data(SHAPE, plan, H100, [(held, 1e3, 1e3)])
    once = PLAN.recipe.parameters * held.dense * 63 / 64 / (kernels.BANDWIDTH * 8 * H100.levels[1].share)
    assert waits - hidden == pytest.approx(
        (1 - 1 / SHAPE.layers) * once * (1 - STACKS["fsdp1"].collective_share), rel=0.1
    )  # and α


def test_gradients_of_32_bit_shards_come_after_the_loss():
    plan = replace(PLAN, microbatch=1, stack="torchtitan")
    once, twice = (memory.peak(SHAPE, replace(plan, batch=batch)) for batch in (64, 128))
    gradients = 4 * SHAPE.parameters / 64
    assert twice.states - once.states == pytest.approx(gradients, rel=1e-6)  # the second micro-batch finds the first one's
    assert memory.model_states(SHAPE, plan).total == pytest.approx(16 * SHAPE.parameters / 64, rel=1e-6)
    update = memory.peak(SHAPE, replace(plan, dp=1, batch=1, zero=0, seq=128))
    assert update[:2] == (16 * SHAPE.parameters, 0)
    assert update.total == pytest.approx(1.17 * 20 * SHAPE.parameters)  # a tensor of Adam's in 32 bits


def test_the_allocator_holds_what_it_held_on_one_gpu():
    for chip in ("h100", "h200"):
        shares = [int(row["reserved"]) / int(row["allocated"]) - 1 for row in published.rows(f"{chip}_steps")]
        assert {STACKS[name].reserved for name in ("pytorch", "torchtitan", "torch-megatron")} == {
            round(sum(shares) / len(shares), 2)
        }


def test_states_in_flat_buffers_are_held_once_and_what_comes_and_goes_with_the_allocator_s_share():
    plan = Plan(dp=4, seq=2048, recompute="none", stack="torch-megatron")
    peak, states = memory.peak(SHAPE, plan), memory.model_states(SHAPE, plan)
    assert peak.states == states.total
    assert peak.buffers == pytest.approx(0.17 * peak.activations, abs=1)


def test_a_softmax_of_separate_operators_keeps_32_bits_a_score_and_makes_twice_that_in_backward():
    plan = Plan(seq=1024, recompute="none", flash=False, stack="torch-megatron")
    scores = SHAPE.heads * 1024 * 1024
    stored, not_stored = (memory.layer_activations(SHAPE, replace(plan, flash=flash)) for flash in (False, True))
    assert stored - not_stored == (4 + 2) * scores - 4 * SHAPE.heads * 1024  # the result in 32 and in 16 bits; no log-sum-exp
    one = replace(SHAPE, vocab=8)  # no loss to speak of, so that the peak is in a layer's backward
    both = memory.peak(one, plan), memory.peak(one, replace(plan, recompute="full"))
    assert both[0].buffers == pytest.approx(0.17 * both[0].activations + 1.17 * 8 * scores, rel=0.01)
    assert both[1].buffers > 1.17 * (6 + 8) * scores


def test_gathered_logits_are_whole_on_every_tensor_parallel_rank():
    plan = Plan(tp=2, seq=1024, recompute="full", stack="torch-megatron")
    gathered, cut = (memory.activations(SHAPE, replace(plan, stack=name)) for name in ("torch-megatron", "megatron-core"))
    assert gathered - cut == 1024 * SHAPE.vocab * (14 - 4 / 2)


def test_experts_biases_are_added_expert_by_expert_in_32_bits_and_clamps_are_operators_of_their_own():
    shape, plan = models["gpt-oss-120b"], Plan(dp=64, ep=64, seq=4096, microbatch=4, stack="megatron-bridge")
    found = layer.experts(shape, plan)
    routed = plan.rank_tokens * shape.top_k
    biases = [kernel for kernel in found if kernel.part == "bias"]
    assert len(biases) == 2 * shape.experts / 64 + 2
    assert sum(kernel.bytes for kernel in biases) == 28 * routed * shape.hidden
    (product,) = [kernel for kernel in found if kernel.part == "product"]
    assert product.bytes == (6 + 2 * (2 + 2) + (4 + 4)) * routed * shape.expert_ffn
    plain = layer.experts(replace(shape, bias=False, clamped=False), plan)
    assert [kernel.part for kernel in plain] == [kernel.part for kernel in found if kernel.part != "bias"]


def test_repeated_keys_travel_for_each_query_head():
    shape, plan = models["llama3-405b"], Plan(tp=8, cp=4, seq=32768, context="all-gather")
    sent = {name: calls.context(shape, replace(plan, stack=name).layer_plan) for name in ("pytorch", "torchtitan")}
    for once, repeated in zip(*sent.values(), strict=True):
        assert repeated.elements == 16 * once.elements  # a rank has 16 query heads, and one of keys
        assert (repeated.op, repeated.itemsize) == (once.op, once.itemsize)


def test_separate_operators_keep_more_for_backward():
    fused, eager = (
        memory.layer_activations(SHAPE, Plan(seq=8192, recompute="none", stack=name)) for name in ("pytorch", "pytorch-eager")
    )
    assert eager - fused == 8192 * (2 * 4 * SHAPE.hidden + 2 * SHAPE.ffn)  # two norms in 32 bits, and the function's output


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_what_op_level_recomputation_keeps_is_known_of_dense_layers_only(model):
    with pytest.raises(ValueError, match=f"modeled for dense layers only; for {model} say recompute='none' or 'full'"):
        step.estimate(models[model], Plan(stack="torchtitan", zero=3, dp=8), H100)
    assert step.estimate(models[model], Plan(stack="torchtitan", zero=3, dp=8, recompute="full"), H100).seconds > 0


def test_parameters_from_the_host_cost_more_whatever_the_stack():
    for name in STACKS:
        data_alone, from_host = (estimate(name, offload=where).data for where in ("none", "all"))
        assert from_host > data_alone, name


@pytest.mark.parametrize("change", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_fsdp1_has_data_parallelism_only(change):
    [(name, _)] = change.items()
    with pytest.raises(ValueError, match=rf"^{name}=2 with stack='fsdp1', which has data parallelism only: leave {name}=2 out"):
        Plan(stack="fsdp1", **change)
    found = planner.search(models["llama3-8b"], H100, gpus=64, batch=64, stack=("fsdp1", "torchtitan"), zero=3, microbatch=1)
    assert {one.plan.gpus // one.plan.dp for one in found if one.plan.stack == "fsdp1"} == {1}


def test_an_unknown_stack_is_refused_by_name():
    with pytest.raises(ValueError, match=r"stack='torchtitn': .*torchtitan"):
        Plan(stack="torchtitn")
    assert set(ATTENTION) == {"flash-1", "flash-2"}
    assert all(stack.source for stack in STACKS.values())
