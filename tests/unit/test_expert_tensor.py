"""Expert tensor parallelism: experts laid out on the ranks of a stage in another way than attention, in all of theory."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest

from manyranks.theory import ModelShape, Plan, clusters, layer, memory, nd, network, pace, states, step
from manyranks.theory.architecture import parameters_of
from manyranks.theory.expert import chances
from manyranks.theory.published import steps
from manyranks.theory.shapes import models
from tests.unit import exposed

H100, H800 = clusters["h100-dgx"], clusters["h800"]
V3, MIXTRAL = models["deepseek-v3"], models["mixtral-8x7b"]
TINY = ModelShape("tiny", 4, 64, 128, 8, 96, experts=8, top_k=2, expert_ffn=32, shared_experts=1, shared_ffn=16, dense_layers=1)
# dp, cp, tp, etp, ep: tp as etp, whole experts on tensor ranks, expert groups inside and across these, etp above tp.
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


# The default -------------------------------------------------------------------------------------------------------------

HOW = [
    {"zero": zero, "recompute": how, "sequence_parallel": zero < 2}
    for zero in range(4)
    for how in ("none", "selective", "full")
]
PLANS = [(MIXTRAL, Plan(dp=8, tp=4, pp=2, ep=4, seq=4096, batch=64, **how), H100) for how in HOW]
PLANS += [(row.shape, row.plan, row.cluster) for table in steps.PRETRAINING for row in steps.of(table)]


@pytest.mark.parametrize(("shape", "plan", "cluster"), PLANS, ids=lambda one: getattr(one, "name", ""))
def test_published_rows_leave_etp_out_and_are_the_same_with_etp_as_tp(shape, plan, cluster):
    assert (plan.etp, plan.expert_tp) == (None, plan.tp)
    assert plan.expert_ranks == plan.dp * plan.cp // plan.ep
    if shape.experts:
        said = replace(plan, etp=plan.tp)
        one, other = (step.estimate(shape, each, cluster, gpus=plan.gpus) for each in (plan, said))
        assert (one.parts, one.warning) == (other.parts, other.warning)
        for quantity in (memory.peak, memory.model_states, memory.rank_parameters):
            assert quantity(shape, plan) == quantity(shape, said)


# What a rank holds -------------------------------------------------------------------------------------------------------


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
        assert list(memory.states_of(held, plan)[:3]) == expected


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


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_real_ranks_have_whole_experts_as_etp_1_says_and_whole_shared_ones_which_theory_cuts(ep):
    shape = replace(TINY, kv_heads=8)
    plan = Plan(dp=4, tp=2, ep=ep, etp=1, seq=64)
    (held,), parts = memory.rank_parameters(shape, plan), nd.holds.parts(shape, plan)
    elements = {
        expert: sum(p.elements for part in parts for p in part.parameters if p.kind.expert == expert) for expert in (0, 1)
    }
    routed = elements[1] if ep > 1 else held.experts
    assert held.experts == routed
    shared = shape.moe_layers * parameters_of(shape.shared)
    assert sum(elements.values()) - held.experts - held.dense == shared / 2


def test_the_gate_of_shared_experts_is_whole_on_every_tensor_parallel_rank():
    """As gate_weight in Megatron-LM, megatron/core/transformer/moe/shared_experts.py."""
    plain, gated = (memory.rank_parameters(replace(TINY, shared_gate=gate), Plan(tp=4, seq=64))[0] for gate in (False, True))
    assert gated.dense - plain.dense == TINY.moe_layers * TINY.hidden


# What it sends -----------------------------------------------------------------------------------------------------------


def test_the_gradients_of_experts_travel_among_the_edp_ranks_that_have_them():
    plan = Plan(dp=4, tp=2, ep=4, etp=1, seq=64, zero=1)  # edp 2: tensor-parallel ranks have different experts
    held = memory.rank_parameters(TINY, plan)[0]
    assert states.groups(plan) == (states.Group(4, 4, 2), states.Group(2, 2, 4))
    routed = 3 * 8 * 3 * 64 * 32  # layers, experts, matrices
    assert held.experts == routed / 4
    rows = states.rows(states.Holding((held,), (held,)), TINY, plan).items
    assert [row.groups["shards"] for row in rows.values()] == [(4, 2), (2, 4)]
    cut = replace(plan, etp=None)  # half of every expert, on ranks of which no other has the same
    assert states.groups(cut)[1] == states.Group(1, 1, 8)


class Recorder:
    """In place of network.gather and of its all-to-all: bytes by the ranks of the group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.gathered, self.sent = [], []
        monkeypatch.setattr(network, "gather", lambda route, size, _: self.gathered.append((route.ranks, size)) or 0.0)
        monkeypatch.setattr(
            network, "near_and_far", lambda route, near, far, _: self.sent.append((route.ranks, near, far)) or 0.0
        )


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
    seen = Recorder(monkeypatch)
    plan = Plan(dp=2, tp=4, ep=ep, etp=etp, seq=64)
    exposed.seconds(TINY, plan, replace(H100, name=f"recorded, {etp}, {ep}"), "moe")
    attention, routed, shared = gathered
    assert seen.gathered == [routed] * 5 + [shared] * 5 + [attention] * 5  # twice each way, and once again
    assert seen.sent == [(sent[0], sent[1], 0.0)] * 4  # there and back, each way, inside a node


def test_expert_groups_of_neighbours_stay_in_the_node_where_those_of_cut_experts_leave_it():
    cut, whole = (Plan(dp=8, tp=8, ep=8, etp=etp, seq=4096) for etp in (None, 1))
    assert chances.way(MIXTRAL, cut, H100).between > 0 == chances.way(MIXTRAL, whole, H100).between
    for plan in (cut, whole):
        assert chances.way(MIXTRAL, plan, H100).seconds == pytest.approx(exposed.expert(MIXTRAL, plan, H100)[0])
    spread = replace(whole, ep=4, dp=2, tp=2)
    other = replace(spread, tp=1, dp=4)
    assert exposed.expert(MIXTRAL, spread, H100) < exposed.expert(MIXTRAL, other, H100)


# What it takes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("etp", [1, 2, 8])
def test_a_rank_s_experts_compute_as_much_for_every_etp(etp):
    cut, other = (
        [kernel for kernel in layer.experts(V3, Plan(dp=8, tp=8, seq=4096, etp=e), 1.0) if kernel.part == "mlp"]
        for e in (None, etp)
    )
    assert sum(kernel.flops for kernel in cut) == pytest.approx(sum(kernel.flops for kernel in other))
    assert [kernel.weights * 8 for kernel in cut[:1]] == pytest.approx([kernel.weights * etp for kernel in other[:1]])


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_deepseek_s_layer_is_faster_with_whole_experts(tp):
    usual = {"dp": 128 // tp, "pp": 16, "tp": tp, "seq": 4096, "batch": 15360, "precision": "fp8"}
    cut, whole = Plan(**usual, ep=16), Plan(**usual, ep=16 * tp, etp=1)  # as many weights on a rank
    one, other = (pace.of_layer(V3, plan, H800, moe=True) for plan in (cut, whole))
    for each, faster in zip((one.forward, one.backward), (other.forward, other.backward), strict=True):
        assert faster.compute < each.compute
        assert faster.tensor < each.tensor / 4
    assert step.estimate(V3, whole, H800, gpus=2048).seconds < step.estimate(V3, cut, H800, gpus=2048).seconds


def test_an_etp_beyond_the_node_says_what_it_costs():
    plan = Plan(dp=32, tp=1, etp=16, seq=4096)
    said = step.estimate(MIXTRAL, plan, H100, gpus=32).warning
    assert said.startswith("etp=16 lies on 2 nodes of 8, which costs ")
    assert not step.estimate(MIXTRAL, replace(plan, etp=8), H100, gpus=32).warning
    assert step.estimate(MIXTRAL, replace(plan, etp=None), H100, gpus=32).warning == ""


# Real ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": 2, "tp": 2, "etp": 2}, "etp=2: the small GPT's experts are whole on every tensor-parallel rank; say etp=1"),
        ({"dp": 2, "tp": 2, "etp": 1, "ep": 4}, "ep=4 does not divide dp·cp = 2"),
    ],
)
def test_a_layout_that_real_ranks_do_not_have_is_refused(given, said):
    shape = replace(TINY, kv_heads=8)
    for count in (nd.of_rank, nd.payload, nd.calls):
        with pytest.raises(ValueError, match=f"^{said}"):
            count(shape, Plan(seq=64, **given))


def test_real_ranks_are_counted_the_same_with_etp_1_and_without():
    for zero, ep in itertools.product(range(4), (1, 2, 4)):
        one, other = (Plan(dp=4, tp=2, ep=ep, etp=etp, seq=64, zero=zero) for etp in (None, 1))
        for count in (nd.of_rank, nd.payload):
            assert count(replace(TINY, kv_heads=8), one) == count(replace(TINY, kv_heads=8), other)


def test_a_twin_has_whole_experts_and_says_so():
    cut, whole = (Plan(dp=16, tp=8, ep=8, etp=etp, seq=4096) for etp in (None, 1))
    assert nd.twin(MIXTRAL, cut).plan == nd.twin(MIXTRAL, whole).plan
    assert nd.twin(MIXTRAL, cut).plan.etp == 1
    assert nd.twin(MIXTRAL, cut).changed["etp"].startswith("8 → 1: ")
    assert "etp" not in nd.twin(MIXTRAL, whole).changed
    with pytest.raises(ValueError, match=r"^ep=8 with dp=1 and cp=1: the twin's experts"):
        nd.twin(MIXTRAL, Plan(tp=8, ep=8, etp=1, seq=4096))
