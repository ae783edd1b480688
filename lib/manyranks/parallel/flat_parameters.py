"""Flat parameters: end to end in one row, which is cut into one equal shard per rank.

    N     ranks that share the row
    E     elements of the row: its parameters, and padding up to a multiple of N
    S     elements of a shard, E / N

The whole row comes by an all-gather, and its gradient leaves by a reduce-scatter. Either
way a rank sends (N − 1)/N of the row. PyTorch's FSDP calls a row a FlatParameter.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group, members, wait
from manyranks.parallel.collectives.ring import add_up
from manyranks.parallel.shard import local

Named = dict[str, nn.Parameter]


class Row:
    """Says where parameters lie in a row, and which part of each belongs to this rank.

    named: parameters of one dtype by name, in the order of the row
    group: the ranks that share the row, None for all
    """

    def __init__(self, named: Named, group: Group = None):
        everyone = members(group)
        self.names, self.n, self.rank = tuple(named), len(everyone.ranks), everyone.place
        self.shapes = [p.shape for p in named.values()]
        ends = list(accumulate((shape.numel() for shape in self.shapes), initial=0))
        self.elements = ends[-1]  # without padding
        self.size = -(-self.elements // self.n)  # S
        begin = self.rank * self.size
        inside = [min(max(end - begin, 0), self.size) for end in ends]
        # For each parameter: its place in this rank's shard, and the element it starts at.
        self.spans = [slice(*pair) for pair in pairwise(inside)]
        self.firsts = [max(begin - end, 0) for end in ends[:-1]]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Makes a row of these tensors, padded with zeros."""
        row_E = tensors[0].detach().new_zeros(self.n * self.size)
        for part, tensor in zip(self.parts(row_E), tensors, strict=True):
            part.copy_(tensor.detach())
        return row_E

    def join(self, shards: Sequence[Tensor], shard_S: Tensor) -> Tensor:
        """Copies this rank's shards of the parameters into its shard of the row."""
        for span, shard in zip(self.spans, shards, strict=True):
            shard_S[span] = local(shard).detach()
        return shard_S

    def parts(self, row_E: Tensor) -> list[Tensor]:
        """Cuts a row into its parameters, in their shapes, without copying."""
        parts = row_E[: self.elements].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def own(self, row_E: Tensor) -> Tensor:
        """Returns this rank's shard of a row, without copying."""
        return row_E.view(self.n, -1)[self.rank]

    def split(self, shard_S: Tensor) -> list[Tensor]:
        """Cuts this rank's shard of a row into its shards of the parameters."""
        return [shard_S[span] for span in self.spans]

    @torch.no_grad()
    def take_gradients(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Moves gradients, divided by N, into a new row; a missing one counts as −0.

        A sum is −0 where all ranks have −0: nobody used that parameter. Each gradient is
        dropped as soon as it's copied, so that only one exists twice. Raises ValueError
        for a sparse gradient.
        """
        zero = parameters[0].new_zeros((), dtype=dtype)
        row_E = parameters[0].new_empty(self.n * self.size, dtype=dtype)
        row_E[self.elements :] = 0
        each = zip(self.parts(row_E), parameters, self.names, strict=True)
        for part, parameter, name in each:
            if parameter.grad is None:
                part.fill_(-0.0)
            elif parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{name} has a sparse gradient, and only dense ones are averaged: "
                    "in an embedding, say sparse=False"
                )
            else:
                # 0 + −0 is 0: so −0 stands for no gradient, and for nothing else.
                torch.add(zero, parameter.grad.to(dtype), alpha=1 / self.n, out=part)
                parameter.grad = None
        return row_E

    def gradients(self, mean_S: Tensor, absent: Sequence[bool]) -> list[Tensor | None]:
        """Cuts this rank's shard of a mean; None for what no rank had a gradient of.

        absent: the parameters that this rank had none of
        """
        return [
            None if missing and grad.numel() and _is_minus_zero(grad) else grad
            for grad, missing in zip(self.split(mean_S), absent, strict=True)
        ]


def _is_minus_zero(grad: Tensor) -> bool:
    return bool(((grad == 0) & grad.signbit()).all())


def reduce_scatter(row_E: Tensor, group: Group = None) -> Tensor:
    """Returns this rank's shard of the sum over the ranks. The sums are made in row_E.

    gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes: the first
    half of our ring all-reduce replaces it. NCCL's own is used as it is.
    """
    everyone = members(group)
    chunks = row_E.chunk(len(everyone.ranks))
    if dist.get_backend(group) == "gloo":
        wait(add_up(chunks, everyone))
    else:
        dist.reduce_scatter_single(chunks[everyone.place], row_E, group=group)
    return chunks[everyone.place].clone()


def start_reduce_scatter(row_E: Tensor, group: Group = None) -> Callable[[], Tensor]:
    """Starts a reduce-scatter; call what it returns to wait for this rank's shard.

    A ring needs every rank at every hop, so it can't run beside other work. On gloo each
    rank sends shard k of its row straight to rank k, which adds up what arrives in the
    order of the ranks: an all-to-all, with the same (N − 1)/N of the row per rank.
    row_E: used up; gloo's thread would keep its memory for a while after the end
    """
    n = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo":
        shard_S = row_E.new_empty(row_E.numel() // n)
        work = dist.reduce_scatter_single(shard_S, row_E, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return shard_S

        return arrived
    arriving_E = torch.empty_like(row_E)
    work = dist.all_to_all_single(arriving_E, row_E, group=group, async_op=True)

    def shard() -> Tensor:
        work.wait()
        first_S, *others = arriving_E.view(n, -1)
        sum_S = first_S.clone()
        for other_S in others:
            sum_S += other_S
        for used in (row_E, arriving_E):
            used.untyped_storage().resize_(0)
        return sum_S

    return shard
