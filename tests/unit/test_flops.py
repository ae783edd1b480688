"""theory.flops and theory.layer: products counted by torch, papers' closed forms, MFU and HFU. measure.flops: bytes moved."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from manyranks import theory, training
from manyranks.measure import meta
from manyranks.measure.flops import WorkCounter
from manyranks.theory import flops, layer, published
from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.plan import Plan

B, S = 2, 12
GPT = ModelShape("gpt", 3, 24, 96, 4, 50, gated=False, norm="layernorm", bias=True, tied=True, positions=16)
LLAMA = ModelShape("llama", 2, 24, 40, 6, 50, kv_heads=2, head_size=8)
ROUTED = replace(LLAMA, name="routed", experts=6, top_k=2, expert_ffn=10, shared_experts=2, shared_ffn=7, dense_layers=1)
LATENT = ModelShape("latent", 2, 24, 40, 4, 50, latent=LatentAttention(10, 12, 4, 2, 6))
UNCOMPRESSED = replace(LATENT, name="uncompressed", latent=LatentAttention(0, 12, 4, 2, 6))
SHAPES = (GPT, LLAMA, ROUTED, LATENT, UNCOMPRESSED)


# Models of torch modules


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape, h = shape, shape.hidden
        self.sizes = [shape.query_size, shape.kv_size, shape.kv_size]
        self.qkv, self.out = nn.Linear(h, sum(self.sizes)), nn.Linear(shape.query_size, h)

    def forward(self, x_BSH):
        q, k, v = (y.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2) for y in self.qkv(x_BSH).split(self.sizes, -1))
        k, v = (y.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1) for y in (k, v))
        return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values from one short vector a token; the rotary part of the key serves all heads."""

    def __init__(self, shape):
        super().__init__()
        self.shape, h, a, c = shape, shape.hidden, shape.heads, shape.latent
        query = a * (c.nope_size + c.rope_size)
        self.q = nn.Sequential(nn.Linear(h, c.q_rank), nn.Linear(c.q_rank, query)) if c.q_rank else nn.Linear(h, query)
        self.down, self.up = nn.Linear(h, c.kv_rank + c.rope_size), nn.Linear(c.kv_rank, a * (c.nope_size + c.value_size))
        self.out = nn.Linear(a * c.value_size, h)

    def forward(self, x_BSH):
        a, c = self.shape.heads, self.shape.latent
        latent, rotary = self.down(x_BSH).split([c.kv_rank, c.rope_size], -1)
        k, v = self.up(latent).unflatten(-1, (a, -1)).transpose(1, 2).split([c.nope_size, c.value_size], -1)
        k = torch.cat([k, rotary[:, None].expand(-1, a, -1, -1)], -1)
        q = self.q(x_BSH).unflatten(-1, (a, -1)).transpose(1, 2)
        return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape, ffn):
        super().__init__()
        self.up, self.down = nn.Linear(shape.hidden, ffn), nn.Linear(ffn, shape.hidden)
        self.gate = nn.Linear(shape.hidden, ffn) if shape.gated else None

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gate else F.gelu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.router, self.top_k = nn.Linear(shape.hidden, shape.experts), shape.top_k
        self.routed = nn.ModuleList(MLP(shape, shape.expert_ffn) for _ in range(shape.experts))
        self.shared = nn.ModuleList(MLP(shape, shape.shared_ffn) for _ in range(shape.shared_experts))

    def forward(self, x_BSH):
        x = x_BSH.flatten(0, 1)
        share, chosen = self.router(x).softmax(-1).topk(self.top_k)
        out = sum(expert(x) for expert in self.shared)
        for i, expert in enumerate(self.routed):
            token, rank = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * share[token, rank, None])
        return out.view_as(x_BSH)


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding, self.head = nn.Embedding(shape.vocab, shape.hidden), nn.Linear(shape.hidden, shape.vocab)
        attention = Latent if shape.latent else Attention
        mlps = (Experts(shape) if shape.is_moe(i) else MLP(shape, shape.ffn) for i in range(shape.layers))
        self.layers = nn.ModuleList(nn.ModuleList([attention(shape), mlp]) for mlp in mlps)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for attention, mlp in self.layers:
            x = x + attention(F.layer_norm(x, x.shape[-1:]))
            x = x + mlp(F.layer_norm(x, x.shape[-1:]))
        return self.head(x)


def counted(shape, backward):
    model = Model(shape)
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.randint(shape.vocab, (B, S))).sum()
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_forward_has_the_products_that_torch_counts(shape):
    assert B * S * sum(flops.forward(shape, S)[:]) == counted(shape, backward=False)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_forward_and_backward_have_the_products_that_torch_counts(shape):
    assert B * S * flops.per_token(shape, S, "full") == counted(shape, backward=True)


# The kernels of a layer


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]), st.sampled_from(["bf16", "fp8", "fp32"]))
def test_the_kernels_of_all_ranks_multiply_what_the_model_does(shape, t, c, precision):
    plan = Plan(cp=c, tp=t, seq=S, microbatch=B, flash=False, precision=precision)
    layers = [layer.forward(shape, plan, shape.is_moe(i)) for i in range(shape.layers)]
    parts = {part: c * sum(k.flops for kernels in layers for k in kernels if (k.part == "core") == (part == "core"))
             for part in ("core", "rest")}  # fmt: skip
    expected = flops.forward(shape, S)
    assert t * parts["core"] == pytest.approx(B * S * expected.core)
    whole = 0  # every tensor-parallel rank routes its tokens, and compresses them for its own heads
    if shape.latent:
        whole = 2 * shape.layers * shape.hidden * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.rope_size)
    whole += expected.router
    assert t * parts["rest"] == pytest.approx(B * S * (expected.layers - expected.core + (t - 1) * whole))
    head = sum(kernel.flops for kernel in layer.head(shape, plan))
    assert t * c * head == pytest.approx(B * S * expected.head)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_backward_multiplies_twice_what_forward_does_and_full_recomputation_three_times(shape):
    for kind, times in (("none", 2), ("full", 3)):
        plan = Plan(seq=S, flash=False, recompute=kind)
        forward, backward = (sum(k.flops for k in side(shape, plan, False)) for side in (layer.forward, layer.backward))
        assert backward == times * forward


RATES = {"bf16": {"bf16"}, "fp8": {"bf16", "fp8"}, "mxfp8": {"bf16", "fp8"}, "nvfp4": {"bf16", "fp4"}, "fp32": {"fp32"}}


@pytest.mark.parametrize(("precision", "rates"), RATES.items())
@pytest.mark.parametrize("flash", [False, True])
def test_products_run_at_the_rate_of_the_precision(precision, rates, flash):
    plan = Plan(seq=S, precision=precision, flash=flash)
    kernels = layer.forward(ROUTED, plan, True) + layer.backward(ROUTED, plan, True) + layer.head(ROUTED, plan)
    assert {kernel.rate for kernel in kernels if kernel.flops} == rates


# Closed forms


@pytest.mark.parametrize(
    "name", [f"megatron-{row['params_B'].removesuffix('.0')}b" for row in published.rows("megatron_sc21_table1")]
)
def test_megatron_s_closed_forms(name):
    shape, s = theory.models[name], Fraction(2048)
    h, L, V = shape.hidden, shape.layers, shape.vocab
    model = 72 * L * s * h**2 * (1 + s / (6 * h) + Fraction(V, 12 * h * L))
    full = 96 * L * s * h**2 * (1 + s / (6 * h) + Fraction(V, 16 * L * h))
    selective = 72 * L * s * h**2 * (1 + s / (3 * h) + Fraction(V, 12 * h * L))
    assert s * Fraction(flops.per_token(shape, 2048, "korthikanti")) == model
    assert s * Fraction(flops.hardware_per_token(shape, 2048, "full", "megatron-sc21")) == full
    assert s * Fraction(flops.hardware_per_token(shape, 2048, "selective", "korthikanti")) == selective


@pytest.mark.parametrize("name", ["palm-540b", "gpt2", "llama3-8b"])
def test_palm_s_closed_form(name):
    shape = theory.models[name]
    attention = 12 * shape.layers * shape.heads * shape.head_size * 2048
    assert flops.per_token(shape, 2048, "palm") == 6 * shape.parameters + attention
    assert flops.per_token(shape, 2048, "parameters") == 6 * shape.parameters == flops.training(shape.parameters, 1)


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-70b"])
def test_nemo_s_closed_form(name):
    shape = theory.models[name]
    without = shape.parameters - shape.vocab * shape.hidden
    assert flops.per_token(shape, 4096, "nemo") == 6 * without + 6 * shape.layers * shape.hidden * 4096


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b", "gpt2", "mixtral-8x7b"])
def test_without_a_convention_half_of_the_scores_count(name):
    shape, seq = theory.models[name], 8192
    read_only = shape.embedding_parameters - shape.tied * shape.vocab * shape.hidden
    rule = 6 * (shape.active_parameters - read_only) + 6 * shape.layers * shape.hidden * seq
    assert flops.per_token(shape, seq) == flops.per_token(shape, seq, "causal") == pytest.approx(rule, rel=1e-3)


def test_a_causal_mask_leaves_half_of_the_score_matrix():
    full, causal, none = (flops.per_token(LLAMA, seq, kind) for seq, kind in ((64, "full"), (64, "causal"), (0, "full")))
    assert causal - none == (full - none) / 2 > 0


# Utilisation


def test_mfu_is_the_model_s_flops_over_what_the_accelerators_could_do():
    shape, each = theory.models["llama3-8b"], flops.per_token(theory.models["llama3-8b"], 8192)
    assert flops.mfu(shape, 8192, tokens_per_second=1e5, gpus=8, peak=1e15) == pytest.approx(each * 1e5 / 8e15)


@pytest.mark.parametrize("convention", sorted(flops.CONVENTIONS))
def test_hfu_is_mfu_without_recomputation_and_never_below_it(convention):
    given = {"seq": 2048, "tokens_per_second": 1e4, "gpus": 8, "peak": 1e15, "convention": convention}
    mfu = flops.mfu(GPT, **given)
    none, selective, full = (flops.hfu(GPT, recompute=kind, **given) for kind in ("none", "selective", "full"))
    assert none == pytest.approx(mfu)
    assert mfu <= min(selective, full)


def test_full_recomputation_adds_a_forward_of_all_layers_but_not_of_the_head():
    once, again = (flops.hardware_per_token(GPT, S, kind) for kind in ("none", "full"))
    headless = replace(GPT, vocab=1)
    assert again - once == pytest.approx(flops.per_token(headless, S) / 3 - 2 * GPT.hidden)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flops.per_token(GPT, -1), "seq=-1"),
        (lambda: flops.per_token(GPT, 8, "palms"), "convention 'palms': did you mean 'palm'"),
        (lambda: flops.hardware_per_token(GPT, 8, "selectiv"), "recompute='selectiv': did you mean 'selective'"),
        (lambda: flops.mfu(GPT, 8, -1.0, 8, 1e15), "tokens_per_second=-1.0"),
        (lambda: flops.mfu(GPT, 8, 1.0, 0, 1e15), "gpus=0"),
        (lambda: flops.mfu(GPT, 8, 1.0, 8, 0), "peak=0"),
        (lambda: flops.training(-1, 1), "parameters=-1"),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused(call, said):
    with pytest.raises(ValueError, match=f".*{said}"):
        call()


def test_products_are_named_and_sized_as_the_layers_are():
    shape = ModelShape("tiny", 3, 64, 160, 8, 1000, kv_heads=2)
    sizes = {p.name: (p.k, p.n, p.count) for p in flops.products(shape, 128)}
    assert sizes == {
        "query": (64, 64, 3),
        "key": (64, 16, 3),
        "value": (64, 16, 3),
        "output": (64, 64, 3),
        "scores": (8, 128, 24),
        "values": (128, 8, 24),
        "mlp gate": (64, 160, 3),
        "mlp up": (64, 160, 3),
        "mlp down": (160, 64, 3),
        "head": (64, 1000, 1),
    }


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "deepseek-v3", "mixtral-8x7b"])
def test_products_without_the_core_have_the_active_matrices_weights(name):
    shape = theory.models[name]
    weights = sum(p.k * p.n * p.count for p in flops.products(shape, 4096) if p.part != "core")
    read_only = shape.embedding_parameters - shape.tied * shape.vocab * shape.hidden
    assert weights <= shape.active_parameters - read_only < 1.001 * weights  # the rest are norms and biases


# Bytes that operators move -----------------------------------------------------------------------------------------------

TABLE, ROWS = torch.ones(1000, 8), torch.tensor([3, 5, 3])  # 32,000 bytes; 24 bytes, for 3 rows of 32 bytes
LOOKED_UP = 3 * 32 + 24 + 3 * 32  # read, indices read, written
MOVED = {
    "an addition reads two and writes one": (lambda: TABLE + TABLE, 3 * 32_000),
    "in place it reads two and writes one": (lambda: TABLE.mul_(TABLE), 3 * 32_000),
    "a view moves nothing": (lambda: TABLE[5:].T.expand(4, 8, 995), 0),
    "an expanded view is read once": (lambda: TABLE[0].expand(500, 8) * 2, 32 + 500 * 32),
    "so is an unfolded one": (lambda: TABLE.view(-1).unfold(0, 1000, 1) * 2, 32_000 + 4 * 7001 * 1000),
    "of a slice only its own elements are read": (lambda: TABLE[:, 0] * 2, 2 * 4000),
    "indexing reads what it returns": (lambda: TABLE[ROWS], LOOKED_UP),
    "in a column too": (lambda: TABLE[:, ROWS], 2 * 12_000 + 24),
    "and of windows that overlap": (lambda: TABLE.view(-1).unfold(0, 8, 1)[ROWS], LOOKED_UP),
    "embedding": (lambda: F.embedding(ROWS, TABLE), LOOKED_UP),
    "index_select": (lambda: TABLE.index_select(0, ROWS), LOOKED_UP),
    "gather": (lambda: TABLE.gather(0, ROWS[:, None]), 12 + 24 + 12),
    "take": (lambda: TABLE.take(ROWS), 12 + 24 + 12),
}


@pytest.mark.parametrize("what", MOVED)
def test_an_operator_moves_the_bytes_it_touches(what):
    run, expected = MOVED[what]
    with WorkCounter() as work:
        run()
    assert work.bytes == expected


def test_a_batch_of_the_corpus_is_charged_its_own_bytes_and_not_the_corpus():
    with WorkCounter() as work:
        training.corpus.batch(0, 16, 128, 0, 4)
    rows = 4 * 129
    assert work.bytes == 16 * 8 + (2 * rows + 4 * 8) + 9 * rows  # places drawn, rows cut, made int64


def test_a_composition_has_the_flops_of_its_parts_and_moves_bytes_as_a_whole():
    x, linear = torch.ones(4, 8), nn.Linear(8, 16, bias=False)
    with torch.inference_mode(), WorkCounter() as work:
        linear(x)
    assert (work.flops, work.bytes) == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    with WorkCounter() as work:
        torch.ops.aten.silu_backward(x, x)
    assert (work.flops, work.bytes) == (0, 4 * 3 * 4 * 8)


def test_a_fused_function_moves_its_arguments_its_results_and_what_it_changes_but_all_flops_count():
    def scores_apart(x, y, total):
        scores = x @ y.T
        total += scores.exp().sum()
        return scores.sum(1)

    x, y, total = torch.ones(5, 3), torch.ones(7, 3), torch.zeros(())
    with WorkCounter() as work, meta.fused(kernels := SimpleNamespace(sum=scores_apart), "sum"):
        kernels.sum(x, y, total)
    assert work.bytes == 4 * (x.numel() + y.numel() + 2 + 5)
    assert work.flops == 2 * 5 * 7 * 3
    assert kernels.sum is scores_apart


def test_a_fused_function_that_does_nothing_moves_nothing():
    idle, x = SimpleNamespace(run=lambda x: x[2:]), torch.ones(100)
    with WorkCounter() as work, meta.fused(idle, "run"):
        idle.run(x)
    assert work.bytes == 0


# Products beside mm ------------------------------------------------------------------------------------------------------

MATRIX, VECTOR = torch.ones(6, 4), torch.ones(4)
BATCH, OTHER_BATCH = torch.ones(3, 6, 4), torch.ones(3, 4, 5)
PRODUCTS = {
    "matrix and vector": (lambda: MATRIX @ VECTOR, 2 * 6 * 4),
    "two vectors": (lambda: VECTOR.dot(VECTOR), 2 * 4),
    "vdot": (lambda: VECTOR.vdot(VECTOR), 2 * 4),
    "addmv": (lambda: torch.addmv(torch.zeros(6), MATRIX, VECTOR), 2 * 6 * 4),
    "addmv in place": (lambda: torch.zeros(6).addmv_(MATRIX, VECTOR), 2 * 6 * 4),
    "a sum of products": (lambda: torch.addbmm(torch.zeros(6, 5), BATCH, OTHER_BATCH), 2 * 3 * 6 * 4 * 5),
    "and in place": (lambda: torch.zeros(6, 5).addbmm_(BATCH, OTHER_BATCH), 2 * 3 * 6 * 4 * 5),
    "baddbmm in place": (lambda: torch.zeros(3, 6, 5).baddbmm_(BATCH, OTHER_BATCH), 2 * 3 * 6 * 4 * 5),
}


@pytest.mark.parametrize("what", PRODUCTS)
def test_a_product_of_any_kind_has_its_flops(what):
    run, expected = PRODUCTS[what]
    with WorkCounter() as work:
        run()
    assert work.flops == expected


def test_a_grouped_product_has_the_flops_of_its_rows_forward_and_backward():
    rows, ends = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True), torch.tensor([2, 5, 6], dtype=torch.int32)
    experts = torch.ones(3, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    with WorkCounter() as work:
        F.grouped_mm(rows, experts, offs=ends).square().sum().backward()
    assert work.flops == 3 * 2 * 6 * 16 * 8
