"""The trainer's experts on their own axes, and FSDP around them: ranks hold and send what theory.expert says."""

from dataclasses import replace

import pytest

from manyranks.theory import Plan, clusters
from manyranks.theory import expert as theory
from manyranks.training.checkpoint import _states
from manyranks.training.config import GPTConfig
from manyranks.training.parallelize import mesh_of
from manyranks.training.trainer import Trainer
from manyranks.world.counted.measurement import payload
from tests.conftest import matrix
from tests.ranks.composed import GPT, SETTINGS, plan

STEPS = 2
MOE = replace(GPT, experts=8, top_k=3, expert_ffn=24, tied=False)
ODD = replace(MOE, experts=6, expert_ffn=9, hidden=36, heads=6, kv_heads=3, seq=48, layers=2)
CASES = {
    "ep over tp": (MOE, {"dp": 2, "tp": 2, "etp": 1, "ep": 4}),
    "etp as tp, ZeRO-0": (MOE, {"dp": 2, "tp": 2, "etp": 2, "ep": 2, "zero": 0}),
    "etp below tp, FSDP": (replace(MOE, kv_heads=4), {"tp": 4, "etp": 2, "zero": 3}),
    "etp without tp, FSDP, micro-batches": (MOE, {"dp": 4, "etp": 2, "zero": 3, "batch": 8}),
    "etp without tp, ZeRO-2, micro-batches": (MOE, {"dp": 4, "etp": 2, "zero": 2, "batch": 8}),
    "etp without tp, ZeRO-1": (MOE, {"dp": 4, "etp": 2, "zero": 1}),
    "whole experts, FSDP": (MOE, {"dp": 4, "ep": 2, "zero": 3}),
    "etp 3": (ODD, {"dp": 3, "etp": 3, "batch": 3}),
    "ep 3 over tp, FSDP": (ODD, {"tp": 3, "etp": 1, "ep": 3, "zero": 3, "batch": 3}),
}
KEPT = ("ep over tp", "etp without tp, FSDP, micro-batches", "etp 3")


def steps(gpt: GPTConfig, chosen: Plan) -> tuple[list, int, int]:
    """The choices of each layer's router, in order; the rank's bytes of its experts, and of their moments."""
    trainer, seen = Trainer(gpt, replace(SETTINGS, batch=chosen.batch, plan=chosen)), []
    spread = trainer.spread
    for layer in spread.parts.model.layers:
        layer.mlp.router.register_forward_hook(lambda router, inputs, routing: seen.append(routing.experts_TK.tolist()))
    trainer.run(STEPS)
    pairs = [pair for row in spread.rows for pair in zip(row.parameters, row.shards, strict=True)]
    states, own = (
        _states(spread),
        [t for p, t in pairs or zip(spread.kinds, spread.kinds, strict=True) if spread.kinds[p].expert],
    )
    moments = sum(states[tensor][moment].nbytes for tensor in own for moment in ("exp_avg", "exp_avg_sq"))
    return seen, sum(p.nbytes for p, kind in spread.kinds.items() if kind.expert), moments


@pytest.mark.lenient  # it measures what gloo sends
@pytest.mark.parametrize("name", matrix(CASES, KEPT))
def test_bytes_and_memory_of_experts_are_what_theory_says(world_of, name):
    gpt, fields = CASES[name]
    chosen = plan(gpt, **fields)
    shape, mesh, m = gpt.shape(), mesh_of(chosen), world_of(chosen.gpus).measure(steps, gpt, chosen)
    seen, held, moments = zip(*m.results, strict=True)
    cut, together = mesh.etp or 1, chosen.ep * (mesh.etp or 1)
    for first in range(0, chosen.gpus, together):  # ranks that together have all experts are neighbors
        expected = [0] * together
        for routing in zip(*seen[first : first + together], strict=True):
            sends = theory.one_hop(routing, gpt.experts, gpt.hidden, 4, cut)
            expected = [a + b for a, b in zip(expected, sends.payload, strict=True)]
        ranks = range(first, first + together)
        groups = {rank: [mesh.group("ep", rank), mesh.group("etp", rank) if mesh.etp else ()] for rank in ranks}
        sent = [sum(away(call, rank) for call in m.calls[rank] if call.ranks in groups[rank]) for rank in ranks]
        assert sent == expected
    assert m.replay(clusters["h100-dgx"]).makespan > 0
    share = theory.rank_states(shape, chosen).experts
    assert set(held) == {share.parameters}
    assert set(moments) == {share.optimizer}
    for rank in m.ranks:
        alike = mesh.group("ep_replicas", rank)
        if alike != mesh.group("data", rank):  # else all else travels there, too
            sent = sum(payload(call, rank) for call in m.calls[rank] if call.ranks == alike and call.op != "broadcast")
            assert sent == (STEPS * theory.shared_bytes(shape, chosen) if len(alike) > 1 else 0)


def away(call, rank: int) -> int:
    """Bytes that an all-to-all sends to others."""
    return sum(size for other, size in zip(call.ranks, call.parts, strict=True) if other != rank) if call.parts else 0
