"""Refusals of expert parallelism, each with what to give instead."""

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel import wrappers
from manyranks.parallel.collectives.messages import Group

SCORES = ("softmax", "sigmoid")
HOPS = (("experts",), ("nodes", "inside"))
AXES = tuple((*first, *hops) for hops in HOPS for first in (("replicas",), ()))


def check_devices(experts: int, devices: int) -> None:
    """Raises ValueError where devices can't have as many experts each."""
    if devices < 1 or experts % devices:
        raise ValueError(
            f"devices={devices} don't divide {experts} experts: choose a divisor of "
            f"{experts}"
        )


def check_choices(experts: int, top_k: int, groups: int, groups_per_token: int) -> None:
    """Raises ValueError where a token can't make so many choices."""
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k}: a token goes to 1 to {experts} experts")
    if groups < 1 or experts % groups:
        raise ValueError(
            f"groups={groups} does not divide {experts} experts: give a divisor"
        )
    if not 1 <= groups_per_token <= groups:
        raise ValueError(f"groups_per_token={groups_per_token}: 1 to groups={groups}")
    if top_k > (room := experts // groups * groups_per_token):
        raise ValueError(
            f"top_k={top_k}: {groups_per_token} of {groups} groups have {room} experts; "
            "give more groups_per_token, or a smaller top_k"
        )


def check_router(scores: str, top_k: int, experts: int, normalize: bool, **weights) -> None:
    """Raises ValueError for what no router can be.

    weights: of both ways to balance
    """
    if scores not in SCORES:
        raise ValueError(f"scores={scores!r}: choose one of {', '.join(SCORES)}")
    if top_k == 1 < experts and normalize:
        raise ValueError(
            "top_k=1 with normalize=True: the only gate is 1 whatever the router does, so "
            "that it never learns; say normalize=False"
        )
    for name, value in weights.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r}: give 0 or more")


def check_factor(factor: float | None) -> None:
    """Raises ValueError for what is no capacity factor; None drops nothing."""
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"capacity={factor!r}: a factor above 0, or None to drop nothing")


def check_mesh(mesh: DeviceMesh, group: Group) -> None:
    """Raises ValueError for other axes, and for ranks that aren't the group's, in order.

    With an axis "tensor" they may be some times as many, the group's among them.
    """
    names = mesh.mesh_dim_names or ()
    cut = names[-1:] == ("tensor",)
    if (names[:-1] if cut else names) not in AXES:
        known = " or ".join(str(axes) for axes in AXES)
        raise ValueError(
            f"a mesh with the axes {mesh.mesh_dim_names}: give {known}, and "
            '"tensor" after them where several ranks cut each expert'
        )
    ranks = mesh.mesh.flatten().tolist()
    own = dist.get_process_group_ranks(group or dist.group.WORLD)
    if cut and set(own) < set(ranks) and len(ranks) % len(own) == 0:
        return
    wrappers.check_mesh(mesh, group)


def check_experts(
    named: dict[str, nn.Module], kind: type, degree: int, slices: int
) -> None:
    """Raises ValueError for modules that can't be dealt to so many ranks, in slices."""
    for name, experts in named.items():
        if not isinstance(experts, kind):
            raise ValueError(
                f"{name} is {type(experts).__name__}: give the name of an Experts; "
                "take_over puts one in the place of transformers'"
            )
        if experts.dealt:
            raise ValueError(f"{name} is dealt to ranks already: build the model anew")
        if len(experts.gate) % degree:
            raise ValueError(
                f"{len(experts.gate)} experts of {name} on {degree} ranks: give a number "
                "of ranks that divides them"
            )
        if slices > 1 and not experts.sliced:
            raise ValueError(
                f"{name} is {type(experts).__name__}, whose weights no rank cuts: leave "
                'the axis "tensor" out, so that each expert is whole on its rank'
            )
        ffn = experts.gate.shape[1]
        if slices > 1 and ffn % slices:
            raise ValueError(
                f"{name}'s feed-forward size {ffn} on {slices} ranks that cut each "
                "expert: give a number of ranks that divides it"
            )


def check_routers(routers: Sequence[nn.Module], sharers: int) -> None:
    """Raises ValueError for routers that can't be balanced.

    sharers: ranks of a loss
    """
    sizes = {len(router.weight) for router in routers}
    if len(sizes) > 1:
        raise ValueError(f"routers of {sorted(sizes)} experts: give all layers as many")
    if sharers > 1 and any(router.auxiliary for router in routers):
        raise ValueError(
            f"a router's auxiliary loss on {sharers} ranks that share a loss: balance by "
            "bias_speed, or give each rank sequences of its own"
        )
