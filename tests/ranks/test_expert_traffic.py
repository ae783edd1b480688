"""parallel.expert on real ranks: every all-to-all sends what theory.expert says of the routing itself, byte by byte."""

import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import manyranks as mr
from manyranks.parallel import expert as parallel
from manyranks.theory import expert

HIDDEN, FFN, EXPERTS, TOP_K = 5, 3, 12, 3
Rows = list[list[int]]


def routing_of(kind: str, ranks: int) -> list[Rows]:
    """Choices of each rank's tokens, which are not as many everywhere."""
    rng = random.Random(ranks)
    tokens = [0 if kind == "no tokens" and rank == ranks - 1 else 5 + 3 * rank for rank in range(ranks)]
    if kind == "one expert":
        return [[[EXPERTS - 1, -1, -1]] * count for count in tokens]
    whole = [[rng.sample(range(EXPERTS), TOP_K) for _ in range(count)] for count in tokens]
    drop = 0.3 if kind == "dropped" else 0.0
    return [[[-1 if rng.random() < drop else one for one in token] for token in own] for own in whole]


def routed(routing: list[Rows], dtype: torch.dtype, nodes: int | None) -> None:
    """Forward and backward of one layer; nodes: None for one hop."""
    rank, ranks = torch.distributed.get_rank(), len(routing)
    chosen_TK = torch.tensor(routing[rank], dtype=torch.int64).view(-1, TOP_K)
    x_TH = torch.randn(len(chosen_TK), HIDDEN, dtype=dtype, requires_grad=True)
    gates_TK = torch.rand(chosen_TK.shape, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    own, how = parallel.Experts(EXPERTS // ranks, HIDDEN, FFN).to(dtype), parallel.Routing(chosen_TK, gates_TK)
    if nodes is None:
        y_TH = parallel.one_hop(x_TH, how, own.compute, EXPERTS)
    else:
        mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("nodes", "inside"))
        y_TH = parallel.two_hops(x_TH, how, own.compute, EXPERTS, mesh.get_group("nodes"), mesh.get_group("inside"))
    y_TH.sum().backward()


def check_calls(m, sends: expert.Sends, ranks: int) -> None:
    for rank in range(ranks):
        calls = [call for call in m.calls[rank] if call.op == "all_to_all"]
        for call, exchange in zip(calls, sends.both, strict=True):
            assert call.parts == tuple(exchange.bytes[rank][other] for other in call.ranks), exchange.what
            assert call.bytes == sum(exchange.bytes[rank]), exchange.what
            assert call.received == sum(row[rank] for row in exchange.bytes), exchange.what
    assert tuple(m.payload_bytes[rank] for rank in range(ranks)) == sends.payload


@pytest.mark.parametrize("kind", ["full", "dropped", "no tokens", "one expert"])
def test_one_hop_sends_what_the_routing_says(shared_worlds, kind):
    routing = routing_of(kind, shared_worlds.size)
    m = shared_worlds.measure(routed, routing, torch.float32, None)
    check_calls(m, expert.one_hop(routing, EXPERTS, HIDDEN, 4), shared_worlds.size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["full", "dropped", "no tokens", "one expert"])
@pytest.mark.parametrize("shared_worlds", [4], indirect=True, scope="module")
def test_two_hops_send_what_the_routing_says_between_nodes_and_inside(shared_worlds, kind, dtype):
    routing = routing_of(kind, 4)
    m = shared_worlds.measure(routed, routing, dtype, 2)
    sends = expert.two_hops(routing, EXPERTS, HIDDEN, 2, dtype.itemsize)
    check_calls(m, sends, 4)
    ways = [(rank, *way) for rank in range(4) for call in m.calls[rank] for way in zip(call.ranks, call.parts, strict=False)]
    assert sum(size for rank, other, size in ways if rank // 2 != other // 2) == sends.split(2).between


def test_a_hop_that_joins_no_ranks_is_no_call(shared_worlds):
    ranks = shared_worlds.size
    routing = routing_of("full", ranks)
    for nodes in (1, ranks):
        m = shared_worlds.measure(routed, routing, torch.float32, nodes)
        check_calls(m, expert.two_hops(routing, EXPERTS, HIDDEN, nodes, 4), ranks)


def test_one_rank_sends_nothing():
    routing = routing_of("full", 1)
    with mr.World(1, backend="gloo", timeout=30) as world:
        assert world.measure(routed, routing, torch.float32, None).calls[0] == []
    assert expert.one_hop(routing, EXPERTS, HIDDEN).both == expert.two_hops(routing, EXPERTS, HIDDEN, 1).both == ()


def chosen(groups: int, tokens: int) -> Rows:
    """A fresh router's choices of random tokens."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    router = parallel.Router(32, 16, 4, groups=groups, groups_per_token=1)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(9))
    return router(torch.randn(tokens, 32)).experts_TK.tolist()


@pytest.mark.parametrize("shared_worlds", [4], indirect=True, scope="module")
def test_node_limited_routing_spares_the_network_with_two_hops_and_not_with_one(shared_worlds):
    """Experts in groups of a node's, chosen by a real router; copies as the theory of random choices has them."""
    between = {}
    for groups in (1, 2):
        routing = shared_worlds.run(chosen, groups, 400)
        one, two = (expert.one_hop(routing, 16, 8), expert.two_hops(routing, 16, 8, 2))
        between[groups] = one.split(2, "rows").between / 16 / 1600, two.split(2, "copies").between / 16 / 1600
        expected = expert.one_hop_copies(16, 4, 4, 2, groups), expert.two_hops_copies(16, 4, 4, 2, groups)
        assert between[groups] == pytest.approx([copies.between for copies in expected], rel=0.05)
    (one, two), (one_limited, two_limited) = between.values()
    assert one_limited == pytest.approx(one, rel=0.05)
    assert two / two_limited == pytest.approx(2 * (1 - 70 / 1820), rel=0.05)  # free, it is a node's alone in 2·70 of 1,820
