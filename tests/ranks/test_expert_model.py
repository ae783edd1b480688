"""ExpertParallel: the GPT with experts, changed from outside, trains as one process does on all ranks' sequences.

One matrix: cases (models, what is frozen, shared or computed again) × who averages and shards × numbers of ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel import clipping
from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.expert import ExpertParallel, Experts, Router, move_biases, take_counts
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT, Attention, loss
from manyranks.training.gpt import Layer as GPTLayer
from manyranks.training.trainer import Trainer
from tests.conftest import matrix
from tests.ranks.test_tensor import lively, off
from tests.unit.attention_reference import largest

SMALL = GPTConfig(layers=2, hidden=16, heads=4, ffn=24, vocab=13, seq=10, experts=12, expert_ffn=6)
CONFIGS = {
    "plain": SMALL,
    "like V3": replace(
        SMALL,
        **{"top_k": 4, "shared_experts": 1, "dense_layers": 1, "expert_groups": 4, "groups_per_token": 2},
        **{"scores": "sigmoid", "auxiliary": 0.1, "bias_speed": 0.05},
    ),
    "capacity": replace(SMALL, top_k=3, capacity=0.7, tied=False),
    "frozen": replace(SMALL, auxiliary=0.1),
}
FROZEN = ("embedding.", "layers.0.attention", "layers.0.mlp.router", "layers.0.mlp.experts", "layers.1.mlp.experts.up")
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=1e-2)}
NEAR = {"sgd": 1e-10, "adamw": 1e-8}
MOST = {"plain": 0.7, "like V3": 0.57, "capacity": 0.6, "frozen": 0.5}  # the norm at which gradients are clipped
PARTS = {"layers": (GPTLayer,), "all but the router": (Attention, Experts)}


def gpt(kind: str, shared: str = "", **changes) -> GPT:
    """shared: what its layers share, "experts" or "a weight"."""
    model = lively(GPT(replace(CONFIGS[kind], **changes)))
    for name, p in model.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    first, second = (layer.mlp for layer in model.layers)
    if shared == "experts":
        second.experts = first.experts
    elif shared:
        second.experts.up = first.experts.up
    return model


def batch(number: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of that many ranks, two sequences of each."""
    random = torch.Generator().manual_seed(number)
    tokens_BT = torch.randint(SMALL.vocab, (2 * ranks, SMALL.seq + 1), generator=random)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def routers_of(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def alone(model: GPT, number: int, ranks: int) -> Tensor:
    """One process's loss. Capacity is a rank's: its sequences run alone."""
    parts = ranks if model.config.capacity else 1
    pairs = zip(*(x.chunk(parts) for x in batch(number, ranks)), strict=True)
    total = sum(loss(model(inputs), targets) for inputs, targets in pairs) / parts
    return total + sum(router.loss for router in routers_of(model) if router.loss is not None)


def cut(model: nn.Module, mesh: str = "", **how) -> ExpertParallel:
    """mesh: sizes and names, as in test_expert."""
    sizes, names = [int(size) for size in mesh.split()[::2]], tuple(mesh.split()[1::2])
    return ExpertParallel(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names) if mesh else None, **how)


class Case(NamedTuple):
    """wrapper: who averages and shards; micro: micro-batches of a step; again: what is checkpointed, before it's cut or not."""

    kind: str = "plain"
    wrapper: str = "alone"
    mesh: str = ""
    optimizer: str = "adamw"
    micro: int = 1
    shared: str = ""
    again: str = ""
    before: bool = True


CASES = {
    2: [
        *[
            Case("like V3", optimizer="sgd", micro=2),
            Case(mesh="2 replicas 1 experts"),
            Case("like V3", mesh="1 experts 2 tensor"),
        ],
        *[Case("frozen", "FSDP", "2 replicas 1 experts", "sgd", shared="a weight"), Case(again="layers", before=False)],
    ],
    3: [
        *[Case("frozen", optimizer="sgd", micro=2), Case("capacity", mesh="3 nodes 1 inside"), Case("plain", "ZeRO-1")],
        *[Case("plain", "FSDP", micro=2), Case("frozen", "FSDP", "3 replicas 1 experts", "sgd")],
        *[Case("like V3", mesh="1 experts 3 tensor", micro=2), Case(mesh="1 experts 3 tensor", shared="a weight")],
        *[Case(again="layers"), Case("like V3", again="all but the router", before=False), Case(shared="experts")],
    ],
    4: [
        *[Case("like V3", mesh="2 replicas 2 experts"), Case("capacity", "alone", "2 replicas 1 nodes 2 inside", "sgd", 2)],
        *[Case("plain", "ZeRO-1", "2 replicas 2 experts"), Case("capacity", "FSDP", "2 replicas 2 experts", "sgd", 2)],
        *[Case("like V3", "FSDP", "2 replicas 1 experts 2 tensor"), Case("frozen", "ZeRO-1", "2 experts 2 tensor")],
        *[Case("capacity", again="layers", mesh="2 nodes 2 inside"), Case(shared="experts", mesh="2 experts 2 tensor")],
    ],
}
KEPT = [(n, case) for n in (3, 4) for case in CASES[n]][::2]
WAYS = [(n, case) for n, cases in CASES.items() for case in cases]


@cache
def trained(case: Case, ranks: int, steps: int = 5) -> tuple[dict, list[float], int]:
    """One process's state, each step's norm before it was clipped, and the copies of the last step."""
    model, norms = gpt(case.kind, case.shared), []
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(case.micro):
            (alone(model, case.micro * step + part, ranks) / case.micro).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST[case.kind]).item())
        optimizer.step()
        counts_LE = take_counts(routers_of(model))
        move_biases(routers_of(model), counts_LE)
    assert all(router.bias_E.any() == (router.bias_speed > 0) for router in routers_of(model))
    return {name: value.clone() for name, value in model.state_dict().items()}, norms, counts_LE.tolist()


def wrapped(case: Case, model: ExpertParallel) -> tuple[nn.Module, list, Callable]:
    """The model in its wrapper, its optimizers, and what clips."""
    own, optimizer = model.expert_parameters(), OPTIMIZERS[case.optimizer]
    if case.wrapper == "FSDP":
        apart = dict.fromkeys(own, model.replicas)
        whole = FullyShardedDataParallel(model, units=model.module.layers, shared_by=apart.get)
        return whole, [optimizer(whole.parameters())], partial(clipping.clip_grad_norm, list(whole.parameters()))
    if case.wrapper == "alone":
        return model, [optimizer(model.parameters())], model.clip_grad_norm_
    pairs = [(model.dense_parameters(), None), (own, model.replicas)]
    found = [ZeroOptimizer(each, optimizer.func, 1, group, **optimizer.keywords) for each, group in pairs]

    def clip(most: float) -> Tensor:
        for one in found:
            one.gradients()
        return clipping.clip_grad_norm([shard for one in found for shard in one.shards()], most)

    return model, found, clip


def train(case: Case, wanted: dict[str, Tensor], norms: list[float]) -> tuple[float, float, list[list[int]]]:
    """The same on ranks: the largest differences of a weight or bias, and of a norm; the last load."""
    n, model, off_by = dist.get_world_size(), gpt(case.kind, case.shared), 0.0
    inner, again = model, partial(checkpoint_modules, which=lambda module: isinstance(module, PARTS.get(case.again, ())))
    if case.before:
        again(inner)
    model = cut(inner, case.mesh, reduces=case.wrapper == "alone")
    if not case.before:
        again(inner)
    whole, optimizers, clip = wrapped(case, model)
    for step, norm in enumerate(norms):
        for part in range(case.micro):
            with nullcontext() if part == case.micro - 1 else model.no_sync():
                inputs, targets = (x.chunk(n)[dist.get_rank()] for x in batch(case.micro * step + part, n))
                ((loss(whole(inputs), targets) + model.auxiliary_loss()) / case.micro).backward()
                model.finish()
        off_by = max(off_by, abs(clip(MOST[case.kind]).item() - norm))
        for one in optimizers:
            one.step()
            one.zero_grad()
    if whole is not model:
        state = {name.removeprefix("module."): value for name, value in whole.full_state_dict().items()}
        wanted = wanted | {name: model.part(name, wanted[name]) for name in model._expert_names()}
    else:
        model.load_full_state_dict(state := model.full_state_dict())
    assert state.keys() == wanted.keys()
    return largest(off(value, wanted[name]) for name, value in state.items()), off_by, model.load_LE.tolist()


@pytest.mark.parametrize(
    ("n", "case"), matrix(WAYS, KEPT), ids=lambda one: " ".join(map(str, one)) if isinstance(one, Case) else one
)
def test_steps_are_those_of_one_process(world_of, n, case):
    weights, norms, load = trained(case, n)
    assert MOST[case.kind] < max(norms), norms
    if case.again:
        m = world_of(n).measure(train, case, weights, norms)
        calls = [tuple(call.op for call in calls if call.op != "broadcast") for calls in m.calls.values()]
        assert len(set(calls)) == 1, "all ranks issue the same, in the same order, in backward, too"
    for weight, norm, found in m.results if case.again else world_of(n).run(train, case, weights, norms):
        assert weight < NEAR[case.optimizer]
        assert norm < 1e-8
        assert found == load


def once(kind: str) -> tuple[float, float, set]:
    """One backward of experts that were frozen when the model was cut: the differences to one process of the loss and of all
    gradients, by their size, in 64 bits or under autocast; gradients' dtypes."""
    n, half = dist.get_world_size(), kind == "like V3"
    one, model = gpt(kind), gpt(kind)
    if half:
        one, model = one.float(), model.float()
    model.layers[1].mlp.experts.requires_grad_(False)
    model = cut(model)
    model.requires_grad_(True)
    inputs, targets = (x.chunk(n)[dist.get_rank()] for x in batch(0, n))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs, ours = alone(one, 0, n), loss(model(inputs), targets) + model.auxiliary_loss()
    theirs.backward()
    ours.backward()
    model.finish()
    dist.all_reduce(value := ours.detach() / n)
    size = max(p.grad.abs().max().item() for p in one.parameters())
    wanted = {name: p.grad for name, p in one.named_parameters()}
    wanted |= {name: model.part(name, wanted[name]) for name in model._expert_names()}
    gradients = largest(off(p.grad, wanted[name]) for name, p in model.module.named_parameters())
    return off(value, theirs) / theirs.item(), gradients / size, {p.grad.dtype for p in model.parameters()}


@pytest.mark.parametrize(
    ("kind", "near", "dtype"), [("plain", (1e-12, 1e-12), torch.float64), ("like V3", (1e-2, 0.05), torch.float32)]
)
def test_experts_may_learn_later_in_bfloat16_too(shared_world, kind, near, dtype):
    for value, gradients, kinds in shared_world.run(once, kind):
        assert value < near[0]
        assert gradients < near[1]
        assert kinds == {dtype}


# States


def moved(state: dict[str, Tensor], mesh: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The first state of a model that ranks seed otherwise, and this one after it was loaded."""
    model = cut(GPT(CONFIGS["like V3"], seed=9 if dist.get_rank() else 3), mesh)
    first = {name: value.clone() for name, value in model.full_state_dict().items()}
    model.load_full_state_dict(state)
    return first, model.full_state_dict()


DEGREES = [(2, ""), (4, ""), (2, "2 nodes 1 inside"), (4, "2 replicas 1 experts 2 tensor"), (3, "3 replicas 1 experts")]
DEGREES += [(4, "2 experts 2 tensor"), (4, "2 replicas 2 experts"), (3, "")]


@pytest.mark.parametrize(("n", "mesh"), DEGREES)
def test_first_weights_are_rank_0_s_and_a_state_is_one_process_s_whatever_the_degree(sizes, n, mesh):
    first, state = (GPT(CONFIGS["like V3"], seed=seed).state_dict() for seed in (3, 5))
    for pair in sizes[n].run(moved, state, mesh):
        for found, wanted in zip(pair, (first, state), strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("balanced", [{"auxiliary": 0.1}, {"bias_speed": 0.1}])
def test_a_trainer_without_a_plan_refuses_to_balance(balanced):
    with pytest.raises(ValueError, match="adds no balancing loss and moves no biases; leave both 0, or train with"):
        Trainer(replace(SMALL, vocab=256, **balanced), TrainingConfig(steps=1, batch=1))
