"""ExpertParallel: the GPT with experts, changed from outside, trains as one process does on all ranks' sequences."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.expert import ExpertParallel, Experts, Router, move_biases, take_counts
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT, Attention, loss
from manyranks.training.gpt import Layer as GPTLayer
from tests.ranks import test_sharded_training
from tests.ranks.test_tensor import lively, off
from tests.ranks.test_trainer import assert_close
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
}
CONFIGS["frozen"] = replace(SMALL, auxiliary=0.1)
FROZEN = ("embedding.", "layers.0.attention", "layers.0.mlp.router", "layers.0.mlp.experts", "layers.1.mlp.experts.up")
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=1e-2)}
NEAR = {"sgd": 1e-10, "adamw": 1e-8}
MOST = {"plain": 0.9, "like V3": 0.5, "capacity": 0.45, "frozen": 0.5}  # the norm at which gradients are clipped
HOP, HOPS = ("experts",), ("nodes", "inside")


def gpt(kind: str, **changes) -> GPT:
    model = lively(GPT(replace(CONFIGS[kind], **changes)))
    for name, p in model.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    return model


def batch(number: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of that many ranks, two sequences of each."""
    random = torch.Generator().manual_seed(number)
    tokens_BT = torch.randint(SMALL.vocab, (2 * ranks, SMALL.seq + 1), generator=random)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def routers_of(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def alone(model: GPT, number: int, ranks: int) -> Tensor:
    """One process's loss. Capacity is a rank's: its sequences run by themselves."""
    parts = ranks if model.config.capacity else 1
    pairs = zip(*(x.chunk(parts) for x in batch(number, ranks)), strict=True)
    total = sum(loss(model(inputs), targets) for inputs, targets in pairs) / parts
    return total + sum(router.loss for router in routers_of(model) if router.loss is not None)


def ours(model: ExpertParallel, number: int, ranks: int) -> Tensor:
    inputs, targets = (x.chunk(ranks)[dist.get_rank()] for x in batch(number, ranks))
    return loss(model(inputs), targets) + model.auxiliary_loss()


def cut(model: nn.Module, shape: tuple[int, ...] = (), axes: tuple[str, ...] = (), **how) -> ExpertParallel:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes) if shape else None
    return ExpertParallel(model, mesh=mesh, **how)


@cache
def trained(kind: str, optimizer: str, micro: int, ranks: int, steps: int = 6) -> tuple[dict, list[float]]:
    """One process's state, and each step's norm before it was clipped. micro: micro-batches of a step."""
    model, norms = gpt(kind), []
    steps_of = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        steps_of.zero_grad()
        for part in range(micro):
            (alone(model, micro * step + part, ranks) / micro).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST[kind]).item())
        steps_of.step()
        move_biases(routers_of(model), take_counts(routers_of(model)))
    assert all(router.bias_E.any() == (router.bias_speed > 0) for router in routers_of(model))
    return {name: value.clone() for name, value in model.state_dict().items()}, norms


def state_gap(model: ExpertParallel, expected: dict[str, Tensor]) -> float:
    state = model.full_state_dict()
    assert state.keys() == expected.keys()
    return largest(off(value, expected[name]) for name, value in state.items())


def train(kind: str, optimizer: str, micro: int, expected: dict, norms: list[float], **how) -> float:
    """The same on ranks; the largest difference of a weight or a bias."""
    model, ranks = cut(gpt(kind), **how), dist.get_world_size()
    steps_of = OPTIMIZERS[optimizer](model.parameters())
    for step, norm in enumerate(norms):
        steps_of.zero_grad()
        for part in range(micro):
            with nullcontext() if part == micro - 1 else model.no_sync():
                (ours(model, micro * step + part, ranks) / micro).backward()
                model.finish()
        assert abs(model.clip_grad_norm_(MOST[kind]).item() - norm) < 1e-8
        steps_of.step()
    return state_gap(model, expected)


WAYS = {  # model, optimizer, micro-batches of a step, mesh
    2: [("like V3", "sgd", 2, {}), ("plain", "adamw", 1, {"shape": (2, 1), "axes": ("replicas", *HOP)})],
    3: [("frozen", "sgd", 1, {}), ("capacity", "adamw", 1, {"shape": (3, 1), "axes": HOPS})],
    4: [
        ("like V3", "adamw", 1, {"shape": (2, 2), "axes": ("replicas", *HOP)}),
        ("capacity", "sgd", 2, {"shape": (2, 1, 2), "axes": ("replicas", *HOPS)}),
    ],
}


def test_steps_of_micro_batches_balanced_and_clipped_are_those_of_one_process(shared_worlds):
    for kind, optimizer, micro, how in WAYS[shared_worlds.size]:
        weights, norms = trained(kind, optimizer, micro, shared_worlds.size)
        assert min(norms) < MOST[kind] < max(norms), (kind, norms)
        found = largest(shared_worlds.run(train, kind, optimizer, micro, weights, norms, **how))
        assert found < NEAR[optimizer], (kind, how)


# With other parts of the library


def sharded(shape: tuple, axes: tuple, expected: dict) -> float:
    """ZeRO's stage 1, of what all ranks have over all of them, and of experts over their replicas."""
    model, n = cut(gpt("plain"), shape, axes, reduces=False), dist.get_world_size()
    groups = [(model.dense_parameters(), None), (model.expert_parameters(), model.replicas)]
    optimizers = [ZeroOptimizer(own, torch.optim.AdamW, 1, group, lr=1e-2) for own, group in groups]
    for step in range(5):
        ours(model, step, n).backward()
        model.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state_gap(model, expected)


@pytest.mark.parametrize(
    ("shared_worlds", "shape", "axes"), [(4, (2, 2), ("replicas", *HOP)), (3, (), ())], indirect=["shared_worlds"]
)
def test_optimizer_states_may_be_sharded(shared_worlds, shape, axes):
    one, n = gpt("plain"), shared_worlds.size
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        alone(one, step, n).backward()
        optimizer.step()
    assert largest(shared_worlds.run(sharded, shape, axes, dict(one.state_dict()))) < 1e-8


def gradient_gap(model: ExpertParallel, one: nn.Module) -> float:
    theirs = {name: p.grad for name, p in one.named_parameters()}
    own = {name: grad for name, grad in theirs.items() if ".experts." not in name}
    own |= {name: model.part(name, theirs[name]) for name in model._expert_names() if theirs.get(name) is not None}
    return largest(off(p.grad, own.get(name)) for name, p in model.module.named_parameters())


PARTS = {"layers": (GPTLayer,), "all but the router": (Attention, Experts)}


def with_checkpoints(parts: str, kind: str, before: bool, **how) -> tuple[float, list[int]]:
    """The largest difference of a gradient, and what each layer's load adds up to."""
    n, one, model = dist.get_world_size(), gpt(kind), gpt(kind)
    if before:
        checkpoint_modules(model, lambda module: isinstance(module, PARTS[parts]))
    model = cut(model, **how)
    if not before:
        checkpoint_modules(model.module, lambda module: isinstance(module, PARTS[parts]))
    alone(one, 0, n).backward()
    ours(model, 0, n).backward()
    model.finish()
    return gradient_gap(model, one), model.load_LE.sum(1).tolist()


@pytest.mark.parametrize(
    ("parts", "kind", "before"),
    [
        ("layers", "plain", True),
        ("layers", "capacity", False),
        ("all but the router", "like V3", True),
        ("all but the router", "like V3", False),
    ],
)
@pytest.mark.parametrize("shared_worlds", [3, 4], indirect=True, scope="module")
@pytest.mark.few(2)
def test_what_is_computed_again_in_backward_is_sent_again_in_the_same_order_and_counted_once(
    shared_worlds, parts, kind, before
):
    n, config = shared_worlds.size, CONFIGS[kind]
    how = {"shape": (2, n // 2), "axes": HOPS} if n % 2 == 0 else {}
    m = shared_worlds.measure(with_checkpoints, parts, kind, before, **how)
    assert largest(error for error, _ in m.results) < 1e-12
    choices = 2 * n * SMALL.seq * config.top_k
    assert m.results[0][1] == [choices] * config.shape().moe_layers
    made = [[(call.op, str(call.ranks)) for call in calls if call.op != "broadcast"] for calls in m.calls.values()]
    assert len({tuple(op for op, _ in calls) for calls in made}) == 1


def lost(reentrant: bool) -> str:
    """What an auxiliary loss says that was made inside a checkpoint."""
    model = cut(gpt("like V3"))
    if reentrant:
        model.module.layers[1] = Reentrant(model.module.layers[1])
    else:
        checkpoint_modules(model.module, lambda module: isinstance(module, GPTLayer))
    try:
        ours(model, 0, dist.get_world_size()).backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


class Reentrant(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, *args, use_reentrant=True)


def test_an_auxiliary_loss_that_got_lost_in_a_checkpoint_is_an_error_on_all_ranks(shared_world):
    assert all("leave the router out of it, or balance by bias_speed" in said for said in shared_world.run(lost, True))
    assert all("by another way than its result" in said for said in shared_world.run(lost, False))


def learning_later() -> float:
    """Experts that were frozen when the model was cut."""
    n, one, model = dist.get_world_size(), gpt("plain"), gpt("plain")
    for p in model.layers[0].mlp.experts.parameters():
        p.requires_grad_(False)
    model = cut(model)
    model.requires_grad_(True)
    alone(one, 0, n).backward()
    ours(model, 0, n).backward()
    model.finish()
    return gradient_gap(model, one)


def test_experts_may_learn_later(shared_world):
    assert largest(shared_world.run(learning_later)) < 1e-12


def sharing(which: str) -> tuple[float, float]:
    """Layers with the same experts, or with one of their weights: differences of gradients and of the state."""
    n, one, model = dist.get_world_size(), gpt("plain"), gpt("plain")
    for each in (one, model):
        first, second = (layer.mlp for layer in each.layers)
        if which == "experts":
            second.experts = first.experts
        else:
            second.experts.up = first.experts.up
    model = cut(model)
    alone(one, 0, n).backward()
    ours(model, 0, n).backward()
    model.finish()
    model.load_full_state_dict(model.full_state_dict())
    return gradient_gap(model, one), state_gap(model, one.state_dict())


@pytest.mark.parametrize("which", ["experts", "a weight"])
def test_layers_may_share_experts(shared_world, which):
    assert largest(gap for gaps in shared_world.run(sharing, which) for gap in gaps) < 1e-12


def evaluated() -> tuple[float, int, int]:
    """The difference in outputs; counts, before and after."""
    one, model = gpt("plain").eval(), cut(gpt("plain")).eval()
    inputs = batch(0, 1)[0]
    with torch.no_grad():
        difference = off(model(inputs), one(inputs))
    return difference, sum(int(router.counts_E.sum()) for router in routers_of(model)), float(model.auxiliary_loss())


def test_in_evaluation_nothing_is_counted(shared_world):
    for difference, *counted in shared_world.run(evaluated):
        assert difference < 1e-12
        assert counted == [0, 0]


def in_bfloat16() -> tuple[float, float, set]:
    """The differences to one process of the loss and of all gradients, by their own size; what dtypes gradients have."""
    n, one, model = dist.get_world_size(), gpt("like V3").float(), cut(gpt("like V3").float())
    with torch.autocast("cpu", torch.bfloat16):
        both = alone(one, 0, n), ours(model, 0, n)
    for value in both:
        value.backward()
    model.finish()
    value = both[1].detach().clone()
    dist.all_reduce(value)
    size = max(p.grad.abs().max().item() for p in one.parameters())
    kinds = {p.grad.dtype for p in model.module.parameters()}
    return off(value / n, both[0]) / both[0].item(), gradient_gap(model, one) / size, kinds


def test_products_may_be_in_bfloat16(shared_world):
    for value, gradients, kinds in shared_world.run(in_bfloat16):
        assert value < 1e-2
        assert gradients < 0.05
        assert kinds == {torch.float32}


# States


def first_state(seed_of_others: int, **how) -> dict[str, Tensor]:
    config = replace(CONFIGS["like V3"], tied=False)
    return cut(GPT(config, seed=seed_of_others if dist.get_rank() else 3), **how).full_state_dict()


def test_first_weights_are_those_of_one_process_at_any_degree(sizes):
    expected = GPT(replace(CONFIGS["like V3"], tied=False), seed=3).state_dict()
    hows = {2: {}, 3: {"shape": (3, 1), "axes": ("replicas", *HOP)}, 4: {"shape": (2, 2), "axes": HOPS}}
    for n, how in hows.items():
        for state in sizes[n].run(first_state, 9, **how):
            assert state.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in state.items())


def stepped(state: dict[str, Tensor], step: int, **how) -> dict[str, Tensor]:
    """One step of training from this state."""
    model = cut(GPT(CONFIGS["like V3"], seed=5).double(), **how)
    model.load_full_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(step, 1)
    (loss(model(inputs), targets) + model.auxiliary_loss()).backward()
    model.finish()
    optimizer.step()
    return model.full_state_dict()


def test_a_state_goes_from_one_degree_to_any_other(sizes):
    state, one = gpt("like V3").state_dict(), gpt("like V3")
    ways = [(2, {}), (4, {}), (2, {"shape": (2, 1), "axes": HOPS}), (4, {"shape": (2, 2), "axes": ("replicas", *HOP)}), (3, {})]
    for step, (n, how) in enumerate(ways):
        state = sizes[n].run(stepped, state, step, **how)[n - 1]
        one.zero_grad()
        alone(one, step, 1).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        move_biases(routers_of(one), take_counts(routers_of(one)))
    assert largest(off(value, state[name]) for name, value in one.state_dict().items()) < 1e-12
    one.load_state_dict(state)


# The trainer

TRAINED = replace(SMALL, vocab=256, shared_experts=1, dense_layers=1, scores="sigmoid")
TRAINING = TrainingConfig(steps=6, batch=7, warmup=2)


@pytest.mark.parametrize("how", [{}, {"zero": 2, "recompute": "full"}, {"zero": 3, "accumulate": 2}], ids=str)
@pytest.mark.few(1)
def test_the_trainer_trains_experts_on_all_ranks_alike(shared_world, how):
    wanted = test_sharded_training.trained(TRAINED, TRAINING)
    for found in shared_world.run(test_sharded_training.trained, TRAINED, replace(TRAINING, **how)):
        assert_close(found, wanted)


@pytest.mark.parametrize("balanced", [{"auxiliary": 0.1}, {"bias_speed": 0.1}])
def test_it_refuses_to_balance_them(balanced):
    with pytest.raises(ValueError, match="adds no balancing loss and moves no biases; leave both 0, or train with"):
        test_sharded_training.trained(replace(TRAINED, **balanced), TRAINING)
