"""Expert parallelism applied from outside, inside data parallelism.

    mesh = init_device_mesh("cpu", (N // e, e), mesh_dim_names=("replicas", "experts"))
    model = ExpertParallel(GPT(config), mesh=mesh)
    (loss(model(tokens_BS), targets_BS) + model.auxiliary_loss()).backward()
    model.finish(); optimizer.step()

Every rank has its own sequences and E/e experts of each layer; e ranks have them all.
With an axis "tensor" t ranks cut each expert, and e·t ranks have them all. These may be
others than those that cut attention: see training.parallelize.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel import clipping, replicas
from manyranks.parallel.collectives.messages import Group, members
from manyranks.parallel.expert import checks
from manyranks.parallel.expert.dispatch import Experts, in_slices, one_hop
from manyranks.parallel.expert.router import Router, move_biases, take_counts
from manyranks.parallel.expert.two_hops import two_hops
from manyranks.parallel.shard import refuse_shards
from manyranks.parallel.tensor.cuts import Cut, equal
from manyranks.parallel.wrappers import (
    Accumulating,
    average_gradients,
    matching,
    only_whole,
    saves,
)


class ExpertParallel(Accumulating):
    """A model whose experts are dealt to ranks; all else of it is on every rank.

    module: changed in place; all ranks start from the weights of the group's rank 0
    experts: a pattern of the names of its Experts
    group: all ranks that share the batch
    mesh: of those ranks, in their order, with the axes "replicas" (if there are any) and
        "experts", or for two hops "nodes" and "inside" instead; then "tensor", the ranks
        that cut each expert, if any. None: all are one expert-parallel group. Beside
        tensor parallelism, whose ranks share a loss, the mesh has all of them, and the
        group has one of each
    reduces: False leaves gradients to others, as to FSDP or two ZeroOptimizers:
        dense_parameters() are for the group, expert_parameters() for .replicas, the ranks
        with the same experts
    same_tokens: the ranks of "tensor" have the same tokens, as without sequence parallelism

    .load_LE: after finish(), the copies that each expert of each layer was to get, over all
    ranks and micro-batches of the step.
    Raises ValueError for a mesh of other axes or ranks, for models that differ, for routers
    of different sizes, and where the ranks don't divide the experts.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: str = "layers.*.mlp.experts",
        group: Group = None,
        mesh: DeviceMesh | None = None,
        reduces: bool = True,
        same_tokens: bool = False,
    ):
        super().__init__(module)
        refuse_shards(module.named_parameters(), "ExpertParallel")
        self.group, self.ranks, self.reduces = group, len(members(group).ranks), reduces
        groups = {"experts": group}
        if mesh is not None:
            checks.check_mesh(mesh, group)
            groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        alike = groups.pop("replicas", None)
        self._slices = groups.pop("tensor", None)
        self._axes = list(groups.values())
        self.degree = math.prod(map(dist.get_world_size, self._axes))
        self.width = dist.get_world_size(self._slices) if self._slices else 1
        self.sharers = mesh.mesh.numel() // self.ranks if mesh else 1
        self._names = {name for name, _ in matching(module, experts)}
        checks.check_experts(self._experts, Experts, self.degree, self.width)
        checks.check_routers(self._routers, self.sharers)
        replicas.check_same(module, group)
        replicas.broadcast([*module.parameters(), *module.buffers()], group)
        self.replicas = alike or dist.new_group(
            [dist.get_rank()], use_local_synchronization=True
        )
        self._deal(same_tokens)
        self._counted = [group]  # whose tokens load_LE counts: the group's, and so on
        if self.sharers > 1 and not same_tokens:
            self._counted = [self.replicas, *self._axes, self._slices]
        for router in self._routers:
            router.ranks, router.group = self.ranks, group
        self.load_LE: Tensor | None = None

    @property
    def _experts(self) -> dict[str, nn.Module]:
        """The experts in the module: a pipeline leaves a rank its own stages only."""
        named = self.module.named_modules()
        return {name: part for name, part in named if name in self._names}

    @property
    def _routers(self) -> list[Router]:
        return [part for part in self.module.modules() if isinstance(part, Router)]

    def forward(self, *args, **kwargs):
        """Calls the module. All ranks of the group do so together."""
        return self.module(*args, **kwargs)

    def auxiliary_loss(self) -> Tensor:
        """Sums the routers' losses of the latest forward; add it to the loss.

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
        zero = torch.zeros((), device=next(self.module.parameters()).device)
        return sum((router.loss for router in routers), zero)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Lists those that only this rank and its replicas have."""
        return [p for _, p in self._own()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Lists those that all ranks have: attention, routers, shared experts and so on."""
        own = set(self.expert_parameters())
        return [p for p in self.module.parameters() if p not in own]

    @torch.no_grad()
    def finish(self) -> None:
        """Averages gradients: each becomes the gradient of all ranks' mean loss.

        Parameters that all ranks have are averaged over all. An expert has seen the tokens
        of several ranks, and a hook has divided by their number; its replicas are averaged.
        reduces=False leaves both means to others. The routers' biases move in any case.
        Call it once a step, after the last backward.
        """
        if self._accumulates:
            return
        if self.reduces:
            average_gradients(self.dense_parameters(), self.group)
            average_gradients(self.expert_parameters(), self.replicas)
        if self._routers:
            self.load_LE = take_counts(self._routers)
            for group in self._counted:
                dist.all_reduce(self.load_LE, group=group)
            move_biases(self._routers, self.load_LE)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scales all gradients: their norm, over all ranks' experts, is at most that.

        Call it after finish(), with all gradients reduced. Returns the norm before. Raises
        ValueError for most below 0, and where ranks share a loss.
        """
        if self.sharers > 1:
            raise ValueError(
                f"{self.sharers} ranks share each loss, and what is cut over them isn't "
                "known here: clip as training.spread does, by parallel.clipping"
            )
        dense, own = self.dense_parameters(), self.expert_parameters()
        holders = [self.ranks] * len(dense)
        holders += [dist.get_world_size(self.replicas)] * len(own)
        return clipping.clip_grad_norm([*dense, *own], most, self.group, holders)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state_dict, with all experts, on every rank; all call it."""
        state = dict(self.module.state_dict())
        for name in self._expert_names():
            for axis, dim in reversed(self._dealt(name)):
                part = state[name].contiguous()
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(axis))]
                dist.all_gather(parts, part, group=axis)
                state[name] = torch.cat(parts, dim)
        return state

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this rank's part of a state with all experts, written at any degree."""
        own = {name: self.part(name, state[name]) for name in self._expert_names()}
        self.module.load_state_dict({**state, **own})

    def part(self, name: str, whole_EOI: Tensor) -> Tensor:
        """Copies this rank's part of all experts' weights of that name."""
        for axis, dim in self._dealt(name):
            parts = whole_EOI.chunk(dist.get_world_size(axis), dim)
            whole_EOI = parts[dist.get_rank(axis)]
        return whole_EOI.clone(memory_format=torch.contiguous_format)

    def cuts(self, name: str, shape: torch.Size) -> list[Cut]:
        """Says where this rank's part, of this shape, lies in all experts' weights."""
        place = 0
        for axis in self._axes:
            place = place * dist.get_world_size(axis) + dist.get_rank(axis)
        found = [equal(shape[0] * self.degree, self.degree, place)]
        for axis, dim in self._dealt(name)[len(self._axes) :]:
            size, own = shape[dim] * self.width, dist.get_rank(axis)
            found.append(equal(size, self.width, own, dim))
        return found

    def _dealt(self, name: str) -> list[tuple[Group, int]]:
        """Each group that shares out a weight of experts, and the dim it cuts."""
        found = [(axis, 0) for axis in self._axes]
        if self.width > 1:
            found.append((self._slices, Experts.sliced[name.rpartition(".")[2]]))
        return found

    def _own(self) -> list[tuple[str, nn.Parameter]]:
        """The experts' parameters, each once: layers may share some."""
        return list(nn.ModuleList(self._experts.values()).named_parameters())

    def _expert_names(self) -> list[str]:
        """All names: layers may share their experts."""
        own = set(self.expert_parameters())
        named = self.module.named_parameters(remove_duplicate=False)
        return [name for name, p in named if p in own]

    def _deal(self, same_tokens: bool) -> None:
        """Keeps this rank's part of the experts, and has rows travel to the others."""
        if len(self._axes) == 1:
            hop = partial(one_hop, group=self._axes[0])
        else:
            hop = partial(two_hops, nodes=self._axes[0], inside=self._axes[1])
        for experts in self._experts.values():
            experts.dealt = True
            experts.hop = partial(hop, experts=len(experts.gate))
            if self.width > 1:
                experts.slicing = partial(in_slices, group=self._slices, same=same_tokens)
        losses = self.degree * self.width / self.sharers
        for name, p in self._own():
            p.data = self.part(name, p.data)
            if losses != 1:
                _hooked(p, partial(torch.mul, other=1 / losses))
        if self.degree * self.width > 1:
            saves(self.module, only_whole)
            said = "the ExpertParallel model's own clip_grad_norm_"
            clipping.refuse_alone(self.expert_parameters(), said)


def _hooked(parameter: nn.Parameter, hook: Callable) -> None:
    """Hooks a parameter; a frozen one, too, for it may learn later."""
    learns = parameter.requires_grad
    parameter.requires_grad_().register_hook(hook)
    parameter.requires_grad_(learns)
