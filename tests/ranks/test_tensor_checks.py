"""parallel.tensor.checks: gradients of whole parameters on features of one rank are summed; a comparison changes nothing."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import Column, Row, parallelize
from tests.ranks.test_tensor import DEGREES, Counts, gaps, heads, lively, off, random

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


# A comparison with the whole model


def as_it_was() -> list[bool]:
    """The state after a comparison: mode, buffers, gradients, random numbers, and what the first pass is to show."""
    t = dist.get_world_size()
    model = lively(Counts(t))
    model.out.bias.grad = grad = torch.ones_like(model.out.bias)
    model.drop.eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    tp = parallelize(model, None, heads(t), example={"x_BSH": random(2, 5, model.q.in_features)})
    unchanged = [model.training, not model.drop.training, model.passes.item() == 0, model.num_heads == 2]
    unchanged += [model.out.bias.grad is grad, bool((grad == 1).all()), torch.equal(torch.get_rng_state(), state)]
    unchanged += [p is model.out.bias or p.grad is None for p in tp.parameters()]
    return [*unchanged, all(tp._looks), tp._frozen is None]


def test_a_comparison_leaves_nothing_changed(shared_worlds):
    assert all(map(all, shared_worlds.run(as_it_was)))


def others() -> list[bool]:
    """A model beside, one that was dropped, an example that is not wanted."""
    t, model, x = dist.get_world_size(), nn.Linear(12, 24), torch.ones(2, 3, 12)
    whole = weakref.ref(model.weight)
    kept = copy.deepcopy(model)
    cut = parallelize(nn.Sequential(model), None, {"0": Column()})
    (kept(x).sum() + cut(x).sum()).backward()
    torch.optim.SGD([*kept.parameters(), *cut.parameters()], 0.1).step()
    del model
    gc.collect()
    counts = parallelize(Counts(t), None, heads(t), example=False)
    return [whole() is None, counts.module.num_heads == 2 * t]


def test_what_is_right_is_not_refused_and_a_dropped_weight_is_gone(shared_worlds):
    assert all(map(all, shared_worlds.run(others)))
