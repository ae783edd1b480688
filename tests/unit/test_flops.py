"""FLOPs and bytes: what WorkCounter counts while models train is what theory.flops says, to the last one."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from manyranks import theory, training
from manyranks.measure import meta
from manyranks.measure.flops import WorkCounter, operators
from manyranks.theory import flops, layer, published
from manyranks.theory.architecture import LatentAttention
from manyranks.theory.plan import Plan
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT, loss
from manyranks.training.parallelize import parallelize

B, S = 2, 16
SMALL = GPTConfig(layers=2, hidden=24, heads=4, vocab=40, seq=S, ffn=20)
MODELS = {
    "dense": SMALL,
    "grouped": replace(SMALL, kv_heads=2, tied=False),
    "not gated": replace(SMALL, style="gpt2"),
    "experts": replace(SMALL, layers=3, experts=4, top_k=2, expert_ffn=12, shared_experts=1, dense_layers=1),
    "latent": replace(SMALL, latent=LatentAttention(10, 12, 4, 2, 6)),
    "latent, whole queries": replace(SMALL, latent=LatentAttention(0, 12, 4, 2, 6)),
}
RECOMPUTE = ("none", "selective", "full")
DENSE, ROUTED, *LATENT = (MODELS[kind].shape() for kind in ("dense", "experts", "latent", "latent, whole queries"))


# Theory against the counter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # without it attention is fused; a counter takes all scores, whatever the mask
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_s_flops_are_those_that_are_counted(kind, recompute, dropout):
    config = replace(MODELS[kind], dropout=dropout)
    model = parallelize(GPT(config), TrainingConfig(recompute=recompute)).model
    tokens = torch.randint(config.vocab, (B, S))
    with WorkCounter() as work:
        value = loss(model(tokens), tokens)
        forward = work.flops
        value.backward()
    shape = config.shape()
    assert forward == B * S * sum(flops.forward(shape, S))
    again = 0
    if shape.latent and recompute == "selective":  # our core expands keys and values, so they're expanded again
        again = sum(2 * p.k * p.n * p.count for p in flops.products(shape, S) if p.name == "key, value up")
    expected = flops.hardware_per_token(shape, S, recompute, "full", flash=not dropout)
    assert work.flops == B * S * (expected + again)
    if dropout and recompute == "none":
        assert work.flops == B * S * flops.per_token(shape, S, "full")


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "deepseek-v3", "mixtral-8x7b"])
def test_products_without_the_core_have_the_active_matrices_weights(name):
    shape = theory.models[name]
    weights = sum(p.k * p.n * p.count for p in flops.products(shape, 4096) if p.part != "core")
    read_only = shape.embedding_parameters - shape.tied * shape.vocab * shape.hidden
    assert weights <= shape.active_parameters - read_only < 1.001 * weights  # the rest are norms and biases


# The kernels of a layer --------------------------------------------------------------------------------------------------


@given(st.sampled_from([DENSE, ROUTED, *LATENT]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_the_kernels_of_all_ranks_multiply_what_the_model_does(shape, t, c):
    plan = Plan(cp=c, tp=t, seq=S, microbatch=B, flash=False)
    kernels = [kernel for i in range(shape.layers) for kernel in layer.forward(shape, plan, shape.is_moe(i))]
    core = sum(kernel.flops for kernel in kernels if kernel.part == "core")
    rest = sum(kernel.flops for kernel in kernels) - core
    expected = flops.forward(shape, S)
    assert t * c * core == pytest.approx(B * S * expected.core)
    whole = expected.router  # every tensor-parallel rank routes its tokens, and compresses them for its own heads
    if shape.latent:
        whole += 2 * shape.layers * shape.hidden * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.rope_size)
    assert t * c * rest == pytest.approx(B * S * (expected.layers - expected.core + (t - 1) * whole))
    assert t * c * sum(kernel.flops for kernel in layer.head(shape, plan)) == pytest.approx(B * S * expected.head)


@pytest.mark.parametrize("shape", [DENSE, ROUTED, *LATENT])
def test_backward_multiplies_twice_what_forward_does_and_full_recomputation_three_times(shape):
    for kind, times in (("none", 2), ("full", 3)):
        plan = Plan(seq=S, flash=False, recompute=kind)
        forward, backward = (sum(kernel.flops for kernel in side) for side in layer.work(shape, plan, "dense")[:2])
        assert backward == times * forward


RATES = {"bf16": {"bf16"}, "fp8": {"bf16", "fp8"}, "mxfp8": {"bf16", "fp8"}, "nvfp4": {"bf16", "fp4"}, "fp32": {"fp32"}}


@pytest.mark.parametrize(("precision", "rates"), RATES.items())
@pytest.mark.parametrize("flash", [False, True])
def test_products_run_at_the_rate_of_the_precision(precision, rates, flash):
    plan = Plan(seq=S, precision=precision, flash=flash)
    moe = layer.work(ROUTED, plan, "moe")
    kernels = moe.forward + moe.backward + layer.head(ROUTED, plan)
    assert {kernel.rate for kernel in kernels if kernel.flops} == rates


# Conventions, MFU, HFU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published.rows("megatron_sc21_table1"), ids=lambda row: row["params_B"])
def test_megatron_s_closed_forms(row):
    shape, s = theory.models[f"megatron-{row['params_B'].removesuffix('.0')}b"], Fraction(2048)
    h, L, V = shape.hidden, shape.layers, shape.vocab
    model, full, selective = (
        factor * L * s * h**2 * (1 + s / (core * h) + Fraction(V, head * h * L))
        for factor, core, head in ((72, 6, 12), (96, 6, 16), (72, 3, 12))
    )
    assert s * Fraction(flops.per_token(shape, 2048, "korthikanti")) == model
    assert s * Fraction(flops.hardware_per_token(shape, 2048, "full", "megatron-sc21")) == full
    assert s * Fraction(flops.hardware_per_token(shape, 2048, "selective", "korthikanti")) == selective


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-70b", "palm-540b", "gpt2", "mixtral-8x7b"])
def test_closed_forms_of_the_other_conventions(name):
    shape, seq = theory.models[name], 4096
    scores = shape.layers * shape.heads * shape.head_size * seq
    read_only = shape.embedding_parameters - shape.tied * shape.vocab * shape.hidden
    every, active = 6 * shape.active_parameters, 6 * (shape.active_parameters - read_only)
    forms = {"parameters": every, "palm": every + 12 * scores, "torchtitan": active + 12 * scores, "nemo": active + 6 * scores}
    assert {kind: flops.per_token(shape, seq, kind) for kind in forms} == forms
    assert flops.training(shape.parameters, 2) == 12 * shape.parameters
    causal, full, none = (flops.per_token(shape, n, kind) for n, kind in ((seq, "causal"), (seq, "full"), (0, "full")))
    assert flops.per_token(shape, seq) == causal == pytest.approx(active + 6 * scores, rel=2e-3)  # all but norms and biases
    assert causal - none == pytest.approx((full - none) / 2)


@pytest.mark.parametrize("convention", sorted(flops.CONVENTIONS))
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_utilization_is_flops_over_what_the_accelerators_could_do(convention, recompute):
    core = flops.forward(DENSE, S, flops.CONVENTIONS[convention].attention).core
    once, plain, fused = (
        flops.per_token(DENSE, S, convention),
        *(flops.hardware_per_token(DENSE, S, recompute, convention, flash) for flash in (False, True)),
    )
    assert fused - plain == pytest.approx(core / 2)
    assert plain >= once
    assert (plain == once) == (recompute == "none" or (recompute == "selective" and not core))
    run = {"tokens_per_second": 1e4, "gpus": 8, "peak": 1e12, "convention": convention}
    assert flops.mfu(DENSE, S, **run) == pytest.approx(once * 1e4 / 8e12)
    assert flops.hfu(DENSE, S, **run, recompute=recompute, flash=True) == pytest.approx(fused * 1e4 / 8e12)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flops.per_token(DENSE, -1), "seq=-1"),
        (lambda: flops.per_token(DENSE, 8, "palms"), "convention 'palms': did you mean 'palm'"),
        (lambda: flops.hardware_per_token(DENSE, 8, "selectiv"), "recompute='selectiv': did you mean 'selective'"),
        (lambda: flops.mfu(DENSE, 8, -1.0, 8, 1e15), "tokens_per_second=-1.0"),
        (lambda: flops.mfu(DENSE, 8, 1.0, 0, 1e15), "gpus=0"),
        (lambda: flops.mfu(DENSE, 8, 1.0, 8, 0), "peak=0"),
        (lambda: flops.training(-1, 1), "parameters=-1"),
        (lambda: flops.training(1, -1), "tokens=-1"),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused(call, said):
    with pytest.raises(ValueError, match=f".*{said}"):
        call()


# One operator ------------------------------------------------------------------------------------------------------------

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
    "a composition moves bytes as a whole": (lambda: torch.ops.aten.silu_backward(TABLE, TABLE), 3 * 32_000),
    # Of the corpus only its batch: places drawn, rows cut, made int64.
    "a batch": (lambda: training.corpus.batch(0, 16, 128, 0, 4), 16 * 8 + (2 * 4 * 129 + 4 * 8) + 9 * 4 * 129),
}
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
    "addmm in place": (lambda: torch.zeros(6, 5).addmm_(MATRIX, OTHER_BATCH[0]), 2 * 6 * 4 * 5),
    "baddbmm in place": (lambda: torch.zeros(3, 6, 5).baddbmm_(BATCH, OTHER_BATCH), 2 * 3 * 6 * 4 * 5),
}
COUNTED = [(name, "bytes", *case) for name, case in MOVED.items()] + [(name, "flops", *case) for name, case in PRODUCTS.items()]


@pytest.mark.parametrize(("what", "run", "expected"), [case[1:] for case in COUNTED], ids=[case[0] for case in COUNTED])
def test_an_operator_has_the_flops_of_its_product_and_moves_the_bytes_it_touches(what, run, expected):
    with WorkCounter() as work:
        run()
    assert getattr(work, what) == expected


def test_a_grouped_product_has_the_flops_of_its_rows_or_columns_forward_and_backward():
    rows, ends = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True), torch.tensor([2, 5, 6], dtype=torch.int32)
    experts = torch.ones(3, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    with WorkCounter() as work:
        F.grouped_mm(rows, experts, offs=ends).square().sum().backward()
    assert work.flops == 3 * 2 * 6 * 16 * 8
    with WorkCounter() as work:
        F.grouped_mm(experts.mT.detach(), torch.ones(6, 16, dtype=torch.bfloat16).T, offs=ends)
    assert work.flops == 2 * 6 * 16 * 8


def test_operators_are_listed_in_order_and_a_composition_stands_for_its_parts():
    x, linear = torch.ones(3, 4), nn.Linear(4, 5)
    found = operators(lambda: linear(x).relu_().sum())
    once = 2 * 3 * 4 * 5, 4 * (5 + 12 + 20 + 15)
    assert found[0] == ("aten::addmm", ((5,), (3, 4), (4, 5)), *once)
    assert [(each.name, each.flops, each.bytes) for each in found[1:]] == [("aten::relu_", 0, 120), ("aten::sum", 0, 64)]
    with torch.inference_mode(), WorkCounter() as work:
        found = operators(linear, x)
        linear(x)
    assert [(each.name, each.flops, each.bytes) for each in found] == [("aten::linear", *once)]
    assert (work.flops, work.bytes) == (2 * once[0], 2 * once[1])


def test_a_fused_function_moves_its_arguments_its_results_and_what_it_changes_but_all_flops_count():
    def scores_apart(x, y, total):
        scores = x @ y.T
        total += scores.exp().sum()
        return scores.sum(1)

    x, y, total = torch.ones(5, 3), torch.ones(7, 3), torch.zeros(())
    kernels = SimpleNamespace(sum=scores_apart, idle=lambda x: x[2:])
    with WorkCounter() as work, meta.fused(kernels, "sum", "idle"):
        kernels.sum(x, y, total)
        kernels.idle(x)  # a view: nothing more
    assert (work.flops, work.bytes) == (2 * 5 * 7 * 3, 4 * (x.numel() + y.numel() + 2 + 5))
    assert kernels.sum is scores_apart
