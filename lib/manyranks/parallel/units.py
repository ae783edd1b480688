"""Units: what stage 3 of ZeRO gathers before it is used, and forgets afterwards.

Between uses a rank holds one shard of a unit. The parameters stay where they are in the
module. While the unit is there they are views of a row whose memory comes and goes: what
autograd has saved for backward is there again when the row is gathered again. While it is
not, they have their shapes and read as NaN.
"""

import math
from collections.abc import Callable, Hashable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.sharding import Named, ShardedRow

Kind = Callable[[nn.Parameter], Hashable]
Group = dist.ProcessGroup | None
Sharers = Callable[[nn.Parameter], Group] | None  # the ranks that have a parameter


class Unit(ShardedRow):
    """A row that is only there between gather() and free().

    dtype: of the row, and so of what computes; reduce_dtype: that gradients travel in; None
    for the row's. shard_S keeps the parameters' own dtype, 32 bits at least.
    replicas: ranks with the same shard, over which its gradient is averaged, too.
    """

    def __init__(
        self,
        name: str,
        named: Named,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        replicas: dist.ProcessGroup | None = None,
    ):
        super().__init__(named, group)
        self.name, self._reduce_dtype, self._replicas = name, reduce_dtype, replicas
        self.used = False  # in a forward pass whose gradient was not reduced yet
        self.learns = self.parameters[0].requires_grad
        shard_S = self.shard_S.detach().clone()
        self.shard_S = nn.Parameter(shard_S, requires_grad=self.learns)
        self.row_E = self.row_E.to(dtype or self.row_E.dtype)
        self._whole = self.parts(self.row_E)
        nothing = torch.tensor(math.nan).to(self.row_E)
        self._absent = [nothing.expand(p.shape) for p in self.parameters]
        self._work: dist.Work | None = None
        self._bytes, self._version = self.row_E.nbytes, 0
        self.gathered = True
        self.free()

    @torch.no_grad()
    def start(self) -> None:
        """Starts to gather, unless it is there: the row's memory is back at once."""
        if self.gathered and self._version != self.shard_S._version:
            self.free()  # the optimizer has changed the shards since
        if not self.gathered:
            self.row_E.untyped_storage().resize_(self._bytes)
            mine_S = self.shard_S.to(self.row_E.dtype)
            self._work = dist.all_gather_single(
                self.row_E, mine_S, group=self.group, async_op=True
            )
            self.gathered, self._version = True, self.shard_S._version

    def gather(self) -> None:
        """Afterwards the parameters are there."""
        self.start()
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._show(self._whole)

    def free(self) -> None:
        """Gives the row's memory back."""
        if self._work is not None:
            self._work.wait()  # nobody may write to memory that is given back
            self._work = None
        if self.gathered:
            self._show(self._absent)
            self.row_E.untyped_storage().resize_(0)
            self.gathered = False

    def _show(self, parts: list[Tensor]) -> None:
        for part, parameter in zip(parts, self.parameters, strict=True):
            parameter.data = part

    def mean(self, dtype: torch.dtype | None = None) -> Tensor:
        mean_S = super().mean(dtype or self._reduce_dtype)
        if self._replicas is not None:
            mean_S /= dist.get_world_size(self._replicas)
            dist.all_reduce(mean_S, group=self._replicas)
        return mean_S

    @torch.no_grad()
    def reduce(self) -> None:
        """The mean of all ranks' gradients, to the shards; the whole ones are dropped."""
        mean_S, grad_S = self.mean().to(self.shard_S.dtype), self.shard_S.grad
        self.shard_S.grad = mean_S if grad_S is None else grad_S.add_(mean_S)
        self.missing, self.used = set(self.parameters), False

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the whole parameters, by name, as the optimizer has them."""
        whole_E = self.shard_S.new_empty(self.row_E.numel())
        dist.all_gather_single(whole_E, self.shard_S.detach(), group=self.group)
        return dict(zip(self.names, (p.clone() for p in self.parts(whole_E)), strict=True))


def own_parameters(path: str, module: nn.Module) -> Named:
    """The module's own parameters, and those of its lists, which have no forward."""
    own = dict(module.named_parameters(path, recurse=False))
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            own |= dict(child.named_parameters(f"{path}.{name}" if path else name))
    return own


def kinds(named: Named, kind: Kind | None = None) -> list[Named]:
    """Parted by dtype, device, whether they learn, and what kind() says of them."""
    parts: dict[tuple, Named] = {}
    for name, p in named.items():
        key = p.dtype, p.device, p.requires_grad, kind and kind(p)
        parts.setdefault(key, {})[name] = p
    return list(parts.values())


def by_name(params: Iterable) -> Named:
    """An optimizer's params by name, else by number. A tied one counts once."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    pairs = [p if isinstance(p, tuple) else (str(k), p) for k, p in enumerate(listed)]
    first = {p: name for name, p in reversed(pairs)}
    return {name: p for name, p in pairs if first[p] == name}
