"""What parallel.expert refuses: on all ranks, before any message of its own, so that none waits, and with what to do."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.expert.families import OfTransformers
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from tests.ranks import refused

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, ffn=16, vocab=7, seq=8, experts=8, expert_ffn=4)
NAMES = ("replicas", "experts")


def mesh(*shape: int, names: tuple[str, ...] | None = NAMES) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def model(pattern: str = "layers.*.mlp.experts", mesh: DeviceMesh | None = None, gpt: nn.Module | None = None, **changes):
    return ExpertParallel(gpt or GPT(GPTConfig(**vars(CONFIG) | changes)), pattern, mesh=mesh)


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
    gpt, fewer = GPT(CONFIG), GPT(GPTConfig(**vars(CONFIG) | {"experts": 4}))
    gpt.layers[1].mlp = fewer.layers[1].mlp
    return model(gpt=gpt)


CUT = ("experts", "tensor")


def others():
    """Experts of transformers, whose gate and up are one tensor."""
    theirs = nn.Module()
    theirs.gate_up_proj, theirs.down_proj = nn.Parameter(torch.ones(4, 8, 4)), nn.Parameter(torch.ones(4, 4, 4))
    return ExpertParallel(nn.ModuleDict({"experts": OfTransformers(theirs)}), "experts", mesh=mesh(2, 2, names=CUT))


def shared(**changes):
    """Ranks 0 and 2 share no loss, nor do 1 and 3; the others do."""
    place = dist.get_rank() % 2
    group = dist.new_group([place, place + 2], use_local_synchronization=True)
    return ExpertParallel(GPT(GPTConfig(**vars(CONFIG) | changes)), group=group, mesh=mesh(2, 2, names=CUT))


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
    "twice": (twice, r"layers\.1\.mlp\.experts is dealt to ranks already: build the model anew"),
}


def refusals() -> dict[str, str]:
    return refused.said(REFUSED)


def test_what_does_not_fit_is_refused_on_all_ranks_with_what_to_do(four):
    for found in four.run(refusals):
        assert {name: found[name] for name, (_, message) in REFUSED.items() if not re.search(message, found[name])} == {}


def test_nothing_is_sent_before_a_refusal(four):
    def silent() -> None:
        for name in ("experts", "nothing", "no experts", "their place"):
            with pytest.raises(ValueError, match=REFUSED[name][1]):
                REFUSED[name][0]()

    assert all(not calls for calls in four.measure(silent).calls.values())


def differing() -> list[str]:
    said, rank = [], dist.get_rank()
    for changes in ({"expert_ffn": 8 if rank == 2 else 4}, {"layers": 3 if rank == 1 else 2}):
        with pytest.raises(ValueError, match="the ranks' models differ") as error:
            model(**changes)
        said.append(str(error.value))
    frozen = GPT(CONFIG)
    frozen.layers[1].mlp.experts.up.requires_grad_(rank != 3)
    with pytest.raises(ValueError, match="the ranks' models differ") as error:
        model(gpt=frozen)
    return [*said, str(error.value)]


def test_models_that_differ_are_refused_on_all_ranks(four):
    sizes, layers, frozen = (
        "rank 2 has parameter layers.0.mlp.experts.gate",
        "rank 1 has",
        "rank 3 has frozen parameter layers.1",
    )
    for found in four.run(differing):
        assert [words in text for words, text in zip((sizes, layers, frozen), found, strict=True)] == [True] * 3


def test_a_rank_that_the_group_has_not_is_told_so(four):
    def outside() -> str:
        group = dist.new_group([1, 3])
        try:
            ExpertParallel(GPT(CONFIG), group=group)
            return ""
        except ValueError as error:
            return str(error)

    said = four.run(outside)
    assert said[1] == said[3] == ""
    assert "this rank is not in the group" in said[0]
    assert "this rank is not in the group" in said[2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"style": "gpt2"}, "experts=8 with style='gpt2': experts are gated and have no biases"),
        ({"experts": 8.0}, "experts=8.0: must be a whole number"),
        ({"experts": -8}, "experts=-8: must be a whole number"),
        ({"experts": 1}, "top_k=2: a token uses 1 to experts=1 of them"),
        ({"top_k": 0}, "top_k=0: must be a whole number, 1 or more"),
        ({"top_k": 1.5}, "top_k=1.5: must be a whole number, 1 or more"),
        ({"expert_ffn": 0}, "expert_ffn=0 with experts=8: give the feed-forward size"),
        ({"shared_experts": -1}, "shared_experts=-1: must be a whole number"),
        ({"dense_layers": 3}, "dense_layers=3: the model has layers=2"),
        ({"expert_groups": 3}, "expert_groups=3 does not divide experts=8"),
        ({"expert_groups": 4, "groups_per_token": 5}, "groups_per_token=5: there are expert_groups=4"),
        ({"expert_groups": 8}, "top_k=2: 1 groups have 1 experts"),
        ({"scores": "sigmoids"}, "scores='sigmoids': did you mean 'sigmoid'"),
        ({"capacity": 0}, "capacity=0: a factor above 0, or None"),
        ({"capacity": torch.nan}, "capacity=nan: a factor above 0, or None"),
        ({"auxiliary": -0.1}, "auxiliary=-0.1: give 0 or more"),
        ({"bias_speed": torch.inf}, "bias_speed=inf: give 0 or more"),
        ({"experts": 0}, "expert_ffn=4 without experts: give experts, or leave it out"),
        ({"experts": 0, "expert_ffn": None, "bias_speed": 0.1}, "bias_speed=0.1 without experts"),
    ],
)
def test_sizes_of_experts_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        GPTConfig(**vars(CONFIG) | wrong)
