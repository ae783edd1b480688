"""Context parallelism applied from outside: every rank has a part of every sequence.

    model = ContextParallel(GPT(config), "layers.*.attention.core", attention="ring")
    inputs_BS, targets_BS = model.shard(tokens_BT[:, :-1]), model.shard(tokens_BT[:, 1:])
    model.loss(model(inputs_BS), targets_BS).backward(); model.finish(); optimizer.step()

Norms, linear layers, embedding and loss look at one token at a time. They have to know
where it stands, no more; only attention looks at other tokens.

    B batch   S a rank's tokens   T the whole sequence's
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from manyranks.parallel.collectives.messages import Group, members
from manyranks.parallel.context import layouts
from manyranks.parallel.context.checks import groups
from manyranks.parallel.context.exchange import (
    all_gather_attention,
    ring_ulysses_attention,
    ulysses_attention,
)
from manyranks.parallel.context.latent import latent_attention
from manyranks.parallel.context.layouts import TILE, Mask
from manyranks.parallel.context.ring import ring_attention
from manyranks.parallel.shard import refuse_shards
from manyranks.parallel.wrappers import Accumulating, check_mesh, matching, sum_gradients

ATTENTION = {
    "ring": ring_attention,
    "all-gather": all_gather_attention,
    "ulysses": ulysses_attention,
    "ring-ulysses": ring_ulysses_attention,
}
_IGNORED = -100  # a target that does not count: F.cross_entropy's ignore_index
_WAY_OUT = (
    "for a model of transformers, register ring_attention by AttentionInterface, and give "
    "the model position_ids, as in Your own model; for another, give the name of a module "
    "that is called with q, k and v"
)


class ContextParallel(Accumulating):
    """Makes a model's attention reach over the ranks of a group; the rest of it is local.

    module: the same on every rank, called as module(tokens_BS, positions_S); it is changed
        in place
    cores: a pattern of the names of its modules that are called with q_BASD, k_BGSD and
        v_BGSD, or in a ring as latent_attention is: they are replaced
    group: the ranks that share a sequence, None for all
    attention: "ring", "all-gather", "ulysses" or "ring-ulysses"
    mesh: for "ring-ulysses", of the group's ranks in their order
    layout, causal, tile, window: as Mask takes them; documents are given to forward

    Raises ValueError for unknown names, for cores that fit no module or have dropout, and
    for a mesh that is missing, not needed or of other ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        cores: str,
        group: Group = None,
        attention: str = "ring",
        layout: str = "zigzag",
        mesh: DeviceMesh | None = None,
        causal: bool = True,
        tile: int = TILE,
        window: int | None = None,
    ):
        super().__init__(module)
        _check_call(module)
        refuse_shards(module.named_parameters(), "ContextParallel")
        everyone, found = members(group), matching(module, cores)
        self.group, self.rank, self.ranks = group, everyone.place, len(everyone.ranks)
        self.layout, self.sharing = layout, _sharing(attention, mesh, group)
        layouts.multiple(layout, self.ranks, self.sharing)  # raises
        how = {"causal": causal, "layout": layout, "tile": tile, "window": window}
        Mask(**how)  # raises
        how["mesh" if mesh else "group"] = mesh or group
        self.attention = partial(ATTENTION[attention], **how)
        self._latent = partial(latent_attention, **how) if attention == "ring" else None
        self._documents_BT: Tensor | None = None
        for name, core in found:
            _check_core(name, core)
        for name, _ in found:
            above, _, own = name.rpartition(".")
            setattr(module.get_submodule(above), own, _Core(name, self._attend))

    def forward(self, tokens_BS: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Returns what the module gives for the own tokens, which shard() cut out.

        documents_BT: a number for each token of the whole sequence, see ring_attention. A
        checkpoint does not keep them: then, backward first, and the next forward after it.
        Raises ValueError for a sequence that does not suit the layout.
        """
        self._documents_BT = documents_BT
        positions_S = self.positions(tokens_BS.shape[1] * self.ranks)
        return self.module(tokens_BS, positions_S.to(tokens_BS.device))

    def positions(self, seq: int) -> Tensor:
        """Returns where the own tokens of a sequence of so many stand, on the CPU.

        Raises ValueError for a sequence that does not suit the layout.
        """
        places = layouts.positions(self.layout, seq, self.ranks, self.sharing)
        return places[self.rank].flatten()

    def shard(self, whole_BT: Tensor) -> Tensor:
        """The own part of what all tokens have: inputs; targets, after they were shifted.

        Raises ValueError for a sequence that does not suit the layout.
        """
        return layouts.shard(
            whole_BT, self.layout, self.rank, self.ranks, sharing=self.sharing
        )

    def loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """The own share of the mean over all ranks' tokens whose target is not −100.

        The ranks' losses add up to the mean, and so do their gradients, in finish(). A mean
        of the ranks' means would weigh tokens by how many others their rank has. In fp32 or
        better; one all-reduce of 8 bytes. Raises ValueError for targets that do not fit.
        """
        if targets_BS.shape != logits_BSV.shape[:-1]:
            raise ValueError(
                f"targets of shape {tuple(targets_BS.shape)} for logits of shape "
                f"{tuple(logits_BSV.shape)}: give the own ones, shard(targets)"
            )
        precise = torch.promote_types(logits_BSV.dtype, torch.float32)
        logits_NV, targets_N = logits_BSV.flatten(0, 1).to(precise), targets_BS.flatten()
        count = (targets_N != _IGNORED).sum()
        dist.all_reduce(count, group=self.group)
        return F.cross_entropy(logits_NV, targets_N, reduction="sum") / count

    @torch.no_grad()
    def finish(self) -> None:
        """Sums all gradients over the ranks: each has seen its own tokens only.

        Call it once a step, after the last backward.
        """
        if not self._accumulates and self.ranks > 1:
            sum_gradients(self.module.parameters(), self.group)

    def _attend(self, *qkv: Tensor) -> Tensor:
        attention = self.attention if len(qkv) == 3 else self._latent
        if attention is None:
            raise ValueError("latents travel in a ring only: say attention='ring'")
        return attention(*qkv, documents_BT=self._documents_BT)


class _Core(nn.Module):
    def __init__(self, name: str, attend: Callable[..., Tensor]):
        super().__init__()
        self.name, self.attend = name, attend

    def forward(self, *qkv: Tensor, **named: Any) -> Tensor:
        if len(qkv) not in (3, 5) or named:
            given = ", ".join([*(type(x).__name__ for x in qkv), *named])
            raise ValueError(
                f"{self.name} is called with {given}, not with q, k and v; {_WAY_OUT}"
            )
        return self.attend(*qkv)


def _sharing(attention: str, mesh: DeviceMesh | None, group: Group) -> int:
    """Ranks that share a shard of the ring."""
    if attention not in ATTENTION:
        raise ValueError(f"attention={attention!r}: choose one of {', '.join(ATTENTION)}")
    if attention != "ring-ulysses":
        if mesh is not None:
            raise ValueError(
                f"mesh with attention={attention!r}: give a group, or ring-ulysses"
            )
        return 1
    _, ulysses = groups(mesh)
    check_mesh(mesh, group)
    return dist.get_world_size(ulysses)


def _check_call(module: nn.Module) -> None:
    """Raises ValueError for a model of transformers whose second input isn't positions."""
    second = [*inspect.signature(module.forward).parameters, "", ""][1]
    if hasattr(getattr(module, "config", None), "model_type") and second != "position_ids":
        raise ValueError(
            f"{type(module).__name__} takes {second} where ContextParallel gives positions;"
            f" {_WAY_OUT}"
        )


def _check_core(name: str, core: nn.Module) -> None:
    rate = getattr(getattr(core, "dropout", None), "rate", 0)
    if rate:
        raise ValueError(
            f"{name} drops {rate} of its weights, which blockwise attention never has: "
            "train without dropout"
        )
