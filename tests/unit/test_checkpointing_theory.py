"""theory.checkpointing, theory.optimal_checkpoints: what plans cost and hold; the optimal one against a search of all."""

import heapq
import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import checkpointing, flops, published
from manyranks.theory.checkpointing import Action, Layer, nearest, run, segments
from manyranks.theory.optimal_checkpoints import Schedules, optimal, strategies
from manyranks.theory.plan import Plan

EQUAL = Layer(forward=1, backward=2, output=2, saved=34)
LARGE = Layer(1, 1, 10**15, 10**15), Layer(1, 1, 1, 10**15)


# The lectures' plans

# Of equal layers: a plan, how many forwards it adds, and its peak beside two gradients.
PLANS = [
    *((checkpointing.keep_all(n), n, 0, 34 * n) for n in (5, 16)),
    *((checkpointing.from_input(n), n, n * (n + 1) // 2, 2 + 34) for n in (3, 10, 40)),  # layers 1 to i for each i
    *((segments(n, c), n, n, 2 * (c - 1) + 34 * n // c) for n, c in ((9, 3), (16, 4), (7, 7), (7, 1))),
    (segments(10, 3), 10, 10, 34 * 4),  # fullest in the first, which is a layer longer
    *((nearest(n, c), n, n * (n // c + 1) // 2, 2 * c + 34) for n, c in ((9, 3), (16, 4), (12, 6))),
    (checkpointing.every_layer(12), 12, 12, 2 * 11 + 34),
]


@pytest.mark.parametrize(("plan", "n", "extra", "peak"), PLANS)
def test_a_plan_computes_and_holds_what_the_lectures_say(plan, n, extra, peak):
    outcome = run([EQUAL] * n, plan)
    assert (outcome.extra, outcome.forwards, outcome.time) == (extra, n + extra, 3 * n + extra)
    assert outcome.peak == peak + 2 * 2


def test_the_best_number_of_segments_is_about_the_root_of_n_times_the_layer_s_share():
    for chain in ([Layer(1, 2, 1, 1)] * 64, [EQUAL] * 100):
        n = len(chain)
        best = min(range(1, n + 1), key=lambda count: run(chain, segments(n, count)).peak)
        root = round(math.sqrt(n * chain[0].saved / chain[0].output))
        least, near = (run(chain, segments(n, count)).peak for count in (best, root))
        assert abs(best - root) <= root / 4
        assert least <= near <= 1.1 * least


def steps(text: str) -> list[Action]:
    """Reads a plan, such as "keep 1, backward 1"."""
    return [Action(kind, int(layer)) for kind, layer in map(str.split, text.split(","))]


def test_each_moment_of_a_plan_is_counted():
    plan = steps("forward 1, store 1, keep 2, backward 2, keep 1, backward 1")
    chain = [Layer(1, 2, 10, 70), Layer(1, 2, 100, 500)]
    #        a_1  a_1  a_1 + saved_2  + both gradients    saved_1 and a gradient   and the input's
    assert run(chain, plan, gradient=7).held == (10, 10, 510, 510 + 100 + 10, 70 + 10, 70 + 10 + 7)


FOLLOWED = {
    "keep 2": "layer 2 cannot be computed: the output of layer 1 is not there",
    "forward 1, forward 2, keep 2": "the output of layer 1 is not there",
    "forward 1, forward 2, store 1": "the output of layer 1 was not just computed",
    "keep 1, backward 1": "layer 2 is next, and must be kept",
    "forward 3": "a layer from 1 to 2",
    "fly 1": "forward, store, keep or backward",
    "keep 1, keep 2, backward 2": "ends before layer 1 went backward",
}
REFUSED = [
    *((partial(run, [EQUAL] * 2, steps(plan)), message) for plan, message in FOLLOWED.items()),
    *((partial(plan, 4, n), "give a number from 1 to 4") for plan in (segments, nearest) for n in (0, 5, 1.0)),
    (partial(optimal, [], 10), "one layer or more"),
    (partial(optimal, [Layer(1, 1, 2, 1)], 10), "saved >= output"),
    (partial(optimal, [Layer(-1, 1, 2, 3)], 10), "0 or more"),
    (partial(optimal, [EQUAL], 0), "give 1 or more of both"),
    (partial(optimal, [EQUAL] * 3, 37), "no plan for these 3 layers fits"),
    *((partial(optimal, [EQUAL, large, EQUAL], 100), "no plan for these 3 layers fits") for large in LARGE),
    (lambda: Schedules([EQUAL] * 3, 200).plan(39), "a plan for these layers needs at least 40"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_has_no_plan_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The optimal plan


def searched(chain, budget, gradient):
    """The least extra time, by Dijkstra over everything that can be held: (stored, kept, at hand, layers left, begun)."""
    n, output = len(chain), [gradient, *(layer.output for layer in chain)]

    def held(stored, kept, hand, left, begun):
        alone = (stored | {hand}) - kept - {0, None}
        return sum(chain[i - 1].saved for i in kept) + sum(output[i] for i in alone) + begun * output[left]

    def moves(stored, kept, hand, left, begun):
        for i in range(1, left + 1):
            if i == 1 or i - 1 in stored | kept | {hand}:
                at = hand if hand == i - 1 else None
                if i not in stored | kept:
                    bytes_ = output[i] + held(stored, kept, at, left, begun)
                    yield chain[i - 1].forward, bytes_, (stored, kept, i, left, begun)
                if i not in kept:
                    after = stored | {i - 1}, kept | {i}, i, left, begun
                    yield chain[i - 1].forward, held(*after), after
        if hand is not None:
            yield 0, 0, (stored | {hand}, kept, hand, left, begun)
        if left in kept:
            after = stored - {left - 1}, kept - {left}, None, left - 1, True
            yield 0, held(stored, kept, None, left, True) + output[left - 1], after

    start, count = (frozenset(), frozenset(), None, n, False), itertools.count()
    best, heap = {start: 0}, [(0, next(count), start)]
    while heap:
        time, _, state = heapq.heappop(heap)
        if state[3] == 0:
            return time - sum(layer.forward for layer in chain)
        for more, bytes_, after in moves(*state) if best[state] == time else ():
            if bytes_ <= budget and time + more < best.get(after, math.inf):
                best[after] = time + more
                heapq.heappush(heap, (time + more, next(count), after))
    return math.inf


def layers(most: int, *times: st.SearchStrategy) -> st.SearchStrategy:
    sizes = st.tuples(*times, st.integers(0, most), st.integers(0, most))
    return sizes.map(lambda drawn: Layer(*drawn[:3], drawn[2] + drawn[3]))


def compare(chain, budget, gradient):
    least = searched(chain, budget, gradient)
    try:
        schedules = Schedules(chain, budget, gradient=gradient)
    except ValueError:
        assert least == math.inf
        return None
    outcome = run(chain, schedules.plan(budget), gradient)
    assert outcome.extra == schedules.extra(budget) == least
    assert outcome.peak <= budget
    return schedules.least


@given(st.lists(layers(5, st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5), st.floats(0.2, 1.0), st.booleans())
def test_no_plan_within_the_budget_is_faster_and_the_least_budget_is_the_least(chain, share, differs):
    gradient = 3 * differs
    budget = max(1, round(share * run(chain, checkpointing.keep_all(len(chain)), gradient).peak))
    least = compare(chain, budget, gradient)
    assert least is None or searched(chain, least - 1, gradient) == math.inf


@pytest.mark.parametrize("gradient", [0, 2])
@pytest.mark.parametrize("chain", [[Layer(1, 2, 2, 5)] * 5, [Layer(1, 2, 2, 3)] * 3 + [Layer(4, 2, 2, 7)] * 3])
def test_no_plan_of_equal_layers_is_faster_at_any_budget(chain, gradient):
    for budget in range(5, run(chain, checkpointing.keep_all(len(chain)), gradient).peak + 1, 3):
        compare(chain, budget, gradient)


@settings(max_examples=30)
@given(st.lists(layers(9999, st.integers(1, 3), st.just(2)), min_size=1, max_size=24), st.floats(0.5, 1), st.integers(8, 64))
def test_rounding_to_slots_never_exceeds_the_budget(chain, share, slots):
    budget = math.ceil(share * run(chain, checkpointing.keep_all(len(chain))).peak)
    try:
        plan = optimal(chain, budget, slots)
    except ValueError:
        return
    assert run(chain, plan).peak <= budget


@pytest.mark.parametrize("n", [4, 16, 36])
def test_the_optimal_plan_beats_the_root_of_n_in_its_own_memory(n):
    best, once = (run([EQUAL] * n, strategies([EQUAL] * n)[name]) for name in ("optimal", "√N, once"))
    assert best.peak <= once.peak
    assert best.extra < once.extra


# Transformers


@pytest.mark.parametrize("row", published.rows("korthikanti_configs"), ids=lambda row: row["model"])
def test_a_transformer_s_chain_has_the_published_bytes(row):
    shape, h, a, t = theory.models[f"megatron-{row['model'].split()[0].lower()}"], int(row["hidden"]), int(row["heads"]), 8
    plan = Plan(tp=t, microbatch=4, seq=2048, flash=False, precision="fp16", recompute="none")
    chain = checkpointing.chain_of(shape, plan)
    sbh = 2048 * 4 * h
    assert len(chain) == int(row["layers"])
    assert (chain[0].output, chain[0].saved) == (2 * sbh // t, (34 * sbh + 5 * a * 2048**2 * 4) // t)
    assert sum(layer.forward for layer in chain) == 4 * 2048 * flops.forward(shape, 2048).layers


@pytest.mark.parametrize(("norm", "numbers"), [("layernorm", 2), ("rmsnorm", 1), ("none", 0)])
def test_norms_keep_a_number_or_two_a_token(norm, numbers):
    shape = replace(theory.models["megatron-22b"], norm=norm)
    assert checkpointing.statistics(shape, Plan(seq=64, microbatch=3)) == 2 * numbers * 4 * 64 * 3
    assert checkpointing.statistics(shape, Plan(seq=64, tp=8), itemsize=2) == 2 * numbers * 2 * 8
