"""Refusals of parallel.expert: on all ranks, before it sends any message, so that none waits, and with what to do."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.expert.families import OfTransformers
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer
from tests.ranks import refused

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, ffn=16, vocab=7, seq=8, experts=8, expert_ffn=4)
NAMES = ("replicas", "experts")


def mesh(*shape: int, names: tuple[str, ...] | None = NAMES) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def model(pattern: str = "layers.*.mlp.experts", mesh: DeviceMesh | None = None, gpt: nn.Module | None = None, **changes):
    return ExpertParallel(gpt or GPT(replace(CONFIG, **changes)), pattern, mesh=mesh)


def twice():
    """Its second layer is new: nothing of the model may change before all of it is checked."""
    gpt = GPT(CONFIG)
    model("layers.1.mlp.experts", gpt=gpt)
    before = gpt.layers[0].mlp.experts.gate
    try:
        model(gpt=gpt)
    finally:
        assert gpt.layers[0].mlp.experts.gate is before
        assert len(before) == 8


def uneven():
    """A layer with fewer experts than the others have."""
    gpt, fewer = GPT(CONFIG), GPT(replace(CONFIG, experts=4))
    gpt.layers[1].mlp = fewer.layers[1].mlp
    return model(gpt=gpt)


CUT = ("experts", "tensor")


def frozen():
    """A model that is frozen in part on one rank only."""
    gpt = GPT(CONFIG)
    gpt.layers[1].mlp.experts.up.requires_grad_(dist.get_rank() != 3)
    return model(gpt=gpt)


def outside():
    """Ranks 1 and 3 say that a mesh is wrong, the others that they aren't in the group."""
    return ExpertParallel(GPT(CONFIG), group=dist.new_group([1, 3]), mesh=mesh(4, names=("ep",)))


class Reentrant(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, *args, use_reentrant=True)


def lost(reentrant: bool):
    """An auxiliary loss that was made inside a checkpoint."""
    gpt = GPT(replace(CONFIG, auxiliary=0.1))
    if reentrant:
        gpt.layers[1] = Reentrant(gpt.layers[1])
    else:
        checkpoint_modules(gpt, lambda module: isinstance(module, Layer))
    cut = model("layers.0.mlp.experts" if reentrant else "layers.*.mlp.experts", gpt=gpt)
    (cut(torch.zeros(1, 8, dtype=torch.int64)).sum() + cut.auxiliary_loss()).backward()


def others():
    """Experts of transformers, whose gate and up are one tensor."""
    theirs = nn.Module()
    theirs.gate_up_proj, theirs.down_proj = nn.Parameter(torch.ones(4, 8, 4)), nn.Parameter(torch.ones(4, 4, 4))
    return ExpertParallel(nn.ModuleDict({"experts": OfTransformers(theirs)}), "experts", mesh=mesh(2, 2, names=CUT))


def shared(**changes):
    """Ranks 0 and 2 share no loss, nor do 1 and 3; the others do."""
    place = dist.get_rank() % 2
    group = dist.new_group([place, place + 2], use_local_synchronization=True)
    return ExpertParallel(GPT(replace(CONFIG, **changes)), group=group, mesh=mesh(2, 2, names=CUT))


AXES = r"a mesh with the axes \(.*\): give \('replicas', 'experts'\) or \('experts',\) or \('replicas', 'nodes', 'inside'\) or"
REFUSED = {
    "no axes": (lambda: model(mesh=mesh(4, names=None)), r"a mesh with the axes None: give"),
    "other axes": (lambda: model(mesh=mesh(4, names=("ep",))), AXES),
    "their order": (lambda: model(mesh=mesh(2, 2, names=NAMES[::-1])), AXES),
    "both": (lambda: model(mesh=mesh(2, 1, 2, names=("nodes", "inside", "experts"))), AXES),
    "not all ranks": (
        lambda: model(mesh=mesh(2, 2, names=("dp", "experts"))["experts"]),
        r"a mesh of the ranks \[[02], [13]\] for a group of \[0, 1, 2, 3\]: give these, in this order",
    ),
    "their place": (
        lambda: model(mesh=DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)),
        r"a mesh of the ranks \[\[0, 2\], \[1, 3\]\] for a group of \[0, 1, 2, 3\]",
    ),
    "experts": (lambda: model(experts=6), r"6 experts of layers\.0\.mlp\.experts on 4 ranks: give a number of ranks that div"),
    "in nodes": (lambda: model(mesh=mesh(2, 2, names=("nodes", "inside")), experts=6), r"6 experts of .* on 4 ranks"),
    "routers": (uneven, r"routers of \[4, 8\] experts: give all layers as many"),
    "norm": (lambda: model().clip_grad_norm_(-1.0), r"most=-1\.0: give the largest norm"),
    "nothing": (lambda: model("layers.*.experts"), r"'layers\.\*\.experts' matches no module: see the model's named_mod"),
    "no experts": (lambda: model("layers.*.mlp"), r"layers\.0\.mlp is MoE: give the name of an Experts"),
    "dense": (lambda: model(experts=0, expert_ffn=None), r"matches no module"),
    "tensor first": (lambda: model(mesh=mesh(2, 2, names=("tensor", "experts"))), AXES),
    "slices": (lambda: model(mesh=mesh(1, 4, names=CUT), expert_ffn=6), r"feed-forward size 6 on 4 ranks that cut each expert"),
    "others' experts": (others, r"experts is OfTransformers, whose weights no rank cuts: leave the axis .tensor. out"),
    "a loss of two": (lambda: shared(auxiliary=0.1), r"a router's auxiliary loss on 2 ranks that share a loss: balance by"),
    "norm of two": (lambda: shared().clip_grad_norm_(1.0), r"2 ranks share each loss, and what is cut over them isn't known"),
    "sizes": (
        lambda: model(expert_ffn=8 if dist.get_rank() == 2 else 4),
        r"the ranks' models differ.*rank 2 has parameter layers\.0\.mlp\.experts\.gate",
    ),
    "depth": (lambda: model(layers=3 if dist.get_rank() == 1 else 2), r"the ranks' models differ.*rank 1 has"),
    "frozen": (frozen, r"the ranks' models differ.*rank 3 has frozen parameter layers\.1"),
    "outside": (outside, r"this rank is not in the group|a mesh with the axes"),
    "lost in PyTorch's": (lambda: lost(True), "leave the router out of it, or balance by bias_speed"),
    "lost in ours": (lambda: lost(False), "RuntimeError.*by another way than its result"),
    "twice": (twice, r"layers\.1\.mlp\.experts is dealt to ranks already: build the model anew"),
}


def refusals() -> dict[str, str]:
    return refused.said(REFUSED)


def test_what_does_not_fit_is_refused_on_all_ranks_with_what_to_do(four):
    assert refused.unlike(REFUSED, four.run(refusals)) == {}


def test_nothing_is_sent_before_a_refusal(four):
    def silent() -> None:
        for name in ("experts", "nothing", "no experts", "their place"):
            with pytest.raises(ValueError, match=REFUSED[name][1]):
                REFUSED[name][0]()

    assert all(not calls for calls in four.measure(silent).calls.values())
