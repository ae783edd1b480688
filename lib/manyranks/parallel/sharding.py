"""Sharding: parameters end to end in one row, of which each rank keeps a part.

    N     ranks that share the work
    E     elements of a row: those of its parameters, and padding to a multiple of N
    S     elements of a shard, E / N

A rank keeps shard_S, on which the optimizer works. The whole row comes by an all-gather and
its gradient leaves by a reduce-scatter; in each of them a rank sends (N − 1)/N of the row.
"""

from collections.abc import Iterable
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import members, wait
from manyranks.parallel.collectives.ring import add_up

Named = dict[str, nn.Parameter]
_HALF = (torch.bfloat16, torch.float16)


def reduce_scatter(row_E: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's shard of the sum over the ranks. row_E is used up: sums are made in it.

    gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes: the first
    half of our ring all-reduce takes its place. NCCL's own is used as it is.
    """
    everyone = members(group)
    chunks = row_E.chunk(len(everyone.ranks))
    if dist.get_backend(group) == "gloo":
        wait(add_up(chunks, everyone))
    else:
        dist.reduce_scatter_single(chunks[everyone.place], row_E, group=group)
    return chunks[everyone.place].clone()


@torch.no_grad()
def clip_grad_norm(
    shards: Iterable[Tensor],
    most: float,
    group: dist.ProcessGroup | None = None,
    holders: Iterable[int] = repeat(1),
) -> Tensor:
    """Scales the shards' gradients so that the norm of all ranks' together is at most that.

    holders: how many ranks have each shard. Returns the norm before. Raises ValueError for
    most below 0.
    """
    if not most >= 0:
        raise ValueError(f"most={most}: give the largest norm that a gradient may have")
    pairs = zip(shards, holders, strict=False)
    grads = [(shard.grad, count) for shard, count in pairs if shard.grad is not None]
    device = grads[0][0].device if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, count in grads:
        total += grad.square().sum(dtype=torch.float64) / count
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for grad, _ in grads:
        grad.mul_((most / (norm + 1e-6)).clamp(max=1).to(grad.dtype))
    return norm


class ShardedRow:
    """Parameters of one dtype, end to end in row_E, of which they become views.

    names, parameters: in the order of the row; shard_S: what this rank keeps of it, a
    Parameter for an optimizer, in 32 bits where the parameters have 16; grad_S: its part of
    the mean of all ranks' gradients.
    """

    def __init__(self, named: Named, group: dist.ProcessGroup | None = None):
        self.names, self.parameters, self.group = tuple(named), tuple(named.values()), group
        everyone = members(group)
        self._n, self._rank = len(everyone.ranks), everyone.place
        self.elements = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self.row_E = first.detach().new_zeros(self.elements + -self.elements % self._n)
        for part, parameter in zip(self.parts(self.row_E), self.parameters, strict=True):
            part.copy_(parameter.detach())
            parameter.data = part
        own_S = self.own(self.row_E)
        own_S = own_S.float() if own_S.dtype in _HALF else own_S
        self.shard_S = nn.Parameter(own_S, requires_grad=first.requires_grad)
        self.grad_S: Tensor | None = None
        self.missing = set(self.parameters)  # those whose gradients have not come

    @property
    def named(self) -> list[tuple[nn.Parameter, str]]:
        """Each parameter with its name."""
        return list(zip(self.parameters, self.names, strict=True))

    @property
    def has_masters(self) -> bool:
        """Whether shard_S is another copy than the row, in more bits."""
        return self.shard_S.dtype != self.row_E.dtype

    def parts(self, row_E: Tensor) -> list[Tensor]:
        """The parameters' parts of a row, in their shapes."""
        parts = row_E[: self.elements].split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def own(self, row_E: Tensor) -> Tensor:
        """This rank's part of a row."""
        return row_E.view(self._n, -1)[self._rank]

    def owned(self) -> list[tuple[nn.Parameter, int, slice]]:
        """What shard_S has of each parameter: from which element on, and where in it."""
        size, found, at = self.shard_S.numel(), [], 0
        begin = self._rank * size
        for parameter in self.parameters:
            first, stop = max(at, begin), min(at + parameter.numel(), begin + size)
            if first < stop:
                found.append((parameter, first - at, slice(first - begin, stop - begin)))
            at += parameter.numel()
        return found

    @torch.no_grad()
    def take_gradients(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradients, divided by N, in a new row; zeros where there is none.

        Each is dropped once it is in the row, so that they are not there twice. Raises
        ValueError for a sparse one.
        """
        row_E = self.row_E.new_empty(self.row_E.numel(), dtype=dtype)
        row_E[self.elements :] = 0
        for part, (parameter, name) in zip(self.parts(row_E), self.named, strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{name} has a sparse gradient, and only dense ones are averaged: "
                    "in an embedding, say sparse=False"
                )
            else:
                torch.mul(parameter.grad.to(row_E.dtype), 1 / self._n, out=part)
                parameter.grad = None
        return row_E

    def mean(self, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's shard of the mean gradient of all; dtype: that it travels in."""
        return reduce_scatter(self.take_gradients(dtype), self.group)

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the mean of all ranks' gradients to grad_S; the whole ones are dropped."""
        mean_S = self.mean()
        self.grad_S = mean_S if self.grad_S is None else self.grad_S.add_(mean_S)
        self.missing = set(self.parameters)

    def hand_over(self) -> None:
        """The optimizer's shard gets its gradient, in its own dtype."""
        if self.grad_S is not None:
            self.shard_S.grad = self.grad_S.to(self.shard_S.dtype)

    def drop_gradients(self) -> None:
        """Forgets all gradients, whole ones and shards."""
        self.grad_S = self.shard_S.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def spread(self) -> dist.Work:
        """All shards start to come into the row: what the optimizer made is the model's."""
        own_S = self.own(self.row_E)
        if self.has_masters:
            own_S.copy_(self.shard_S)
        # So that a backward that needs what they were before can tell.
        torch.autograd.graph.increment_version(self.parameters)
        return dist.all_gather_single(self.row_E, own_S, group=self.group, async_op=True)
