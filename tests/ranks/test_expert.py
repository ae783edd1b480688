"""parallel.expert: experts on several ranks compute what one process does, whatever the router says."""

from collections.abc import Callable
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from manyranks.parallel.expert import ExpertParallel, Experts, Router, Routing, one_hop
from manyranks.parallel.expert.dispatch import by_expert
from tests.conftest import matrix
from tests.unit.attention_reference import draw, gap, largest
from tests.unit.expert_reference import layer, mixture

DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 3, 4], [3, 4]), indirect=True, scope="module")
H, E, FFN = 5, 12, 3
TOKENS = [7, 4, 6, 5]  # of each rank
HOP, HOPS = ("experts",), ("nodes", "inside")
MESHES = {  # by the number of ranks: the mesh's shape and its axes
    1: [((1,), HOP), ((1, 1), HOPS)],
    3: [((3,), HOP), ((3, 1), ("replicas", *HOP)), ((3, 1), HOPS)],
    4: [
        *[((4,), HOP), ((2, 2), ("replicas", *HOP)), ((4, 1), ("replicas", *HOP))],
        *[((1, 4), HOPS), ((2, 2), HOPS), ((4, 1), HOPS)],
        *[((2, 2, 1), ("replicas", *HOPS)), ((2, 1, 2), ("replicas", *HOPS))],
    ],
}


class Layer(nn.Module):
    def __init__(self, k: int = 2, bias: list[float] | None = None, **options):
        super().__init__()
        self.router, self.experts = Router(H, E, k, **options), Experts(E, H, FFN)
        with torch.no_grad():
            for seed, p in enumerate(self.double().parameters()):
                p.copy_(draw(*p.shape, seed=seed))
            self.router.bias_E += torch.tensor(bias or [0.0] * E)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.experts(x_TH, self.router(x_TH))


class Told(nn.Module):
    """Experts whose router stands outside."""

    def __init__(self):
        super().__init__()
        self.experts = Layer().experts

    def forward(self, x_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return self.experts(x_TH, Routing(experts_TK, gates_TK))


@cache
def meshes() -> dict[str, Callable[[nn.Module], ExpertParallel]]:
    """How to cut a module, by name. Groups take long to make: once for all tests of a world."""
    n = dist.get_world_size()
    made = {f"{axes} {shape}": init_device_mesh("cpu", shape, mesh_dim_names=axes) for shape, axes in MESHES[n]}
    return {"no mesh": partial(ExpertParallel, experts="experts")} | {
        name: partial(ExpertParallel, experts="experts", mesh=mesh) for name, mesh in made.items()
    }


def shards(tokens: list[int], width: int = H, seed: int = 20) -> list[Tensor]:
    """The tokens of each rank."""
    return [draw(count, width, seed=seed + r).requires_grad_() for r, count in enumerate(tokens)]


def of_experts(model: ExpertParallel, whole: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradients of this rank's experts, each with the right one."""
    return [(p.grad, model.part("gate", grad)) for p, grad in zip(model.expert_parameters(), whole, strict=True)]


# With a router


def routed(tokens: list[int], auxiliary: float, **options) -> dict[str, float]:
    """The largest difference in outputs, load and gradients: of tokens, of the router, of experts."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    xs, weights = shards(tokens[:n]), shards(tokens[:n], seed=40)
    one = Layer(**options)
    experts = list(one.experts.parameters())
    outputs, loss, counts = layer(xs, one.router.weight, experts, **({"k": 2} | as_reference(options)))
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)) / n + auxiliary * loss
    grad_x, grad_router, *grads = torch.autograd.grad(total, [xs[rank], one.router.weight, *experts])
    for name, cut in meshes().items():
        model, x_TH = cut(Layer(auxiliary=auxiliary, **options)), xs[rank].detach().requires_grad_()
        y_TH = model(x_TH)
        ((y_TH * weights[rank]).sum() + model.auxiliary_loss()).backward()
        model.finish()
        pairs = [(y_TH, outputs[rank]), (x_TH.grad, n * grad_x), (model.module.router.weight.grad, grad_router)]
        found[name] = gap(pairs + of_experts(model, grads)) if x_TH.numel() else gap(pairs[2:] + of_experts(model, grads))
        assert model.load_LE.tolist() == [counts]
    return found


def as_reference(options: dict) -> dict:
    """Under the reference's names."""
    return {{"groups_per_token": "per_token"}.get(name, name): value for name, value in options.items()}


BIAS = [0.3 * ((5 * i) % 7) / 7 for i in range(E)]
ROUTERS = {
    "dropless": {"k": 3},
    "one choice": {"k": 1, "normalise": False, "scores": "sigmoid"},
    "capacity": {"k": 3, "capacity": 0.6, "auxiliary": 0.3},
    "a rank without tokens": {"k": 3, "capacity": 0.8, "auxiliary": 0.3, "tokens": [5, 0, 3, 0]},
    "groups, biases, capacity": {
        **{"k": 4, "scores": "sigmoid", "bias": BIAS, "auxiliary": 0.2},
        **{"groups": 4, "groups_per_token": 2, "capacity": 0.9},
    },
}


@DEGREES
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.few(4)
def test_outputs_and_all_gradients_are_those_of_one_process(shared_worlds, name):
    for found in shared_worlds.run(routed, **{"tokens": TOKENS, "auxiliary": 0.0} | ROUTERS[name]):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}
        assert len(found) == len(MESHES[shared_worlds.size]) + 1


# With choices that no router would make


def told(choices: list[Tensor]) -> dict[str, tuple[float, int]]:
    """choices: each rank's. The largest difference, gradients of gates included, and how many rows its experts computed."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    tokens, k = [len(rows) for rows in choices], choices[0].shape[1]
    xs, gates, weights = shards(tokens), shards(tokens, k, seed=60), shards(tokens, seed=40)
    experts = list(Told().experts.parameters())
    outputs = [mixture(x, rows.tolist(), g, *experts) for x, rows, g in zip(xs, choices, gates, strict=True)]
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)) / n
    total = total + 0 * sum(p.sum() for p in (*xs, *gates, *experts))  # where nothing depends on one of them
    grad_x, grad_gates, *grads = torch.autograd.grad(total, [xs[rank], gates[rank], *experts])
    for name, model in told_models().items():
        leaves = [x.detach().requires_grad_() for x in (xs[rank], gates[rank])]
        model.zero_grad()
        y_TH, rows = counted(model, leaves[0], choices[rank], leaves[1])
        (y_TH * weights[rank]).sum().backward()
        model.finish()
        own = [(y_TH, outputs[rank]), (leaves[0].grad, n * grad_x), (leaves[1].grad, n * grad_gates)]
        found[name] = gap((own if len(y_TH) else []) + of_experts(model, grads)), rows
        assert y_TH.shape == outputs[rank].shape
    return found


@cache
def told_models() -> dict[str, ExpertParallel]:
    return {name: cut(Told()) for name, cut in meshes().items()}


def counted(model: ExpertParallel, *inputs: Tensor) -> tuple[Tensor, int]:
    """The output, and the rows that this rank's experts computed."""
    experts, rows = model.module.experts, []
    whole = experts.compute
    with patch.object(experts, "compute", lambda x_RH, counts: rows.append(len(x_RH)) or whole(x_RH, counts)):
        return model(*inputs), sum(rows)


def random_choices(n: int, first: int = 0, last: int = E, tokens: list[int] = TOKENS, k: int = 2) -> list[Tensor]:
    """Of the experts from first to last."""
    return [first + draw(tokens[r], last - first, seed=80 + r).argsort(1)[:, :k] for r in range(n)]


def one_rank(n: int, which: int, rows: Tensor) -> list[Tensor]:
    """Any choices, and these on one of the ranks."""
    made = random_choices(n)
    made[which] = rows
    return made


NOWHERE = torch.full((4, 2), -1)
CHOICES = {
    "all to one expert": lambda n: [torch.full((t, 1), 7) for t in TOKENS[:n]],
    "nothing for the first rank": lambda n: random_choices(n, first=E // n if n > 1 else 0),
    "nothing for the second node": lambda n: random_choices(n, last=E // 2),
    "everything to the last rank": lambda n: random_choices(n, first=E - E // n),
    "each token twice to a rank": lambda n: random_choices(n, k=E),
    "a rank without tokens": lambda n: random_choices(n, tokens=[0, 6, 0, 3]),
    "no tokens at all": lambda n: random_choices(n, tokens=[0] * 4),
    "some dropped": lambda n: [rows.masked_fill(rows % 3 == 1, -1) for rows in random_choices(n, k=3)],
    "all dropped": lambda n: [NOWHERE] * n,
    "all of one rank dropped": lambda n: one_rank(n, n - 1, NOWHERE),
}


@DEGREES
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.few(5)
def test_any_choices_are_carried_out_and_the_gradients_come_back(shared_worlds, name):
    choices = CHOICES[name](shared_worlds.size)
    found = shared_worlds.run(told, choices)
    copies = sum(int((rows >= 0).sum()) for rows in choices)
    for case in found[0]:
        errors, rows = zip(*(of_rank[case] for of_rank in found), strict=True)
        assert largest(errors) < 1e-12, case
        assert sum(rows) == copies, f"{case}: each copy is computed once"


# Groups


def in_pairs() -> float:
    """Ranks 0 and 2, and ranks 1 and 3, at the same time, with other numbers."""
    other = dist.get_rank() % 2
    group = dist.new_group([other, other + 2], use_local_synchronization=True)
    rank, xs = dist.get_rank(group), shards([4 + other, 3])
    one = Layer(k=2)
    outputs, _, _ = layer(xs, one.router.weight, list(one.experts.parameters()), 2)
    wanted = torch.autograd.grad(sum(y.square().sum() for y in outputs) / 2, one.parameters())
    model = ExpertParallel(Layer(k=2), "experts", group)
    y_TH = model(xs[rank])
    y_TH.square().sum().backward()
    model.finish()
    return gap([(y_TH, outputs[rank]), (model.module.router.weight.grad, wanted[0]), *of_experts(model, list(wanted[1:]))])


@pytest.mark.parametrize("shared_worlds", [4], indirect=True)
def test_two_groups_know_nothing_of_each_other(shared_worlds):
    assert largest(shared_worlds.run(in_pairs)) < 1e-12


def replicas() -> list[tuple[int, list[int]]]:
    """For each mesh, the degree and the ranks with the same experts."""
    return [(model.degree, dist.get_process_group_ranks(model.replicas)) for model in told_models().values()]


@pytest.mark.parametrize("shared_worlds", [4], indirect=True)
def test_replicas_are_the_ranks_with_the_same_experts_and_the_rank_alone_where_there_are_none(shared_worlds):
    alone = [(4, [1])]
    assert shared_worlds.run(replicas)[1] == [*alone * 2, (2, [1, 3]), (1, [0, 1, 2, 3]), *alone * 3, (2, [1, 3]), (2, [1, 3])]


# PyTorch's own


def by_pytorch(x_TH: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """One hop with PyTorch's all-to-all, which has a gradient; own experts one after the other."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd as carried

    n, k = dist.get_world_size(), routing.experts_TK.shape[1]
    order_R, counts_E = by_expert(routing.experts_TK, E)
    came_E = torch.empty_like(counts_E)
    dist.all_to_all_single(came_E, counts_E)
    ways = came_E.view(n, -1).sum(1).tolist(), counts_E.view(n, -1).sum(1).tolist()
    came_RH = carried(x_TH[order_R // k], *ways, dist.group.WORLD)
    number_R = torch.arange(E // n).repeat(n).repeat_interleave(came_E)
    y_RH = came_RH.new_zeros(came_RH.shape)
    for i in range(E // n):
        rows = (number_R == i).nonzero()[:, 0]
        x_rH = came_RH[rows]
        y_rH = F.linear(F.silu(F.linear(x_rH, experts.gate[i])) * F.linear(x_rH, experts.up[i]), experts.down[i])
        y_RH = y_RH.index_copy(0, rows, y_rH)
    back_RH = carried(y_RH, *ways[::-1], dist.group.WORLD)
    return torch.zeros_like(x_TH).index_add(0, order_R // k, back_RH * routing.gates_TK.flatten()[order_R, None])


def both_ways() -> float:
    rank, n = dist.get_rank(), dist.get_world_size()
    experts, (x_TH, gates_TK) = Layer().experts, (shards(TOKENS[:n])[rank], shards(TOKENS[:n], 2, seed=60)[rank])
    for p in experts.parameters():
        p.data = p.data.chunk(n)[rank].clone()
    routing, inputs = Routing(random_choices(n)[rank], gates_TK), [x_TH, gates_TK, *experts.parameters()]
    ours, theirs = one_hop(x_TH, routing, experts.compute, E), by_pytorch(x_TH, routing, experts)
    grads = [torch.autograd.grad(y_TH.square().sum(), inputs) for y_TH in (ours, theirs)]
    return gap([(ours, theirs), *zip(*grads, strict=True)])


def test_results_are_those_of_pytorch_s_all_to_all(shared_worlds):
    assert largest(shared_worlds.run(both_ways)) < 1e-12
