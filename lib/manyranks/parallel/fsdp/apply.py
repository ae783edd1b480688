"""FSDP's step: when the units of a module are gathered, freed and reduced."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from manyranks.parallel import replicas
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.fsdp.cut import cut
from manyranks.parallel.fsdp.order import Order
from manyranks.parallel.fsdp.state import Sharded
from manyranks.parallel.fsdp.unit import Part, Unit
from manyranks.parallel.shard import Origin
from manyranks.parallel.wrappers import in_backward, only_whole, saves


class FullyShardedDataParallel(Sharded):
    """Shards a module's parameters over ranks, and gathers them unit by unit to compute.

    From then on parameters(), named_parameters() and state_dict() give this rank's shards,
    here and in every module around it: one flat tensor per parameter, maybe empty, under
    the parameter's own name. Wrappers may lie in each other; the outermost one leads.

    module: reached as .module; all ranks start from the parameters of the group's rank 0
    group: the ranks that share, None for all
    mesh: replicas × shards, instead of a group: the ranks of a row share the parameters,
        and gradients are averaged over the rows, too (HSDP)
    units: modules gathered as a whole; None for the module's children and the children of
        its lists. Everything else is gathered module by module
    compute_dtype: dtype of parameters that compute, and of inputs; None for their own
    reduce_dtype: dtype that gradients travel in; None for compute_dtype
    prefetch: units gathered ahead; with 0, no message runs beside computing
    keep_last: whether the last unit of forward stays for backward
    shared_by: gives the ranks that share a parameter, where these aren't the group's

    Shards keep the parameters' dtype, 32 bits at least; buffers keep theirs. All ranks run
    the same modules in the same order, in backward, too; the first step notes it.
    Raises ValueError for a mesh that isn't of two dimensions, a group beside a mesh, units
    that aren't in the module or lie in each other, and ties to modules outside.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        mesh: DeviceMesh | None = None,
        units: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        prefetch: int = 1,
        keep_last: bool = True,
        shared_by: Callable[[nn.Parameter], Group] | None = None,
    ):
        super().__init__()
        self.group, replica_group = _levels(group, mesh)
        group_of = shared_by or (lambda parameter: self.group)
        inner = [m for m in module.modules() if isinstance(m, Sharded)]
        found = cut(module, units, group_of, inner)
        _equalize(module, found.parts, self.group, replica_group, group_of)
        self.module, self._dtype, self.training = module, compute_dtype, module.training
        self._prefetch, self._keep_last = prefetch, keep_last
        self._lead = lambda: self  # a function: a module as an attribute would be a child
        own = [
            Unit(
                part,
                group_of(part.first),
                dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                replicas=replica_group,
            )
            for part in found.parts
        ]
        self._needs = {used: [own[k] for k in of] for used, of in found.needs.items()}
        for unit in own:
            each = zip(unit.part.named, unit.shards, unit.row.firsts, strict=True)
            for name, shard, first in each:
                shard.origin = Origin(name, shard.whole.shape, first, self.group)
                shard.reads = lambda: bool(self._lead()._running)
                shard.gather = partial(lambda unit: self._lead()._bring(unit), unit)
        for wrapper in inner:
            self._needs |= wrapper._follow(self)
        self.units = list(dict.fromkeys(u for of in self._needs.values() for u in of))
        self._reduces = True
        self._order = Order(module, self.group)
        for unit in self.units:
            unit.order = self._order
        saves(module, only_whole)
        self._running: list[tuple[nn.Module, frozenset[Unit]]] = []  # and what they have
        self._done: list[Unit] = []  # not needed any more in this pass, but not freed
        self._leaving: Unit | None = None  # its gradients are on their way
        self._backward_runs = False
        self._arrived = False  # a gradient, in this backward
        self._users: dict[Unit, set[nn.Module]] = {}  # the modules that need it
        self._computing: set[nn.Module] = set()  # in backward
        self.forward = torch.compiler.disable(self.forward)  # the module may be compiled
        self._hooks = self._register()

    def _register(self) -> list[RemovableHandle]:
        """Lets modules call before and after their forward, and parameters with a gradient.

        Ours comes first: other hooks may use a module's parameters.
        """
        before = torch.compiler.disable(self._before_forward)
        after = torch.compiler.disable(self._after_forward)
        found = []
        for module in self._needs:
            how = {"with_kwargs": True, "prepend": True}
            found.append(module.register_forward_pre_hook(before, **how))
            found.append(module.register_forward_hook(after, always_call=True))
        for unit in self.units:
            for whole in unit.whole if unit.learns else ():
                hook = partial(self._gradient, unit)
                found.append(whole.register_post_accumulate_grad_hook(hook))
        return found

    def _follow(self, lead: "FullyShardedDataParallel") -> dict[nn.Module, list[Unit]]:
        """Leaves it to a wrapper around this one to say when units come and go."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._lead = lambda: lead
        return self._needs

    def forward(self, *args, **kwargs):
        """The module's, of inputs in compute_dtype. Raises ValueError for a changed one."""
        if self._dtype:
            args, kwargs = _cast((args, kwargs), self._dtype)
        if self._lead() is not self or in_backward():
            return self.module(*args, **kwargs)
        for unit in self.units:
            unit.part.check()
        self._order.begin("forward")
        self._order.begin("backward")
        if self._reduces:  # else no optimizer has stepped since what is still here came
            self._free_done()
        if self._backward_runs:  # it has raised, and its gradients are incomplete
            self._leaving = None
            self._backward_runs = self._arrived = False
            self.forget()
        outputs = self.module(*args, **kwargs)
        self._order.end("forward")
        for output in _learning(outputs):
            output.register_hook(lambda grad: self._expect_end())
        if not torch.is_grad_enabled():
            self._free_done(self.units)  # also what was gathered ahead and not used
        return outputs

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        have = self._running[-1][1] if self._running else frozenset()
        self._running.append((module, have.union(self._needs[module])))
        if have.issuperset(self._needs[module]):
            return  # a module around this one has them here
        if in_backward() and all(unit.shown for unit in self._needs[module]):
            return  # a checkpoint computes it again, and its gradient has brought them
        if not in_backward():
            self._free_done(but=self._needs[module])
            self._watch(module, (args, kwargs))
        for unit in self._needs[module]:
            unit.wait()
            unit.used |= torch.is_grad_enabled()
        self._start_next(module)

    def _bring(self, unit: Unit) -> None:
        """A module that computes reads another one's parameter: it needs that unit, too."""
        module, have = self._running.pop()
        if unit not in have:
            self._needs[module].append(unit)
        self._running.append((module, have.union([unit])))
        unit.wait()
        unit.used |= torch.is_grad_enabled()

    def _after_forward(self, module: nn.Module, args: tuple, outputs) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass  # one that has raised
        have = self._running[-1][1] if self._running else frozenset()
        if have.issuperset(self._needs[module]):
            return
        if not in_backward():  # else a checkpoint may go on with its own forward
            for unit in self._needs[module]:
                unit.hide()
            self._done += self._needs[module]
            if not self._keep_last:
                self._free_done()
            for output in _learning(outputs):
                output.register_hook(partial(self._before_backward, module))

    def _watch(self, module: nn.Module, inputs: object) -> None:
        """Waits for the gradients of all its inputs: the last one ends its backward."""
        for unit in self._needs[module]:
            self._users.setdefault(unit, set()).add(module)
        missing = set(range(len(tensors := _learning(inputs))))
        for k, tensor in enumerate(tensors):
            tensor.register_hook(partial(self._after_backward, module, missing, k))

    def _before_backward(self, module: nn.Module, grad: Tensor) -> None:
        self._expect_end()
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: a sharded module has no gradients of gradients: its "
                "rows are gone by then; take them of a copy that isn't sharded"
            )
        self._computing.add(module)
        self._free_done(but=self._needs[module])
        for unit in self._needs[module]:
            unit.wait()
        self._start_next(module)

    def _after_backward(
        self, module: nn.Module, missing: set[int], k: int, grad: Tensor
    ) -> None:
        """Frees units that no parameter's gradient frees: frozen, or several modules'."""
        missing.discard(k)
        if missing:
            return
        self._computing.discard(module)
        needed = {unit for other in self._computing for unit in self._needs[other]}
        for unit in self._needs[module]:
            if unit not in needed and (not unit.learns or len(self._users[unit]) > 1):
                unit.free()

    def _gradient(self, unit: Unit, whole: nn.Parameter) -> None:
        """A parameter's gradient is ready. When all of a unit's are, they leave."""
        self._expect_end()
        self._arrived = unit.used = True
        unit.missing.discard(whole)
        if not unit.missing:
            unit.free()
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not self._reduces:
            unit.missing = set(unit.whole)  # they wait, whole, for another backward
            return
        self._hand_over()  # the unit before had this one's whole backward to leave
        unit.reduce()
        self._leaving = unit
        if not self._prefetch:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._leaving is not None:
            self._leaving.hand_over()
            self._leaving = None

    def _start_next(self, module: nn.Module) -> None:
        kind = "backward" if in_backward() else "forward"
        for other in self._order.note(kind, module, self._prefetch):
            for unit in self._needs[other]:
                unit.start()

    def _free_done(self, also: Iterable[Unit] = (), but: Iterable[Unit] = ()) -> None:
        for unit in (*self._done, *also):
            if unit not in but:
                unit.free()
        self._done.clear()

    def _expect_end(self) -> None:
        """A backward runs: has autograd call _end when it's over."""
        if not self._backward_runs:
            self._backward_runs = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self, finished: bool = False) -> None:
        """Frees everything, and reduces units that still miss a gradient.

        finished: whether the step is over, and not just a backward, in which only inputs'
            gradients may have been asked for
        """
        self._order.end("backward")
        if self._arrived or finished:
            for unit in self.units:
                unit.free()
                if unit.learns and unit.used:
                    self._reduce(unit)
            self._hand_over()
            self._done.clear()
            self._computing.clear()  # also modules whose backward never came to its end
        self._backward_runs = self._arrived = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank, whole; none are sent.

        The next backward outside reduces the sums. It saves messages and costs memory:
        without it, each backward adds to the shards' gradients. To forget the sums, call
        this module's zero_grad(): an optimizer's doesn't know them.
        """
        lead = self._lead()
        before = lead._reduces
        lead._reduces = False
        try:
            yield
        finally:
            lead._reduces = before

    def finish(self) -> None:
        """Ends a step on all ranks, as backward does itself: reduces what is left."""
        self._lead()._end(finished=True)


def _levels(group: Group, mesh: DeviceMesh | None) -> tuple[Group, Group]:
    """Returns the group that shards, and the one that replicates, if any.

    Raises ValueError for a mesh that isn't of two dimensions, and one beside a group.
    """
    if mesh is None:
        return group, None
    if group is not None or mesh.ndim != 2:
        raise ValueError(
            f"mesh={mesh}: give a mesh of two dimensions, replicas × shards, and no group"
        )
    return mesh.get_group(1), mesh.get_group(0)


def _equalize(
    module: nn.Module,
    parts: list[Part],
    group: Group,
    replica_group: Group,
    group_of: Callable[[nn.Parameter], Group],
) -> None:
    """Gives all ranks the parameters and buffers of the group's rank 0.

    Raises ValueError where the ranks' models differ.
    """
    replicas.check_same(module, group)
    named = {p: part for part in parts for p in part.named.values()}
    if replica_group is not None:
        replicas.broadcast([*named, *module.buffers()], replica_group)
    for parameter in named:
        replicas.broadcast([parameter], group_of(parameter))
    replicas.broadcast(module.buffers(), group)


def _learning(values: object) -> list[Tensor]:
    """Returns the results that learn, in nested values or an object's attributes."""
    leaves = tree_leaves((values, getattr(values, "__dict__", None)))
    return [x for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None]


def _cast(values: object, dtype: torch.dtype) -> object:
    """Returns nested values with floating-point tensors in another dtype."""

    def one(value: object) -> object:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return tree_map(one, values)
