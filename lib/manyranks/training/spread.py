"""A model that is spread over ranks: what of it is on this one, who averages its gradients, who
keeps which of the optimizer's states, and what it takes to finish a step."""

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import clipping
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.context import ContextParallel
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel, state
from manyranks.parallel.fsdp.unit import Unit
from manyranks.parallel.mesh import Here
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import Schedule
from manyranks.parallel.pipeline.split import Stage
from manyranks.parallel.precision import Held, MasterOptimizer, optimizer_states
from manyranks.parallel.tensor import TensorParallel
from manyranks.parallel.wrappers import average_gradients, sum_gradients
from manyranks.parallel.zero import ShardedRow, ZeroOptimizer
from manyranks.training import gpt
from manyranks.training.config import TrainingConfig

Wrapper = Callable[..., nn.Module]
Pairs = list[tuple[Tensor, "Kind"]]


class Kind(NamedTuple):
    """The kind of parameters whose states lie in one row.

    decays: whether weight decay applies: to matrices, for norms and biases have no size to lose
    expert: whether only this rank's ep_replicas have it
    summed_over: ranks whose gradients of it are parts of one, beside data parallelism's
    copies: how many ranks of one data-parallel coordinate have the same elements
    """

    decays: bool
    expert: bool = False
    summed_over: Group = None
    copies: int = 1


class Parts:
    """A rank's parts of a model, and the axes that were applied to it.

    names: of the parameters, in the whole model
    size: how many numbers the whole model's parameters have
    """

    def __init__(self, model: gpt.GPT, here: Here | None):
        self.model, self.here = model, here
        self.size = sum(parameter.numel() for parameter in model.parameters())
        self.names: dict[nn.Parameter, str] = {}
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.experts: ExpertParallel | None = None
        self.stages: dict[int, nn.Module] = {}
        self.schedule: Schedule | None = None

    def note_names(self) -> None:
        """Notes the parameters' names, once they are those that the model keeps."""
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}

    def take_stages(self, stages: list[Stage], schedule: Schedule) -> None:
        """Keeps this rank's stages. Nothing of the others is left in the model."""
        rank, self.schedule = self.here.coordinates["pp"], schedule
        self.stages = {s: stages[s] for s, owner in enumerate(schedule.placement) if owner == rank}
        kept = {part for stage in self.stages.values() for part in stage.parts}
        for name, part in self.model.named_children():
            if part is not self.model.layers and part not in kept:
                setattr(self.model, name, nn.Identity())
        for i, layer in enumerate(self.model.layers):
            if layer not in kept:
                self.model.layers[i] = nn.Identity()
        self.names = {parameter: self.names[parameter] for parameter in self.model.parameters()}

    def kinds(self) -> dict[nn.Parameter, Kind]:
        """Returns the kind of each parameter on this rank."""
        own = set(self.experts.expert_parameters()) if self.experts else set()
        tied = {one.parameter: one.stages for s in self.stages.values() for one in s.shared}
        return {p: self._kind(p, p in own, tied.get(p, ())) for p in self.model.parameters()}

    def _kind(self, parameter: nn.Parameter, expert: bool, stages: tuple[int, ...]) -> Kind:
        copies, over = len({self.schedule.placement[s] for s in stages}) or 1, []
        if self.tensor and not (expert and self.here.mesh.etp):  # these have their own axes
            name = self.names[parameter]
            copies *= self.tensor.holders(name)
            over = self.tensor.summed_over(name)
        return Kind(parameter.ndim >= 2, expert, over[0] if over else None, copies)


class Spread:
    """Parts of a model with AdamW, ready for steps.

    .model: in its wrapper, with .module, no_sync() and finish(), as parallel.data_parallel's;
    .pipeline: where it has stages, else None; .optimizer, .parts, .kinds; .rows: of ZeRO-1 and 2;
    .units: of ZeRO-3.
    group: the ranks that have the same parameters. Raises ValueError for sharding without ranks,
    and for a wrapper with sharding.
    """

    def __init__(self, parts: Parts, training: TrainingConfig, wrapper: Wrapper, group: Group):
        _check(training.zero, parts.experts is not None, wrapper)
        self.parts, self.training, self.kinds = parts, training, parts.kinds()
        self._group, self._shards, self._replicas = group, group, None
        if parts.here and training.plan.dp_shard:
            self._shards, self._replicas = map(parts.here.group, ("shards", "replicas"))
        whole = parts.context or parts.model  # as it is called where there are no stages
        self.rows: list[ShardedRow] = []
        self.units: list[Unit] = []
        self._zeros: list[ZeroOptimizer] = []
        if training.zero == 3:
            self.model = self._fully_sharded(whole)
        elif training.zero or parts.experts:
            self.model = Alone(whole, None if training.zero else parts.experts)
        else:
            alone = not dist.is_initialized() or (parts.here and dist.get_world_size(group) == 1)
            self.model = Alone(whole) if alone else wrapper(whole, group)
        self.optimizer = self._optimizer()
        self.pipeline = self._pipeline() if parts.stages else None

    def loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Sums the losses of the own tokens; the logits may be a part of the vocabulary's."""
        total = self.parts.tensor.loss if self.parts.tensor else gpt.loss
        return total(logits_BSV, targets_BS, reduction="sum")

    def complete(self) -> None:
        """Turns gradients into those of the global mean, where data parallelism alone does not.

        Called after the last finish() of a step.
        """
        if self.parts.here is None:
            return
        if self.pipeline:
            self.pipeline.tie()
        stepped = self.stepped()
        if self._replicas and self.training.zero < 3:
            average_gradients([t for t, kind in stepped if not kind.expert], self._replicas)
        for group in dict.fromkeys(kind.summed_over for _, kind in stepped):
            if group is not None:
                sum_gradients([t for t, kind in stepped if kind.summed_over is group], group)

    def clip(self, most: float) -> Tensor:
        """Scales all gradients so that the whole model's norm is at most that; after complete()."""
        stepped, here, zero = self.stepped(), self.parts.here, self.training.zero
        if not zero and not (
            here and here.mesh.pp * here.mesh.tp * here.mesh.ep * (here.mesh.etp or 1) > 1
        ):
            # Every rank has the whole mean gradient, so its norm needs no message.
            return nn.utils.clip_grad_norm_([tensor for tensor, _ in stepped], most)
        holders = [kind.copies * self._copies(kind) for _, kind in stepped]
        everyone = None if here else self._group
        return clipping.clip_grad_norm([t for t, _ in stepped], most, everyone, holders)

    def stepped(self) -> Pairs:
        """Returns what the optimizer steps, with gradients: parameters or shards, and each kind."""
        for zero in self._zeros:
            zero.gradients()
        if not self.rows:
            return list(self.kinds.items())
        return [
            (shard, self.kinds[p])
            for row in self.rows
            for p, shard in zip(row.parameters, row.shards, strict=True)
        ]

    def held(self) -> Held:
        """Returns what this rank holds now, as ZeroOptimizer.held(), padding included."""
        if self._zeros:
            each = [zero.held() for zero in self._zeros]
            return Held(*(sum(tensors, ()) for tensors in zip(*each, strict=True)))
        if self.units:
            return state.held(self.units, self.optimizer)
        masters = tuple(p for p in getattr(self.optimizer, "masters", ()) if p not in self.kinds)
        grads = tuple(p.grad for p in self.kinds if p.grad is not None)
        states = optimizer_states(getattr(self.optimizer, "optimizer", self.optimizer))
        return Held(tuple(self.kinds), grads, masters, **states)

    def _copies(self, kind: Kind) -> int:
        """Data-parallel ranks that have the same elements of what is stepped."""
        if not self.training.zero:
            return dist.get_world_size(self._shared_by(kind))
        return dist.get_world_size(self._replicas) if self._replicas else 1

    def _shared_by(self, kind: Kind) -> Group:
        return self.parts.here.group("ep_replicas") if kind.expert else self._shards

    def _fully_sharded(self, whole: nn.Module) -> nn.Module:
        if not self.parts.stages:
            model = self._unit_by_unit(whole)
            self.units = model.units
            return model
        stages = {s: self._unit_by_unit(stage) for s, stage in self.parts.stages.items()}
        self.parts.stages = stages
        self.units = [unit for stage in stages.values() for unit in stage.units]
        return Alone(whole)

    def _unit_by_unit(self, module: nn.Module) -> FullyShardedDataParallel:
        """Wraps a module without autocast, which would keep weights in bfloat16 until backward."""
        half = torch.bfloat16 if self.training.bf16 else None
        full = next(module.parameters()).dtype if half else None
        where = {"group": self._shards}
        if self._replicas:
            where = {"mesh": self.parts.here.plane("replicas", "shards")}
        if module is self.parts.context:  # its one child is the GPT
            model = self.parts.model
            where["units"] = [model.embedding, *model.layers, model.head]
        if self.parts.experts:
            where["shared_by"] = lambda parameter: self._shared_by(self.kinds[parameter])
        return FullyShardedDataParallel(module, compute_dtype=half, reduce_dtype=full, **where)

    def _optimizer(self):
        training, adam = self.training, torch.optim.AdamW
        settings = {"lr": training.learning_rate, "betas": training.betas, "fused": True}
        if training.zero not in (1, 2):
            groups = decay_groups(self.stepped(), training)
            half = next(iter(self.kinds)).dtype in (torch.bfloat16, torch.float16)
            if half and not training.zero:
                return MasterOptimizer(groups, adam, **settings)
            return adam(groups, **settings)
        for expert in sorted({kind.expert for kind in self.kinds.values()}):
            own = [(p, kind) for p, kind in self.kinds.items() if kind.expert == expert]
            groups, group = decay_groups(own, training), self._shared_by(own[0][1])
            self._zeros.append(ZeroOptimizer(groups, adam, training.zero, group, **settings))
        self.rows = [row for zero in self._zeros for row in zero.rows]
        return self._zeros[0] if len(self._zeros) == 1 else Together(self._zeros)

    def _pipeline(self) -> Pipeline:
        """Ties come after data parallelism, so that copies stay the same to the last bit."""
        parts, group = self.parts, self.parts.here.group("pp")
        return Pipeline(parts.stages, parts.schedule, group, self._mean_loss, ties=False)

    def _mean_loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return self.loss(logits_BSV, targets_BS) / targets_BS.numel()


def decay_groups(pairs: Iterable[tuple[Tensor, Kind]], training: TrainingConfig) -> list[dict]:
    """An optimizer's groups, one of each kind, with weight decay on matrices only."""
    of_kind: dict[Kind, list[Tensor]] = {}
    for tensor, kind in sorted(pairs, key=lambda pair: not pair[1].decays):
        of_kind.setdefault(kind, []).append(tensor)
    return [
        {"params": tensors, "weight_decay": training.weight_decay if kind.decays else 0.0}
        for kind, tensors in of_kind.items()
    ]


class Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[ZeroOptimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Alone(nn.Module):
    """The interface of parallel.data_parallel's wrappers for a model that needs none of them.

    experts: what averages its gradients, if not the optimizer.
    """

    def __init__(self, module: nn.Module, experts: ExpertParallel | None = None):
        super().__init__()
        self.module, self.forward = module, module.forward
        self.no_sync = experts.no_sync if experts else contextlib.nullcontext
        self._finish = experts.finish if experts else None

    def finish(self) -> None:
        if self._finish:
            self._finish()


def _check(zero: int, experts: bool, wrapper: Wrapper) -> None:
    if zero and not dist.is_initialized():
        raise ValueError(
            f"zero={zero}: states are shared among ranks, and this process has none beside it; "
            "train on a world's ranks, or with zero=0"
        )
    if zero and wrapper is not OverlappedDataParallel:
        raise ValueError(f"wrapper with zero={zero}, which takes its place: leave one of both out")
    if experts and wrapper is not OverlappedDataParallel:
        raise ValueError("wrapper with ep > 1, which averages for itself: leave the wrapper out")
