"""A small model in float64, and a rank's batches, for the checks of exercise 02_data_parallel to train."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyranks.given.numbers import EXACT, seed_of, whole

_HIDDEN, _ROWS, _LENGTH = 48, 3, 6
_VOCAB = _HIDDEN + 1  # a layer has as many bytes as the embedding, so gloo does not notice if they are mixed up


class Toy(nn.Module):
    """Registers `detour` before `first` and uses it after. Where it is used, its bucket is full before the one ahead of it."""

    def __init__(self, *words):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed_of(*words))
            self.embedding = nn.Embedding(_VOCAB, _HIDDEN, **EXACT)
            self.detour = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
            self.first = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
            self.frozen = nn.Linear(_HIDDEN, _HIDDEN, bias=False, **EXACT)
            self.second = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
            self.head = nn.Linear(_HIDDEN, _VOCAB, bias=False, **EXACT)
            self.register_buffer("scale", torch.rand(3, **EXACT))
            self.register_buffer("count", torch.randint(1000, ()), persistent=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x_BS: Tensor, detour: bool = False) -> Tensor:
        h = torch.tanh(self.first(self.embedding(x_BS)))
        h = h + torch.tanh(self.detour(h)) if detour else h
        return self.head(h + self.second(torch.tanh(self.frozen(h))) * self.scale.mean())


def learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Batch(NamedTuple):
    """A rank's. detour: whether it uses the layer of this name."""

    x_BS: Tensor
    detour: bool

    def loss(self, model: nn.Module) -> Tensor:
        """Returns the mean over its examples."""
        logits = model(*self)
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, _VOCAB), self.x_BS[:, 1:].reshape(-1))


def batch(number: int, rank: int, seed: int, rows: int = _ROWS) -> Batch:
    """Returns a rank's batch of this number. Some use `detour` on no rank, on one, or on all but one."""
    detour = (number == 1 and rank == 1) or (number % 3 == 2 and rank != 0)
    return Batch(whole(_VOCAB, (rows, _LENGTH), seed, number, rank), detour)
