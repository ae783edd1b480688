"""theory.memory: model states and activations against published tables and formulas, and against tensors that torch saves."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from manyranks import theory
from manyranks.theory import memory, published, tensor
from manyranks.theory.architecture import LatentAttention, ModelShape, parameters_of
from manyranks.theory.plan import RECIPES, Plan
from manyranks.theory.published import steps

MEGATRON = ("megatron-22b", "megatron-175b", "megatron-530b", "megatron-1t")
GPT = ModelShape("gpt", 4, 32, 128, 4, 96, gated=False, norm="layernorm", bias=True, dropout=True, positions=64, tied=True)
LLAMA = ModelShape("llama", 4, 32, 80, 8, 96, kv_heads=4)
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "dense_layers": 1, "router_bias": True}
ROUTED = replace(LLAMA, name="routed", **EXPERTS)
LATENT = ModelShape("latent", 4, 32, 80, 8, 96, latent=LatentAttention(12, 16, 4, 2, 4), mtp_depth=1, **EXPERTS)
SHAPES = (GPT, LLAMA, ROUTED, LATENT, replace(LLAMA, name="gemma", qk_norm=True, norms_per_layer=4, qkv_bias=True))
# The paper's implementation: no flash attention.
PAPER = {"seq": 2048, "flash": False, "precision": "fp16"}


# Model states: published numbers are test_published's


def test_bf16_moments_save_four_bytes_a_parameter():
    both = [memory.model_states(1000, Plan(zero=0, precision=name)) for name in ("bf16-fp32-gradients", "bf16-moments")]
    assert [states.optimizer for states in both] == [12000, 8000]  # master, two moments: 4 + 4 + 4 and 4 + 2 + 2


@given(st.sampled_from(SHAPES), st.sampled_from(sorted(RECIPES)), st.sampled_from([(1, 1), (2, 1), (8, 2), (8, 8)]), st.data())
def test_states_never_rise_with_the_zero_stage_and_shards_hold_the_whole(shape, precision, ranks, data):
    dp, shards = ranks
    kinds = {"precision": precision, "pp": data.draw(st.sampled_from([1, 2, 4])), "tp": data.draw(st.sampled_from([1, 2, 4]))}
    ep = data.draw(st.sampled_from([1, shards])) if shape.experts else 1
    plans = [Plan(dp=dp, dp_shard=shards, ep=ep, zero=zero, **kinds) for zero in range(4)]
    totals = [memory.model_states(shape, plan).total for plan in plans]
    assert totals == sorted(totals, reverse=True)
    if shards == 1 or ep == 1:
        for replicated, sharded in zip(
            memory.model_states(shape, plans[0])[:3], memory.model_states(shape, plans[3]), strict=False
        ):
            assert replicated <= sharded * shards < replicated + 2 * 16 * shards  # two tensors, each padded to whole elements


def test_hsdp_shards_over_its_shards_only_and_context_ranks_are_shards_too():
    states = {plan: memory.model_states(960_000, plan) for plan in (Plan(dp=8, dp_shard=2, zero=3), Plan(dp=2, zero=3))}
    assert len(set(states.values())) == 1
    assert memory.model_states(960_000, Plan(dp=2, cp=4, zero=3)).total == 16 * 960_000 // 8
    assert memory.model_states(960_000, Plan(dp=2, pp=4, zero=0)).total == 16 * 960_000 // 4


@pytest.mark.parametrize("zero", range(4))
def test_what_is_offloaded_is_on_the_host_and_nothing_is_lost(zero):
    here, optimizer, everything = (
        memory.model_states(ROUTED, Plan(dp=4, pp=2, zero=zero, offload=kind)) for kind in ("none", "optimizer", "all")
    )
    assert here.host == 0
    assert everything == (0, 0, 0, here.total)
    assert optimizer == (here.parameters, here.gradients, 0, here.optimizer)


@given(st.sampled_from(SHAPES), st.sampled_from([1, 2, 4]), st.sampled_from(["1f1b", "zb-v", "interleaved"]), st.booleans())
def test_the_shards_of_all_ranks_sum_to_the_model(shape, t, schedule, tied):
    p, ep = 2, 2 if shape.experts else 1
    shape = replace(shape, tied=tied)
    plan = Plan(dp=ep, pp=p, tp=t, ep=ep, schedule=schedule, virtual=2 if schedule == "interleaved" else 1)
    held = sum(t * (rank.dense + ep * rank.experts) for rank in memory.rank_parameters(shape, plan))
    whole = shape.layers * parameters_of(shape.norms) + parameters_of(shape.final_norm + shape.moe_layers * shape.router)
    whole += shape.hidden * (shape.positions + shape.bias * 2 * shape.layers)  # biases after a sum, of attention and MLP
    if shape.latent:  # compressed on each tensor-parallel rank, for all its heads
        whole += shape.layers * shape.hidden * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.rope_size)
    second = shape.vocab * shape.hidden if tied and schedule != "zb-v" else 0  # a V has both ends on one rank
    assert held == pytest.approx(shape.parameters + shape.mtp_parameters + (t - 1) * whole + second, rel=1e-12)


def test_each_tensor_parallel_rank_has_a_key_and_value_head():
    one = replace(LLAMA, kv_heads=1, norm="none")
    held = memory.rank_parameters(one, Plan(tp=8))[0].dense
    attention = 32 * (4 + 2 * 4) + 4 * 32  # one query head of eight, one key and one value head of 4, back from one head
    assert held == 4 * (attention + 3 * 32 * 80 / 8) + 2 * 96 * 32 / 8


@pytest.mark.parametrize("t", [1, 2, 4])
def test_biases_after_a_sum_positions_and_norms_are_whole_on_each_tensor_parallel_rank(t):
    """Part by part, as parallel.tensor cuts the small GPT: column-parallel biases are cut, row-parallel ones are not."""
    columns = 32 * (3 * 32 + 128) + 3 * 32 + 128  # queries, keys, values and up, with their biases
    rows = 32 * 32 + 128 * 32
    layer = (columns + rows) // t + 2 * 32 + 2 * 2 * 32  # two biases after a sum, two norms of a scale and a shift
    first, last = memory.rank_parameters(GPT, Plan(pp=2, tp=t))
    assert first.dense == 2 * layer + 96 * 32 // t + 64 * 32  # learned positions
    assert last.dense == 2 * layer + 96 * 32 // t + 2 * 32
    assert first.dense == 2 * tensor.parameters(GPT, t).total + 96 * 32 // t + 64 * 32


@pytest.mark.parametrize("shape", ["llama3-8b", None, -1.0, float("nan")])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"^shape="):
        memory.model_states(shape, Plan())


# Activations against the published formulas


def formula(configuration, **letters):
    row = next(row for row in published.rows("korthikanti_activation_formulas") if row["configuration"] == configuration)
    text = row["bytes_per_layer_fp16"].partition("  ")[0].replace("^", "**")
    return eval(text, {name: Fraction(value) for name, value in letters.items()})


@pytest.mark.parametrize(
    ("configuration", "given"),
    [
        ("no parallelism", {"recompute": "none", "tp": 1}),
        ("TP", {"recompute": "none", "sequence_parallel": False}),
        ("TP + SP", {"recompute": "none"}),
        ("TP + selective recompute", {"recompute": "selective", "sequence_parallel": False}),
        ("TP + SP + selective recompute", {"recompute": "selective"}),
        ("full recompute", {"recompute": "full", "sequence_parallel": False}),
    ],
)
@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize(("b", "t"), [(1, 1), (1, 8), (4, 2)])
def test_a_layer_keeps_the_bytes_of_the_published_formula(configuration, given, name, b, t):
    shape, plan = theory.models[name], Plan(microbatch=b, **{"tp": t, **PAPER, **given})
    letters = {"s": 2048, "b": b, "h": shape.hidden, "a": shape.heads, "t": plan.tp}
    assert memory.layer_activations(shape, plan) == formula(configuration, **letters)


def test_full_recomputation_with_sequence_parallelism_keeps_a_share_of_the_input():
    shape = theory.models["megatron-22b"]
    whole, shared = (Plan(tp=8, recompute="full", sequence_parallel=sp, **PAPER) for sp in (False, True))
    assert memory.layer_activations(shape, whole) == 8 * memory.layer_activations(shape, shared) == 2 * 2048 * shape.hidden


@pytest.mark.parametrize("row", [row for row in steps.korthikanti() if "full" in row.name], ids=lambda row: row.name)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_first_stage_holds_all_layers_worth_and_the_embedding_s_masks(row, recompute):
    shape, ran = row.shape, row.plan
    t, p, v, b = ran.tp, ran.pp, ran.virtual, ran.microbatch
    plan = Plan(pp=p, tp=t, virtual=v, microbatch=b, batch=ran.batch, recompute=recompute, **PAPER)
    letters = {
        "s": 2048,
        "b": b,
        "h": shape.hidden,
        "a": shape.heads,
        "t": t,
        "L": shape.layers,
        "p": p,
        "m": v,
        "v": shape.vocab,
    }
    kept = formula("1F1B first stage (TP+SP)", **letters | ({"a": 0} if recompute == "selective" else {}))
    kept *= formula("interleaved first stage multiplier", **letters) if v > 1 else 1
    kept += formula("embedding dropout, first stage", **letters)
    kept += formula("p=1 tail: last LN + output input + fp32 logits", **letters) if p == 1 else 0
    assert memory.activations(shape, plan) == kept


def test_each_multi_token_prediction_module_keeps_one_more_layer_and_one_more_head():
    plan = Plan(seq=64, recompute="none")
    with_it, without = (memory.activations(replace(LATENT, mtp_depth=depth), plan) for depth in (1, 0))
    head = formula("p=1 tail: last LN + output input + fp32 logits", s=64, b=1, h=32, t=1, v=96)
    assert with_it - without == memory.layer_activations(LATENT, plan, moe=True) + head


# Activations against what torch saves


def saved_bytes(layer, x, parameters):
    """Bytes of the storages that autograd keeps, each counted once, without parameters."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    assert y.requires_grad
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def weights(*sizes):
    return [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]


@pytest.mark.parametrize(("b", "s"), [(1, 16), (2, 24), (3, 8)])
def test_the_paper_s_layer_saves_what_the_formula_says_and_the_norms_statistics(b, s):
    h, a = GPT.hidden, GPT.heads
    qkv, out, up, down = own = weights((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
    biases = weights(3 * h, h, 4 * h, h)
    norms = [torch.ones(h, requires_grad=True) for _ in range(4)]  # fp32 scales and shifts: statistics in fp32

    def drop(x):
        return torch.native_dropout(x, 0.1, True)[0]

    def layer(x_BSH):
        x = F.layer_norm(x_BSH, (h,), *norms[:2])
        q, k, v = (y.view(b, s, a, h // a).transpose(1, 2) for y in F.linear(x, qkv, biases[0]).split(h, dim=-1))
        probabilities = drop(torch.softmax(q @ k.mT * (h // a) ** -0.5, dim=-1))
        x_BSH = x_BSH + drop(F.linear((probabilities @ v).transpose(1, 2).reshape(b, s, h), out, biases[1]))
        x = F.gelu(F.linear(F.layer_norm(x_BSH, (h,), *norms[2:]), up, biases[2]))
        return x_BSH + drop(F.linear(x, down, biases[3]))

    measured = saved_bytes(layer, torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True), own + biases + norms)
    statistics = 2 * 2 * 4 * b * s  # two norms, mean and 1/deviation, fp32
    plan = Plan(seq=s, microbatch=b, flash=False, recompute="none")
    assert measured - statistics == memory.layer_activations(GPT, plan)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one fp32 number a token."""

    @staticmethod
    def forward(ctx, x, scale):
        inverse = x.float().square().mean(-1).rsqrt()
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse[..., None] * scale).to(x.dtype)


class FusedProduct(torch.autograd.Function):
    """silu(gate) · up that keeps its two inputs."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up


VARIANTS = [{}, {"kv_heads": 1}, {"kv_heads": 8}, {"qk_norm": True}, {"norms_per_layer": 4}, {"parallel_layers": True},
            {"parallel_layers": True, "norms_per_layer": 1}]  # fmt: skip


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)) or "plain")
def test_a_gated_layer_with_grouped_queries_saves_what_the_rules_say(flash, variant):
    shape, b, s = replace(LLAMA, **variant), 1, 24
    h, f, a, g, d = shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.head_size
    sizes = (a * d, h), (g * d, h), (g * d, h), (h, a * d), (f, h), (f, h), (h, f), h, d
    q, k, v, out, gate, up, down, scale, short = own = weights(*sizes)
    statistics = []

    def norm(x, scale, wanted=True):
        statistics.append(4 * x.shape[:-1].numel() * wanted)
        return FusedNorm.apply(x, scale) if wanted else x

    def attention(x_BSH):
        # A group's queries side by side: the right bytes, not the right values. Norms of queries and keys a head at a time.
        queries = norm(F.linear(x_BSH, q).view(b, g, a // g * s, d), short, shape.qk_norm)
        keys, values = (F.linear(x_BSH, w).view(b, s, g, d).transpose(1, 2) for w in (k, v))
        keys = norm(keys, short, shape.qk_norm)
        core = F.scaled_dot_product_attention if flash else lambda q, k, v: torch.softmax(q @ k.mT, dim=-1) @ v
        return F.linear(core(queries, keys, values).reshape(b, s, a * d), out)

    def layer(x_BSH):
        normed = norm(x_BSH, scale)
        attended = x_BSH + norm(attention(normed), scale, shape.norms_per_layer == 4)
        if shape.norms_per_layer > 1:
            normed = norm(x_BSH if shape.parallel_layers else attended, scale)
        out = F.linear(FusedProduct.apply(F.linear(normed, gate), F.linear(normed, up)), down)
        return attended + norm(out, scale, shape.norms_per_layer == 4)

    measured = saved_bytes(layer, torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True), own)
    plan = Plan(seq=s, microbatch=b, flash=flash, recompute="none")
    assert measured - sum(statistics) == memory.layer_activations(shape, plan)


# The peak


@pytest.mark.parametrize("shape", [LLAMA, ROUTED])
@pytest.mark.parametrize(("schedule", "flying"), [("1f1b", 2), ("gpipe", 4)])
def test_offloaded_activations_wait_on_the_host_and_two_layers_stay(shape, schedule, flying):
    plan = Plan(pp=2, seq=64, batch=4, recompute="none", schedule=schedule)
    kinds = (False, True) if shape.experts else (False, False)  # of the first stage's two layers
    each = [memory.layer_activations(shape, plan, moe) for moe in kinds]
    for layers in (1, 2, 5):
        away = replace(plan, offload_layers=layers)
        share = min(1, layers / 2)
        waiting = flying * share * sum(each)
        stays = 2 * share * sum(each) / min(layers, 2)
        if not shape.experts:  # else the last stage, which has two layers with experts, may have more
            assert memory.host(shape, away) == waiting
        left = memory.peaks(shape, plan)[0].activations - memory.peaks(shape, away)[0].activations
        assert left == pytest.approx(max(0, waiting - stays), abs=1)
    assert memory.host(shape, plan) == 0


def test_the_host_keeps_states_and_activations():
    plan = Plan(dp=2, seq=64, batch=2, recompute="none", offload="all", offload_layers=3)
    states = memory.model_states(LLAMA, plan).host
    assert memory.host(LLAMA, plan) == states + 3 * memory.layer_activations(LLAMA, plan)


def test_what_one_layer_recomputes_lives_beside_what_is_kept():
    none, selective, full = (Plan(recompute=kind, **PAPER) for kind in ("none", "selective", "full"))
    whole = memory.layer_activations(GPT, none)
    loss = memory.activations(GPT, full) - GPT.layers * memory.layer_activations(GPT, full) - GPT.hidden * 2048  # and a mask
    for plan in (none, selective, full):  # the loss's own memory is free again by then
        again = whole - memory.layer_activations(GPT, plan)
        assert memory.peak(GPT, plan).buffers == max(0, again - loss)


def test_zero_3_gathers_two_units_and_keeps_all_of_them_where_it_does_not_reshard():
    layers = replace(LLAMA, norm="none", vocab=1, layers=10)
    unit = 2 * layers.parameters / 10
    buffers = [memory.peak(layers, Plan(dp=4, recompute="none", **kinds)).buffers
               for kinds in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard_after_forward": False})]  # fmt: skip
    assert buffers == pytest.approx([0, unit, 3 * unit, 11 * unit], abs=2)
    assert memory.peak(layers, Plan(recompute="none", offload="all")).buffers == pytest.approx(3 * unit, abs=2)
