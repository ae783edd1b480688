"""Two suites written for other code: one for a sharded optimizer, one for fully sharded training. A few lines adapt ours."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import ZeroOptimizer

# The adapters.


def sharded_optimizer(params, optimizer_class, **kwargs):
    return ZeroOptimizer(params, optimizer_class, **kwargs)


def wrap(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FullyShardedDataParallel(module, compute_dtype=compute_dtype, reduce_dtype=torch.float32)


def after_backward(model: nn.Module, optimizer) -> None:
    model.finish()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = model.full_state_dict()
    return {name: whole[name] for name, _ in model.module.named_parameters()}


# The suite for a sharded optimizer.


class Shares(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.into, self.one, self.back = nn.Linear(10, 10), nn.Linear(10, 30, bias=False), nn.Linear(30, 10)
        self.other, self.out = nn.Linear(10, 30, bias=False), nn.Linear(30, 5)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.out(torch.relu(self.other(torch.relu(self.back(torch.relu(self.one(self.into(x))))))))


class Apart(nn.Module):
    """Nothing is shared, and a parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(10, 23, bias=False), nn.Linear(23, 5)
        self.fixed = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)

    def forward(self, x):
        return self.out(torch.relu(self.into(x))) * self.fixed.sum()


def optimizer_suite(toy) -> None:
    torch.manual_seed(42)
    plain = toy()
    model = copy.deepcopy(plain)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    ours = sharded_optimizer(model.parameters(), torch.optim.AdamW, **options)
    for _ in range(10):
        x, y = torch.rand(32, 10), torch.rand(32, 5)
        for module, optimizer in ((plain, theirs), (model, ours)):
            optimizer.zero_grad()
            ((module(x) - y) ** 2).sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("toy", [Shares, Apart])
def test_a_suite_for_a_sharded_optimizer_holds_for_ours(shared_worlds, toy):
    """All ranks have the same batch, so the mean of their gradients is each one's."""
    shared_worlds.run(optimizer_suite, toy)


# The suite for fully sharded training.


class Norm(nn.Module):
    """By the root of the mean square, in 32 bits."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm, self.up, self.down = Norm(size), nn.Linear(size, 3 * size, bias=False), nn.Linear(3 * size, size, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, vocabulary: int = 31, size: int = 16, depth: int = 3):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocabulary, size), nn.ModuleList(Layer(size) for _ in range(depth))
        self.norm, self.head = Norm(size), nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def in_16_bits(model: nn.Module, dtype) -> nn.Module:
    narrow = copy.deepcopy(model)
    return narrow if dtype is None else narrow.to(dtype)


def fsdp_suite(compute_dtype, steps: int = 8) -> None:
    rank, n, rows = dist.get_rank(), dist.get_world_size(), 2
    torch.manual_seed(0)
    plain = Language()
    model = wrap(copy.deepcopy(plain), compute_dtype)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    for step in range(steps):
        torch.manual_seed(step)
        tokens, labels = torch.randint(31, (2, n * rows, 7))
        mine = slice(rank * rows, (rank + 1) * rows)
        ours.zero_grad()
        loss_of(model(tokens[mine]), labels[mine]).backward()
        after_backward(model, ours)
        ours.step()
        theirs.zero_grad()
        for part in range(n):
            of_part = slice(part * rows, (part + 1) * rows)
            narrow = in_16_bits(plain, compute_dtype)
            loss_of(narrow(tokens[of_part]), labels[of_part]).backward()
            for wide, p in zip(plain.parameters(), narrow.parameters(), strict=True):
                share = p.grad.to(wide.dtype) / n
                wide.grad = share if wide.grad is None else wide.grad + share
        theirs.step()
    whole, expected = gathered(model), dict(plain.named_parameters())
    assert whole.keys() == expected.keys()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if compute_dtype is None else {"rtol": 1e-3, "atol": 1e-3}
    for name, value in expected.items():
        assert whole[name].dtype == value.dtype
        torch.testing.assert_close(whole[name], value.detach(), msg=lambda m, name=name: f"{name}: {m}", **tolerance)
    assert sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in expected.values()) / n + 8


@pytest.mark.parametrize("compute_dtype", ["fp32", "fp16"])
@pytest.mark.few(1)
def test_a_suite_for_fully_sharded_training_holds_for_ours(shared_worlds, compute_dtype):
    shared_worlds.run(fsdp_suite, {"fp32": None, "fp16": torch.float16}[compute_dtype])
