"""parallel.expert, a layer: on ranks it computes what one process does, whatever the router says, and sends what theory says.

One matrix: choices, even ones that no router would make × ways to lay out experts × numbers of ranks. test_expert_model
has what routers learn on ranks.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel import expert as parallel
from manyranks.parallel.expert import ExpertParallel, Experts, Router, Routing, in_slices, one_hop
from manyranks.theory import expert as theory
from tests.conftest import matrix
from tests.unit.attention_reference import draw, gap, largest
from tests.unit.expert_reference import layer, mixture

DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 3, 4], [3, 4]), indirect=True, scope="module")
H, E, FFN = 5, 12, 6
TOKENS = [7, 4, 6, 5]  # of each rank
MESHES = {  # by the number of ranks: the sizes of its axes, in words as short as "2 replicas 2 experts"
    1: ["1 experts", "1 nodes 1 inside", "1 experts 1 tensor"],
    3: ["3 experts", "3 replicas 1 experts", "3 nodes 1 inside", "1 experts 3 tensor"],
    4: [
        *["4 experts", "2 replicas 2 experts", "4 replicas 1 experts", "1 nodes 4 inside", "2 nodes 2 inside"],
        *["4 nodes 1 inside", "2 replicas 2 nodes 1 inside", "2 replicas 1 nodes 2 inside"],
        *["2 experts 2 tensor", "2 replicas 1 experts 2 tensor", "1 nodes 2 inside 2 tensor", "2 nodes 1 inside 2 tensor"],
    ],
}


class Layer(nn.Module):
    def __init__(self, auxiliary: float = 0.0):
        super().__init__()
        self.router, self.experts = Router(H, E, 2, auxiliary=auxiliary), Experts(E, H, FFN)
        with torch.no_grad():
            for seed, p in enumerate(self.double().parameters()):
                p.copy_(draw(*p.shape, seed=seed))

    def forward(self, x_TH: Tensor, *told: Tensor) -> Tensor:
        """told: choices and gates, where these don't come from the router."""
        return self.experts(x_TH, Routing(*told) if told else self.router(x_TH))


@cache
def ways() -> dict[str, Callable[[nn.Module], ExpertParallel]]:
    """How to lay out experts, by name. Groups take long to make: once for all tests of a world."""
    found = {"no mesh": partial(ExpertParallel, experts="experts")}
    for words in MESHES[dist.get_world_size()]:
        sizes, names = words.split()[::2], tuple(words.split()[1::2])
        mesh = init_device_mesh("cpu", tuple(map(int, sizes)), mesh_dim_names=names)
        found[words] = partial(ExpertParallel, experts="experts", mesh=mesh)
    return found


def shards(tokens: list[int], width: int = H, seed: int = 20) -> list[Tensor]:
    """The tokens of each rank."""
    return [draw(count, width, seed=seed + r).requires_grad_() for r, count in enumerate(tokens)]


def of_experts(model: ExpertParallel, whole: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradients of this rank's experts, each with the right one."""
    named = model.module.experts.named_parameters()
    return [(p.grad, model.part(name, grad)) for (name, p), grad in zip(named, whole, strict=True)]


# Any choices


def told(choices: list[Tensor]) -> dict[str, tuple[float, float]]:
    """choices: each rank's. The largest difference, gradients of gates included, and how many rows its experts computed."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    tokens, k = [len(rows) for rows in choices], choices[0].shape[1]
    xs, gates, weights = shards(tokens), shards(tokens, k, seed=60), shards(tokens, seed=40)
    experts = list(Layer().experts.parameters())
    outputs = [mixture(x, rows.tolist(), g, *experts) for x, rows, g in zip(xs, choices, gates, strict=True)]
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)) / n
    total = total + 0 * sum(p.sum() for p in (*xs, *gates, *experts))  # where nothing depends on one of them
    grad_x, grad_gates, *grads = torch.autograd.grad(total, [xs[rank], gates[rank], *experts])
    for name, model in told_models().items():
        x_TH, gates_TK = (x.detach().requires_grad_() for x in (xs[rank], gates[rank]))
        model.zero_grad()
        y_TH, rows = counted(model, x_TH, choices[rank], gates_TK)
        (y_TH * weights[rank]).sum().backward()
        model.finish()
        own = [(y_TH, outputs[rank]), (x_TH.grad, n * grad_x), (gates_TK.grad, n * grad_gates)]
        found[name] = gap((own if len(y_TH) else []) + of_experts(model, grads)), rows / model.width
        assert y_TH.shape == outputs[rank].shape
    return found


@cache
def told_models() -> dict[str, ExpertParallel]:
    return {name: cut(Layer()) for name, cut in ways().items()}


def counted(model: ExpertParallel, *inputs: Tensor) -> tuple[Tensor, int]:
    """The output, and the rows that this rank's experts computed."""
    experts, rows = model.module.experts, []
    whole = experts.compute
    with patch.object(experts, "compute", lambda x_RH, counts: rows.append(len(x_RH)) or whole(x_RH, counts)):
        return model(*inputs), sum(rows)


def random_choices(n: int, first: int = 0, last: int = E, tokens: list[int] = TOKENS, k: int = 2) -> list[Tensor]:
    """Choices among the experts from first to last."""
    return [first + draw(tokens[r], last - first, seed=80 + r).argsort(1)[:, :k] for r in range(n)]


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
    "all of one rank dropped": lambda n: [*random_choices(n)[: n - 1], NOWHERE],
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
        assert sum(rows) == copies, f"{case}: each copy is computed once, by each slice"


# Groups


def in_pairs(how: str) -> float:
    """Ranks 0 and 2, and ranks 1 and 3, are groups, each with its own losses.

    how: with different experts, and a rank without tokens; or both groups with the same experts, which ranks 0 and 1,
    and 2 and 3, cut as they cut attention, with the same tokens or with parts of a sequence
    """
    rank, alone, same = dist.get_rank(), how == "alone", how == "same tokens"
    group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    mesh = None if alone else init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "tensor"))
    tokens = {"alone": [4 + rank % 2, 0], "same tokens": [4, 3], "parts": TOKENS}[how]
    xs, own, one = shards(tokens), rank if how == "parts" else rank // 2, Layer()
    outputs, loss, counts = layer(xs, one.router.weight, list(one.experts.parameters()), 2)
    total = sum(y.square().sum() for y in outputs) / 2 + alone * loss
    grad_x, *wanted = torch.autograd.grad(total, [xs[own], *one.parameters()])
    model = ExpertParallel(Layer(auxiliary=float(alone)), "experts", group, mesh, same_tokens=same)
    x_TH = xs[own].detach().requires_grad_()
    y_TH = model(x_TH)
    (y_TH.square().sum() + model.auxiliary_loss()).backward()
    model.finish()
    if how == "parts":  # each has a part of the router's gradient
        dist.all_reduce(model.module.router.weight.grad, group=mesh.get_group("tensor"))
    assert model.load_LE.tolist() == [counts]
    assert y_TH.shape == outputs[own].shape
    pairs = [(y_TH, outputs[own]), (x_TH.grad, 2 * grad_x)] if len(y_TH) else []
    return gap([*pairs, (model.module.router.weight.grad, wanted[0]), *of_experts(model, wanted[1:])])


@pytest.mark.parametrize("how", ["alone", "same tokens", "parts"])
@pytest.mark.parametrize("shared_worlds", [4], indirect=True)
def test_two_groups_know_nothing_of_each_other_or_cut_the_same_experts(shared_worlds, how):
    assert largest(shared_worlds.run(in_pairs, how)) < 1e-11


def alike() -> list[tuple[int, list[int]]]:
    return [(model.degree, dist.get_process_group_ranks(model.replicas)) for model in told_models().values()]


@pytest.mark.parametrize("shared_worlds", [4], indirect=True)
def test_replicas_are_the_ranks_with_the_same_experts(shared_worlds):
    alone, pair = (4, [1]), (2, [1, 3])
    cut = [(2, [1]), (1, [1, 3]), (2, [1]), (2, [1])]
    assert shared_worlds.run(alike)[1] == [alone, alone, pair, (1, [0, 1, 2, 3]), alone, alone, alone, pair, pair, *cut]


# What is sent


def layer_of(choices: list[Tensor], dtype: torch.dtype, inside: int, hops: int) -> None:
    """Forward and backward. inside: ranks of a node, with two hops; those that cut an expert, with one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n // inside, inside), mesh_dim_names=("outer", "inner"))
    outer, inner = (mesh.get_group(name) for name in mesh.mesh_dim_names)
    chosen_TK = choices[rank]
    x_TH = torch.randn(len(chosen_TK), H, dtype=dtype, requires_grad=True)
    gates_TK = torch.rand(chosen_TK.shape, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    routing = Routing(chosen_TK, gates_TK)
    if hops == 2:
        own = Experts(E // n, H, FFN).to(dtype)
        y_TH = parallel.two_hops(x_TH, routing, own.compute, E, outer, inner)
    else:
        own = Experts(E * inside // n, H, FFN // inside).to(dtype)
        y_TH = one_hop(x_TH, routing, partial(in_slices, compute=own.compute, group=inner), E, outer)
    y_TH.sum().backward()


@DEGREES
@pytest.mark.parametrize("name", ["all to one expert", "a rank without tokens", "some dropped", "each token twice to a rank"])
@pytest.mark.few(4)
def test_every_all_to_all_sends_what_theory_makes_of_the_routing_byte_by_byte(shared_worlds, name):
    n, choices = shared_worlds.size, CHOICES[name](shared_worlds.size)
    routing, sizes = [rows.tolist() for rows in choices], (E, H)
    for inside, dtype in product(sorted({1, max(1, n // 2), n}), (torch.bfloat16, torch.float64)):
        for hops in (1, 2):
            m = shared_worlds.measure(layer_of, choices, dtype, inside, hops)
            one = partial(theory.one_hop, routing, *sizes, dtype.itemsize, inside)
            sends = theory.two_hops(routing, *sizes, n // inside, dtype.itemsize) if hops == 2 else one()
            for rank in range(n):
                calls = [call for call in m.calls[rank] if call.op == "all_to_all"]
                for call, exchange in zip(calls, sends.both, strict=True):
                    assert call.parts == tuple(exchange.bytes[rank][other] for other in call.ranks), exchange.what
                    assert call.received == sum(row[rank] for row in exchange.bytes), exchange.what
            assert tuple(m.payload_bytes[rank] for rank in range(n)) == sends.payload
