"""ZeRO: in data parallelism every rank holds the same bytes; ZeRO keeps each byte once.

With 2 bytes for a parameter, 2 for its gradient and 12 for its master and Adam's moments,
Φ parameters take this much on each of N ranks:

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

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import buckets, clipping, replicas
from manyranks.parallel.collectives.messages import Group, wait
from manyranks.parallel.flat_parameters import Named, Row, reduce_scatter
from manyranks.parallel.fsdp.apply import FullyShardedDataParallel
from manyranks.parallel.precision import Clip, Held, groups_of, optimizer_states, wide
from manyranks.parallel.shard import Origin, accumulate, refuse_shards


class ShardedRow:
    """Makes parameters views of one row; this rank's optimizer has a shard of it.

    named: parameters of one dtype by name; they become views of row_E
    group: the ranks that share, None for all

    shards are this rank's parts of the parameters, for an optimizer: views of the row, or
    masters in 32 bits where that has 16; grad_S is its part of the mean of all gradients.
    """

    def __init__(self, named: Named, group: Group = None):
        self.row, self.group = Row(named, group), group
        self.names, self.parameters = tuple(named), tuple(named.values())
        self.elements, self.row_E = self.row.elements, self.row.of(self.parameters)
        for part, parameter in zip(
            self.row.parts(self.row_E), self.parameters, strict=True
        ):
            parameter.data = part
        self._own_S = self.row.own(self.row_E)
        own = [part.to(wide(part.dtype)) for part in self.row.split(self._own_S)]
        self.shards = [nn.Parameter(part) for part in own]
        each = zip(self.shards, named.items(), self.row.firsts, strict=True)
        for shard, (name, parameter), first in each:
            shard.origin = Origin(name, parameter.shape, first, group)
        self.grad_S: Tensor | None = None
        self.missing = set(self.parameters)  # those whose gradients haven't come
        self._absent = [True] * len(self.parameters)  # no gradient in grad_S
        self._versions = [p._version for p in self.parameters]

    @property
    def has_masters(self) -> bool:
        """Returns whether shards are other copies than the row, in more bits."""
        return self.shards[0].dtype != self.row_E.dtype

    def check(self) -> None:
        """Raises ValueError for a parameter that was changed from outside."""
        views = self.row.parts(self.row_E)
        each = zip(self.names, self.parameters, views, self._versions, strict=True)
        for name, p, part, version in each:
            if not p.requires_grad:
                change = "was frozen"
            elif (p.dtype, p.data_ptr()) != (part.dtype, part.data_ptr()):
                change = "was cast, moved or given other data"
            elif self.has_masters and p._version != version:
                change = "was loaded, but not its master in 32 bits"
            else:
                continue
            raise ValueError(
                f"{name} {change} after ZeroOptimizer was made: change the model first, "
                "then make the optimizer"
            )

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the mean of all ranks' gradients to grad_S; the whole ones are dropped."""
        had = [p.grad is not None for p in self.parameters]
        self._absent = [a and not b for a, b in zip(self._absent, had, strict=True)]
        grad_E = self.row.take_gradients(self.parameters, self.row_E.dtype)
        mean_S = reduce_scatter(grad_E, self.group)
        self.grad_S = mean_S if self.grad_S is None else self.grad_S.add_(mean_S)
        self.missing = set(self.parameters)

    def hand_over(self) -> None:
        """Gives the optimizer's shards their gradients, in their own dtype."""
        if self.grad_S is not None:
            mean_S = self.grad_S.to(self.shards[0].dtype)
            accumulate(self.shards, self.row.gradients(mean_S, self._absent))

    def drop_gradients(self) -> None:
        """Forgets all gradients, whole ones and shards."""
        self.grad_S, self._absent = None, [True] * len(self.parameters)
        for parameter in (*self.parameters, *self.shards):
            parameter.grad = None

    @torch.no_grad()
    def spread(self) -> dist.Work:
        """Starts to bring all shards into the row: the optimizer's step is the model's."""
        if self.has_masters:
            self.row.join(self.shards, self._own_S)
        # So that a backward that needs what they were before can tell.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [p._version for p in self.parameters]
        return dist.all_gather_single(
            self.row_E, self._own_S, group=self.group, async_op=True
        )


class ZeroOptimizer:
    """Any elementwise torch optimizer, its states sharded over the ranks.

    params, **kwargs: as optimizer_class takes them; params may be groups, and named
    stage: with 1, gradients stay whole; they are reduced, each rank to its shard, in
        step(). With 2, they are reduced in backward, row by row, and only shards stay
    group: the ranks that share, None for all
    bucket_bytes: about what a row holds

    Parameters in 16 bits get masters in 32. Frozen parameters, and those that no rank has a
    gradient of, are left alone. All ranks begin with rank 0's parameters.
    .optimizer is the torch optimizer, of shards: a learning-rate schedule takes it.
    torch.amp.GradScaler's step() takes this one; call gradients() before its unscale_().
    Raises ValueError for another stage, without parameters, for one given twice or changed
    afterwards, and for an optimizer that looks at whole parameters, as Adafactor and Muon.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        stage: int = 1,
        group: Group = None,
        bucket_bytes: int = 10_000_000,
        **kwargs,
    ):
        if stage not in (1, 2):
            raise ValueError(f"stage={stage}: ZeroOptimizer has 1 and 2; Zero3 is stage 3")
        replicas.check_bytes(bucket_bytes)
        self.stage, self.group, self._most = stage, group, bucket_bytes
        self.rows: list[ShardedRow] = []
        self.frozen: list[tuple[str, nn.Parameter]] = []
        self._left, self._prepared, self._backward = 0, False, False
        groups = groups_of(params)
        _check_elementwise(optimizer_class, groups[0], **kwargs)
        groups = [self._sharded(group) for group in groups]
        self.optimizer = optimizer_class(groups, **kwargs)

    @property
    def param_groups(self) -> list[dict]:
        """The torch optimizer's, of shards."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict:
        """Returns the torch optimizer's, of this rank's shards; masters aren't in it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Loads what state_dict() gave on this rank. boxes.of_model is for other ranks."""
        self.optimizer.load_state_dict(state)

    def add_param_group(self, param_group: dict) -> None:
        """Adds parameters, as a torch optimizer does."""
        self.optimizer.add_param_group(self._sharded(param_group))

    def _sharded(self, param_group: dict) -> dict:
        """The group, with shards in place of its parameters."""
        named = _by_name(param_group["params"])
        refuse_shards(named.items(), "ZeroOptimizer")
        taken = {p for row in self.rows for p in row.parameters}
        if twice := [name for name, p in named.items() if p in taken]:
            raise ValueError(f"{twice[0]} is in two groups: each parameter belongs to one")
        replicas.broadcast(named.values(), self.group)
        learning = {name: p for name, p in named.items() if p.requires_grad}
        self.frozen += [(n, p) for n, p in named.items() if not p.requires_grad]
        clipping.refuse_alone(learning.values(), "this ZeroOptimizer's clip_grad_norm_")
        parts = buckets.parts(learning, self._most)
        rows = [ShardedRow(part, self.group) for part in parts]
        if self.stage == 2:
            for row in rows:
                for parameter in row.parameters:
                    hook = partial(self._arrived, row)
                    parameter.register_post_accumulate_grad_hook(hook)
        self.rows += rows
        return {**param_group, "params": [shard for row in rows for shard in row.shards]}

    def _arrived(self, row: ShardedRow, parameter: Tensor) -> None:
        """Stage 2: a gradient has just been made."""
        if not self._backward:
            self._backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        row.missing.discard(parameter)
        while self._left < len(self.rows) and not self.rows[self._left].missing:
            self._reduce_next()

    def _backward_over(self) -> None:
        """Reduces the rows that haven't left because a parameter has no gradient."""
        while self._left < len(self.rows):
            self._reduce_next()
        self._left, self._backward = 0, False

    def _reduce_next(self) -> None:
        self.rows[self._left].reduce()
        self._left += 1

    def _prepare(self) -> None:
        """Gives the optimizer its gradients; stage 1 reduces them only now."""
        for row in self.rows:
            row.check()
        if thawed := [name for name, p in self.frozen if p.requires_grad]:
            raise ValueError(
                f"{thawed[0]} was frozen when ZeroOptimizer was made, and isn't any more: "
                "make the optimizer again, or add_param_group() it"
            )
        if not self._prepared:
            for row in self.rows:
                if self.stage == 1:
                    row.reduce()
                row.hand_over()
        self._prepared = True

    def gradients(self) -> list[Tensor]:
        """The shards', of the ranks' mean, times the loss's scale; before step()."""
        self._prepare()
        return [shard.grad for shard in self.shards() if shard.grad is not None]

    def shards(self) -> list[nn.Parameter]:
        """Returns this rank's parts of all parameters, which .optimizer steps."""
        return [shard for row in self.rows for shard in row.shards]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler asks this first in its step: its gradients must be there then."""
        self._prepare()
        return False

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Clips all ranks' shards as torch.nn.utils does; before step. Returns the norm."""
        self._prepare()
        return clipping.clip_grad_norm(self.shards(), most, self.group)

    def step(self, scale: float = 1.0, clip: Clip | None = None) -> None:
        """Steps the shards; then all ranks have all parameters again.

        It uses the gradients up: there are none afterwards.
        scale: what the gradients were multiplied by, a LossScaler's
        clip: called with the shards, divided by it: lambda shards:
            zero.clip_grad_norm_(1.0), of all together
        """
        for grad in self.gradients():
            if scale != 1:
                grad /= scale
        if clip is not None:
            clip(self.shards())
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
        """Returns what this rank holds now, padding included; gradients until step()."""
        whole = [p.grad for row in self.rows for p in row.parameters]
        shards = [row.grad_S for row in self.rows]
        if self._prepared:
            shards = [shard.grad for shard in self.shards()]
        return Held(
            parameters=(*(row.row_E for row in self.rows), *(p for _, p in self.frozen)),
            gradients=tuple(g for g in (*whole, *shards) if g is not None),
            masters=tuple(s for row in self.rows for s in row.shards if row.has_masters),
            **optimizer_states(self.optimizer),
        )


def _check_elementwise(optimizer: type[torch.optim.Optimizer], group: dict, **how) -> None:
    """Raises ValueError for an optimizer that steps a whole otherwise than its parts.

    optimizer: a class
    group: a parameter group, whose options are tried
    **how: its own
    """
    group = group | {"lr": 0.1} if group.get("lr", how.get("lr")) == 0 else group
    whole = torch.linspace(-1, 1, 12, dtype=torch.float64, device="cpu")
    # Options that it doesn't know it refuses in its own words.
    optimizer([{**group, "params": [nn.Parameter(whole.view(4, 3).clone())]}], **how)
    try:
        stepped = _stepped(optimizer, group, how, [whole.view(4, 3)])
        pieces = _stepped(optimizer, group, how, [whole[:5], whole[5:]])
        same, why = torch.allclose(stepped, pieces, 1e-9, 1e-12), None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        same, why = False, error
    if not same:
        name = getattr(optimizer, "__name__", optimizer)
        raise ValueError(
            f"{name} looks at whole parameters, or can't step without more "
            "than their gradients: each rank has a part of them here; give one that works "
            "element by element, such as AdamW, or train with OverlappedDataParallel"
        ) from why


def _stepped(optimizer: type, group: dict, how: dict, values: list[Tensor]) -> Tensor:
    """Returns parameters, end to end, after two steps with gradients of the same sizes."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    steps = optimizer([{**group, "params": parameters}], **how)
    for _ in range(2):
        for p in parameters:
            p.grad = p.detach().sin() + 0.5
        steps.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def _by_name(params: Iterable) -> Named:
    """Names an optimizer's params, by number where they have no names; ties count once."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    pairs = [p if isinstance(p, tuple) else (str(k), p) for k, p in enumerate(listed)]
    first = {p: name for name, p in reversed(pairs)}
    return {name: p for name, p in pairs if first[p] == name}


class Zero3(FullyShardedDataParallel):
    """Shards a module's parameters, and gathers them one module at a time.

    Stage 3 as the lecture has it: each module's own parameters come before its forward and
    its backward and go afterwards, and no message runs beside computing. A tied parameter
    belongs to the first module that has it.

    module: reached as .module; all ranks start from the parameters of the group's rank 0
    group: the ranks that share, None for all
    Raises ValueError as FullyShardedDataParallel does.
    """

    def __init__(self, module: nn.Module, group: Group = None):
        super().__init__(module, group, units=(), prefetch=0, keep_last=False)
