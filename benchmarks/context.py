"""Context parallelism: ring attention against one process, 128k tokens in little memory, and what stays exposed at scale."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, pairs, timed
from manyranks import theory
from manyranks.measure import meta
from manyranks.parallel import context
from manyranks.parallel.context import ring

SIZE = 64  # of a head
LONG, LONG_ROUNDS = 2**15, 3
HUGE, HUGE_RANKS, CHECKED = 2**17, 4, 4
SHORT, SHORT_HEADS, SHORT_ROUNDS = 2**13, 2, 5

LLAMA, CLUSTER = theory.models["llama3-8b"], theory.clusters["h100-dgx"]
RANKS, SHARDS = (8, 16), (2**12, 2**14)  # of one node and two; tokens of a rank

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    yield from _long()
    yield from _huge()
    yield from _one_process()
    yield from _two_ranks()
    yield from _replayed()


class Inputs(NamedTuple):
    """q, k and v of one sequence, and the gradient of the output."""

    q_BASD: Tensor
    k_BASD: Tensor
    v_BASD: Tensor
    do_BASD: Tensor

    @classmethod
    def random(cls, seq: int, heads: int = 1, seed: int = 0) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)
        q, k, v, do = (torch.randn(1, heads, seq, SIZE, generator=generator) for _ in cls._fields)
        return cls(*(x.requires_grad_() for x in (q, k, v)), do)

    def shard(self, layout: str = "zigzag") -> "Inputs":
        """This rank's part."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, k, v, do = (context.shard(x.detach(), layout, rank, ranks, dim=2) for x in self)
        return Inputs(*(x.requires_grad_() for x in (q, k, v)), do)


def _step(attention: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of q, k and v."""
    *qkv, do_BASD = inputs
    o_BASD = attention(*qkv)
    return o_BASD.detach(), *torch.autograd.grad(o_BASD, qkv, do_BASD)


# Two ranks against one process


def _long() -> Iterator[Row]:
    with mr.World(2) as world:
        both = training.slowest(world.run(_ring_and_alone))
    halves = {"ours": both["ours"], "theirs": tuple(seconds / 2 for seconds in both["theirs"])}
    yield Row(f"attention to {LONG:,} tokens: ring on 2 ranks; half of one process's time", **halves, ratio_at_most=1.25)


def _ring_and_alone() -> dict[str, tuple[float, ...]]:
    """Pairs of seconds; while rank 0 computes alone, the other waits. First of all, that both compute the same."""
    whole = Inputs.random(LONG)
    own = whole.shard()
    for ours, all_rows in zip(_step(context.ring_attention, own), _step(context.blockwise_attention, whole), strict=True):
        theirs = context.shard(all_rows, "zigzag", dist.get_rank(), 2, dim=2)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    alone = _alone(partial(_step, context.blockwise_attention, whole))
    ring = partial(_step, context.ring_attention, own)
    return pairs(*(partial(training.fastest, step, 1) for step in (ring, alone)), rounds=LONG_ROUNDS)


def _alone(step: training.Step) -> training.Step:
    return step if dist.get_rank() == 0 else lambda: None


# As many tokens as full attention has no room for


def _huge() -> Iterator[Row]:
    with mr.World(HUGE_RANKS, timeout=1800) as world:
        seconds, memory = zip(*world.run(_long_ring, HUGE), strict=True)
    yield Row(f"attention to {HUGE:,} tokens: ring on {HUGE_RANKS} ranks, once", (max(seconds),))
    what = "  … the ranks' memory beyond what they held before, each at its most; that of the whole matrix of scores"
    if None in memory:
        yield Row(what, skipped="only Linux tells what a process had at its most")
        return
    scores = 4.0 * HUGE**2
    yield Row(what, (float(sum(memory)),), (scores,), unit="bytes", at_most=0.6e9)


def _long_ring(seq: int) -> tuple[float, int | None]:
    """Seconds, and the most memory that the call took: inputs and what a first call loads are there before. Then it checks
    the result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _step(context.ring_attention, Inputs.random(512, seed=rank))
    own = Inputs.random(seq // ranks, seed=rank)
    found: list[tuple[Tensor, ...]] = []
    dist.barrier()
    before = _begin_peak()
    seconds = timed(lambda: found.append(_step(context.ring_attention, own)))
    memory = None if before is None else _resident("VmHWM") - before
    _check(*found[0], own, seq)
    return seconds, memory


def _begin_peak() -> int | None:
    """Makes the kernel count this process's peak anew, and returns the bytes it has now; None where the kernel can't."""
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    """Bytes of this process as the kernel counted them, with all pages that it shares with others."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _check(o: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, own: Inputs, seq: int) -> None:
    """Some rows of o and dq, by a softmax over all keys; the sums of dk and dv: a query's weights add up to 1, always."""
    ranks = dist.get_world_size()
    places_S = torch.cat([places_CL.flatten() for places_CL in context.positions("zigzag", seq, ranks)])
    everyone = [Inputs.random(seq // ranks, seed=rank) for rank in range(ranks)]
    k, v = (torch.cat([getattr(inputs, name).detach() for inputs in everyone], 2) for name in ("k_BASD", "v_BASD"))
    some = torch.linspace(0, seq // ranks - 1, CHECKED).long()
    visible = places_S <= context.positions("zigzag", seq, ranks)[dist.get_rank()].flatten()[some, None]
    rows = own.q_BASD[:, :, some].detach().requires_grad_()
    right = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible)
    torch.testing.assert_close(o[:, :, some], right, rtol=1e-3, atol=1e-5)
    (gradient,) = torch.autograd.grad(right, rows, own.do_BASD[:, :, some])
    torch.testing.assert_close(dq[:, :, some], gradient, rtol=1e-3, atol=1e-5)
    sums = torch.stack([dk.sum(2), dv.sum(2) - own.do_BASD.sum(2)])
    dist.all_reduce(sums)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=0.05)


# Side by side


def _one_process() -> Iterator[Row]:
    with mr.World(1) as world:
        (seconds,) = world.run(_against_pytorch)
    yield Row(f"attention to {SHORT:,} tokens, 1 thread: blockwise; F.scaled_dot_product_attention", **seconds)


def _against_pytorch() -> dict[str, tuple[float, ...]]:
    inputs = Inputs.random(SHORT)
    theirs = partial(F.scaled_dot_product_attention, is_causal=True)
    return _seconds((context.blockwise_attention, inputs), (theirs, inputs))


def _two_ranks() -> Iterator[Row]:
    compared = {
        "ring; all-gather": _ring_and(context.all_gather_attention),
        "ring; Ulysses": _ring_and(context.ulysses_attention),
        "ring, contiguous; zigzag": _layouts,
    }
    with mr.World(2) as world:
        for name, both in compared.items():
            what = f"attention to {SHORT:,} tokens, {SHORT_HEADS} heads, 2 ranks: {name}"
            yield Row(what, **training.slowest(world.run(both)))


def _ring_and(other: Callable[..., Tensor]) -> Callable[[], dict[str, tuple[float, ...]]]:
    def both() -> dict[str, tuple[float, ...]]:
        own = Inputs.random(SHORT, SHORT_HEADS).shard()
        return _seconds((context.ring_attention, own), (other, own))

    return both


def _layouts() -> dict[str, tuple[float, ...]]:
    whole = Inputs.random(SHORT, SHORT_HEADS)
    return _seconds(
        *((partial(context.ring_attention, layout=layout), whole.shard(layout)) for layout in ("contiguous", "zigzag"))
    )


def _seconds(*both: tuple[Callable[..., Tensor], Inputs]) -> dict[str, tuple[float, ...]]:
    measures = [partial(training.fastest, partial(_step, *one), 1) for one in both]
    pairs(*measures, rounds=1)
    return pairs(*measures, rounds=SHORT_ROUNDS)


# What messages leave exposed at the size of an 8B model


def _replayed() -> Iterator[Row]:
    """One value each: no clock is read, and every run gives the same."""
    for ranks in RANKS:
        with mr.World(ranks, backend="gloo") as world:
            for shard in SHARDS:
                timeline = world.measure(_shapes_step, shard, flops=True).replay(CLUSTER, sharing=True)
                exposed = max(map(timeline.exposed_communication, timeline.ranks))
                what = f"ring attention of {LLAMA.name}, {ranks} ranks of {shard:,} tokens, replayed on {CLUSTER.name}"
                limit = 0.02 if shard >= _least_shard(ranks) else None
                yield Row(f"{what}: exposed; its time", (exposed,), (timeline.makespan,), ratio_at_most=limit)


def _least_shard(ranks: int) -> float:
    """Computes how many tokens a rank needs for a causal backward to hide its messages, by theory."""
    link = CLUSTER.between(0, ranks - 1)
    how = {"causal": True, "backward": True}
    return theory.context.least_shard(CLUSTER.accelerator.flops, link.bandwidth, LLAMA.heads, LLAMA.kv_heads, **how)


def _shapes_step(shard: int) -> None:
    """Runs both passes in bfloat16 on tensors without data; a visit's attention is one operator, as a flash kernel is."""
    sizes = [(1, heads, shard, LLAMA.hidden // LLAMA.heads) for heads in (LLAMA.heads, LLAMA.kv_heads, LLAMA.kv_heads)]
    with meta.without_numbers(), meta.fused(ring, "attend", "attend_backward"):
        q, k, v = (torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
        o = context.ring_attention(q, k, v, tile=shard // 2)
        o.backward(torch.empty_like(o))
