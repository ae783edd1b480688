"""FSDP: stage 3 of ZeRO in units, such as layers, with messages beside computing.

    forward    gather 1 | compute 1, gather 2 | free 1, compute 2, gather 3 | …
    backward   compute L, gather L−1 | free L, reduce L, compute L−1, gather L−2 | …

Two of L units are whole at a time: the one that computes and the next one. The last one
stays after forward, because backward starts with it. In backward three things happen at
once: a unit computes, the next one is on its way here, and the gradients of the previous
one are on their way to their owners. So a rank sends, for Φ parameters on N ranks,
(N − 1)/N times Φ for forward, Φ less the last unit for backward, and Φ for the gradients.

    model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss(model(x), y).backward(); model.finish(); optimizer.step(); optimizer.zero_grad()

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv 2304.11277, sections 3 and 4.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel import partition
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.flat_parameters import Row, start_reduce_scatter
from manyranks.parallel.partition import in_backward, learning
from manyranks.parallel.parts import only_whole, saves
from manyranks.parallel.same_order import Order
from manyranks.parallel.shard import Origin, as_parts
from manyranks.parallel.sharded import Sharded


class Unit:
    """Parameters that are gathered, freed and reduced together.

    The model's Parameters become `shards`, which an optimizer trains. While the unit is
    here, modules compute with `whole`, Parameters that are views of one row. The row's
    memory comes and goes. Autograd's saved tensors lie in it, too, and are right again as
    soon as the row is gathered again.
    """

    def __init__(
        self,
        part: partition.Part,
        group: Group = None,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        replicas: Group = None,
        finish_gather: Callable[[dist.Work], object] = dist.Work.wait,
    ):
        self.part, self.group, self.replicas = part, group, replicas
        self.row = Row(part.named, group)
        self.shards = list(part.named.values())
        row_E = self.row.of(self.shards)
        self.row_E = row_E.to(dtype) if dtype and row_E.is_floating_point() else row_E
        self.bytes, self.reduce_dtype = self.row_E.nbytes, reduce_dtype or self.row_E.dtype
        own = self.row.split(self.row.own(row_E))
        self.whole = partition.split(part.named, self.row.parts(self.row_E), own)
        self.learns = self.shards[0].requires_grad
        self.missing = set(self.whole)  # those whose gradients haven't come
        self.used = False  # in a forward pass whose gradients weren't reduced yet
        self.gathered, self.shown = True, False  # whether modules have the whole ones
        self._versions = self._now()  # of what was gathered
        self._gather: dist.Work | None = None  # the row is on its way here
        self.finish_gather = finish_gather
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
            self.finish_gather(self._gather)
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
        partition.accumulate(self.shards, self.row.gradients(mean_S, self._absent))

    def forget(self) -> None:
        """Drops whole gradients, and those on their way."""
        if self._reduction is not None:
            self._reduction()
        self._reduction, self.missing = None, set(self.whole)
        for whole in self.whole:
            whole.grad = None


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
        self.group, replicas = partition.levels(group, mesh)
        group_of = shared_by or (lambda parameter: self.group)
        inner = [m for m in module.modules() if isinstance(m, Sharded)]
        cut = partition.cut(module, units, group_of, inner)
        partition.equalize(module, cut.parts, self.group, replicas, group_of)
        self.module, self._dtype, self.training = module, compute_dtype, module.training
        self._prefetch, self._keep_last = prefetch, keep_last
        self._lead = lambda: self  # a function: a module as an attribute would be a child
        own = [
            Unit(
                part,
                group_of(part.first),
                dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                replicas=replicas,
                finish_gather=lambda work: self._lead()._order.wait(work),
            )
            for part in cut.parts
        ]
        self._needs = {used: [own[k] for k in of] for used, of in cut.needs.items()}
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
        saves(module, only_whole)
        self._running: list[tuple[nn.Module, frozenset[Unit]]] = []  # and what they have
        self._done: list[Unit] = []  # not needed any more in this pass, but not freed
        self._leaving: Unit | None = None  # its gradients are on their way
        self._backward_runs = False
        self._arrived = False  # a gradient, in this backward
        self._frees = partition.Ends(self._needs)
        self.forward = torch.compiler.disable(self.forward)  # the module may be compiled
        self._hooks = partition.hooks(
            self._needs, self._before_forward, self._after_forward, self._gradient
        )

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
            args, kwargs = partition.cast((args, kwargs), self._dtype)
        if self._lead() is not self or in_backward():
            return self.module(*args, **kwargs)
        partition.check([unit.part for unit in self.units])
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
        for output in learning(outputs):
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
            self._frees.watch(module, (args, kwargs))
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
            for output in learning(outputs):
                output.register_hook(partial(self._before_backward, module))

    def _before_backward(self, module: nn.Module, grad: Tensor) -> None:
        self._expect_end()
        self._frees.begin(module)
        self._free_done(but=self._needs[module])
        for unit in self._needs[module]:
            unit.wait()
        self._start_next(module)

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
            self._frees.clear()
        self._backward_runs = self._arrived = False

    def finish(self) -> None:
        """Ends a step on all ranks, as backward does itself: reduces what is left."""
        self._lead()._end(finished=True)
