"""The small model that checks of data parallelism train, and what one process makes of it: right, and wrong in known ways."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
Gradients = list[dict[str, torch.Tensor | None]]  # by rank; None where there is no gradient

HIDDEN, RATE = 48, 0.1
VOCAB = HIDDEN + 1  # a layer has as many bytes as the embedding, so that gloo does not see it where they are mixed up
ROWS, LENGTH = 3, 6
FROZEN_BYTES, TIED_BYTES = 8 * HIDDEN * HIDDEN, 8 * VOCAB * HIDDEN
_EXACT = {"dtype": torch.float64}  # with digits that float32 has not


class Toy(nn.Module):
    """A tied weight, a frozen layer, a layer that only some examples use, buffers, one of them of whole numbers; float64.

    `detour` is registered before `first` and used after it: where it is used, its bucket is full before the one in front of it.
    """

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, **_EXACT)
        self.detour = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.first = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.frozen = nn.Linear(HIDDEN, HIDDEN, bias=False, **_EXACT)
        self.second = nn.Linear(HIDDEN, HIDDEN, **_EXACT)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, **_EXACT)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(3, **_EXACT))
        self.register_buffer("count", torch.tensor(seed))

    @classmethod
    def bytes(cls) -> int:
        """Of parameters and buffers."""
        model = cls(0)
        return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])

    def forward(self, x_BS, detour: bool = False):
        """Logits of the next token."""
        h = torch.tanh(self.first(self.embedding(x_BS)))
        h = h + torch.tanh(self.detour(h)) if detour else h
        return self.head(h + self.second(torch.tanh(self.frozen(h))) * self.scale.mean())


def examples(rank: int, batch: int, rows: int = ROWS) -> torch.Tensor:
    """[rows, LENGTH] tokens, others for each rank and batch."""
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    return torch.randint(VOCAB, (rows, LENGTH), generator=generator)


def detours(rank: int, batch: int) -> bool:
    """Whether this rank's batch uses the layer `detour`: in some on no rank, in some on one, in some on all but one."""
    return (batch == 1 and rank == 1) or (batch % 3 == 2 and rank != 0)


def loss_of(model: nn.Module, rank: int, batch: int, rows: int = ROWS) -> torch.Tensor:
    """The mean loss over this rank's examples in this batch."""
    x_BS = examples(rank, batch, rows)
    logits = model(x_BS, detours(rank, batch))
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), x_BS[:, 1:].reshape(-1))


def weights(model: nn.Module) -> Tensors:
    """A copy of the parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: Toy) -> Tensors:
    """A copy of the gradients, by the parameter's name; zeros where there is none."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}


def own(model: Toy, losses: Iterable[Callable[[Toy], torch.Tensor]]) -> dict[str, torch.Tensor | None]:
    """The gradients of the losses' sum on this model; None where there is none."""
    model.zero_grad()
    for loss in losses:
        loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def mean(grads: Gradients) -> Gradients:
    """The mean over the ranks, on every rank; one that is missing counts as zero."""
    return weighted(grads, [1] * len(grads))


def weighted(grads: Gradients, counts: list[int]) -> Gradients:
    """The mean over the ranks' examples, of which each has so many."""
    share = {name: [_filled(grads, r, name) * c for r, c in enumerate(counts)] for name in grads[0]}
    return [{name: sum(terms) / sum(counts) for name, terms in share.items()} for _ in grads]


def _filled(grads: Gradients, rank: int, name: str) -> torch.Tensor:
    there = next((g[name] for g in grads if g[name] is not None), torch.zeros(()))
    return torch.zeros_like(there) if grads[rank][name] is None else grads[rank][name]


def trained(batches: list[list[int]], seeds: list[int], combine: Callable[[Gradients, int], Gradients]) -> list[Tensors]:
    """The replicas' weights after plain SGD, one step for each list of (micro-)batches; seeds: of each rank's first weights.

    combine: from the ranks' own gradients, and the number of the step, to those that the ranks use.
    """
    models = [Toy(seed) for seed in seeds]
    for step, parts in enumerate(batches):
        found = [own(m, [lambda m, r=r, b=b: loss_of(m, r, b) for b in parts]) for r, m in enumerate(models)]
        found = [{name: None if g is None else g.clone() for name, g in mine.items()} for mine in found]
        for model, mine in zip(models, combine(found, step), strict=True):
            _step(model, mine)
    return [weights(model) for model in models]


@torch.no_grad()
def _step(model: Toy, grads: dict[str, torch.Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        if (grad := grads.get(name)) is not None:
            parameter -= RATE * grad
