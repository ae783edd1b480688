"""Context parallelism on a few ranks: what a rank sends for one attention, what it keeps, and how even the work is."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.context import ATTENTION
from manyranks.theory import context as theory

_HEADS, _KV_HEADS, _SIZE, _SHARD, _TILE = 8, 2, 32, 128, 32  # _SHARD: tokens of a rank
_AXES = ("ring", "ulysses")


@OnRanks
def context(values, ranks, say):
    """An attention on 2 to 8 ranks, float32, in the explorer's layout, mask and variant: bytes sent and kept, and FLOPs."""
    n, variant, layout = few(values["cp"]), values["variant"], values["layout"]
    u = {"ulysses": n, "ring-ulysses": min(n, values["ulysses"] or 2)}.get(variant, 1)  # ranks that exchange heads
    sizes, seq = (1, n * _SHARD, _HEADS, _KV_HEADS, _SIZE), n * _SHARD
    world = ranks(n)
    say(0.4, f"{variant}, {seq:,} tokens on {n} ranks")
    how = variant, values["causal"], layout, (n // u, u)
    counted = world.measure(_there_and_back, *how, flops=True)
    sent = max(bytes_sent(counted).values())
    if variant == "ring-ulysses":
        messages = theory.ring_ulysses(*sizes, n // u, u, 4).both
    else:
        messages = theory.VARIANTS[variant](*sizes, n, 4).both
    say(0.7, "what is kept for backward")
    kept = theory.saved(*sizes, n, itemsize=4, ulysses=u).total
    work, flops = theory.work(seq, n // u, layout, values["causal"], _TILE), counted.flops.values()
    rows = (
        Compared("sent by a rank", messages.bytes, sent),
        Compared("kept per rank for backward", kept, max(world.run(_kept, *how))),
        Compared("work, slowest ÷ mean", theory.balance(work), n * max(flops) / sum(flops), "number"),
    )
    return SmallRun(f"{n} ranks of this machine, {variant}, {seq:,} tokens, {_HEADS} query heads, {_KV_HEADS} key/value", rows)


def _attention(variant: str, causal: bool, layout: str, shape: tuple[int, int]) -> tuple:
    """The function, what it's called with, and how."""
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    qkv = [torch.randn(1, a, _SHARD, _SIZE, requires_grad=True) for a in heads]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=_AXES) if variant == "ring-ulysses" else None
    return ATTENTION[variant], (*qkv, mesh), {"causal": causal, "layout": layout, "tile": _TILE}


def _there_and_back(*how) -> None:
    function, given, named = _attention(*how)
    o = function(*given, **named)
    o.backward(torch.ones_like(o))


def _kept(*how) -> int:
    function, given, named = _attention(*how)
    return saved_bytes(function, *given, **named)
