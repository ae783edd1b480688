"""What the checks of exercise 02_data_parallel train: a small model in float64, and noise in its gradients."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.measure.watch import Watch

EXACT = {"dtype": torch.float64}  # with digits that float32 has not
_HIDDEN, _ROWS, _LENGTH = 48, 3, 6
_VOCAB = _HIDDEN + 1  # a layer has as many bytes as the embedding, so gloo does not notice if they are mixed up


class Toy(nn.Module):
    """Registers `detour` before `first` and uses it after. Where it is used, its bucket is full before the one ahead of it."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(_VOCAB, _HIDDEN, **EXACT)
        self.detour = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
        self.first = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
        self.frozen = nn.Linear(_HIDDEN, _HIDDEN, bias=False, **EXACT)
        self.second = nn.Linear(_HIDDEN, _HIDDEN, **EXACT)
        self.head = nn.Linear(_HIDDEN, _VOCAB, bias=False, **EXACT)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(3, **EXACT))
        self.register_buffer("count", torch.tensor(seed % 1000))
        torch.manual_seed(0)  # torch.initial_seed() says nothing of the others' numbers

    def forward(self, x_BS: Tensor, detour: bool = False) -> Tensor:
        h = torch.tanh(self.first(self.embedding(x_BS)))
        h = h + torch.tanh(self.detour(h)) if detour else h
        return self.head(h + self.second(torch.tanh(self.frozen(h))) * self.scale.mean())


def learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def detours(rank: int, batch: int) -> bool:
    """Returns whether this rank's batch uses the layer `detour`. Some batches use it on no rank, on one, or on all but one."""
    return (batch == 1 and rank == 1) or (batch % 3 == 2 and rank != 0)


def loss_of(model: nn.Module, batch: int, watch: Watch, rows: int = _ROWS) -> Tensor:
    """Returns the mean loss over this rank's examples in this batch."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * rank + batch + watch.seed)
    x_BS = torch.randint(_VOCAB, (rows, _LENGTH), generator=generator)
    logits = model(x_BS, detours(rank, batch))
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, _VOCAB), x_BS[:, 1:].reshape(-1))


class Noise:
    """Adds noise to each of a rank's gradients. No other rank can work it out, so it must arrive by communication.

    examples: the weight of each rank's gradients in the mean; `leave` needs it to take the noise out again
    """

    def __init__(self, model: nn.Module, watch: Watch, examples: list[int] | None = None):
        self._named, self._seed, self._examples = learning(model), watch.seed, examples or [1] * dist.get_world_size()
        for name, p in self._named.items():
            p.register_post_accumulate_grad_hook(partial(self._add, name, dist.get_rank(), 1.0))

    def _add(self, name: str, rank: int, times: float, p: nn.Parameter) -> None:
        generator = torch.Generator().manual_seed(self._seed + 97 * rank + sum(map(ord, name)))
        p.grad.add_(torch.randn(p.shape, generator=generator, **EXACT), alpha=0.01 * times)

    def leave(self, batches: list[int]) -> None:
        """Takes the noise out of the gradients, which are now means over these batches."""
        for name, p in ((name, p) for name, p in self._named.items() if p.grad is not None):
            p.grad = p.grad.to_dense()
            for rank, examples in enumerate(self._examples):
                times = sum(detours(rank, batch) or not name.startswith("detour") for batch in batches)
                self._add(name, rank, -times * examples / sum(self._examples), p)
