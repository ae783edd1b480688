"""theory.context: bytes, scores, balance, overlap and room against counts by hand, closed forms and published tables."""

import re
from dataclasses import replace
from itertools import accumulate, pairwise, product, starmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import Plan, clusters, context, kernels, layer, memory, models, published
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import Calls
from manyranks.theory.collectives import chunk_sizes
from manyranks.theory.kernels import Constants
from manyranks.theory.published import context as tables
from tests.unit import exposed

H100 = clusters["h100-dgx"]
FREE, NO_LATENCY = Constants(overhead=0.0), H100.with_link("node", latency=0.0)
LLAMA = models["llama3-8b"]
SIZES = (2, 48, 12, 2, 8)  # b, s, a, g, D
layouts = st.sampled_from(context.LAYOUTS)


# What a rank sends


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_ring_sends_keys_and_values_to_all_others_and_in_backward_their_gradients_too(n):
    block = 2 * 2 * 2 * 48 // n * 8  # of keys and values, b·g·(s/N)·D each
    assert context.ring(*SIZES, n).forward == Calls(send=n - 1, bytes=(n - 1) * block * 2)
    for how, numbers in (({}, 2 + 4), ({"itemsize": 8}, 8 + 8), ({"accumulating": 2}, 2 + 2)):
        assert context.ring(*SIZES, n, **how).backward == Calls(send=2 * (n - 1), bytes=(n - 1) * block * numbers)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 4))
def test_tensor_parallelism_sends_n_times_what_ulysses_sends(n, b, units):
    sizes = (b, 8 * units, 8, 8, 4, n)
    assert context.tensor_parallel(*sizes).forward.bytes == n * context.ulysses(*sizes).forward.bytes


# Scores under a mask


def seen(seq: int, n: int, layout: str, sees, tile: int | None = 1) -> context.Work:
    """Every pair of tiles where a query sees a key, looked at score by score."""

    def tiles(chunk: range) -> list[range]:
        sizes = chunk_sizes(len(chunk), -(-len(chunk) // (tile or len(chunk))))
        return [chunk[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]

    def scores(queries: int, keys: int) -> int:
        return sum(len(a) * len(b) for a, b in product(own[queries], own[keys]) if any(starmap(sees, product(a, b))))

    own = [[cut for chunk in context.chunks(seq, n, layout, r) for cut in tiles(chunk)] for r in range(n)]
    return [[scores(r, (r - hop) % n) for hop in range(n)] for r in range(n)]


@pytest.mark.parametrize("tile", [1, 2, 3, 4, None])
@pytest.mark.parametrize("layout", context.LAYOUTS)
def test_work_is_that_of_every_pair_of_tiles_of_which_something_is_visible(layout, tile):
    for n, units in product((1, 2, 3, 4), (1, 2, 3, 5, 7)):
        seq = 2 * n * units
        assert context.work(seq, n, layout, tile=tile) == seen(seq, n, layout, lambda q, k: k <= q, tile)


@given(st.integers(1, 16), st.integers(1, 30))
def test_the_balance_of_each_layout_is_its_closed_form(n, units):
    seq = 2 * n * units
    balance = {layout: context.balance(context.work(seq, n, layout)) for layout in context.LAYOUTS}
    assert balance["contiguous"] == pytest.approx(2 - 1 / n - (1 - 1 / n) / (seq + 1), rel=1e-12)
    assert balance["striped"] == pytest.approx(1 + (n - 1) / (seq + 1), rel=1e-12)
    assert balance["zigzag"] == 1
    assert context.balance(context.work(seq, n, "contiguous", tile=None)) == pytest.approx(2 * n / (n + 1), rel=1e-12)
    assert context.contiguous_balance(n) == pytest.approx(balance["contiguous"], abs=1 / seq)
    assert context.work(seq, n, causal=False) == [[(seq // n) ** 2] * n] * n
    surplus = {layout: context.surplus(context.work(seq, n, layout, tile=None), seq) for layout in context.LAYOUTS}
    exact = {"contiguous": 1 + 1 / n, "striped": 2, "zigzag": 1 + 1 / (2 * n)}  # only striped skips no whole block
    assert surplus == pytest.approx({layout: each * seq / (seq + 1) for layout, each in exact.items()})


def test_hops_last_as_long_as_their_slowest_rank():
    contiguous = context.in_step(context.work(24, 3, "contiguous"))
    assert contiguous.hops == [36, 64, 64]  # the last rank's: it never idles
    assert contiguous.slowest == max(context.totals(context.work(24, 3, "contiguous")))
    assert contiguous.idle == pytest.approx(1 - (24 * 25 / 2) / (3 * 164))
    assert context.in_step(context.work(24, 3, "zigzag")) == ([36, 32, 32], 0.0)


# Documents and windows


@pytest.mark.parametrize("layout", context.LAYOUTS)
@pytest.mark.parametrize("lengths", [[24], [1, 23], [7, 5, 12], [8, 8, 8], [1] * 24, [3, 2, 9, 4, 6]])
def test_a_token_sees_itself_and_those_before_it_in_its_document_or_window(lengths, layout):
    document, window = [k for k, length in enumerate(lengths) for _ in range(length)], lengths[-1] + 1
    for n in (1, 2, 3, 4):
        found = context.document_work(lengths, n, layout), context.window_work(24, n, window, layout)
        assert found[0] == seen(24, n, layout, lambda q, k: k <= q and document[k] == document[q])
        assert found[1] == seen(24, n, layout, lambda q, k: q - window < k <= q)


def test_a_window_balances_contiguous_shards_and_saves_hops():
    found = context.window_work(2**14, 8, 2**10)
    assert context.balance(found) < 1.04  # the first tokens see less
    assert (context.stops(found), context.stops(context.window_work(2**14, 8, 2**10, "zigzag"))) == ([0, 1], [0, 1, 7])
    assert 3 * context.ring(*SIZES, 4, hops=1) == context.ring(*SIZES, 4)


# What a rank keeps


@pytest.mark.parametrize("cp", [2, 8, 16, 32])
def test_a_layer_keeps_what_attention_saves_with_ulysses_copies_of_key_value_heads(cp):
    def kept(variant: str, shape: ModelShape) -> int:
        plan = Plan(cp=cp, seq=4096, recompute="none", context=variant)
        sizes = (1, 4096, shape.heads, shape.kv_heads, shape.head_size, cp)
        own = context.saved(*sizes, ulysses=cp if variant == "ulysses" else 1).total
        return memory.layer_activations(shape, plan) - own

    others = kept("ring", LLAMA)
    assert others == kept("ulysses", LLAMA) == kept("ring", replace(LLAMA, kv_heads=1)) > 0


# Overlap


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("causal", "layout"), [(False, "zigzag"), (True, "zigzag"), (True, "contiguous"), (True, "striped")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_with_the_least_shard_a_hop_computes_as_long_as_its_message_travels(heads, kv_heads, causal, layout, backward):
    rate, bandwidth, n, d = 1e12, 1e9, 8, 64
    shard = context.least_shard(rate, bandwidth, heads, kv_heads, causal, layout, backward)
    seq = 2 * n * round(shard / 2)
    scores = context.in_step(context.work(seq, n, layout, causal)).hops[1]
    send = context.ring(1, seq, heads, kv_heads, d, n)
    message = (send.backward if backward else send.forward).bytes / (n - 1)
    assert context.flops(scores, 1, heads, d, backward) / rate == pytest.approx(message / bandwidth, rel=1e-2)
    assert context.least_shard(312e12, 12.5e9) == 24960


def test_hops_are_charged_as_kernels_and_messages_by_a_rank_s_own_share_of_the_slowest_link():
    sizes = (1, 65536, 32, 8, 128)
    inside, between, strided = (context.hops(*sizes, n, H100, stride=k) for n, k in ((8, 1), (16, 1), (8, 8)))
    message = 2 * 65536 // 8 * 8 * 128 * 2
    assert inside.messages == pytest.approx([5e-6 + 3.4e-6 + message / (0.79 * 450e9)] * 7 + [0, 0])
    assert between.messages == pytest.approx([5e-6 + 14e-6 + message / 2 / (0.79 * 50e9)] * 15 + [0, 0])
    assert strided.messages[0] == pytest.approx(5e-6 + 14e-6 + message / (0.79 * 50e9))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_gradients_travel_two_blocks_behind_their_keys_and_the_last_message_under_nothing(n):
    """As parallel.context.ring sends them: N − 1 messages each way."""
    backward = context.hops(1, 840 * n, 8, 2, 64, n, NO_LATENCY, backward=True, constants=FREE)
    keys = 2 * 840 * 2 * 64 * 2
    units = [round(each * 0.79 * 450e9 / keys, 6) for each in backward.messages]
    assert units == {1: [0, 0], 2: [1, 0, 2], 3: [1, 1, 2, 2], 8: [1, 1, *[3] * 5, 2, 2]}[n]
    assert sum(units) * keys == pytest.approx(context.ring(1, 840 * n, 8, 2, 64, n).backward.bytes)
    assert backward.exposed >= backward.messages[-1]


@pytest.mark.parametrize(("n", "stride", "shard"), [(2, 1, 1024), (16, 1, 1024), (16, 1, 4096), (2, 8, 1024), (16, 8, 4096)])
def test_a_ring_in_a_step_waits_as_its_hops_do(n, stride, shard):
    """Given the same seconds of attention: a step charges it as one kernel, not as N."""
    plan = Plan(cp=n, tp=stride, seq=n * shard)
    sizes = (1, n * shard, LLAMA.heads // stride, LLAMA.kv_heads // stride, LLAMA.head_size, n, H100)
    both = [context.hops(*sizes, stride=stride, backward=backward) for backward in (False, True)]
    core = tuple(sum(each.compute) for each in both)
    found = exposed.context(LLAMA, plan, H100, core)
    assert found == pytest.approx([each.exposed for each in both], rel=0.01)


def test_all_hops_together_are_the_layer_s_attention_but_for_starting_kernels_and_reading_blocks():
    seq, n = 2**17, 8
    plan = Plan(cp=n, seq=seq)
    (core,) = (k for k in layer.forward(LLAMA, plan, False) if k.part == "core")
    back = layer.gradients(core, plan)
    sizes = (1, seq, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_size, n, H100)
    for kernel, backward in ((core, False), (back[0], True)):
        found = sum(context.hops(*sizes, backward=backward, constants=FREE).compute)
        assert found == pytest.approx(kernels.seconds(kernel, H100.accelerator, FREE), rel=0.03)


# Ulysses in plans and step times


def test_ulysses_with_more_ranks_than_key_value_heads_is_charged_for_copies():
    """As context.ulysses counts them."""
    shape = ModelShape("grouped", 2, 512, 512, 32, 100, kv_heads=4)
    for cp, tp in ((2, 1), (4, 1), (8, 1), (4, 2)):
        plan = Plan(cp=cp, tp=tp, seq=1024, context="ulysses")
        sent = context.ulysses(1, 1024, 32 // tp, max(1, 4 // tp), 16, cp).forward.bytes
        found = exposed.context(shape, plan, NO_LATENCY, (0.0, 0.0), FREE)
        assert found == pytest.approx([sent / (0.79 * 450e9)] * 2)


# Published tables: test_published.py has Ring Attention's


def test_contiguous_rings_were_measured_at_what_their_balance_allows():
    rows = tables.shares()
    for row, printed in zip(rows, published.rows("ring_flash_attention"), strict=True):
        assert 100 * row.share == pytest.approx(float(printed["pct_of_ideal"]), abs=0.1)
        if row.variant == "ring" and not row.documents:
            assert row.share == pytest.approx(row.bound, abs=0.02)
        elif row.bound:
            assert row.share < row.bound < 1
    assert {row.variant for row in rows if row.bound} == {"ring", "zigzag", "stripe"}
    assert sum(row.bound is None for row in rows) == 12


# The longest sequence that fits


@pytest.mark.parametrize("variant", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize(("cp", "tp"), [(4, 1), (2, 8), (8, 2)])
def test_one_unit_more_than_the_longest_does_not_fit(cp, tp, variant):
    plan = Plan(cp=cp, tp=tp, zero=3, context=variant, recompute="full")
    found, unit, room = context.longest(LLAMA, plan, H100), 2 * cp * tp, H100.accelerator.memory
    assert found % unit == 0
    numbers = found // cp * 2 * max(1, 8 // tp) * 128
    others = {"ring": 4 * numbers + (4 if cp > 2 else 2) * 4 * numbers, "all-gather": cp * 6 * numbers}.get(variant, 0)
    peaks = [memory.peak(LLAMA, replace(plan, seq=seq)).total + others * seq // found for seq in (found, found + unit)]
    assert peaks[0] <= room < peaks[1]


# Bad input


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: context.ring(1, 22, 8, 2, 16, 4), "seq=22 on n=4 ranks: give 20 or 24"),
        (lambda: context.ring(1, 24, 8, 3, 16, 4), "kv_heads=3 does not divide heads=8: choose a divisor of 8"),
        (lambda: context.ring(1, 24, 8, 2, 16, 4, accumulating=0.5), "accumulating=0.5: must be"),
        (lambda: context.ring(1, 24, 8, 2, 16, 4, hops=4), "hops=4 on n=4 ranks: give 0 to 3"),
        (lambda: context.window_work(24, 4, 0), "window=0: must be"),
        (lambda: context.ulysses(1, 24, 8, 2, 16, 3), "Ulysses needs n=3 to divide heads=8: choose a divisor of 8"),
        (lambda: context.ulysses(1, 24, 12, 6, 16, 4), "Ulysses needs one of n=4 and kv_heads=6 to divide the other"),
        (lambda: context.saved(1, 48, 8, 8, 16, 2, ulysses=4), "ulysses=4 does not divide n=2: choose a divisor of 2"),
        (lambda: context.chunks(24, 4, "zigzag", 4), "rank=4: must be one of the 4 ranks, 0 to 3"),
        (lambda: context.work(24, 5, "zigzag"), "seq=24 in 10 chunks, zigzag on n=5 ranks: give 20 or 30"),
        (lambda: context.work(24, 4, "zig-zag"), "layout='zig-zag': did you mean 'zigzag'? choose from contiguous, striped"),
        (lambda: context.work(24, 4, tile=0), "tile=0: must be"),
        (lambda: context.document_work([20, 0, 4], 4), "lengths[1]=0: must be"),
        (lambda: context.least_shard(0.0, 1.0), "rate=0.0, bandwidth=1.0: both must be above 0"),
        (lambda: context.hops(1, 64, 8, 8, 16, 4, "h100"), "cluster='h100': give a Cluster"),
        (lambda: context.buffers(1, 1, 4, "gather"), "variant='gather': did you mean 'all-gather'?"),
        (lambda: context.longest(LLAMA, Plan(tp=3), H100), "tp=3 does not divide"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        call()
