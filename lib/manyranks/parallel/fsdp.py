"""FSDP: stage 3 of ZeRO by units of several layers, with communication beside computing.

    forward    gather unit 1 | compute 1, gather 2 | free 1, compute 2, gather 3 | …
    backward   compute L, gather L − 1 | reduce and free L, compute L − 1, gather L − 2 | …

Of a model of L units, two are whole at a time: the one that computes and the next one. The
last one stays after forward, for backward begins with it. So a rank sends, for Φ parameters
on N ranks, (N − 1)/N times Φ for forward, Φ less the last unit for backward, and Φ for the
gradients, each in the precision in which it travels.

    model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss(model(x), y).backward(); model.finish(); optimizer.step(); optimizer.zero_grad()

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv 2304.11277, sections 3 and 4.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from manyranks.parallel import replicas
from manyranks.parallel.sharding import clip_grad_norm
from manyranks.parallel.units import Kind, Sharers, Unit, kinds
from manyranks.parallel.zero import Zero3


class FullyShardedDataParallel(Zero3):
    """Gathers a unit before it is used and the next one beside it; frees, reduces, shards.

    module, group: as in Zero3. mesh: replicas × shards, instead of a group: the ranks of a
    row share the parameters, and gradients are averaged over the rows, too (HSDP).
    units: modules that are gathered as a whole; None for the module's children, and those
    of its lists. What is in none of them is gathered module by module.
    compute_dtype: of parameters that compute, and of inputs; reduce_dtype: that gradients
    travel in, None for compute_dtype. Shards and optimizer keep the parameters' own dtype.
    prefetch: how many units are gathered ahead; keep_last: whether the last one of forward
    stays for backward.
    kind: parts a unit further, by what it says of each parameter. Those of one kind, as of
    weight decay, have shards of their own, so that an optimizer can treat them their way:
    (unit.shard_S, kind(unit.parameters[0])) for unit in model.units. More shards are more
    messages, of the same bytes.
    shared_by: says of each parameter which ranks share it, where these are not all the
    group's, as of an expert; it is one group for parameters of one kind.
    The first step notes the order of the modules, from then on they are prefetched.
    Buffers keep their dtype. All ranks run the same modules in the same order.
    Raises ValueError for a mesh that is not of two dimensions, for a group and a mesh, and
    for units that are not in the module or lie in each other.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        units: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        prefetch: int = 1,
        keep_last: bool = True,
        kind: Kind | None = None,
        shared_by: Sharers = None,
    ):
        nn.Module.__init__(self)
        shards, self._replicas = _levels(group, mesh)
        self._whole = _checked(module, units)
        self._dtype, self._reduce_dtype = compute_dtype, reduce_dtype
        self._prefetch, self._keep_last, self._kind = prefetch, keep_last, kind
        self._shared_by = shared_by
        self._forward, self._backward = _Order(), _Order()
        self._done: list[Unit] = []  # not needed any more in this pass, but not freed
        self._computing: set[nn.Module] = set()  # their backward
        self._hooks: list[RemovableHandle] = []  # in the graphs since the last finish()
        self._synchronises = True
        if self._replicas is not None:
            replicas.broadcast([*module.parameters(), *module.buffers()], self._replicas)
        self._shard(module, shards, shared_by)
        needed = [unit for units in self._needs.values() for unit in units]
        self._shared = {unit for unit in needed if needed.count(unit) > 1}

    def _parts(self) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
        inside = {part for unit in self._whole for part in unit.modules()}
        for path, module, own in super()._parts():
            if module in self._whole:
                yield path, module, dict(module.named_parameters(path))
            elif module not in inside:
                yield path, module, own

    def _kinds(self, named: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
        return kinds(named, self._kind)

    def _unit(self, name: str, named: dict[str, nn.Parameter]) -> Unit:
        types = self._dtype, self._reduce_dtype
        one = next(iter(named.values()))
        group = self._shared_by(one) if self._shared_by else self.group
        return Unit(name, named, group, *types, replicas=self._replicas)

    def forward(self, *args, **kwargs):
        """The module's, of inputs in compute_dtype."""
        self._forward.begin()
        self._backward.begin()
        args, kwargs = tree_map(self._cast, (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._done += self.units  # also what was gathered ahead and not used
            self._free_done()
        return outputs

    def _cast(self, value):
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if floats and self._dtype else value

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        if _in_backward():  # it is computed again, from a checkpoint
            super()._before_forward(module, inputs)
            return self._start(self._backward.next(module, self._prefetch))
        self._free_done(but=self._needs[module])
        super()._before_forward(module, inputs)
        self._start(self._forward.next(module, self._prefetch))
        differ = [value for value in tree_leaves(inputs) if _differs(value)]
        if differ:
            over = partial(self._after_backward, module)
            self._hooks.append(torch.autograd.graph.register_multi_grad_hook(differ, over))

    def _after_forward(self, module: nn.Module, inputs: tuple, outputs) -> None:
        if _in_backward():
            return
        self._done += self._needs[module]
        if not self._keep_last:
            self._free_done()
        self._follow(module, outputs)

    def _before_backward(self, module: nn.Module, grad: Tensor) -> None:
        self._computing.add(module)
        self._free_done(but=self._needs[module])
        super()._before_backward(module, grad)
        self._start(self._backward.next(module, self._prefetch))

    def _after_backward(self, module: nn.Module, grads: tuple) -> None:
        """Frees what no gradient's arrival does: frozen units and those of several modules.

        Called when the gradients of all the module's inputs are there.
        """
        self._computing.discard(module)
        needed = {unit for other in self._computing for unit in self._needs[other]}
        for unit in self._needs[module]:
            if unit not in needed and (not unit.learns or unit in self._shared):
                unit.free()

    def _complete(self, unit: Unit) -> None:
        if self._synchronises:
            unit.reduce()
        else:
            unit.missing = set(unit.parameters)

    def _start(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for unit in self._needs[module]:
                unit.start()

    def _free_done(self, but: Iterable[Unit] = ()) -> None:
        for unit in self._done:
            if unit not in but:
                unit.free()
        self._done.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank, whole, and finish() does nothing.

        The next backward outside reduces the sums. It saves messages and costs memory:
        without it, each backward adds to the shards' gradients.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def finish(self) -> None:
        """To be called after backward: reduces what some gradient is missing of."""
        self._done.clear()
        self._computing.clear()
        for hook in self._hooks:  # each holds its own node of the graph, which holds it
            hook.remove()
        self._hooks.clear()
        super().finish()

    def clip_grad_norm_(self, most: float) -> Tensor:
        """As torch.nn.utils', over all shards; after finish(). Returns the norm before."""
        return clip_grad_norm(self.parameters(), most, self.group)


class _Order:
    """The order in which modules compute: noted as they come, expected the next time."""

    def __init__(self):
        self._modules: list[nn.Module] = []
        self._at = -1

    def begin(self) -> None:
        self._at = -1

    def next(self, module: nn.Module, count: int) -> list[nn.Module]:
        """This one computes; so many are expected next."""
        self._at += 1
        if self._modules[self._at : self._at + 1] != [module]:
            self._modules[self._at :] = [module]  # another order than before
        return self._modules[self._at + 1 : self._at + 1 + count]


def _differs(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _levels(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> tuple:
    """The group that shards, and the one that replicates, if any."""
    if mesh is None:
        return group, None
    if group is not None or mesh.ndim != 2:
        raise ValueError(
            f"mesh={mesh}: give a mesh of two dimensions, replicas × shards, and no group"
        )
    return mesh.get_group(1), mesh.get_group(0)


def _checked(module: nn.Module, units: Iterable[nn.Module] | None) -> list[nn.Module]:
    """The units; None: the children of the module, and those of its lists."""
    if units is None:
        lists, parts = (nn.ModuleList, nn.ModuleDict), (nn.ParameterList, nn.ParameterDict)
        children = [
            (c.children() if isinstance(c, lists) else (c,)) for c in module.children()
        ]
        return [u for group in children for u in group if not isinstance(u, parts)]
    units, names = list(units), {part: name for name, part in module.named_modules()}
    for unit in units:
        if unit not in names:
            raise ValueError(f"a unit is not in the module: {str(unit).splitlines()[0]}")
        if inside := [
            part for part in unit.modules() if part is not unit and part in units
        ]:
            raise ValueError(
                f"the unit {names[inside[0]]} lies in the unit {names[unit]}: "
                "give one of both"
            )
    return units
