"""parallel.context on real ranks: bytes, calls, FLOPs, and what is kept and held, as theory.context counts them."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel import context as parallel
from manyranks.theory import context
from manyranks.theory.tensor import Calls
from tests.conftest import matrix

ATTENTION = {
    "ring": parallel.ring_attention,
    "all-gather": parallel.all_gather_attention,
    "ulysses": parallel.ulysses_attention,
}
BATCH, SEQ, HEADS, SIZE = 2, 48, 12, 4
shapes = pytest.mark.parametrize("kv_heads", [12, 1], ids=["all heads", "one head"])  # one: copies with Ulysses
variants = pytest.mark.parametrize("variant", ATTENTION)


def inputs(kv_heads: int, seq: int, dtype: torch.dtype, heads: int = HEADS) -> list[torch.Tensor]:
    own = seq // dist.get_world_size()
    return [torch.randn(BATCH, h, own, SIZE, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def attend(
    variant: str,
    kv_heads: int,
    backward: bool,
    layout: str = "zigzag",
    tile: int = 512,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    seq: int = SEQ,
    heads: int = HEADS,
) -> None:
    o = ATTENTION[variant](*inputs(kv_heads, seq, dtype, heads), causal=causal, layout=layout, tile=tile)
    if backward:
        o.backward(torch.ones_like(o))


def ring_ulysses(r: int, u: int, kv_heads: int) -> None:
    mesh = init_device_mesh("cpu", (r, u), mesh_dim_names=("ring", "ulysses"))
    o = parallel.ring_ulysses_attention(*inputs(kv_heads, SEQ, torch.float32), mesh)
    o.sum().backward()


def check_calls(m, expected: Calls, n: int) -> None:
    """A reduce-scatter is on gloo a ring of n − 1 messages."""
    sends = expected.send + expected.reduce_scatter * (n - 1)
    ops = {"all_gather": expected.all_gather, "all_to_all": expected.all_to_all, "send": sends, "recv": sends}
    for r in range(n):
        assert m.payload_bytes[r] == expected.bytes
        assert Counter(call.op for call in m.calls[r]) == {op: count for op, count in ops.items() if count}


# Bytes and calls


@shapes
@variants
def test_payload_and_calls_are_the_theory_s_forward_and_backward(shared_worlds, variant, kv_heads):
    n = shared_worlds.size
    expected = context.VARIANTS[variant](BATCH, SEQ, HEADS, kv_heads, SIZE, n, itemsize=4)
    for backward, calls in ((False, expected.forward), (True, expected.both)):
        check_calls(shared_worlds.measure(attend, variant, kv_heads, backward), calls, n)


@pytest.mark.parametrize("shared_worlds", [3], indirect=True, scope="module")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@variants
def test_gradients_of_keys_and_values_travel_in_the_precision_of_sums(shared_worlds, variant, dtype):
    expected = context.VARIANTS[variant](BATCH, SEQ, HEADS, 3, SIZE, 3, itemsize=dtype.itemsize).both
    check_calls(shared_worlds.measure(attend, variant, 3, True, dtype=dtype), expected, 3)


def test_ring_and_ulysses_together_send_what_the_theory_says():
    with mr.World(4, backend="gloo", timeout=30) as world:
        for r, u in ((2, 2), (1, 4), (4, 1)):
            m = world.measure(ring_ulysses, r, u, 2)
            expected = context.ring_ulysses(BATCH, SEQ, HEADS, 2, SIZE, r, u, itemsize=4).both
            assert list(m.payload_bytes.values()) == [expected.bytes] * 4
            for rank in range(4):
                ops = Counter(call.op for call in m.calls[rank])
                assert (ops["all_to_all"], ops["send"]) == (expected.all_to_all, expected.send)


def test_one_rank_sends_nothing():
    with mr.World(1, backend="gloo", timeout=30) as world:
        for variant in ATTENTION:
            assert world.measure(attend, variant, 1, True).calls[0] == []


# FLOPs


@pytest.mark.parametrize("tile", [5, 512])
@pytest.mark.parametrize("layout", context.LAYOUTS)
def test_the_flops_of_each_rank_are_those_of_its_work(shared_worlds, layout, tile):
    n = shared_worlds.size
    expected = context.totals(context.work(SEQ, n, layout, tile=tile))
    forward, both = (shared_worlds.measure(attend, "ring", 3, back, layout, tile, flops=True) for back in (False, True))
    assert list(forward.flops.values()) == [context.flops(scores, BATCH, HEADS, SIZE) for scores in expected]
    again = [context.flops(scores, BATCH, HEADS, SIZE, backward=True) for scores in expected]
    assert [both.flops[r] - forward.flops[r] for r in range(n)] == again


@pytest.mark.parametrize("shared_worlds", [3], indirect=True, scope="module")
def test_with_tiles_of_one_token_the_balance_is_the_mask_s_own(shared_worlds):
    seq = 12
    closed = {"contiguous": 2 - 1 / 3 - 2 / 3 / (seq + 1), "striped": 1 + 2 / (seq + 1), "zigzag": 1}
    for layout, expected in closed.items():
        m = shared_worlds.measure(attend, "ring", 3, False, layout, 1, seq=seq, flops=True)
        assert context.balance([[flops] for flops in m.flops.values()]) == pytest.approx(expected)


@pytest.mark.parametrize("shared_worlds", [3], indirect=True, scope="module")
@pytest.mark.parametrize("causal", [True, False])
def test_an_all_gather_computes_what_a_ring_does_and_ulysses_shares_it_evenly(shared_worlds, causal):
    expected = context.totals(context.work(SEQ, 3, "contiguous", causal, tile=4))
    how = (3, False, "contiguous", 4, causal)
    gathered, ulysses = (shared_worlds.measure(attend, variant, *how, flops=True) for variant in ("all-gather", "ulysses"))
    assert list(gathered.flops.values()) == [context.flops(scores, BATCH, HEADS, SIZE) for scores in expected]
    assert list(ulysses.flops.values()) == [context.flops(sum(expected), BATCH, HEADS // 3, SIZE)] * 3


# What is kept, and what is held


def saved(variant: str, kv_heads: int) -> int:
    return saved_bytes(ATTENTION[variant], *inputs(kv_heads, SEQ, torch.bfloat16))


@pytest.mark.parametrize("shared_worlds", matrix([1, 2, 4], [4]), indirect=True, scope="module")
@shapes
@variants
def test_what_is_kept_for_backward_is_the_theory_s(shared_worlds, variant, kv_heads):
    n = shared_worlds.size
    kept = context.saved(BATCH, SEQ, HEADS, kv_heads, SIZE, n, ulysses=n if variant == "ulysses" else 1)
    copied = variant == "ulysses" and kv_heads < n
    places = 8 * n if copied else 0  # which head each rank gets a copy of
    assert shared_worlds.run(saved, variant, kv_heads) == [kept.total + places] * n
    if not copied:
        assert kept.total * n == context.saved(BATCH, SEQ, HEADS, kv_heads, SIZE, 1).total


LONG, TILE = 192, 16


@pytest.mark.parametrize("shared_worlds", matrix([1, 2, 4], [4]), indirect=True, scope="module")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("layout", "tile"), [("zigzag", 512), ("contiguous", TILE), ("striped", 512)])
@pytest.mark.few(4)
def test_a_ring_s_peak_is_the_theory_s_to_the_byte(shared_worlds, layout, tile, kv_heads, dtype):
    """One head of four numbers: a tile of 16 tokens is long enough."""
    n, how = shared_worlds.size, {"seq": LONG, "heads": 4, "dtype": dtype}
    for backward in (False, True):
        m = shared_worlds.measure(attend, "ring", kv_heads, backward, layout, tile, **how, memory=True)
        expected = context.peak(
            BATCH, LONG, 4, kv_heads, SIZE, n, dtype.itemsize, tile, 2 if layout == "zigzag" else 1, backward
        )
        assert max(m.peak_bytes.values()) == expected.total


@pytest.mark.parametrize("backward", [False, True])
def test_without_scratch_the_peak_falls_with_the_ranks_but_for_positions(backward):
    whole, part = (context.peak(1, 2**17, 1, 1, 64, n, tile=512, backward=backward) for n in (4, 16))
    assert (whole.own, whole.output, whole.in_use) == (4 * part.own, 4 * part.output, 4 * part.in_use)
    assert whole.gradients == 4 * part.gradients
    assert whole.scratch == part.scratch
    assert part.positions == 8 * 2**17 * (1 + 2 / 16)


@pytest.mark.lenient
@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [4]), indirect=True, scope="module")
def test_gathered_keys_and_values_take_the_place_of_a_ring_s_blocks(shared_worlds):
    n, how = shared_worlds.size, {"seq": LONG, "heads": 4}
    m = shared_worlds.measure(attend, "all-gather", 4, True, **how, memory=True)
    ring, block = context.peak(BATCH, LONG, 4, 4, SIZE, n, 4, backward=True), 2 * 4 * BATCH * LONG // n * 4 * SIZE
    others = [context.buffers(block, block, n, variant) for variant in ("ring", "all-gather")]
    assert set(m.peak_bytes.values()) == {ring.total - others[0] + others[1]}
