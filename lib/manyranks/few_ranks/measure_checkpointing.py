"""Activation checkpointing on two ranks: what the layers keep after forward, and what backward computes again."""

from functools import partial

import torch

from manyranks.few_ranks.ranks import OnRanks
from manyranks.measure.compared import Compared, SmallRun
from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.checkpoint_plan import run_plan
from manyranks.parallel.checkpointing import checkpoint_segments
from manyranks.theory import checkpointing as plans
from manyranks.theory import flops, memory, optimal_checkpoints
from manyranks.theory.plan import Plan
from manyranks.training.config import GPTConfig
from manyranks.training.fused import fuse
from manyranks.training.gpt import Layer

_CONFIG = GPTConfig(layers=8, hidden=64, heads=4, kv_heads=1, ffn=224, seq=64)
_PLAN = Plan(seq=_CONFIG.seq, recompute="none")
_SHAPE = _CONFIG.shape()


@OnRanks
def checkpointing(values, ranks, say):
    """Eight layers of Llama's kind with fused kernels, in 16 bits: what a rank keeps of one sequence, and FLOPs computed again.

    The optimal plan has the room that √N segments take. Tensors that a plan holds between its actions aren't
    autograd's: only FLOPs are counted for it, and for the strategy from the input."""
    strategy, n = values["strategy"], _CONFIG.layers
    count = {"C segments": min(values["count"], n), "every layer": n}.get(strategy, 0)
    world = ranks(2)
    say(0.5, f"{n} layers on 2 ranks")
    kept, again = max(world.run(_step, strategy, count))
    layer, one = plans.chain_of(_SHAPE, _PLAN)[0], flops.forward(_SHAPE, _CONFIG.seq).layers * _CONFIG.seq / n
    chain = [layer] * n
    forwards = n if count else plans.run(chain, _plan(strategy, chain)).forwards - n
    rows = [Compared("FLOPs computed again", forwards * one, again, "number")]
    if count or strategy == "keep everything":
        each = memory.layer_activations(_SHAPE, _PLAN) + plans.statistics(_SHAPE, _PLAN)
        rows.insert(0, Compared("kept after forward", count * layer.output or n * each, kept))
    return SmallRun(f"{strategy}, {n} layers of one sequence on each of 2 ranks", tuple(rows))


def _plan(strategy: str, chain: list[plans.Layer]) -> list[plans.Action]:
    found = optimal_checkpoints.strategies(chain)
    return found[strategy]


def _step(strategy: str, count: int) -> tuple[int, int]:
    """Returns bytes that autograd keeps, and how many more FLOPs it takes than a step that keeps everything."""
    torch.manual_seed(0)
    layers = [fuse(Layer(_CONFIG).bfloat16()) for _ in range(_CONFIG.layers)]
    x = torch.randn(1, _CONFIG.seq, _CONFIG.hidden, dtype=torch.bfloat16, requires_grad=True)
    if count:
        run = partial(checkpoint_segments, layers, count=count)
    else:
        run = partial(run_plan, _plan(strategy, plans.chain_of(_SHAPE, _PLAN)), layers)
    plain = torch.nn.Sequential(*layers)
    counted = []
    for each in (plain, run):
        with WorkCounter() as work:
            each(x).sum().backward()
        counted.append(work.flops)
    kept = plain if strategy == "keep everything" else run
    return saved_bytes(kept, x, parameters=plain.parameters()), counted[1] - counted[0]
