"""The small models that checks of ZeRO train. No size is a multiple of 2, 3 or 4, and one is below them; float64."""

from itertools import pairwise

import torch
from torch import nn

from manyranks.grade import toy
from manyranks.grade.toy import VOCAB
from manyranks.measure.memory import PeakBytes

HIDDEN = 47
_BLOCKS = 5
_ROWS = 1  # few tokens: activations are small beside parameters
_SHIFTED, _FROZEN, _TIED = 0, 1, 3  # the numbers of these blocks
_EXACT = {"dtype": torch.float64}


class Net(nn.Module):
    """A tied weight, a frozen layer, a parameter of one element, a layer that only some examples use.

    `detour` is registered before `first` and used after it: where it is used, its gradients come before those of `first`.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, **_EXACT)
        self.detour = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.first = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.frozen = nn.Linear(HIDDEN, HIDDEN, bias=False, **_EXACT)
        self.second = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.third = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.scale = nn.Parameter(torch.ones(1, **_EXACT))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, **_EXACT)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x_BS, detour: bool = False):
        """Logits of the next token."""
        h = torch.tanh(self.first(self.embedding(x_BS)))
        h = h + torch.tanh(self.detour(h)) if detour else h
        h = h + torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.frozen(h))))))
        return self.head(h * self.scale)


def loss_of(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    """The mean loss over this rank's examples in this batch."""
    return toy.loss_of(model, rank, batch, _ROWS)


class Block(nn.Module):
    """A layer, perhaps with a `shift` that only some examples use: set uses_shift before each forward."""

    def __init__(self, seed: int, shifts: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False, **_EXACT)
        self.shift = nn.Parameter(torch.ones(1, **_EXACT)) if shifts else None
        self.uses_shift = False

    def forward(self, h):
        out = self.linear(h)
        return h + torch.tanh(out + self.shift if self.shift is not None and self.uses_shift else out)


class Twice(Block):
    """A block of two layers that share their weight, one of them with a bias."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.again = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.again.weight = self.linear.weight

    def forward(self, h):
        return super().forward(h) + torch.tanh(self.again(h))


def layers() -> nn.ModuleList:
    """To be run one after the other: an embedding, blocks, one of them frozen and one with a tied weight, a head."""
    torch.manual_seed(0)
    made = [nn.Embedding(VOCAB, HIDDEN, **_EXACT)]
    made += [Twice(1 + k) if k == _TIED else Block(1 + k, k == _SHIFTED) for k in range(_BLOCKS)]
    made[1 + _FROZEN].requires_grad_(False)
    return nn.ModuleList([*made, nn.Linear(HIDDEN, VOCAB, bias=False, **_EXACT)])


def shifts(model_layers: nn.ModuleList, rank: int, batch: int) -> None:
    """Has this rank's batch use `shift`, or not."""
    for layer in model_layers:
        layer.uses_shift = (rank + batch) % 2 == 1


def run(model_layers: nn.ModuleList, rank: int, batch: int) -> torch.Tensor:
    """The mean loss, without any ranks."""
    shifts(model_layers, rank, batch)
    h = tokens(rank, batch)
    for layer in model_layers:
        h = layer(h)
    return loss(h, rank, batch)


def tokens(rank: int, batch: int) -> torch.Tensor:
    """This rank's examples in this batch."""
    return toy.examples(rank, batch, _ROWS)


def loss(logits: torch.Tensor, rank: int, batch: int) -> torch.Tensor:
    """The mean over this rank's examples in this batch."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens(rank, batch)[:, 1:].reshape(-1))


def activation_bytes() -> int:
    """What forward keeps of the layers' inputs, with the loss."""
    mine = layers()
    with PeakBytes() as memory:
        before = _bytes(mine)
        kept = run(mine, 0, 1)
        after = memory.live_bytes()
    del kept
    return after - before


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def pieces(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    """What each rank keeps, padding included."""
    flat = tensor.detach().flatten()
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % n)])
    return [piece.clone() for piece in padded.chunk(n)]


def whole(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The tensor of which these are the pieces."""
    return torch.cat(parts)[: shape.numel()].view(shape)


def bounds(shape: torch.Size, n: int) -> list[tuple[int, int]]:
    """Of each rank's elements, without padding."""
    size = -(-shape.numel() // n)
    edges = [min(k * size, shape.numel()) for k in range(n + 1)]
    return list(pairwise(edges))


def padded_bytes(p: torch.Tensor, n: int) -> int:
    """Of the parameter with its padding."""
    return -(-p.numel() // n) * n * p.element_size()
