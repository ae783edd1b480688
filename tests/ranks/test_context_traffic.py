"""parallel.context on real ranks: bytes, calls, FLOPs, what is kept and held, as theory.context counts; the order."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyranks.measure.memory import saved_bytes
from manyranks.parallel.context import ATTENTION
from manyranks.theory import context
from manyranks.theory.calls import Calls
from tests.conftest import matrix
from tests.ranks.test_tensor_traffic import hidden, open_messages

BATCH, SEQ, HEADS, SIZE = 2, 48, 12, 4
variants = pytest.mark.parametrize("variant", context.VARIANTS)
some = pytest.mark.parametrize("shared_worlds", matrix([1, 2, 4], [4]), indirect=True, scope="module")


def inputs(kv_heads: int, seq: int, dtype: torch.dtype, heads: int = HEADS) -> list[torch.Tensor]:
    own = seq // dist.get_world_size()
    return [torch.randn(BATCH, h, own, SIZE, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def attend(variant: str, kv_heads: int, backward: bool, dtype=torch.float32, seq=SEQ, heads=HEADS, **mask) -> None:
    o = ATTENTION[variant](*inputs(kv_heads, seq, dtype, heads), **{"tile": 512} | mask)
    if backward:
        o.backward(torch.ones_like(o))


def check_calls(m, expected: Calls) -> None:
    """A reduce-scatter is on gloo a ring of n − 1 messages."""
    for r, calls in m.calls.items():
        sends = expected.send + expected.reduce_scatter * (len(m.calls) - 1)
        ops = {"all_gather": expected.all_gather, "all_to_all": expected.all_to_all, "send": sends, "recv": sends}
        assert m.payload_bytes[r] == expected.bytes
        assert Counter(call.op for call in calls) == {op: count for op, count in ops.items() if count}


# Bytes and calls


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(12, torch.float32), (1, torch.float32), (3, torch.bfloat16), (3, torch.float64)]
)
@variants
def test_payload_and_calls_are_the_theory_s_forward_and_backward(shared_worlds, variant, kv_heads, dtype):
    """Gradients of keys and values travel in the precision of sums."""
    expected = context.VARIANTS[variant](BATCH, SEQ, HEADS, kv_heads, SIZE, shared_worlds.size, dtype.itemsize)
    for backward, calls in ((False, expected.forward), (True, expected.both)):
        check_calls(shared_worlds.measure(attend, variant, kv_heads, backward, dtype), calls)


def ring_ulysses(r: int, u: int, kv_heads: int) -> None:
    mesh = init_device_mesh("cpu", (r, u), mesh_dim_names=("ring", "ulysses"))
    ATTENTION["ring-ulysses"](*inputs(kv_heads, SEQ, torch.float32), mesh).sum().backward()


def by_itself(variant: str) -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ATTENTION[variant](*inputs(1, SEQ, torch.float32), group).sum().backward()


def test_ring_and_ulysses_together_send_what_the_theory_says_and_one_rank_nothing(four):
    for r, u in ((2, 2), (1, 4), (4, 1)):
        check_calls(four.measure(ring_ulysses, r, u, 2), context.ring_ulysses(BATCH, SEQ, HEADS, 2, SIZE, r, u, 4).both)
    for variant in context.VARIANTS:
        assert not any(four.measure(by_itself, variant).calls.values())


@pytest.mark.parametrize("shared_worlds", matrix([2, 3, 4], [4]), indirect=True, scope="module")
def test_under_a_window_a_ring_makes_the_hops_that_bring_something_and_no_others(shared_worlds):
    """From contiguous shards to the next rank, or to the next few; from zigzag ones to the ranks on both sides."""
    n, seq = shared_worlds.size, 24
    for layout, window in product(("contiguous", "zigzag"), (1, seq // (2 * n) + 1, seq // n + 1, seq // n + 2, seq)):
        counts = context.window_work(seq, n, window, layout)
        stops = context.stops(counts)
        m = shared_worlds.measure(attend, "ring", 3, True, seq=seq, flops=True, layout=layout, window=window, tile=1)
        check_calls(m, context.ring(BATCH, seq, HEADS, 3, SIZE, n, itemsize=4, hops=len(stops) - 1).both)
        check_flops(m, context.totals(counts))
        ahead = [b - a for a, b in zip(stops, [*stops[1:], n], strict=True)]  # from each stop; from the last one home
        peers = [(1 + hop) % n for hop in 2 * ahead[:-1] + ahead[1:]]  # keys twice, gradients
        assert Counter(call.peer for call in m.calls[1] if call.op == "send") == Counter(peers)


# Their order


def step() -> None:
    attend("ring", 6, True, tile=5)


def test_the_next_block_is_requested_before_the_current_one_is_computed(shared_worlds):
    """And what a block has collected leaves while the next is looked at; only the last gradients, on their way home, do not."""
    n, m = shared_worlds.size, shared_worlds.measure(step, flops=True)
    for rank in range(n):
        assert hidden(m.program.ranks[rank]) == [True] * (3 * (n - 1) - 1) + [False]
        assert open_messages(m.program.ranks[rank]) == min(2, n - 1)
        assert {c.bytes for c in m.calls[rank] if c.op == "send"} == {2 * 4 * BATCH * 6 * SEQ // n * SIZE}
        assert {c.peer for c in m.calls[rank] if c.op == "send"} == {(rank + 1) % n}
        assert {c.peer for c in m.calls[rank] if c.op == "recv"} == {(rank - 1) % n}


# FLOPs


def check_flops(m, scores: list[int], heads: int = HEADS) -> None:
    """Compares FLOPs of forward and backward."""
    there, back = ([context.flops(each, BATCH, heads, SIZE, backward) for each in scores] for backward in (False, True))
    assert [*m.flops.values()] == [sum(both) for both in zip(there, back, strict=True)]


@pytest.mark.parametrize("tile", [5, 512])
@pytest.mark.parametrize("layout", context.LAYOUTS)
def test_the_flops_of_each_rank_are_those_of_its_work(shared_worlds, layout, tile):
    scores = context.totals(context.work(SEQ, shared_worlds.size, layout, tile=tile))
    check_flops(shared_worlds.measure(attend, "ring", 3, True, layout=layout, tile=tile, flops=True), scores)


@pytest.mark.parametrize("causal", [True, False])
def test_an_all_gather_computes_what_a_ring_does_and_ulysses_shares_it_evenly(shared_world, causal):
    scores = context.totals(context.work(SEQ, 3, "contiguous", causal, tile=4))
    how = {"layout": "contiguous", "tile": 4, "causal": causal, "flops": True}
    check_flops(shared_world.measure(attend, "all-gather", 3, True, **how), scores)
    check_flops(shared_world.measure(attend, "ulysses", 3, True, **how), [sum(scores)] * 3, HEADS // 3)


# What is kept, and what is held


@some
@pytest.mark.parametrize("kv_heads", [12, 1])  # one: copies with Ulysses
@variants
def test_what_is_kept_for_backward_is_the_theory_s(shared_worlds, variant, kv_heads):
    n = shared_worlds.size
    kept = context.saved(BATCH, SEQ, HEADS, kv_heads, SIZE, n, ulysses=n if variant == "ulysses" else 1)
    places = 8 * n if variant == "ulysses" and kv_heads < n else 0  # which head each rank gets a copy of

    def saved() -> int:
        return saved_bytes(ATTENTION[variant], *inputs(kv_heads, SEQ, torch.bfloat16))

    assert shared_worlds.run(saved) == [kept.total + places] * n


LONG, TILE = 192, 16


@some
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("layout", "tile"), [("zigzag", 512), ("contiguous", TILE), ("striped", 512)])
@pytest.mark.few(4)
def test_a_ring_s_peak_is_the_theory_s_to_the_byte(shared_worlds, layout, tile, kv_heads, dtype):
    """One head of four numbers: a tile of 16 tokens is long enough."""
    n, chunks = shared_worlds.size, 1 + (layout == "zigzag")
    for backward in (False, True):
        how = backward, dtype, LONG, 4
        m = shared_worlds.measure(attend, "ring", kv_heads, *how, layout=layout, tile=tile, memory=True)
        expected = context.peak(BATCH, LONG, 4, kv_heads, SIZE, n, dtype.itemsize, tile, chunks, backward)
        assert max(m.peak_bytes.values()) == expected.total


@pytest.mark.lenient
@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [4]), indirect=True, scope="module")
def test_gathered_keys_and_values_take_the_place_of_a_ring_s_blocks(shared_worlds):
    n, how = shared_worlds.size, {"seq": LONG, "heads": 4}
    m = shared_worlds.measure(attend, "all-gather", 4, True, **how, memory=True)
    ring, block = context.peak(BATCH, LONG, 4, 4, SIZE, n, 4, backward=True), 2 * 4 * BATCH * LONG // n * 4 * SIZE
    others = [context.buffers(block, block, n, variant) for variant in ("ring", "all-gather")]
    assert set(m.peak_bytes.values()) == {ring.total - others[0] + others[1]}
