"""theory.expert: copies and bytes from the routing, chances by enumeration, load, imbalance, states, DeepSeek-V3's step."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.parallel import expert as parallel
from manyranks.parallel.pipeline import program, schedules
from manyranks.parallel.pipeline.schedules import Pair
from manyranks.theory import (
    Plan,
    clusters,
    expert,
    kernels,
    layer,
    memory,
    models,
    network,
    pace,
    pipeline,
    stages,
    step,
)
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.pace import Both
from manyranks.theory.plan import most_imbalance
from manyranks.theory.published import expert as tables
from manyranks.theory.published import steps
from manyranks.timeline import Transfer, replay
from tests.unit import exposed

H800, V3, MIXTRAL, LLAMA = clusters["h800"], models["deepseek-v3"], models["mixtral-8x7b"], models["llama3-8b"]
(PUBLISHED,) = steps.deepseek()
DEEPSEEK = PUBLISHED.plan
EXPERTS = 8


@st.composite
def routings(draw):
    """Of 1, 2, 4 or 8 ranks with 8 experts, some copies dropped, some ranks without tokens; and a number of nodes."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    top_k = draw(st.integers(1, 4))
    experts = st.lists(st.integers(0, EXPERTS - 1), min_size=top_k, max_size=top_k, unique=True)
    token = st.tuples(experts, st.integers(0, 15)).map(
        lambda both: [-1 if both[1] >> i & 1 else x for i, x in enumerate(both[0])]
    )
    routing = [draw(st.lists(token, max_size=4)) for _ in range(ranks)]
    return routing, draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))


# What is sent


def test_bytes_of_one_hop_by_hand():
    routing = [[(0, 3), (1, 2)], [(3, -1), (0, 1)]]  # rank 0 has experts 0 and 1
    sends = expert.one_hop(routing, 4, hidden=8, itemsize=4)
    row = 8 * 4
    assert expert.rows(routing, 4) == ((2, 2), (2, 1))
    assert [exchange.what for exchange in sends.forward] == ["counts", "rows", "results"]
    assert [exchange.bytes for exchange in sends.forward[:2]] == [((16, 16), (16, 16)), ((2 * row, 2 * row), (2 * row, row))]
    assert [exchange.sent for exchange in sends.backward] == [(2 * row, 2 * row)] * 2
    assert sends.payload == (16 + 4 * 2 * row, 16 + 4 * 2 * row)
    assert sends.split(node=2, what="rows") == expert.Split(own=3 * row, inside=4 * row, between=0)
    assert sends.split(node=1, what="results").between == 4 * row


def test_bytes_of_two_hops_by_hand():
    """Four ranks on two nodes with an expert each. The token of rank 1 goes to both, to node 1 once for two experts."""
    routing = [[], [(0, 2, 3)], [], []]
    sends = {exchange.what: exchange.bytes for exchange in expert.two_hops(routing, 4, 8, nodes=2).both}
    row, gates, choices, none = 8 * 2, 3 * 4, 3 * 8, (0,) * 4
    assert expert.node_rows(routing, 4, 2) == (none, (0, 1, 0, 1), none, none)
    assert expert.inside_rows(routing, 4, 2) == (none, (1, 0, 0, 0), none, (0, 0, 1, 1))
    assert [sends[what][1][3] for what in ("copies", "gates", "choices")] == [row, gates, choices]
    assert [sends[what][3][1] for what in ("sums", "gates' gradients", "copies' gradients")] == [row, gates, row]
    assert sends["copies to come"] == ((8, 0, 8, 0), (0, 8, 0, 8)) * 2
    assert sends["counts"] == ((8, 8, 0, 0),) * 2 + ((0, 0, 8, 8),) * 2
    assert (sends["rows"][3], sends["results"][2]) == ((0, 0, row, row), (0, 0, 0, row))


@settings(max_examples=60)
@given(routings())
def test_copies_arrive_once_by_any_way_and_two_hops_cross_the_network_once_for_each_node(drawn):
    routing, nodes = drawn
    n, kept = len(routing), [one for tokens in routing for token in tokens for one in token if one >= 0]
    node, own, load = n // nodes, EXPERTS // nodes, expert.counts(routing, EXPERTS)
    assert load == tuple(kept.count(one) for one in range(EXPERTS))
    for matrix in (expert.rows(routing, EXPERTS), expert.inside_rows(routing, EXPERTS, nodes)):
        assert tuple(map(sum, zip(*matrix, strict=True))) == expert.of_ranks(load, n)
    others = ((rank // node, token) for rank, tokens in enumerate(routing) for token in tokens)
    visits = sum(len({one // own for one in token if one >= 0} - {home}) for home, token in others)
    one, two = expert.one_hop(routing, EXPERTS, 4), expert.two_hops(routing, EXPERTS, 4, nodes)
    assert [two.split(node, what).between for what in ("copies", "sums")] == [visits * 8] * 2
    assert visits * 8 <= one.split(node, "rows").between
    assert two.split(node, "rows").between == 0
    backward = Counter(exchange.bytes for exchange in one.backward)
    assert backward == Counter(exchange.bytes for exchange in one.forward if exchange.what != "counts")
    cut = expert.one_hop(routing, EXPERTS, 4, etp=node)  # node neighbors cut each expert
    gathered = [exchange.split(node) for exchange in cut.both if exchange.what in expert.sends.SLICES[1:]]
    assert all(split == (8 * len(kept), 8 * len(kept) * (node - 1), 0) for split in gathered)
    assert all(exchange.split(node).inside == 0 for exchange in cut.both if exchange.what == "rows")
    for sends in (one, two, cut):
        assert all(sum(exchange.sent) == sum(exchange.received) for exchange in sends.both)
        assert sum(sends.payload) == sends.split(node).sent


# What travels on average


def tokens_of(experts: int, top_k: int, groups: int, per_token: int) -> list[list[int]]:
    """Every choice that a token can make, as many experts in each chosen group."""
    size, found = experts // groups, []
    for chosen in combinations(range(groups), per_token):
        inside = [combinations(range(g * size, (g + 1) * size), top_k // per_token) for g in chosen]
        found += [sum(parts, ()) for parts in product(*inside)]
    return found


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "per_token"), [(8, 3, 1, 1), (8, 2, 4, 2), (16, 4, 4, 2), (16, 4, 2, 1)]
)
def test_copies_on_average_are_those_of_all_routings_there_are(experts, top_k, groups, per_token, nodes):
    ranks, every = 8, tokens_of(experts, top_k, groups, per_token)
    routing = [every] * ranks  # every rank has every token
    limits = (experts, top_k, ranks, nodes, groups, per_token)
    one, two = expert.one_hop(routing, experts, 1, 1), expert.two_hops(routing, experts, 1, nodes, 1)
    hops = [one.split(ranks // nodes, "rows"), two.split(ranks // nodes, "rows"), two.split(ranks // nodes, "copies")]
    direct, inside, between = ([way / ranks / len(every) for way in split] for split in hops)
    assert expert.one_hop_copies(*limits) == pytest.approx((direct[1], direct[2]))
    assert expert.two_hops_copies(*limits) == pytest.approx((inside[1], between[2]))


def test_node_limited_routing_spares_the_network_only_with_two_hops():
    free, limited = (256, 8, 64, 8), (256, 8, 64, 8, 8, 4)
    assert expert.one_hop_copies(*free) == expert.one_hop_copies(*limited) == (8 * (1 / 8 - 1 / 64), 7)
    assert expert.two_hops_copies(*limited).between == 4 * 7 / 8
    assert expert.two_hops_copies(*free).between == pytest.approx(7 * (1 - 0.339), rel=0.01)  # 224·…·217 ÷ 256·…·249


def test_seconds_are_those_of_the_copies_of_two_hops():
    size, route = 1e9, H800.route(64)
    copies = expert.two_hops_copies(256, 8, 64, 8, 8, 4)
    slower = max(copies.inside * size / (0.79 * 200e9), copies.between * size / (0.79 * 50e9))
    assert network.near_and_far(
        route, *(size * each for each in expert.travel(V3, 64, route.inside)), DEFAULT
    ) == pytest.approx(kernels.OVERHEAD + 14e-6 + slower)


# Load


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_imbalance_is_the_largest_over_the_mean(counts):
    expected = max(counts) / (sum(counts) / len(counts)) if sum(counts) else 1.0
    assert expert.imbalance(counts) == pytest.approx(expected)
    assert 1 <= expert.imbalance(counts) + 1e-12 <= len(counts) + 1e-9


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 4), (8, 3, 4), (8, 4, 2), (6, 1, 3), (8, 8, 4)])
def test_no_routing_is_less_balanced_than_the_worst(experts, top_k, ranks):
    own = experts // ranks
    all_to_the_first = [[tuple(range(top_k))] * 3] * ranks
    load = expert.of_ranks(expert.counts(all_to_the_first, experts), ranks)
    assert expert.imbalance(load) == pytest.approx(most_imbalance(experts, top_k, ranks))
    assert max(load) == 3 * ranks * min(top_k, own)


def test_capacity_drops_what_is_beyond_it_for_each_rank_s_tokens():
    assert [expert.capacity(6, 2, 8, factor) for factor in (0.5, 1.0, 1.25, 2.0)] == [1, 2, 2, 3]
    assert expert.dropped([[5, 1, 1, 1], [0, 2, 2, 4]], 3) == (2 + 1) / 16
    assert expert.dropped([[4, 4], [4, 4]], 4) == expert.dropped([[0, 0]], 1) == 0


@given(st.integers(0, 40), st.sampled_from([1, 2, 4]), st.sampled_from([0.1, 0.5, 1.0, 1.25, 2.0]), st.integers(0, 9))
def test_what_is_dropped_is_what_the_code_drops(tokens, top_k, factor, seed):
    scores_TE = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    chosen_TK, room = parallel.choose(scores_TE, top_k), expert.capacity(tokens, top_k, EXPERTS, factor)
    assert room == parallel.capacity(tokens, top_k, EXPERTS, factor)
    kept_TK = parallel.drop(chosen_TK, room, EXPERTS)
    share = float((kept_TK < 0).double().mean()) if tokens else 0.0
    assert expert.dropped([expert.counts([chosen_TK.tolist()], EXPERTS)], room) == pytest.approx(share)


# Imbalance and time


@pytest.mark.parametrize(
    "plan", [DEEPSEEK, replace(DEEPSEEK, schedule="1f1b", tp=2, dp=64, recompute="full")], ids=["own", "other"]
)
def test_a_step_takes_longer_the_less_balanced_it_is(plan):
    assert step.estimate(V3, plan, H800, imbalance=1.0) == step.estimate(V3, plan, H800)
    seconds = [step.estimate(V3, plan, H800, imbalance=each).seconds for each in (1.0, 1.1, 2.0, 32.0)]
    assert seconds == sorted(set(seconds))


def test_the_fullest_rank_multiplies_and_receives_as_many_times_more():
    plan = replace(DEEPSEEK, precision="bf16")
    even, uneven = (layer.experts(V3, plan, imbalance) for imbalance in (1, 3))
    routed = [(a.flops, b.flops) for a, b in zip(even, uneven, strict=True) if a.part == "mlp"]
    assert [b / a for a, b in routed] == [3, 3, 1, 1]  # the experts' products, and the shared expert's
    moved = [sum(kernel.bytes for kernel in each if kernel.part == "route" and not kernel.flops) for each in (even, uneven)]
    assert moved[1] / moved[0] == 5 / 3  # sorted at home, on arrival, where three times as much comes, and put together
    start = kernels.OVERHEAD + 14e-6
    once, more = (exposed.expert(V3, plan, H800, imbalance)[0] - 2 * start for imbalance in (1, 3))
    assert more == pytest.approx(3 * once)


def test_imbalance_concerns_only_layers_with_experts_and_the_module_that_predicts_one_more_token():
    for stage, longer in ((stages.Stage(dense=2, embedding=1, head=1), False), (stages.Stage(mtp=1), True)):
        even, uneven = (exposed.of_stage(V3, DEEPSEEK, H800, stage, imbalance) for imbalance in (1.0, 2.0))
        assert (uneven.forward.expert > even.forward.expert) == (uneven.seconds > even.seconds) == longer


def test_under_tensor_parallelism_the_fullest_rank_gathers_more_rows():
    plan = Plan(dp=4, tp=2, ep=4, seq=4096)
    even, uneven = (exposed.tensor(MIXTRAL, plan, H800, True, 0.0, imbalance)[0] for imbalance in (1, 2))
    assert uneven / even == pytest.approx((1 + 2 * 2) / (1 + 2))  # attention's pair, and one for each of two experts
    assert pace.of_layer(MIXTRAL, plan, H800, moe=True, imbalance=2.0).forward.tensor == pytest.approx(uneven)


def test_a_layer_waits_for_its_fullest_rank():
    plan = Plan(dp=8, ep=8, seq=4096)
    paced = pace.expert_layer(MIXTRAL, plan, H800, 2.0)
    assert paced.balanced == pace.of_layer(MIXTRAL, plan, H800, moe=True)
    assert paced.seconds == paced.forward + paced.backward == pytest.approx(paced.balanced.seconds + paced.waiting)
    assert paced.waiting > 0 == pace.expert_layer(MIXTRAL, plan, H800).waiting
    twice = pace.expert_layer(MIXTRAL, plan, H800, 3.0).waiting
    assert twice == pytest.approx(2 * paced.waiting)


def test_the_warning_about_tensor_parallelism_counts_the_same_imbalance():
    plan = Plan(dp=2, tp=16, ep=2, seq=4096)
    time = step.estimate(replace(MIXTRAL, kv_heads=16), plan, H800, imbalance=2.0)
    inside = step.estimate(time.shape, plan, H800.with_nodes_of(16), imbalance=2.0)
    assert f"costs {time.seconds - inside.seconds:.3g} s per step" in time.warning


# Memory


@pytest.mark.parametrize("ep", [1, 8, 64, 128])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_states_apart_add_up_to_the_rank_s(ep, zero):
    plan = replace(DEEPSEEK, ep=ep, zero=zero)
    share = expert.rank_states(V3, plan)
    assert share.total == memory.model_states(V3, plan).total
    assert share.held in memory.rank_parameters(V3, plan)


def test_zero_1_shards_dense_states_over_all_and_an_expert_s_over_those_that_have_it():
    share = expert.rank_states(V3, DEEPSEEK)
    assert share.dense.optimizer == pytest.approx(8 * share.held.dense / 128, rel=1e-6)
    assert share.experts.optimizer == 8 * share.held.experts / (128 / 64)
    assert expert.rank_states(V3, replace(DEEPSEEK, ep=128)).experts.optimizer == share.experts.optimizer  # ep cancels out


# DeepSeek-V3's step


def test_the_phases_of_deepseek_s_step():
    (run,) = steps.deepseek()
    phases = {phase.name: phase for phase in tables.phases()}
    assert list(phases) == ["1F", "bubble", "1B", "1W", "1F1B", "opt"]
    total = sum(phase.predicted for phase in phases.values())
    assert total == pytest.approx(sum(phase.mean for phase in phases.values())) == pytest.approx(run.measured, rel=0.15)
    assert sum(phase.measured for phase in phases.values()) == pytest.approx(run.measured, rel=0.002)
    off = {name: abs(phase.error) for name, phase in phases.items()}
    assert max(off["1F"], off["1F1B"]) < 0.05
    assert max(off["bubble"], off["1W"], off["opt"]) < 0.2
    assert off["1B"] < 0.4


def test_the_phases_are_the_estimate_s_step_with_what_lone_passes_wait_for_and_gradients_in_the_open():
    first, last = (pace.of_ranks(V3, DEEPSEEK, H800)[rank] for rank in (0, -1))
    often, time = pipeline.dualpipe_actions(16, 120, 0), step.estimate(V3, DEEPSEEK, H800)
    lone = sum(n * each.forward.expert for n, each in zip(often.F, (first, last), strict=True))
    alone = (often.B[0] + often.I[0], often.B[1] + often.I[1])
    lone += sum(n * each.backward.expert for n, each in zip(alone, (first, last), strict=True))
    phases = tables.phases()
    opt = phases[-1].predicted - time.data - time.optimizer
    # In the estimate 120 forwards and backwards of each stage make 60 pairs; here some are lone, and hide nothing.
    assert sum(phase.predicted for phase in phases) == pytest.approx(time.seconds + lone + opt, abs=0.01)


class Charged:
    """Costs of the schedule's actions for our clock. both: each stage's passes."""

    def __init__(self, both: list[Both]):
        self.both = both

    def compute(self, rank: int, work: program.ActionWork) -> float:
        kind, stage, paired = work
        own, mirror = self.both[stage], self.both[len(self.both) - 1 - stage]
        if paired:
            pair = Both(own.forward, mirror.backward) if kind == "F" else Both(mirror.forward, own.backward)
            return pace.hide_experts(pair).seconds / 2
        whole = own.forward.seconds if kind == "F" else own.backward.seconds
        return {"F": whole, "B": whole, "I": whole - own.weight, "W": own.weight}[kind]

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        return Transfer(0.0)


def test_replayed_the_first_rank_does_what_the_phases_say_and_waits_as_long_as_the_closed_form_but_for_a_tenth():
    both = pace.of_ranks(V3, DEEPSEEK, H800)
    table = schedules.dualpipe_v(8, 60)
    assert any(isinstance(item, Pair) for item in table.ranks[0])
    timeline = replay(program.program(table), Charged(both))
    phases = {phase.name: phase.predicted for phase in tables.phases()}
    assert timeline.busy(0) == pytest.approx(sum(phases[name] for name in ("1F", "1B", "1W", "1F1B")))
    assert max(span.finished for span in timeline.spans) - timeline.busy(0) == pytest.approx(phases["bubble"], rel=0.12)


def test_deepseek_s_own_layout_is_the_fastest_that_fits_and_tensor_parallelism_loses():
    layouts = {(found.plan.tp, found.plan.ep): found for found in tables.layouts()}
    assert min((each for each in layouts.values() if each.fits), key=lambda each: each.time.seconds) is layouts[1, 64]
    assert layouts[1, 64].plan == DEEPSEEK
    assert [layouts[1, ep].fits for ep in (8, 16, 32)] == [False, False, True]
    assert max(layouts) == (8, 16)
    for tp, times in ((2, 1.2), (4, 2), (8, 4)):
        assert all(each.time.seconds > times * layouts[1, 64].time.seconds for (t, _), each in layouts.items() if t == tp)
    assert layouts[8, 16].time.limit == "tensor"


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expert.one_hop([[(0,)], [(1,)], [(2,)]], 4, 8), "routing of 3 ranks for experts=4"),
        (lambda: expert.one_hop([[(4,)]], 4, 8), "expert 4 in the routing: they are 0 to 3"),
        (lambda: expert.rows([[(0, 1), (2,)]], 4), "different numbers of choices"),
        (lambda: expert.one_hop([], 4, 8), "routing of 0 ranks"),
        (lambda: expert.one_hop([[]] * 3, 4, 8, etp=2), "routing of 3 ranks with etp=2: give a multiple of etp"),
        (lambda: expert.two_hops([[(0,)], [(1,)]], 4, 8, nodes=3), "nodes=3 does not divide the 2 ranks"),
        (lambda: expert.two_hops([[(0,)], [(1,)]], 4, 0, nodes=2), "hidden=0"),
        (lambda: expert.one_hop([[(0,)], [(1,)]], 4, 8).split(0), "node=0"),
        (lambda: expert.one_hop([[(0,)], [(1,)]], 4, 8).split(1, "row"), "what='row': did you mean 'rows'?"),
        (lambda: expert.one_hop_copies(8, 2, 3), "experts=8 on ranks=3"),
        (lambda: expert.two_hops_copies(8, 9, 4, 2), "top_k=9"),
        (lambda: expert.two_hops_copies(8, 4, 4, 2, 4, 1), "1 groups have 2 experts"),
        (lambda: expert.of_ranks((1, 2, 3), 2), "3 experts on ranks=2"),
        (lambda: expert.imbalance(()), "counts is empty"),
        (lambda: expert.capacity(4, 2, 8, 0.0), "factor=0.0"),
        (lambda: step.estimate(V3, DEEPSEEK, H800, imbalance=0.9), "imbalance=0.9: with ep=64 the fullest rank has 1 to 32"),
        (lambda: step.estimate(V3, DEEPSEEK, H800, imbalance=33), "1 to 32 times"),
        (lambda: step.estimate(V3, DEEPSEEK, H800, imbalance=float("nan")), "imbalance=nan"),
        (lambda: step.estimate(V3, replace(DEEPSEEK, ep=1), H800, imbalance=2), "with ep=1 the fullest rank has the mean load"),
        (lambda: step.estimate(LLAMA, Plan(), H800, imbalance=2), "has the mean load: give 1"),
        (lambda: pace.expert_layer(LLAMA, Plan(), H800), "has no layer with experts"),
        (lambda: pace.expert_layer("mixtral", Plan(), H800), "give a ModelShape"),
        (lambda: pipeline.dualpipe_actions(3, 8, 0), "give an even p"),
        (lambda: pipeline.dualpipe_actions(4, 6, 0), "an even m from 8 on"),
        (lambda: pipeline.dualpipe_actions(4, 8, 4), "a rank from 0 to 3"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
