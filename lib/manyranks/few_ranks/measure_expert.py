"""Expert parallelism on a few ranks: what a layer's tokens send in one hop and in two, and what a rank holds of its experts."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel.expert import Experts, Routing, choose, one_hop, two_hops
from manyranks.theory import expert as theory
from manyranks.theory.plan import most_imbalance

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K, NODES = 512, 128, 64, 16, 4, 2
_kept: dict = {}  # on a rank: its experts, its tokens' choices, and the groups of two hops


@OnRanks
def expert(values, ranks, say):
    """A layer of 16 experts, each whole on its rank (etp = 1), on 2 to 8 ranks in two "nodes", forward and backward in float32:
    bytes on the socket against what theory makes of the router's choices, and the bytes of a rank's experts."""
    n = few(values["ep"])
    full = min(values["imbalance"], most_imbalance(EXPERTS, TOP_K, n))
    say(0.2, f"{n} ranks with {EXPERTS // n} of {EXPERTS} experts each")
    world = ranks(n)
    routing, held = zip(*world.run(_start, full, values["limit"] == 1), strict=True)
    sends = theory.one_hop(routing, EXPERTS, HIDDEN, 4), theory.two_hops(routing, EXPERTS, HIDDEN, NODES, 4)
    rows = []
    for hops, (name, sent) in enumerate(zip(("one hop", "two hops"), sends, strict=True), 1):
        say(0.2 + 0.3 * hops, name)
        counted = world.measure(_layer, hops)
        most = max(bytes_sent(counted).values())
        rows.append(Compared(f"sent by the busiest rank, {name}", max(sent.payload), most))
    rows.append(Compared("a rank's whole experts", EXPERTS // n * 3 * HIDDEN * FFN * 4, max(held)))
    loads = theory.of_ranks(theory.counts(routing, EXPERTS), n)
    where = f"{n} ranks of this machine, {NODES} nodes, etp = 1, {TOKENS} tokens per rank"
    where += f", fullest ÷ mean {theory.imbalance(loads):.2f}"
    return SmallRun(where, tuple(rows))


def _start(full: float, limited: bool) -> tuple[list[list[int]], int]:
    """This rank's choices, and the bytes of its experts.

    full: the fullest rank's load ÷ the mean
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (NODES, n // NODES), mesh_dim_names=("nodes", "inside"))
    experts = Experts(EXPERTS // n, HIDDEN, FFN)
    chosen_TK = _choices(full, EXPERTS // n, limited)
    _kept.update(experts=experts, chosen_TK=chosen_TK, groups=[mesh.get_group(name) for name in ("nodes", "inside")])
    for hops in (1, 2):
        _layer(hops)  # connects the ranks
    return chosen_TK.tolist(), sum(p.nbytes for p in experts.parameters())


def _choices(full: float, own: int, limited: bool) -> torch.Tensor:
    """Each token's experts at random, full · K · own/E of them on rank 0.

    limited: all on one of the nodes
    """
    scores_TE = torch.rand(TOKENS, EXPERTS)
    if full > 1:
        there_T = (torch.arange(TOKENS + 1) * full * TOP_K * own / EXPERTS).floor().diff()  # 1.5 means 1, 2, 1, 2, …
        place_TX = scores_TE[:, :own].argsort().argsort()
        scores_TE[:, :own] += torch.where(place_TX < there_T[:, None], 1.0, -1.0)
    return choose(scores_TE, TOP_K, None, NODES if limited else 1, 1)


def _layer(hops: int) -> None:
    """Runs forward and backward."""
    experts, chosen_TK = _kept["experts"], _kept["chosen_TK"]
    x_TH = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    routing = Routing(chosen_TK, torch.full(chosen_TK.shape, 1 / TOP_K, requires_grad=True))
    hop, groups = (one_hop, []) if hops == 1 else (two_hops, _kept["groups"])
    hop(x_TH, routing, experts.compute, EXPERTS, *groups).sum().backward()
