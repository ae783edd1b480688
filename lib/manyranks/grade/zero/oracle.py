"""What one process makes of a training, each rank with its shards: right, and wrong in known ways."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from manyranks.grade import toy
from manyranks.grade.scripts import Tensors
from manyranks.grade.toy import Gradients
from manyranks.grade.zero import models

Parts = list[Gradients]  # the ranks' own gradients, for each backward of a step
ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}  # eps: that it matters how large gradients are
SGD = {"lr": 0.1, "momentum": 0.9}


def means(parts: Parts, step: int) -> Gradients:
    """The sum over a step's backward passes of the mean over the ranks, on every rank."""
    return added([toy.mean(grads) for grads in parts])


def added(parts: Parts) -> Gradients:
    """The sums over the backward passes; where there is one, nothing else is made."""
    return [{name: sum(part[rank][name] for part in parts) for name in parts[0][rank]} for rank in range(len(parts[0]))]


class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with the defaults of torch's, which takes seconds to import."""

    def __init__(self, parameters: list[nn.Parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self._parameters, self._lr, self._betas, self._eps, self._decay = parameters, lr, betas, eps, weight_decay
        self._first = [torch.zeros_like(p) for p in parameters]
        self._second = [torch.zeros_like(p) for p in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        one, two = self._betas
        for p, first, second in zip(self._parameters, self._first, self._second, strict=True):
            first.lerp_(p.grad, 1 - one)
            second.lerp_(p.grad**2, 1 - two)
            p.mul_(1 - self._lr * self._decay)
            root = (second / (1 - two**self._steps)).sqrt() + self._eps
            p.sub_(self._lr * first / (1 - one**self._steps) / root)


class Momentum:
    """SGD with momentum, as torch's."""

    def __init__(self, parameters: list[nn.Parameter], lr=1e-3, momentum=0.0):
        self._parameters, self._lr, self._momentum = parameters, lr, momentum
        self._past = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, past in zip(self._parameters, self._past, strict=True):
            past.mul_(self._momentum).add_(p.grad)
            p.sub_(self._lr * past)


@dataclass(frozen=True)
class Training:
    """n ranks train what `model` makes. batches: a step's backward passes; loss: of (model, rank, batch).

    combine: from the ranks' own gradients to those that each rank's shards get; learns: whether a rank's shard of a parameter
    is trained; shown: "after", or which parameters all compute with: those "before" a step, the "first" ones, or "own", where
    each rank has only its own shard from the optimizer.
    """

    n: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    batches: list[list[int]]
    combine: Callable[[Parts, int], Gradients] = means
    learns: Callable[[int, str], bool] = lambda rank, name: True
    shown: str = "after"
    optimizer: type = AdamW
    settings: tuple = tuple(ADAMW.items())
    anew: bool = False  # a new optimizer in each step
    frozen_too: bool = False  # the optimizer has frozen parameters, too, with gradients of zeros

    def weights(self) -> list[Tensors]:
        """What each rank computes with in the end."""
        return self.both()[0]

    def both(self) -> tuple[list[Tensors], list[Tensors]]:
        """What each rank computes with in the end, and what its shards are, without padding."""
        ranks, trained = self._trained()
        master = toy.weights(trained)
        shards = [{name: self._cut(tensor, rank) for name, tensor in master.items()} for rank in range(self.n)]
        return [toy.weights(model) for model in ranks], shards

    def _cut(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        first, end = models.bounds(tensor.shape, self.n)[rank]
        return tensor.flatten()[first:end]

    def _trained(self) -> tuple[list[nn.Module], nn.Module]:
        ranks, master = [self.model() for _ in range(self.n)], self.model()
        optimizer = self._optimizer(master)
        for step, batches in enumerate(self.batches):
            parts = [[self._own(model, rank, batch) for rank, model in enumerate(ranks)] for batch in batches]
            before = toy.weights(master)
            self._give(master, self.combine(parts, step))
            optimizer = self._optimizer(master) if self.anew else optimizer
            optimizer.step()
            self._keep(master, before)
            for rank, model in enumerate(ranks):
                self._show(model, rank, master, before)
        return ranks, master

    def _optimizer(self, master: nn.Module) -> "AdamW | Momentum":
        return self.optimizer([p for p in master.parameters() if self._has(p)], **dict(self.settings))

    def _has(self, p: nn.Parameter) -> bool:
        return p.requires_grad or self.frozen_too

    def _own(self, model: nn.Module, rank: int, batch: int) -> dict[str, torch.Tensor | None]:
        grads = toy.own(model, [lambda m: self.loss(m, rank, batch)])
        return {name: None if grad is None else grad.clone() for name, grad in grads.items()}

    def _give(self, master: nn.Module, grads: Gradients) -> None:
        """Each shard gets its gradient from its own rank."""
        for name, p in master.named_parameters():
            if self._has(p):
                p.grad = torch.zeros_like(p)
                for rank, (first, end) in enumerate(models.bounds(p.shape, self.n)):
                    if (grad := grads[rank].get(name)) is not None:
                        p.grad.view(-1)[first:end] = grad.expand_as(p).flatten()[first:end]

    @torch.no_grad()
    def _keep(self, master: nn.Module, before: Tensors) -> None:
        for name, p in master.named_parameters():
            for rank, (first, end) in enumerate(models.bounds(p.shape, self.n)):
                if not self.learns(rank, name):
                    p.view(-1)[first:end] = before[name].flatten()[first:end]

    @torch.no_grad()
    def _show(self, model: nn.Module, rank: int, master: nn.Module, before: Tensors) -> None:
        for (name, p), trained in zip(model.named_parameters(), master.parameters(), strict=True):
            if self.shown == "after":
                p.copy_(trained)
            elif self.shown == "before":
                p.copy_(before[name])
            elif self.shown == "own":
                first, end = models.bounds(p.shape, self.n)[rank]
                p.view(-1)[first:end] = trained.flatten()[first:end]


def scaled(factor: float) -> Callable[[Parts, int], Gradients]:
    """The means times a factor."""
    return lambda parts, step: [{k: g * factor for k, g in mine.items()} for mine in means(parts, step)]


def moved(parts: Parts, step: int) -> Gradients:
    """The means, each with its padding in front."""
    n = len(parts[0])
    return [{name: _moved(grad, n) for name, grad in mine.items()} for mine in means(parts, step)]


def _moved(grad: torch.Tensor, n: int) -> torch.Tensor:
    flat = torch.cat([grad.new_zeros(-grad.numel() % n), grad.flatten()])
    return flat[: grad.numel()].view(grad.shape)


def own(parts: Parts, step: int) -> Gradients:
    """Each rank's own gradients, with zeros for None."""
    return added([filled(grads) for grads in parts])


def filled(grads: Gradients) -> Gradients:
    """Zeros for None."""
    zeros = {name: grad * 0 for name, grad in toy.mean(grads)[0].items()}
    return [{name: zeros[name] if grad is None else grad for name, grad in mine.items()} for mine in grads]


def of_users(parts: Parts, step: int) -> Gradients:
    """The mean over the ranks that have a gradient."""
    return added([_of_users(grads) for grads in parts])


def _of_users(grads: Gradients) -> Gradients:
    users = {name: max(1, sum(mine[name] is not None for mine in grads)) for name in grads[0]}
    return [{name: grad * len(grads) / users[name] for name, grad in mine.items()} for mine in toy.mean(grads)]


def left_none(parts: Parts, step: int) -> Gradients:
    """The means, but zeros where a rank itself has no gradient."""
    kept = [
        [{k: g * 0 if own[k] is None else g for k, g in mine.items()} for own, mine in zip(grads, toy.mean(grads), strict=True)]
        for grads in parts
    ]
    return added(kept)


def last_only(parts: Parts, step: int) -> Gradients:
    """Of a step's backward passes, the last one's."""
    return means(parts[-1:], step)


def first_only(parts: Parts, step: int) -> Gradients:
    """Of a step's backward passes, the first one's."""
    return means(parts[:1], step)


def running(parts: Parts, step: int) -> Gradients:
    """Of the whole gradients, each pass's with all before it: they were not dropped when they had left."""
    return means([part for k in range(len(parts)) for part in parts[: k + 1]], step)


def never_dropped() -> Callable[[Parts, int], Gradients]:
    """Of the whole gradients, each pass's with all before it, those of earlier steps, too."""
    past: Parts = []

    def combine(parts: Parts, step: int) -> Gradients:
        earlier = list(past)
        past.extend(parts)
        return means([part for k in range(len(parts)) for part in earlier + parts[: k + 1]], step)

    return combine


def never_forgotten() -> Callable[[Parts, int], Gradients]:
    """The sums of all steps."""
    past: list[Gradients] = []

    def combine(parts: Parts, step: int) -> Gradients:
        past.append(means(parts, step))
        return added(past)

    return combine
