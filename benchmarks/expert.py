"""Expert parallelism: a layer and its products against PyTorch's own parts, bytes between nodes, and imbalance at scale."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, pairs, processor_seconds
from manyranks import theory
from manyranks.measure import meta
from manyranks.parallel import expert

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS, RANKS = 512, 128, 16, 4, 1024, 4
ROUNDS, STEPS = 15, 2
GROUPED = {"in equal parts": [512] * 8, "in uneven parts": [1800, 1000, 600, 400, 200, 80, 16, 0]}  # rows of each expert

NODES, INSIDE = 4, 2
NODE_LIMITS = {"any": ({}, None), "of 2 nodes": ({"groups": NODES, "groups_per_token": 2}, 0.55)}  # choices, target

V3, CLUSTER = theory.models["deepseek-v3"], theory.clusters["h800"]
LARGE_RANKS, LARGE_TOKENS, LARGE_EXPERTS = 8, 4096, 64

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    yield from _layers()
    yield from _products()
    yield from _between_nodes()
    yield from _replayed()


# A layer on 4 ranks against the same of PyTorch's parts


class Layer(NamedTuple):
    """A router, this rank's experts, and this rank's tokens."""

    router: expert.Router
    experts: expert.Experts
    x_TH: Tensor

    @classmethod
    def random(cls) -> "Layer":
        torch.manual_seed(0)
        router = expert.Router(HIDDEN, EXPERTS, TOP_K)
        torch.manual_seed(1 + dist.get_rank())
        own = expert.Experts(EXPERTS // dist.get_world_size(), HIDDEN, FFN)
        return cls(router, own, torch.randn(TOKENS, HIDDEN, requires_grad=True))

    def parameters(self) -> tuple[Tensor, ...]:
        return self.x_TH, self.router.weight, *self.experts.parameters()


def _layers() -> Iterator[Row]:
    what = f"{EXPERTS} experts of {HIDDEN} × {FFN}, {RANKS} ranks of {TOKENS:,} tokens, {TOP_K} a token: ours; all-to-alls and"
    with mr.World(RANKS) as world:
        for name, products in {"F.grouped_mm": _grouped_mm, "a loop of F.linear": _loop}.items():
            yield Row(f"{what} {name}", **training.slowest(world.run(_both, products)), ratio_at_most=1.03)


def _both(products: Callable[..., Tensor]) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds of a forward and a backward, on this rank. First of all, that both compute the same."""
    layer = Layer.random()
    steps = [partial(_step, way, layer) for way in (_ours, partial(_pytorch, products))]
    for a, b in zip(*(step() for step in steps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    measures = [partial(training.fastest, step, STEPS) for step in steps]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _step(way: Callable[[Layer], Tensor], layer: Layer) -> tuple[Tensor, ...]:
    y_TH = way(layer)
    return y_TH.detach(), *torch.autograd.grad(y_TH, layer.parameters(), y_TH.detach())


def _ours(layer: Layer) -> Tensor:
    return expert.one_hop(layer.x_TH, layer.router(layer.x_TH), layer.experts.compute, EXPERTS)


def _pytorch(products: Callable[..., Tensor], layer: Layer) -> Tensor:
    """As somebody writes it who looks for what PyTorch has."""
    group, n = dist.group.WORLD, dist.get_world_size()
    gates_TK, experts_TK = F.linear(layer.x_TH, layer.router.weight).softmax(-1).topk(TOP_K)
    gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    order_R = experts_TK.flatten().argsort(stable=True)
    leaving_eX = experts_TK.flatten().bincount(minlength=EXPERTS).view(n, -1)
    came_eX = functional.wait_tensor(functional.all_to_all_single(leaving_eX.flatten(), None, None, group)).view(n, -1)
    sent, received = leaving_eX.sum(1).tolist(), came_eX.sum(1).tolist()
    x_RH = functional.all_to_all_single_autograd(layer.x_TH[order_R // TOP_K], received, sent, group)
    expert_R = torch.arange(came_eX.shape[1]).repeat(n).repeat_interleave(came_eX.flatten())
    sorted_R = expert_R.argsort(stable=True)
    y_RH = _mlp(products, layer.experts, functional.wait_tensor(x_RH)[sorted_R], came_eX.sum(0))
    y_RH = functional.all_to_all_single_autograd(y_RH[sorted_R.argsort()], sent, received, group)
    y_RH = functional.wait_tensor(y_RH) * gates_TK.flatten()[order_R, None]
    return torch.zeros_like(layer.x_TH).index_add(0, order_R // TOP_K, y_RH)


def _mlp(products: Callable[..., Tensor], experts: expert.Experts, x_RH: Tensor, counts_X: Tensor) -> Tensor:
    gate_RF, up_RF = (products(x_RH, weight_EFH, counts_X) for weight_EFH in (experts.gate, experts.up))
    return products(F.silu(gate_RF) * up_RF, experts.down, counts_X)


def _grouped_mm(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return F.grouped_mm(x_RI, weight_EOI.mT, offs=counts_E.cumsum(0).int())


def _loop(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    parts = zip(x_RI.split(counts_E.tolist()), weight_EOI, strict=True)
    return torch.cat([F.linear(x_rI, weight_OI) for x_rI, weight_OI in parts])


# Products of unequal groups, in one process


def _products() -> Iterator[Row]:
    with mr.World(1) as world:
        for name, counts in GROUPED.items():
            for other, products in {"a loop of F.linear, cat": _loop, "F.grouped_mm": _grouped_mm}.items():
                (seconds,) = world.run(_grouped, products, counts)
                what = f"{sum(counts):,} rows {name} of {len(counts)} matrices of {HIDDEN} × {FFN}, processor: grouped; {other}"
                yield Row(what, **seconds, ratio_at_most=1.1)


def _grouped(products: Callable[..., Tensor], counts: list[int]) -> dict[str, tuple[float, ...]]:
    torch.manual_seed(0)
    x_RI, weight_EOI = torch.randn(sum(counts), HIDDEN), torch.randn(len(counts), FFN, HIDDEN)
    inputs = x_RI.requires_grad_(), weight_EOI.requires_grad_()
    grad_RO, counts_E = torch.randn(sum(counts), FFN), torch.tensor(counts)

    def step(way: Callable[..., Tensor], counts: list[int] | Tensor) -> tuple[Tensor, ...]:
        y_RO = way(*inputs, counts)
        return y_RO.detach(), *torch.autograd.grad(y_RO, inputs, grad_RO)

    steps = partial(step, expert.grouped, counts), partial(step, products, counts_E)
    for a, b in zip(*(step() for step in steps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    return pairs(*(partial(processor_seconds, step) for step in steps), rounds=2 * ROUNDS)


# What crosses from node to node


def _between_nodes() -> Iterator[Row]:
    """Counted, one value each."""
    with mr.World(NODES * INSIDE, backend="gloo") as world:
        for name, (limits, target) in NODE_LIMITS.items():
            two, one = (float(sum(world.run(_crossing, two_hops, limits))) for two_hops in (True, False))
            what = f"bytes between {NODES} nodes of {INSIDE} ranks, {TOP_K} experts a token, {name}: two hops; one"
            yield Row(what, (two,), (one,), unit="bytes", ratio_at_most=target)


def _crossing(two_hops: bool, limits: dict[str, int]) -> int:
    """Bytes that this rank sends to other nodes, forward and backward."""
    mesh = init_device_mesh("cpu", (NODES, INSIDE), mesh_dim_names=("nodes", "inside"))
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] if two_hops else [None]
    torch.manual_seed(dist.get_rank())
    x_TH, gates_TK = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    routing = expert.Routing(expert.choose(torch.rand(TOKENS, EXPERTS), TOP_K, **limits), gates_TK)
    sizes, real = [], dist.all_to_all_single

    def noted(out: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None, group) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        rows = zip(ranks, sent or [len(x) // len(ranks)] * len(ranks), strict=True)
        away = sum(count for rank, count in rows if rank // INSIDE != dist.get_rank() // INSIDE)
        sizes.append(away * x[:1].nbytes)
        real(out, x, received, sent, group=group)

    with patch.object(dist, "all_to_all_single", noted):
        hop = expert.two_hops if two_hops else expert.one_hop
        y_TH = hop(x_TH, routing, lambda x_RH, counts: x_RH, EXPERTS, *groups)
        y_TH.backward(torch.ones_like(y_TH))
    return sum(sizes)


# What imbalance costs at the size of DeepSeek-V3


def _replayed() -> Iterator[Row]:
    """One value each: no clock is read, and every run gives the same."""
    with mr.World(LARGE_RANKS, backend="gloo") as world:
        times = {x: world.measure(_large, x, flops=True).replay(CLUSTER).makespan for x in (1, 1.25, 1.5, 2, 4)}
    what = f"{LARGE_EXPERTS} experts of {V3.name} on {LARGE_RANKS} ranks, replayed on {CLUSTER.name}"
    for imbalance, seconds in times.items():
        if imbalance > 1:
            yield Row(f"{what}: fullest rank {imbalance} times the mean; balanced", (seconds,), (times[1],))


def _large(imbalance: float) -> None:
    """Forward and backward in bfloat16 without numbers, but for the choices."""
    own, ffn = LARGE_EXPERTS // LARGE_RANKS, V3.expert_ffn
    experts_TK = _choices(imbalance, own)
    with meta.without_numbers():
        with meta.uncounted():
            experts = expert.Experts(own, V3.hidden, ffn).bfloat16()
        x_TH = torch.empty(LARGE_TOKENS, V3.hidden, dtype=torch.bfloat16, requires_grad=True)
        routing = expert.Routing(experts_TK, torch.empty(experts_TK.shape, requires_grad=True))
        y_TH = expert.one_hop(x_TH, routing, experts.compute, LARGE_EXPERTS)
        y_TH.backward(torch.empty_like(y_TH))


def _choices(imbalance: float, own: int) -> Tensor:
    """Draws each token's experts: on average imbalance · K/N of its choices are on rank 0, and the others anywhere."""
    scores_TE = torch.rand(LARGE_TOKENS, LARGE_EXPERTS, generator=torch.Generator().manual_seed(dist.get_rank()))
    there_T = (torch.arange(LARGE_TOKENS + 1) * imbalance * V3.top_k / LARGE_RANKS).floor().diff()
    place_TL = scores_TE[:, :own].argsort().argsort()
    scores_TE[:, :own] += torch.where(place_TL < there_T[:, None], 1.0, -1.0)
    return expert.choose(scores_TE, V3.top_k)
