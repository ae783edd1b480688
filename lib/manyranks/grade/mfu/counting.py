"""FLOPs of the small GPT's real modules, as WorkCounter counts them while these run."""

from collections import Counter
from functools import partial

import torch
from torch import nn

from manyranks.measure.flops import WorkCounter
from manyranks.parallel.checkpointing import checkpoint
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT

_HARDLY = 1e-30  # a rate of dropout that drops nothing, and builds the score matrix


def forward(config: GPTConfig, batch: int, seq: int, predicted: int) -> Counter:
    """Part -> FLOPs of a forward pass with logits for the last `predicted` tokens of each sequence."""
    model, found = GPT(config), Counter()
    for layer in model.layers:
        _count(layer.attention, "attention", found)
        _count(layer.attention.core, "scores", found)
        _count(layer.mlp, "mlp", found)
        if router := getattr(layer.mlp, "router", None):
            _count(router, "router", found)
    _count(model.embedding, "embedding", found)
    _count(model.head, "head", found)
    with torch.no_grad():
        _run(model, _tokens(config, batch, seq), predicted)
    found["attention"] -= found["scores"]
    found["mlp"] -= found["router"]
    return found


def _count(module: nn.Module, part: str, found: Counter) -> None:
    forward = module.forward

    def counted(*args):
        with WorkCounter() as work:
            result = forward(*args)
        found[part] += work.flops
        return result

    module.forward = counted


def _tokens(config: GPTConfig, batch: int, seq: int) -> torch.Tensor:
    return torch.arange(batch * seq).view(batch, seq) % config.vocab


def _run(model: GPT, tokens_BS: torch.Tensor, predicted: int) -> torch.Tensor:
    x_BSH = model.embedding(tokens_BS)
    for layer in model.layers:
        x_BSH = layer(x_BSH)
    return model.head(x_BSH[:, -predicted:])


def step(config: GPTConfig, batch: int, learns: tuple[bool, ...] = (), recompute: str = "none", flash: bool = False) -> float:
    """FLOPs of forward and backward. learns: of each layer, and the embedding does not; (): everything learns.

    flash: whether backward computes the scores again, as the attention kernel's does, or they are kept as matrices.
    """
    model = GPT(config)
    model.embedding.requires_grad_(not learns)
    for layer, its in zip(model.layers, learns or [True] * config.layers, strict=True):
        layer.requires_grad_(its)
        layer.attention.core.dropout.rate = 0.0 if flash else _HARDLY
        if recompute != "none":
            again = layer if recompute == "full" else layer.attention.core
            again.forward = partial(checkpoint, again.forward)
    with WorkCounter() as work:
        _run(model, _tokens(config, batch, config.seq), config.seq).sum().backward()
    return work.flops
