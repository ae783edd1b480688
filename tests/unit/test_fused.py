"""A layer with fused kernels keeps the theory's bytes, and gives PyTorch's gradients."""

import copy

import pytest
import torch

from manyranks import theory, training
from manyranks.measure.memory import saved_bytes

SIZES = [(2, 64, 64, 8, 2, 224), (1, 33, 48, 6, 3, 100), (2, 40, 64, 4, 1, 130)]


def made(b, s, h, a, g, f):
    config = training.GPTConfig(layers=1, hidden=h, heads=a, kv_heads=g, ffn=f, seq=s)
    torch.manual_seed(0)
    return config.shape(), training.gpt.Layer(config), torch.randn(b, s, h)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_fused_layer_has_the_gradients_of_the_plain_one(sizes):
    _, layer, x = made(*sizes)
    found = []
    for each in (layer.double(), training.fuse(copy.deepcopy(layer).double())):
        given = x.double().requires_grad_()
        (each(given) * torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)).sum().backward()
        found.append([given.grad, *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_fused_layer_in_16_bits_keeps_what_theory_says(sizes):
    shape, layer, x = made(*sizes)
    layer, given = training.fuse(layer.bfloat16()), x.bfloat16().requires_grad_()
    plan = theory.Plan(seq=sizes[1], microbatch=sizes[0], batch=sizes[0], recompute="none")
    expected = theory.memory.layer_activations(shape, plan) + theory.checkpointing.statistics(shape, plan)
    assert saved_bytes(layer, given, parameters=layer.parameters()) == expected


def test_a_model_of_another_style_is_refused():
    with pytest.raises(ValueError, match="style='llama'"):
        training.fuse(training.GPT(training.GPTConfig(layers=1, hidden=16, heads=2, seq=8, style="gpt2")))
    with pytest.raises(ValueError, match="has experts"):
        training.fuse(training.GPT(training.GPTConfig(layers=1, hidden=16, heads=2, seq=8, experts=4)))
