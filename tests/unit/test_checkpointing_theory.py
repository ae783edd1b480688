"""theory.checkpointing, theory.optimal_checkpoints: what plans cost and hold; the optimal one against a search of all."""

import heapq
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import checkpointing, flops, memory, optimal_checkpoints, published
from manyranks.theory.checkpointing import Action, Layer, run
from manyranks.theory.optimal_checkpoints import Schedules, optimal, strategies
from manyranks.theory.plan import Plan

EQUAL = Layer(forward=1, backward=2, output=2, saved=34)


# The lectures' plans


def test_keeping_everything_holds_all_layers_and_computes_none_twice():
    for n in (1, 5, 16):
        outcome = run([EQUAL] * n, checkpointing.keep_all(n))
        assert (outcome.extra, outcome.forwards, outcome.time) == (0, n, 3 * n)
        assert outcome.peak == 34 * n + 2 * 2 * (n > 1) + 2 * (n == 1)  # two gradients; a single layer's input has none


def test_recomputing_from_the_input_holds_the_same_at_any_depth_and_computes_n_squared():
    outcomes = {n: run([EQUAL] * n, checkpointing.from_input(n)) for n in (3, 10, 40)}
    assert len({outcome.peak for outcome in outcomes.values()}) == 1
    for n, outcome in outcomes.items():
        assert outcome.forwards == n + n * (n + 1) // 2  # the first pass, then layers 1 to i for each i


@pytest.mark.parametrize(("n", "count"), [(9, 3), (16, 4), (10, 3), (7, 7), (7, 1)])
def test_once_a_segment_is_one_extra_forward_and_holds_the_checkpoints_and_one_segment(n, count):
    outcome = run([EQUAL] * n, checkpointing.segments(n, count))
    assert outcome.extra == n
    if n % count == 0:
        assert outcome.peak == (count - 1) * 2 + n // count * 34 + 2 * 2


@pytest.mark.parametrize(("n", "count"), [(9, 3), (16, 4), (12, 6)])
def test_from_the_nearest_checkpoint_is_cheaper_in_memory_and_dearer_in_compute(n, count):
    outcome, length = run([EQUAL] * n, checkpointing.nearest(n, count)), n // count
    assert outcome.extra == count * length * (length + 1) // 2  # N·(N/C + 1)/2: O(N√N) with √N checkpoints
    assert outcome.peak < run([EQUAL] * n, checkpointing.segments(n, count)).peak


def test_every_layer_is_2sbh_a_layer_and_a_third_more_compute():
    outcome = run([EQUAL] * 12, checkpointing.every_layer(12))
    assert outcome.extra / run([EQUAL] * 12, checkpointing.keep_all(12)).time == pytest.approx(1 / 3)
    assert outcome.peak == 11 * 2 + 34 + 2 * 2


def test_the_best_number_of_segments_is_about_the_root_of_n_times_the_layer_s_share():
    for chain in ([Layer(1, 2, 1, 1)] * 64, [EQUAL] * 100):
        n, best = len(chain), checkpointing.best_count(chain)
        root = round(math.sqrt(n * chain[0].saved / chain[0].output))
        least, near = (run(chain, checkpointing.segments(n, count)).peak for count in (best, root))
        assert abs(best - root) <= root / 4
        assert least <= near <= 1.1 * least


def test_each_moment_of_a_plan_is_counted():
    plan = [
        Action(*step) for step in (("forward", 1), ("store", 1), ("keep", 2), ("backward", 2), ("keep", 1), ("backward", 1))
    ]
    chain = [Layer(1, 2, 10, 70), Layer(1, 2, 100, 500)]
    #        a_1  a_1  a_1 + saved_2  + both gradients    saved_1 and a gradient   and the input's
    assert run(chain, plan, gradient=7).held == (10, 10, 510, 510 + 100 + 10, 70 + 10, 70 + 10 + 7)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("keep", 2)], "layer 2 cannot be computed: the output of layer 1 is not there"),
        ([("forward", 1), ("forward", 2), ("keep", 2)], "the output of layer 1 is not there"),
        ([("forward", 1), ("forward", 2), ("store", 1)], "the output of layer 1 was not just computed"),
        ([("keep", 1), ("backward", 1)], "layer 2 is next, and must be kept"),
        ([("forward", 3)], "a layer from 1 to 2"),
        ([("fly", 1)], "forward, store, keep or backward"),
        ([("keep", 1), ("keep", 2), ("backward", 2)], "ends before layer 1 went backward"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        run([EQUAL] * 2, [Action(*step) for step in steps])


@pytest.mark.parametrize("count", [0, 5, 1.0])
@pytest.mark.parametrize("plan", [checkpointing.segments, checkpointing.nearest])
def test_segments_must_have_layers(plan, count):
    with pytest.raises(ValueError, match="give a number from 1 to 4"):
        plan(4, count)


# The optimal plan


def searched(chain, budget, gradient):
    """The least extra time, by Dijkstra over everything that can be held: (stored, kept, at hand, layers left, begun)."""
    n, output = len(chain), [gradient, *(layer.output for layer in chain)]

    def held(stored, kept, hand, left, begun):
        alone = (stored | {hand}) - kept - {0, None}
        return sum(chain[i - 1].saved for i in kept) + sum(output[i] for i in alone) + begun * output[left]

    def steps(stored, kept, hand, left, begun):
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
        for more, bytes_, after in steps(*state) if best[state] == time else ():
            if bytes_ <= budget and time + more < best.get(after, math.inf):
                best[after] = time + more
                heapq.heappush(heap, (time + more, next(count), after))
    return math.inf


@st.composite
def layers(draw):
    output = draw(st.integers(0, 4))
    return Layer(draw(st.integers(1, 9)), draw(st.integers(0, 9)), output, output + draw(st.integers(0, 5)))


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


@settings(deadline=None, max_examples=60)
@given(st.lists(layers(), min_size=1, max_size=5), st.floats(0.2, 1.0), st.booleans())
def test_no_plan_within_the_budget_is_faster_and_the_least_budget_is_the_least(chain, share, differs):
    gradient = 3 * differs
    budget = max(1, round(share * run(chain, checkpointing.keep_all(len(chain)), gradient).peak))
    least = compare(chain, budget, gradient)
    assert least is None or searched(chain, least - 1, gradient) == math.inf


def test_no_plan_of_eight_unequal_layers_is_faster():
    sizes = [(3, 2, 5), (7, 1, 2), (1, 4, 6), (9, 2, 7), (2, 1, 4), (5, 3, 8), (8, 2, 3), (4, 1, 6)]
    compare([Layer(forward, 2 * forward, output, saved) for forward, output, saved in sizes], 20, 0)


@pytest.mark.parametrize("gradient", [0, 2])
@pytest.mark.parametrize("chain", [[Layer(1, 2, 2, 5)] * 5, [Layer(1, 2, 2, 3)] * 3 + [Layer(4, 2, 2, 7)] * 3])
def test_no_plan_of_equal_layers_is_faster_at_any_budget(chain, gradient):
    for budget in range(5, run(chain, checkpointing.keep_all(len(chain)), gradient).peak + 1, 3):
        compare(chain, budget, gradient)


def test_a_layer_far_larger_than_the_budget_is_refused():
    for large in (Layer(1, 1, 10**15, 10**15), Layer(1, 1, 1, 10**15)):
        with pytest.raises(ValueError, match="no plan for these 3 layers fits"):
            optimal([EQUAL, large, EQUAL], 100)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 999), st.integers(0, 9999)), min_size=1, max_size=24),
    st.floats(0.5, 1),
    st.integers(8, 64),
)
def test_rounding_to_slots_never_exceeds_the_budget(sizes, share, slots):
    chain = [Layer(1.0 + output % 3, 2.0, output, output + more) for output, more in sizes]
    budget = math.ceil(share * run(chain, checkpointing.keep_all(len(chain))).peak)
    try:
        plan = optimal(chain, budget, slots)
    except ValueError:
        return
    assert run(chain, plan).peak <= budget


def test_more_memory_is_never_slower_and_all_of_it_recomputes_nothing():
    chain = [Layer(1 + k % 3, 2, 1 + k % 2, 3 + k % 5) for k in range(40)]
    most = run(chain, checkpointing.keep_all(40)).peak
    schedules = Schedules(chain, most)
    extras = [schedules.extra(budget) for budget in range(schedules.least, most + 1)]
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0
    for budget in range(schedules.least, most, 9):
        outcome = run(chain, schedules.plan(budget))
        assert (outcome.extra, outcome.peak <= budget) == (schedules.extra(budget), True)


@pytest.mark.parametrize("slots", [64, 256])
def test_a_long_chain_of_unequal_layers_has_plans_for_so_many_budgets(slots):
    chain = [Layer(1 + k * 7 % 5, 2, 1000 + 37 * k % 999, 4000 + 91 * k % 3333) for k in range(128)]
    most = run(chain, checkpointing.keep_all(128)).peak // 2
    schedules = Schedules(chain, most, slots=slots)
    for budget in range(schedules.least, most, most // 8):
        assert run(chain, schedules.plan(budget)).peak <= budget


@pytest.mark.parametrize("n", [4, 16, 36])
def test_the_optimal_plan_beats_the_root_of_n_in_its_own_memory(n):
    chain = [EQUAL] * n
    outcomes = {name: run(chain, plan) for name, plan in strategies(chain).items()}
    assert outcomes["optimal"].peak <= outcomes["√N, once"].peak
    assert outcomes["optimal"].extra < outcomes["√N, once"].extra == outcomes["every layer"].extra
    assert outcomes["from the input"].peak <= outcomes["√N, nearest"].peak < outcomes["√N, once"].peak


@pytest.mark.parametrize(
    ("chain", "budget", "message"),
    [
        ([], 10, "one layer or more"),
        ([Layer(1, 1, 2, 1)], 10, "saved >= output"),
        ([Layer(-1, 1, 2, 3)], 10, "0 or more"),
        ([EQUAL], 0, "give 1 or more of both"),
        ([EQUAL] * 3, 37, "no plan for these 3 layers fits"),
    ],
)
def test_chains_and_budgets_that_have_no_plan_are_refused(chain, budget, message):
    with pytest.raises(ValueError, match=message):
        optimal(chain, budget)


def test_a_budget_below_the_least_names_it():
    schedules = Schedules([EQUAL] * 3, 200)
    assert run([EQUAL] * 3, schedules.plan(schedules.least)).peak == schedules.least
    with pytest.raises(ValueError, match=f"the least in which a plan for these layers fits is {schedules.least}"):
        schedules.plan(schedules.least - 1)


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


def test_full_recomputation_adds_a_third_of_the_layers_flops():
    shape = theory.models["megatron-175b"]
    share = checkpointing.extra_share(shape, 2048, "full")
    parts = flops.forward(shape, 2048)
    assert share == pytest.approx(parts.layers / (3 * (parts.layers + parts.head)))
    assert 0.32 < share < 1 / 3
    assert checkpointing.extra_share(shape, 2048, "none") == 0
    assert memory.layer_activations(shape, Plan(seq=2048, recompute="full")) == 2 * 2048 * shape.hidden


def test_the_strategies_have_names_and_good_plans():
    chain = [Layer(1, 2, 3, 11)] * 5
    for plan in optimal_checkpoints.strategies(chain).values():
        assert [action.layer for action in plan if action.kind == "backward"] == [5, 4, 3, 2, 1]
        run(chain, plan)
