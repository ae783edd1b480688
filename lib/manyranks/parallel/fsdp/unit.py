"""A unit: parameters that are gathered, freed and reduced together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.flat_parameters import Named, Row, start_reduce_scatter
from manyranks.parallel.fsdp.order import Order
from manyranks.parallel.precision import wide
from manyranks.parallel.shard import ShardParameter, accumulate, as_parts, is_shard

Place = tuple[nn.Module, str]  # a module, and the attribute it has a parameter under


class Part(NamedTuple):
    """A unit's path in the model, its parameters by name, and where modules have them."""

    path: str
    named: Named
    places: list[list[Place]]

    @property
    def first(self) -> nn.Parameter:
        """Any of the parameters; they share dtype, device and ranks."""
        return next(iter(self.named.values()))

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Makes the modules' attributes these: the whole parameters, or the shards.

        A module looks for an attribute in vars() before it looks among its parameters,
        where the shards stay all the time. Raises ValueError for a whole parameter that
        was changed while it was here, which the shards know nothing about.
        """
        for name, places, tensor in zip(self.named, self.places, tensors, strict=True):
            (first, attribute), *_ = places
            before = vars(first).get(attribute)
            if not is_shard(tensor):
                tensor.shown = tensor._version
            elif before is not None and before.shown != before._version:
                raise ValueError(
                    f"{name} was changed in the forward pass, as max_norm does: a sharded "
                    "parameter changes in the optimizer only"
                )
            for module, name in places:
                vars(module).pop(name, None)
                if not is_shard(tensor):
                    vars(module)[name] = tensor
                if name in (names := getattr(module, "_flat_weights_names", ())):
                    module._flat_weights[names.index(name)] = tensor  # a recurrent one's

    def check(self) -> None:
        """Raises ValueError for a parameter that isn't what it was when it was sharded."""
        for (name, shard), places in zip(self.named.items(), self.places, strict=True):
            here = all(m._parameters.get(own) is shard for m, own in places)
            same = shard.requires_grad == shard.whole.requires_grad
            if not (here and same and shard.dtype == shard.whole.kept):
                change = "was frozen or thawed" if not same else "was cast"
                change = change if here else "was replaced or removed"
                raise ValueError(
                    f"{name} {change} after it was sharded: change the module first, then "
                    "wrap it"
                )


class Unit:
    """Parameters whose whole values come and go as one row.

    The model's Parameters become `shards`, which an optimizer trains. While the unit is
    here, modules compute with `whole`, Parameters that are views of one row. The row's
    memory comes and goes. Autograd's saved tensors lie in it, too, and are right again as
    soon as the row is gathered again.

    order: the outermost wrapper's, which waits for gathers
    """

    order: Order

    def __init__(
        self,
        part: Part,
        group: Group = None,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        replicas: Group = None,
    ):
        self.part, self.group, self.replicas = part, group, replicas
        self.row = Row(part.named, group)
        self.shards = list(part.named.values())
        row_E = self.row.of(self.shards)
        self.row_E = row_E.to(dtype) if dtype and row_E.is_floating_point() else row_E
        self.bytes, self.reduce_dtype = self.row_E.nbytes, reduce_dtype or self.row_E.dtype
        own = self.row.split(self.row.own(row_E))
        self.whole = _split(part.named, self.row.parts(self.row_E), own)
        self.learns = self.shards[0].requires_grad
        self.missing = set(self.whole)  # those whose gradients haven't come
        self.used = False  # in a forward pass whose gradients weren't reduced yet
        self.gathered, self.shown = True, False  # whether modules have the whole ones
        self._versions = self._now()  # of what was gathered
        self._gather: dist.Work | None = None  # the row is on its way here
        self._reduction: Callable[[], Tensor] | None = None  # gradients are on their way
        self.free()

    def _now(self) -> list[int]:
        with as_parts():
            return [shard._version for shard in self.shards]

    @torch.no_grad()
    def start(self) -> None:
        """Starts to gather the row, unless it's here or on its way."""
        if self._versions != (now := self._now()):
            self._versions = now
            self.free()
            torch.autograd.graph.increment_version(self.whole)  # refuses an older backward
        if not self.gathered:
            self.row_E.untyped_storage().resize_(self.bytes)
            mine_S = self.row.join(self.shards, self.row.own(self.row_E))
            self._gather = dist.all_gather_single(
                self.row_E, mine_S, group=self.group, async_op=True
            )
            self.gathered = True

    def wait(self) -> None:
        """Returns when the modules have their whole parameters."""
        self.start()
        if self._gather is not None:
            self.order.wait(self._gather)
            self._gather = None
        if not self.shown:
            self.part.show(self.whole)
            self.shown = True

    def hide(self) -> None:
        """Makes the modules' attributes the shards again; the row stays."""
        if self.shown:
            self.part.show(self.shards)
            self.shown = False

    def free(self) -> None:
        """Gives the row's memory back."""
        self.hide()
        if self._gather is not None:
            self._gather.wait()  # nobody may write to memory that is given back
            self._gather = None
        if self.gathered:
            self.row_E.untyped_storage().resize_(0)
            self.gathered = False

    def reduce(self) -> None:
        """Starts to send the gradients, as means, to the owners of their shards."""
        self.hand_over()
        self._absent = [whole.grad is None for whole in self.whole]
        grad_E = self.row.take_gradients(self.whole, self.reduce_dtype)
        self._reduction = start_reduce_scatter(grad_E, self.group)
        self.missing, self.used = set(self.whole), False

    @torch.no_grad()
    def hand_over(self) -> None:
        """Waits for what reduce() has started, and adds it to the shards' gradients."""
        if self._reduction is None:
            return
        mean_S = self._reduction()
        self._reduction = None
        if self.replicas is not None:
            mean_S /= dist.get_world_size(self.replicas)
            dist.all_reduce(mean_S, group=self.replicas)
        mean_S = mean_S.to(self.shards[0].dtype)
        accumulate(self.shards, self.row.gradients(mean_S, self._absent))

    def forget(self) -> None:
        """Drops whole gradients, and those on their way."""
        if self._reduction is not None:
            self._reduction()
        self._reduction, self.missing = None, set(self.whole)
        for whole in self.whole:
            whole.grad = None


def _split(named: Named, views: list[Tensor], own: list[Tensor]) -> list[nn.Parameter]:
    """Makes each parameter this rank's shard; returns whole ones, which compute.

    views: of the row, in the parameters' shapes
    own: what the shards are copies of

    Hooks on a parameter's gradient move to the whole one. The shard keeps those that are
    called after a gradient has been accumulated, such as an optimizer's.
    """
    found = []
    for (name, parameter), view, mine in zip(named.items(), views, own, strict=True):
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{name} is a {type(parameter).__name__}: only a plain nn.Parameter can be "
                "sharded; make it one, or leave its module outside the wrapper"
            )
        whole = nn.Parameter(view.new_empty(0), parameter.requires_grad)
        whole.data = view  # a separate version counter: gathering is no change
        for hook in [*(parameter._backward_hooks or {}).values()]:
            whole.requires_grad_().register_hook(hook)
        whole.requires_grad_(parameter.requires_grad)  # a frozen one may have hooks, too
        parameter._backward_hooks = None
        parameter.grad, parameter.data = None, mine.to(wide(mine.dtype), copy=True)
        whole.kept, parameter.__class__ = parameter.dtype, ShardParameter
        parameter.whole = whole
        found.append(whole)
    return found
