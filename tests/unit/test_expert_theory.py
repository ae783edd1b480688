"""theory.expert, and experts in all of theory: bytes from the routing, chances, load, DeepSeek-V3's step, etp."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel import expert as parallel
from manyranks.theory import (
    ModelShape,
    Plan,
    clusters,
    expert,
    kernels,
    layer,
    memory,
    models,
    nd,
    network,
    pace,
    pipeline,
    stages,
    states,
    step,
)
from manyranks.theory.plan import most_imbalance
from manyranks.theory.published import expert as tables
from manyranks.theory.published import steps
from tests.unit import exposed

H800, H100 = clusters["h800"], clusters["h100-dgx"]
V3, MIXTRAL, LLAMA = models["deepseek-v3"], models["mixtral-8x7b"], models["llama3-8b"]
(PUBLISHED,) = steps.deepseek()
DEEPSEEK = PUBLISHED.plan
EXPERTS = 8


@st.composite
def routings(draw):
    """Routings of 1, 2, 4 or 8 ranks with 8 experts, some copies dropped, some ranks without tokens; and nodes."""
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


@given(routings())
def test_copies_arrive_once_by_any_way_and_two_hops_cross_the_network_once_for_each_node(drawn):
    routing, nodes = drawn
    n, kept = len(routing), [one for tokens in routing for token in tokens for one in token if one >= 0]
    node, own, load = n // nodes, EXPERTS // nodes, expert.counts(routing, EXPERTS)
    assert load == tuple(kept.count(one) for one in range(EXPERTS))
    for matrix in (expert.rows(routing, EXPERTS), expert.sends.inside_rows(routing, EXPERTS, nodes)):
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
    assert all(sum(sends.payload) == sends.split(node).sent for sends in (one, two, cut))


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


# Load


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 4), (8, 3, 4), (8, 4, 2), (6, 1, 3), (8, 8, 4)])
def test_no_routing_is_less_balanced_than_the_worst(experts, top_k, ranks):
    own = experts // ranks
    all_to_the_first = [[tuple(range(top_k))] * 3] * ranks
    load = expert.of_ranks(expert.counts(all_to_the_first, experts), ranks)
    assert expert.imbalance(load) == pytest.approx(most_imbalance(experts, top_k, ranks))
    assert max(load) == 3 * ranks * min(top_k, own)


def test_imbalance_and_capacity_by_hand():
    assert [expert.imbalance(counts) for counts in ([1, 2, 6], [4, 4], [0, 0])] == [2, 1, 1]
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


# Memory


@pytest.mark.parametrize("ep", [1, 8, 64, 128])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_states_apart_add_up_to_the_rank_s(ep, zero):
    plan = replace(DEEPSEEK, ep=ep, zero=zero)
    share = expert.rank_states(V3, plan)
    assert share.total == memory.model_states(V3, plan).total
    assert share.held in memory.rank_parameters(V3, plan)


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


def test_deepseek_s_own_layout_is_the_fastest_that_fits_and_tensor_parallelism_loses():
    layouts = {(found.plan.tp, found.plan.ep): found for found in tables.layouts()}
    assert min((each for each in layouts.values() if each.fits), key=lambda each: each.time.seconds) is layouts[1, 64]
    assert layouts[1, 64].plan == DEEPSEEK
    assert [layouts[1, ep].fits for ep in (8, 16, 32)] == [False, False, True]
    assert max(layouts) == (8, 16)
    for tp, times in ((2, 1.2), (4, 2), (8, 4)):
        assert all(each.time.seconds > times * layouts[1, 64].time.seconds for (t, _), each in layouts.items() if t == tp)
    assert layouts[8, 16].time.limit == "tensor"


# Experts laid out on the ranks of a stage in another way than attention: etp ranks cut each


TINY = ModelShape("tiny", 4, 64, 128, 8, 96, experts=8, top_k=2, expert_ffn=32, shared_experts=1, shared_ffn=16, dense_layers=1)
# dp, cp, tp, etp, ep: etp as tp, whole experts on tensor ranks, expert groups inside and across these, etp above tp.
LAYOUTS = [
    (4, 1, 2, None, 4),
    (4, 1, 2, 2, 2),
    (4, 1, 2, 1, 4),
    (4, 1, 2, 1, 8),
    (2, 2, 4, 1, 2),
    (2, 2, 4, 2, 4),
    (1, 1, 8, 1, 8),
    (4, 2, 1, 4, 2),
    (8, 1, 2, 8, 1),
]


def plan_of(dp: int, cp: int, tp: int, etp: int | None, ep: int, **more) -> Plan:
    return Plan(**{"dp": dp, "cp": cp, "tp": tp, "etp": etp, "ep": ep, "seq": 64} | more)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_together_hold_every_expert_once_for_each_of_the_edp_that_have_it_and_zero_shards_it_over_these(layout):
    routed = TINY.moe_layers * TINY.experts * TINY.expert_parameters
    for pp in (1, 2):
        plan = plan_of(*layout, pp=pp)
        held = memory.rank_parameters(TINY, plan)
        assert sum(rank.experts for rank in held) * plan.tp * plan.cp * plan.dp == routed * plan.expert_ranks
        whole = memory.rank_parameters(TINY, replace(plan, etp=None, ep=1))
        assert [rank.dense for rank in held] == [rank.dense for rank in whole]
    held = memory.rank_parameters(TINY, plan_of(*layout))[0]._replace(dense=0.0)
    for zero in range(4):
        plan = plan_of(*layout, zero=zero)
        share, copies = Fraction(routed, plan.gpus), plan.expert_ranks  # each element's states once
        parts = zip((2, 2, 12), (zero >= 3, zero >= 2, zero >= 1), strict=True)
        expected = [size * share * (1 if sharded else copies) for size, sharded in parts]
        assert list(states.states_of(held, plan)[:3]) == expected


def test_hsdp_shards_experts_inside_its_groups():
    plan = Plan(dp=8, dp_shard=2, tp=4, ep=4, etp=1, zero=1)
    dense, experts = states.groups(plan)
    assert dense == states.Group(ranks=8, shards=2, stride=4)
    assert experts == states.Group(ranks=8, shards=2, stride=4)  # 32 ranks, four of them with all experts
    assert states.groups(replace(plan, ep=8))[1] == states.Group(ranks=4, shards=1, stride=8)


def test_activations_are_the_same_for_every_etp():
    for recompute in ("none", "selective", "full"):
        plans = [plan_of(2, 1, 4, etp, 1, recompute=recompute) for etp in (None, 1, 2, 8)]
        assert len({memory.activations(TINY, plan) for plan in plans}) == 1


def test_with_one_data_parallel_rank_experts_are_still_gathered_where_tensor_ranks_share_them():
    cut, whole = (Plan(tp=4, seq=64, zero=3, etp=etp) for etp in (None, 1))
    assert memory.peak(TINY, cut).buffers < memory.peak(TINY, whole).buffers


def test_the_gate_of_shared_experts_is_whole_on_every_tensor_parallel_rank():
    """As gate_weight in Megatron-LM, megatron/core/transformer/moe/shared_experts.py."""
    plain, gated = (memory.rank_parameters(replace(TINY, shared_gate=gate), Plan(tp=4, seq=64))[0] for gate in (False, True))
    assert gated.dense - plain.dense == TINY.moe_layers * TINY.hidden


@pytest.mark.parametrize(
    ("etp", "ep", "gathered", "sent"),
    [
        # 64 tokens of 64 numbers in 16 bits: 8,192 bytes. With tp = 4 a rank's own are 16: 2,048 bytes, to two experts each.
        (None, 2, [(4, 8192), (4, 8192), (4, 8192)], (2, 2 * 2048 / 2)),
        (2, 2, [(4, 8192), (2, 4096), (4, 8192)], (2, 2 * 2048 / 2)),
        (1, 2, [(4, 8192), (1, 2048), (4, 8192)], (2, 2 * 2048 / 2)),
        (1, 8, [(4, 8192), (1, 2048), (4, 8192)], (8, 2 * 2048 * 7 / 8)),
    ],
)
def test_messages_of_a_small_layer_by_hand(etp, ep, gathered, sent, monkeypatch):
    """Attention's rows over tp; routed experts' over etp; shared experts' over tp."""
    gathers, sends = [], []
    monkeypatch.setattr(network, "gather", lambda route, size, _: gathers.append((route.ranks, size)) or 0.0)
    monkeypatch.setattr(network, "near_and_far", lambda route, *sizes: sends.append((route.ranks, *sizes[:2])) or 0.0)
    plan = Plan(dp=2, tp=4, ep=ep, etp=etp, seq=64)
    exposed.seconds(TINY, plan, replace(H100, name=f"recorded, {etp}, {ep}"), "moe")
    attention, routed, shared = gathered
    assert gathers == [routed] * 5 + [shared] * 5 + [attention] * 5  # twice each way, and once again
    assert sends == [(sent[0], sent[1], 0.0)] * 4  # there and back, each way, inside a node


def test_expert_groups_of_neighbors_stay_in_the_node_where_those_of_cut_experts_leave_it():
    cut, whole = (Plan(dp=8, tp=8, ep=8, etp=etp, seq=4096) for etp in (None, 1))
    assert expert.way(MIXTRAL, cut, H100).between > 0 == expert.way(MIXTRAL, whole, H100).between
    for plan in (cut, whole):
        assert expert.way(MIXTRAL, plan, H100).seconds == pytest.approx(exposed.expert(MIXTRAL, plan, H100)[0])


@pytest.mark.parametrize("etp", [1, 2, 8])
def test_a_rank_s_experts_compute_as_much_for_every_etp(etp):
    cut, other = (
        [kernel for kernel in layer.experts(V3, Plan(dp=8, tp=8, seq=4096, etp=e), 1.0) if kernel.part == "mlp"]
        for e in (None, etp)
    )
    assert sum(kernel.flops for kernel in cut) == pytest.approx(sum(kernel.flops for kernel in other))
    assert [kernel.weights * 8 for kernel in cut[:1]] == pytest.approx([kernel.weights * etp for kernel in other[:1]])


def test_an_etp_beyond_the_node_says_what_it_costs():
    plan = Plan(dp=32, tp=1, etp=16, seq=4096)
    said = step.estimate(MIXTRAL, plan, H100, gpus=32).warning
    assert said.startswith("etp=16 lies on 2 nodes of 8, which costs ")
    assert not step.estimate(MIXTRAL, replace(plan, etp=8), H100, gpus=32).warning


def test_a_twin_has_whole_experts_and_says_so():
    cut, whole = (Plan(dp=16, tp=8, ep=8, etp=etp, seq=4096) for etp in (None, 1))
    assert nd.twin(MIXTRAL, cut).plan == nd.twin(MIXTRAL, whole).plan
    assert nd.twin(MIXTRAL, cut).plan.etp == 1
    assert nd.twin(MIXTRAL, cut).changed["etp"].startswith("8 → 1: ")
    assert "etp" not in nd.twin(MIXTRAL, whole).changed


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expert.one_hop([[(0,)], [(1,)], [(2,)]], 4, 8), "routing of 3 ranks for experts=4"),
        (lambda: expert.one_hop([[(4,)]], 4, 8), "expert 4 in the routing: they are 0 to 3"),
        (lambda: expert.rows([[(0, 1), (2,)]], 4), "different numbers of choices"),
        (lambda: expert.one_hop([[]] * 3, 4, 8, etp=2), "routing of 3 ranks with etp=2: give a multiple of etp"),
        (lambda: expert.two_hops([[(0,)], [(1,)]], 4, 8, nodes=3), "nodes=3 does not divide the 2 ranks"),
        (lambda: expert.one_hop([[(0,)], [(1,)]], 4, 8).split(0), "node=0"),
        (lambda: expert.one_hop([[(0,)], [(1,)]], 4, 8).split(1, "row"), "what='row': did you mean 'rows'?"),
        (lambda: expert.one_hop_copies(8, 2, 3), "experts=8 on ranks=3"),
        (lambda: expert.two_hops_copies(8, 9, 4, 2), "top_k=9"),
        (lambda: expert.two_hops_copies(8, 4, 4, 2, 4, 1), "1 groups have 2 experts"),
        (lambda: expert.of_ranks((1, 2, 3), 2), "3 experts on ranks=2"),
        (lambda: expert.imbalance(()), "counts is empty"),
        (lambda: expert.capacity(4, 2, 8, 0.0), "factor=0.0"),
        (lambda: step.estimate(V3, DEEPSEEK, H800, imbalance=0.9), "imbalance=0.9: with ep=64 the fullest rank has 1 to 32"),
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
