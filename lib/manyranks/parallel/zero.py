"""ZeRO: every rank of data parallelism holds the same bytes N times over. Share them out.

With 2 bytes for a parameter, 2 for its gradient and 12 for its master and Adam's moments,
Φ parameters take on each of N ranks:

    data parallelism                       16Φ               all-reduce of gradients
    stage 1: optimizer states sharded      4Φ + 12Φ/N        reduce-scatter + all-gather
    stage 2: gradients, too                2Φ + 14Φ/N        the same
    stage 3: parameters, too               16Φ/N             and one all-gather more

    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

    model = Zero3(model); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss.backward(); model.finish(); optimizer.step(); optimizer.zero_grad()

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", arXiv 1910.02054, sections 5 and 7.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyranks.parallel import buckets, replicas
from manyranks.parallel.collectives.messages import wait
from manyranks.parallel.precision import Clip, Held, groups_of, states_of
from manyranks.parallel.sharding import ShardedRow, clip_grad_norm
from manyranks.parallel.units import Group, Sharers, Unit, by_name, kinds, own_parameters


class ZeroOptimizer:
    """Any elementwise torch optimizer, its states sharded over the ranks.

    params, **kwargs: as optimizer_class takes them; params may be groups, and named.
    stage 1: gradients stay whole; they are reduced, each rank to its shard, in step().
    stage 2: they are reduced in backward, row by row, and only shards stay.
    group: the ranks that share, None for all; bucket_bytes: about what a row holds.
    Parameters in 16 bits get masters in 32. A frozen parameter is left alone; one without
    a gradient counts as one with zeros. All ranks begin with rank 0's parameters.
    .optimizer is the torch optimizer, of shards: a learning-rate schedule takes it.
    One that looks at a whole parameter, as Adafactor and Muon do, would see a piece of it.
    Raises ValueError for another stage, without parameters, and for one given twice.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        stage: int = 1,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 10_000_000,
        **kwargs,
    ):
        if stage not in (1, 2):
            raise ValueError(f"stage={stage}: ZeroOptimizer has 1 and 2; Zero3 is stage 3")
        replicas.check_bytes(bucket_bytes)
        self.stage, self.group, self._most = stage, group, bucket_bytes
        self.rows: list[ShardedRow] = []
        self.frozen: list[Tensor] = []
        self._left, self._prepared, self._backward = 0, False, False
        groups = [self._sharded(group) for group in groups_of(params)]
        self.optimizer = optimizer_class(groups, **kwargs)

    @property
    def param_groups(self) -> list[dict]:
        """The torch optimizer's, of shards."""
        return self.optimizer.param_groups

    def add_param_group(self, param_group: dict) -> None:
        """As a torch optimizer's."""
        self.optimizer.add_param_group(self._sharded(param_group))

    def _sharded(self, param_group: dict) -> dict:
        """The group, with shards in place of its parameters."""
        named = by_name(param_group["params"])
        taken = {p for row in self.rows for p in row.parameters}
        if twice := [name for name, p in named.items() if p in taken]:
            raise ValueError(f"{twice[0]} is in two groups: each parameter belongs to one")
        replicas.broadcast(named.values(), self.group)
        learning = {name: p for name, p in named.items() if p.requires_grad}
        self.frozen += [p for p in named.values() if not p.requires_grad]
        parts = buckets.parts(learning, self._most)
        rows = [ShardedRow(part, self.group) for part in parts]
        if self.stage == 2:
            for row in rows:
                for parameter in row.parameters:
                    hook = partial(self._arrived, row)
                    parameter.register_post_accumulate_grad_hook(hook)
        self.rows += rows
        return {**param_group, "params": [row.shard_S for row in rows]}

    def _arrived(self, row: ShardedRow, parameter: Tensor) -> None:
        """Stage 2: a gradient has just been made."""
        if not self._backward:
            self._backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        row.missing.discard(parameter)
        while self._left < len(self.rows) and not self.rows[self._left].missing:
            self._reduce_next()

    def _backward_over(self) -> None:
        """What has not left, for some parameter has no gradient, leaves now."""
        while self._left < len(self.rows):
            self._reduce_next()
        self._left, self._backward = 0, False

    def _reduce_next(self) -> None:
        self.rows[self._left].reduce()
        self._left += 1

    def _prepare(self) -> None:
        """Gives the optimizer its gradients; stage 1 reduces them only now."""
        if not self._prepared:
            for row in self.rows:
                if self.stage == 1:
                    row.reduce()
                row.hand_over()
        self._prepared = True

    def gradients(self) -> list[Tensor]:
        """The shards', of the ranks' mean, times the loss's scale; before step()."""
        self._prepare()
        return [row.shard_S.grad for row in self.rows if row.shard_S.grad is not None]

    def clip_grad_norm_(self, most: float) -> Tensor:
        """As torch.nn.utils', over all ranks' shards; before step(). Returns the norm."""
        self._prepare()
        return clip_grad_norm([row.shard_S for row in self.rows], most, self.group)

    def step(self, scale: float = 1.0, clip: Clip | None = None) -> None:
        """One step on the shards; then all ranks have all parameters again.

        scale: what the gradients were multiplied by, a LossScaler's. clip: called with the
        shards, divided by it: lambda shards: zero.clip_grad_norm_(1.0), of all together.
        It uses the gradients up: there are none afterwards.
        """
        for grad in self.gradients():
            if scale != 1:
                grad /= scale
        if clip is not None:
            clip([row.shard_S for row in self.rows])
        self.optimizer.step()
        self.zero_grad()
        self.spread()

    def spread(self) -> None:
        """All ranks get all parameters from the shards, as after these were loaded."""
        wait([row.spread() for row in self.rows])

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for row in self.rows:
            row.drop_gradients()
        self._prepared = False

    def held(self) -> Held:
        """What this rank holds now, padding included; gradients from backward to step()."""
        whole = [p.grad for row in self.rows for p in row.parameters]
        shards = [row.shard_S.grad if self._prepared else row.grad_S for row in self.rows]
        return Held(
            parameters=(*(row.row_E for row in self.rows), *self.frozen),
            gradients=tuple(g for g in (*whole, *shards) if g is not None),
            masters=tuple(row.shard_S for row in self.rows if row.has_masters),
            **states_of(self.optimizer),
        )


class Zero3(nn.Module):
    """Stage 3, one module at a time: gathered before it is used, freed afterwards.

    module: the model, reached as .module; group: the ranks that share, None for all.
    A unit is what one module has of its own, and a tied parameter belongs to the first that
    has it. Forward gathers a module's units and frees them; so does backward, and when all
    gradients of a unit are there, they are reduced to the shards. parameters() are these:
    give them to an optimizer. All ranks run the same modules in the same order.
    """

    def __init__(self, module: nn.Module, group: Group = None):
        super().__init__()
        self._shard(module, group)

    def _shard(self, module: nn.Module, group: Group, shared_by: Sharers = None) -> None:
        self.module, self.group = module, group
        replicas.check_same(module, group)
        for parameter in module.parameters():
            replicas.broadcast([parameter], shared_by(parameter) if shared_by else group)
        replicas.broadcast(module.buffers(), group)
        self.units: list[Unit] = []
        self._needs: dict[nn.Module, list[Unit]] = {}
        self._cut()
        for used in self._needs:
            used.register_forward_pre_hook(self._before_forward)
            used.register_forward_hook(self._after_forward)
        for unit in self.units:
            for parameter in unit.parameters if unit.learns else ():
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, unit))

    def _cut(self) -> None:
        """Units for what each module has of its own, by dtype, learning or frozen."""
        unit_of: dict[nn.Parameter, Unit] = {}
        for path, module, own in self._parts():
            free = {name: p for name, p in own.items() if p not in unit_of}
            for named in self._kinds(free):
                unit = self._unit(path, named)
                self.units.append(unit)
                unit_of |= dict.fromkeys(unit.parameters, unit)
            if own:
                self._needs[module] = list(dict.fromkeys(unit_of[p] for p in own.values()))

    def _parts(self) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
        """Modules that are gathered, with the parameters that they need."""
        for path, module in self.module.named_modules():
            yield path, module, own_parameters(path, module)

    def _kinds(self, named: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
        return kinds(named)

    def _unit(self, name: str, named: dict[str, nn.Parameter]) -> Unit:
        return Unit(name, named, self.group)

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, named after their units."""
        for k, unit in enumerate(self.units):
            yield f"{k}.{unit.name}", unit.shard_S

    def forward(self, *args, **kwargs):
        """The module's."""
        return self.module(*args, **kwargs)

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        for unit in self._needs[module]:
            unit.gather()
            unit.used |= torch.is_grad_enabled()

    def _after_forward(self, module: nn.Module, inputs: tuple, outputs) -> None:
        for unit in self._needs[module]:
            unit.free()
        self._follow(module, outputs)

    def _follow(self, module: nn.Module, outputs) -> None:
        """Has the module's backward announced by the gradients of its outputs."""
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._before_backward, module))

    def _before_backward(self, module: nn.Module, grad: Tensor) -> None:
        for unit in self._needs[module]:
            unit.gather()

    def _arrived(self, unit: Unit, parameter: Tensor) -> None:
        """A gradient has just been made."""
        unit.missing.discard(parameter)
        if not unit.missing:
            unit.free()
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        unit.reduce()

    def finish(self) -> None:
        """To be called after backward: reduces what some gradient is missing of."""
        for unit in self.units:
            unit.free()
            if unit.learns and unit.used:
                self._complete(unit)

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """What this rank holds now, padding included, with an optimizer of parameters().

        Shards are masters where what computes is in fewer bits. Whole rows are only those
        that are gathered now: none, after finish().
        """
        held = [t for unit in self.units for t in (unit.shard_S, *unit.parameters)]
        rows = [unit.row_E for unit in self.units if unit.gathered]
        return Held(
            parameters=(*(u.shard_S for u in self.units if not u.has_masters), *rows),
            gradients=tuple(t.grad for t in held if t.grad is not None),
            masters=tuple(u.shard_S for u in self.units if u.has_masters),
            **states_of(optimizer),
        )

    def state_dict(self, *args, **kwargs):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "a rank has shards: take full_state_dict(), on all ranks, or sharded_state()"
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state_dict, whole, on every rank."""
        whole = {name: t for unit in self.units for name, t in unit.tensors().items()}
        named = self.module.named_parameters(remove_duplicate=False)
        first = {p: name for unit in self.units for p, name in unit.named}
        state = dict(self.module.state_dict())
        return state | {name: whole[first[p]] for name, p in named}
