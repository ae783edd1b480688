"""FLOPs of the small GPT: what WorkCounter counts while it trains is what theory.flops says, to the last one.

A counter takes attention in full, whatever the mask, so theory is asked for "full".
"""

from dataclasses import replace

import pytest
import torch

from manyranks import theory
from manyranks.measure.flops import WorkCounter
from manyranks.theory import flops
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT
from manyranks.training.gpt import loss as loss_of
from manyranks.training.parallelize import parallelize

B, S = 2, 16
SMALL = GPTConfig(layers=2, hidden=24, heads=4, vocab=40, seq=S, ffn=20)
CONFIGS = {
    "dense": SMALL,
    "GQA": replace(SMALL, kv_heads=2, tied=False),
    "not gated": replace(SMALL, style="gpt2"),
    "MoE": replace(SMALL, layers=3, experts=4, top_k=2, expert_ffn=12, shared_experts=1, dense_layers=1),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])


def counted(config, recompute):
    """FLOPs of forward, and of forward and backward, a token."""
    torch.manual_seed(0)
    model = parallelize(GPT(config), TrainingConfig(recompute=recompute)).model
    tokens = torch.randint(config.vocab, (B, S))
    with WorkCounter() as work:
        loss = loss_of(model(tokens), tokens)
        forward = work.flops
        loss.backward()
    return forward / (B * S), work.flops / (B * S)


@KINDS
@RECOMPUTE
def test_forward_and_training_have_the_flops_that_are_counted_with_fused_attention(kind, recompute):
    config = CONFIGS[kind]
    forward, both = counted(config, recompute)
    assert forward == sum(flops.forward(config.shape(), S))
    assert both == flops.hardware_per_token(config.shape(), S, recompute, "full", flash=True)


@KINDS
@RECOMPUTE
def test_and_with_a_score_matrix_that_dropout_needs(kind, recompute):
    config = replace(CONFIGS[kind], dropout=0.1)
    forward, both = counted(config, recompute)
    assert forward == sum(flops.forward(config.shape(), S))
    assert both == flops.hardware_per_token(config.shape(), S, recompute, "full")


@KINDS
def test_without_recomputation_the_count_is_the_model_s_own_flops(kind):
    config = replace(CONFIGS[kind], dropout=0.1)
    assert counted(config, "none")[1] == flops.per_token(config.shape(), S, "full")


@pytest.mark.parametrize("convention", sorted(flops.CONVENTIONS))
@RECOMPUTE
def test_flash_attention_s_backward_is_half_a_forward_of_the_core_more(convention, recompute):
    shape = SMALL.shape()
    core = flops.forward(shape, S, flops.CONVENTIONS[convention].attention).core
    plain, fused = (flops.hardware_per_token(shape, S, recompute, convention, flash) for flash in (False, True))
    assert fused - plain == pytest.approx(core / 2)
    run = {"tokens_per_second": 1e4, "gpus": 1, "peak": 1e12, "recompute": recompute, "convention": convention}
    assert flops.hfu(shape, S, **run, flash=True) == pytest.approx(1e4 * fused / 1e12)


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-7b"])
def test_torchtitan_s_closed_form(name):
    shape = theory.models[name]
    without = shape.parameters - shape.vocab * shape.hidden
    assert flops.per_token(shape, 4096, "torchtitan") == 6 * without + 12 * shape.layers * shape.hidden * 4096
