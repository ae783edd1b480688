"""parallel.tensor: whole parameters on features of one rank get the sum of the ranks' gradients, wherever they are."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import Column, Row, parallelize
from tests.ranks.test_tensor import DEGREES, gaps, lively, off, random

D = 4  # features of a head


class HeadNorm(nn.Module):
    """As Gemma 3 has it: the weight is used by way of other nodes of the graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x_SAD):
        return F.rms_norm(x_SAD, (D,)) * (1.0 + self.weight.double())


class Layer(nn.Module):
    """Attention with norms of query and key heads and one learned temperature, as in models that nobody here wrote."""

    def __init__(self, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, width = heads, kv_heads, heads * D
        self.norm, self.q_norm, self.k_norm = nn.LayerNorm(width), HeadNorm(), nn.RMSNorm(D)
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * D, bias=False), nn.Linear(width, kv_heads * D, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x_BSH):
        x = self.norm(x_BSH)
        q, k, v = (linear(x).unflatten(-1, (-1, D)) for linear in (self.q, self.k, self.v))
        q, k = self.q_norm(q) * self.temperature, self.k_norm(k)
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True, enable_gqa=True)
        return x_BSH + self.out(y.transpose(1, 2).flatten(-2))


def model(t: int, kv_heads: int) -> nn.Module:
    torch.manual_seed(5)
    return lively(nn.Sequential(*(Layer(2 * t, kv_heads) for _ in range(2)), nn.LayerNorm(2 * t * D)))


def styles(t: int, kv_heads: int) -> dict:
    return {"*.q": Column(2 * t), "*.k": Column(kv_heads), "*.v": Column(kv_heads), "*.out": Row(2 * t)}


def of_torch(kind: nn.Module, reentrant: bool) -> None:
    for layer in kind[:2]:
        layer.forward = partial(torchs.checkpoint, layer.forward, use_reentrant=reentrant)


CHECKPOINTS = {
    "none": lambda kind: None,
    "layers": lambda kind: checkpoint_modules(kind, lambda module: isinstance(module, Layer)),
    "norms": lambda kind: checkpoint_modules(kind, lambda module: isinstance(module, HeadNorm | nn.RMSNorm)),
    "PyTorch's": partial(of_torch, reentrant=False),
    "PyTorch's reentrant": partial(of_torch, reentrant=True),
    "nothing learns before it": lambda kind: None,
}
INSIDE = sorted(f"{k}.{one}" for k in range(2) for one in ("temperature", "q_norm.weight", "k_norm.weight"))


def trained(name: str, kv_heads: int) -> tuple[float, list[str]]:
    """The largest gap to one process in three steps, and which gradients were summed. Models are copied before the first."""
    t, begins, found = dist.get_world_size(), name != "nothing learns before it", 0.0
    alone, ours = model(t, kv_heads), model(t, kv_heads)
    for one in (alone, ours):
        one[0].norm.requires_grad_(begins)
    ours = parallelize(ours, None, styles(t, kv_heads))
    CHECKPOINTS[name](ours.module)
    ours = copy.deepcopy(ours)
    both = [(one, torch.optim.AdamW(one.parameters(), 0.1)) for one in (alone, ours)]
    for step in range(3):
        x = random(2, 5, 2 * t * D, seed=step).requires_grad_(begins)
        results = [one(x) for one, _ in both]
        for y in results:
            y.square().sum().backward()
        ours.finish()
        found = max(found, off(results[1], results[0]), *gaps(ours, alone))
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return found, sorted(one for one, _ in ours.module.named_parameters() if one not in ours.cuts and ours.summed_over(one))


@DEGREES
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_norms_of_single_heads_learn_as_in_one_process(shared_worlds, name):
    t = shared_worlds.size
    for kv_heads in dict.fromkeys((2 * t, t, 1)):
        for gap, summed in shared_worlds.run(trained, name, kv_heads):
            assert gap < 1e-11
            assert summed == (INSIDE if t > 1 else [])
