"""Expert parallelism applied from outside, inside data parallelism.

    mesh = init_device_mesh("cpu", (N // e, e), mesh_dim_names=("replicas", "experts"))
    model = ExpertParallel(GPT(config), mesh=mesh)
    (loss(model(tokens_BS), targets_BS) + model.auxiliary_loss()).backward()
    model.finish(); optimizer.step()

Every rank has sequences of its own and, of each layer, E/e experts; e ranks have them all.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel import clipping, replicas, sharding
from manyranks.parallel.collectives.messages import members
from manyranks.parallel.expert.balance import move_biases, take_counts
from manyranks.parallel.expert.dispatch import Group, one_hop
from manyranks.parallel.expert.experts import Experts
from manyranks.parallel.expert.routing import Router
from manyranks.parallel.expert.two_hops import two_hops
from manyranks.parallel.parts import (
    Accumulating,
    check_mesh,
    matching,
    only_whole,
    saves,
    sum_gradients,
)

AXES = (
    ("replicas", "experts"),
    ("experts",),
    ("replicas", "nodes", "inside"),
    ("nodes", "inside"),
)


class ExpertParallel(Accumulating):
    """A model whose experts are dealt to ranks; all else of it is on every rank.

    module: changed in place; its weights become those of the group's rank 0. experts: a
    pattern of the names of its Experts. group: all ranks that share the batch. mesh: of
    those ranks, in their order, with the axes "replicas" (if there are any) and "experts",
    or for two hops "nodes" and "inside" instead; None: all are one expert-parallel group.
    reduces: False leaves gradients to others, as to two ZeroOptimizers: dense_parameters()
    are for the group, expert_parameters() for .replicas, the ranks with the same experts.
    .load_LE: after finish(), the copies that each expert of each layer was to get, over all
    ranks and micro-batches of the step.
    Raises ValueError for a mesh of other axes or ranks, for models that differ, for routers
    of different sizes, and where the ranks do not divide the experts.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: str = "layers.*.mlp.experts",
        group: Group = None,
        mesh: DeviceMesh | None = None,
        reduces: bool = True,
    ):
        super().__init__(module)
        sharding.refuse_shards(module.named_parameters(), "ExpertParallel")
        self.group, self.ranks = group, len(members(group).ranks)
        self.replicas, self._axes = _groups(mesh, group)
        self.degree = math.prod(dist.get_world_size(axis) for axis in self._axes)
        self.reduces = reduces
        self._names = {name for name, _ in matching(module, experts)}
        _check(self._experts, self._routers, self.degree)
        replicas.check_same(module, group)
        replicas.broadcast([*module.parameters(), *module.buffers()], group)
        self._deal()
        if self.degree > 1:
            saves(module, only_whole)
            own = self.expert_parameters()
            clipping.refuse_alone(own, "the ExpertParallel model's own clip_grad_norm_")
        for router in self._routers:
            router.ranks, router.group = self.ranks, group
        self.load_LE: Tensor | None = None

    @property
    def _experts(self) -> dict[str, nn.Module]:
        """Those that are in the module: a pipeline leaves a rank its own stages only."""
        named = self.module.named_modules()
        return {name: part for name, part in named if name in self._names}

    @property
    def _routers(self) -> list[Router]:
        return [part for part in self.module.modules() if isinstance(part, Router)]

    def forward(self, *args, **kwargs):
        """The module's. All ranks of the group call it together."""
        return self.module(*args, **kwargs)

    def auxiliary_loss(self) -> Tensor:
        """The sum over the routers of the latest forward; add it to the loss.

        Raises ValueError where its gradient got lost, as in PyTorch's reentrant checkpoint;
        in one of parallel.checkpointing, backward is an error.
        """
        routers = [router for router in self._routers if router.loss is not None]
        learning = [router for router in routers if router.weight.requires_grad]
        lost = any(not router.loss.requires_grad for router in learning)
        if torch.is_grad_enabled() and lost:
            raise ValueError(
                "a router's loss has no gradient: its layer ran without one, or inside a "
                "checkpoint; leave the router out of it, or balance by bias_speed"
            )
        return sum((router.loss for router in routers), self._zero())

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that only this rank and its replicas have."""
        return list(nn.ModuleList(self._experts.values()).parameters())

    def dense_parameters(self) -> list[nn.Parameter]:
        """Those that all ranks have: attention, routers, shared experts and so on."""
        own = set(self.expert_parameters())
        return [p for p in self.module.parameters() if p not in own]

    @torch.no_grad()
    def finish(self) -> None:
        """After backward: each gradient becomes that of the mean of all ranks' losses.

        What all ranks have is averaged over all. An expert has seen the tokens of its e
        ranks, which a hook has divided by e; its mean is over the replicas. reduces=False
        leaves both means to ZeroOptimizers. The routers' biases move in any case. Call it
        once a step, after the last backward.
        """
        if self._accumulates:
            return
        if self.reduces:
            _average(self.dense_parameters(), self.group)
            _average(self.expert_parameters(), self.replicas)
        if self._routers:
            self.load_LE = take_counts(self._routers)
            dist.all_reduce(self.load_LE, group=self.group)
            move_biases(self._routers, self.load_LE)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scales all gradients: their norm, over all ranks' experts, is at most that.

        After finish(), with all gradients reduced. Returns the norm before. Raises
        ValueError for most below 0.
        """
        dense, own = self.dense_parameters(), self.expert_parameters()
        holders = [self.ranks] * len(dense) + [self.ranks // self.degree] * len(own)
        return sharding.clip_grad_norm([*dense, *own], most, self.group, holders)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state_dict, with all experts, on every rank; all ranks call it."""
        state = dict(self.module.state_dict())
        for name in self._expert_names():
            state[name] = self._whole(state[name])
        return state

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """From a state with all experts, of any degree; each rank takes its own."""
        own = {name: self._part(state[name]) for name in self._expert_names()}
        self.module.load_state_dict({**state, **own})

    @property
    def place(self) -> int:
        """Which of `degree` equal parts of all experts this rank has, counted from 0."""
        place = 0
        for axis in self._axes:
            place = place * dist.get_world_size(axis) + dist.get_rank(axis)
        return place

    def _zero(self) -> Tensor:
        return torch.zeros((), device=next(self.module.parameters()).device)

    def _expert_names(self) -> list[str]:
        """All names: layers may share their experts."""
        own = set(self.expert_parameters())
        named = self.module.named_parameters(remove_duplicate=False)
        return [name for name, p in named if p in own]

    def _deal(self) -> None:
        """Keeps this rank's experts, and has rows travel to the others."""
        hop = one_hop if len(self._axes) == 1 else two_hops
        for experts in self._experts.values():
            experts.hop = partial(_hop, hop, len(experts.gate), self._axes)
        for p in self.expert_parameters():
            p.data = self._part(p.data)
            if self.degree > 1:
                _hooked(p, partial(torch.mul, other=1 / self.degree))

    def _part(self, whole_EOI: Tensor) -> Tensor:
        for axis in self._axes:
            whole_EOI = whole_EOI.chunk(dist.get_world_size(axis))[dist.get_rank(axis)]
        return whole_EOI.clone()

    def _whole(self, part_EOI: Tensor) -> Tensor:
        for axis in reversed(self._axes):
            n = dist.get_world_size(axis)
            out = part_EOI.new_empty(n * len(part_EOI), *part_EOI.shape[1:])
            dist.all_gather_single(out, part_EOI, group=axis)
            part_EOI = out
        return part_EOI


def _hooked(parameter: nn.Parameter, hook: Callable) -> None:
    """On a frozen one, too, for it may learn later."""
    learns = parameter.requires_grad
    parameter.requires_grad_().register_hook(hook)
    parameter.requires_grad_(learns)


def _hop(hop, total: int, axes: list[Group], x_TH: Tensor, routing, compute) -> Tensor:
    return hop(x_TH, routing, compute, total, *axes)


def _average(parameters: Iterable[nn.Parameter], group: Group) -> None:
    parameters, n = list(parameters), dist.get_world_size(group)
    if n > 1:
        sum_gradients(parameters, group)
    for p in parameters:
        if p.grad is not None:
            p.grad.div_(n)


def _groups(mesh: DeviceMesh | None, group: Group) -> tuple[Group, list[Group]]:
    """The ranks that have the same experts; by axis, those that have all."""
    if mesh is None:
        return _alone(), [group]
    names = mesh.mesh_dim_names
    if names not in AXES:
        known = " or ".join(str(axes) for axes in AXES)
        raise ValueError(f"a mesh with the axes {names}: give {known}")
    check_mesh(mesh, group)
    alike = mesh.get_group("replicas") if "replicas" in names else _alone()
    return alike, [mesh.get_group(name) for name in names if name != "replicas"]


def _alone() -> Group:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _check(named: dict[str, nn.Module], routers: Sequence[Router], degree: int) -> None:
    for name, experts in named.items():
        _check_experts(name, experts, degree)
    sizes = {len(router.weight) for router in routers}
    if len(sizes) > 1:
        raise ValueError(f"routers of {sorted(sizes)} experts: give all layers as many")


def _check_experts(name: str, experts: nn.Module, degree: int) -> None:
    if not isinstance(experts, Experts):
        raise ValueError(
            f"{name} is {type(experts).__name__}: give the name of an Experts; take_over "
            "puts one in the place of transformers'"
        )
    if getattr(experts.hop, "func", None) is _hop:
        raise ValueError(f"{name} is dealt to ranks already: build the model anew")
    if len(experts.gate) % degree:
        raise ValueError(
            f"{len(experts.gate)} experts of {name} on {degree} ranks: give a number of "
            "ranks that divides them"
        )
