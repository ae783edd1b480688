"""parallel.expert on one process: the router's choices and gates, what is dropped, what balances, and experts side by side."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyranks.parallel.expert import (
    Experts,
    Router,
    Routing,
    auxiliary_loss,
    capacity,
    choose,
    communication_loss,
    device_loss,
    drop,
    grouped,
    move_biases,
    new_bias,
    take_counts,
)
from manyranks.parallel.expert.two_hops import visits
from tests.unit.attention_reference import draw
from tests.unit.expert_reference import chosen, kept, layer

T, H, E, F_ = 11, 6, 12, 5


def scores_of(seed: int, tokens: int = T, ties: bool = False) -> Tensor:
    """Numbers between 0 and 1; with ties, many of them equal."""
    scores_TE = draw(tokens, E, seed=seed).sigmoid()
    return (scores_TE * 4).round() / 4 if ties else scores_TE


# Who is chosen


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("k", "groups", "per_token"),
    [(1, 1, 1), (3, 1, 1), (12, 1, 1), (4, 4, 2), (3, 4, 2), (5, 6, 3), (2, 3, 3), (6, 6, 3), (1, 4, 2), (3, 4, 1)],
)
def test_choices_are_those_of_the_rule(k, groups, per_token, bias, ties):
    for seed in range(5):
        scores_TE = scores_of(seed, ties=ties)
        bias_E = draw(E, seed=seed + 100).mul(4).round().div(8) if bias else None  # eighths: sums of ties stay exact
        wanted = [chosen(row, k, bias and bias_E.tolist(), groups, per_token) for row in scores_TE.tolist()]
        assert choose(scores_TE, k, bias_E, groups, per_token).tolist() == wanted
        assert choose(scores_TE.float(), k, bias_E, groups, per_token).dtype == torch.int64


def test_a_token_s_experts_lie_in_so_many_groups_and_no_more():
    experts_TK = choose(scores_of(0, 500), 4, None, groups=6, groups_per_token=2)
    assert max(len(set(row)) for row in (experts_TK // 2).tolist()) == 2
    assert max(len(set(row)) for row in (choose(scores_of(0, 500), 4) // 2).tolist()) == 4


# Gates


def router(**options) -> Router:
    made = Router(H, E, options.pop("top_k", 3), **options).double()
    with torch.no_grad():
        made.weight.copy_(draw(E, H, seed=1))
    return made


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_gates_are_the_scores_of_the_chosen(scores, normalise):
    of, x_TH = router(scores=scores, normalise=normalise, scale=2.5), draw(T, H)
    logits_TE = x_TH @ of.weight.mT
    expected_TE = logits_TE.softmax(1) if scores == "softmax" else logits_TE.sigmoid()
    experts_TK, gates_TK = of(x_TH)
    expected_TK = expected_TE.gather(1, experts_TK)
    torch.testing.assert_close(gates_TK, 2.5 * (expected_TK / expected_TK.sum(1, keepdim=True) if normalise else expected_TK))
    assert gates_TK.sum(1).sub(2.5).abs().max() < 1e-12 or not normalise


def test_the_bias_chooses_and_is_in_no_gate():
    of, x_TH = router(scores="sigmoid"), draw(T, H)
    before = of(x_TH)
    of.bias_E.fill_(3)
    assert torch.equal(of(x_TH).gates_TK, before.gates_TK), "the same for all: nothing changes"
    of.bias_E[7] = 100
    experts_TK, gates_TK = of(x_TH)
    assert (experts_TK[:, 0] == 7).all()
    scores_TK = (x_TH @ of.weight.mT).sigmoid().gather(1, experts_TK)
    torch.testing.assert_close(gates_TK, scores_TK / scores_TK.sum(1, keepdim=True))


def test_gates_of_scores_that_are_all_0_are_no_nan():
    of = router(top_k=2)
    with torch.no_grad():
        of.weight.zero_()
        of.weight[0] = 1e4
    of.bias_E[0] = -10  # the one expert with a score is not chosen
    x_TH = torch.ones(T, H, dtype=torch.float64, requires_grad=True)
    gates_TK = of(x_TH).gates_TK
    gates_TK.sum().backward()
    assert not gates_TK.any()
    assert torch.isfinite(x_TH.grad).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_and_gates_of_bfloat16_are_made_in_float32(autocast):
    of = Router(H, E, 3)
    x_TH = torch.randn(T, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gates_TK = of(x_TH).gates_TK
    assert gates_TK.dtype == torch.float32
    torch.testing.assert_close(gates_TK, of(x_TH.float()).gates_TK)


def test_gradients_of_gates_are_those_of_finite_differences():
    for how in (
        {"scores": "sigmoid"},
        {"normalise": False, "scale": 3.0},
        {"groups": 4, "groups_per_token": 2, "capacity": 0.5},
    ):
        of = router(**how)
        assert torch.autograd.gradcheck(lambda x_TH, of=of: of(x_TH).gates_TK, draw(4, H).requires_grad_())


# Capacity


def test_an_expert_takes_the_mean_times_the_factor_rounded_up():
    assert [capacity(16, 2, 8, factor) for factor in (1.0, 1.25, 1.1, 0.01)] == [4, 5, 5, 1]
    assert drop(torch.zeros(0, 2, dtype=torch.int64), capacity(0, 2, 8, 1.0), 4).shape == (0, 2)


@pytest.mark.parametrize("most", [0, 1, 2, 4, T])
@pytest.mark.parametrize("k", [1, 3])
def test_first_choices_are_kept_before_second_ones_and_earlier_tokens_before_later(most, k):
    dropped = 0
    for seed in range(5):
        experts_TK = choose(scores_of(seed, ties=True), k)
        found_TK = drop(experts_TK, most, E)
        assert found_TK.tolist() == kept(experts_TK.tolist(), most)
        dropped += int((found_TK < 0).sum())
    assert dropped > 0 or most > 2


def test_a_dropped_copy_has_no_gate_and_the_others_keep_theirs():
    full, tight = router(), router(capacity=0.5)
    whole, left = full(draw(T, H)), tight(draw(T, H))
    most = math.ceil(0.5 * T * 3 / E)
    assert left.experts_TK.tolist() == kept(whole.experts_TK.tolist(), most)
    dropped_TK = left.experts_TK < 0
    assert dropped_TK.any()
    assert torch.equal(left.gates_TK, whole.gates_TK.masked_fill(dropped_TK, 0))
    assert torch.equal(full.counts_E, tight.counts_E), "the load is what the router asked for"


# Balance


def test_the_auxiliary_loss_is_1_where_all_are_as_likely_and_the_experts_number_where_one_gets_all():
    even_TE, one_TE = torch.full((T, E), 1 / E, dtype=torch.float64), F.one_hot(torch.full((T,), 5), E).double()
    assert auxiliary_loss(even_TE, torch.full((E,), T), top_k=12).item() == pytest.approx(1, rel=1e-14)
    assert auxiliary_loss(one_TE, one_TE.sum(0).long(), top_k=1).item() == pytest.approx(E, rel=1e-14)
    assert auxiliary_loss(even_TE[:0], torch.zeros(E, dtype=torch.int64), top_k=2).item() == 0, "no tokens, no loss"


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_and_its_gradient_are_those_of_the_formula(scores):
    of, x_TH = router(scores=scores, auxiliary=0.3), draw(T, H)
    of(x_TH)
    (found,) = torch.autograd.grad(of.loss, of.weight)
    weight_EH, experts = of.weight.detach().requires_grad_(), [draw(E, F_, H), draw(E, F_, H), draw(E, H, F_)]
    _, loss, counts = layer([x_TH], weight_EH, experts, 3, scores)
    torch.testing.assert_close(of.loss, 0.3 * loss)
    torch.testing.assert_close(found, torch.autograd.grad(0.3 * loss, weight_EH)[0])
    assert of.counts_E.tolist() == counts
    if scores == "softmax":  # by hand: dL/dlogit_ti = E/T·p_ti·(f_i − Σ_j f_j·p_tj)
        p_TE, f_E = (x_TH @ of.weight.mT).softmax(1).detach(), torch.tensor(counts) / (3.0 * T)
        slope_TE = E / T * p_TE * (f_E - (p_TE * f_E).sum(1, keepdim=True))
        torch.testing.assert_close(found, 0.3 * slope_TE.mT @ x_TH)


@pytest.mark.parametrize("devices", [1, 2, 4, 12])
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_of_devices_are_the_sums_of_deepseek_v2_and_the_mean_over_ranks_is_one_process(devices, ranks):
    """Section 2.2.3, index by index; tokens of two ranks are T each."""
    tokens, k, own, most = ranks * T, 3, E // devices, min(3, devices)
    logits_TE = draw(tokens, E).requires_grad_()
    p_TE = logits_TE.softmax(1)
    chosen_TK = choose(p_TE, k, groups=devices, groups_per_token=most)
    device_of = [[expert // own for expert in choices] for choices in chosen_TK.tolist()]
    f = [E / (k * tokens) * sum(i in choices for choices in chosen_TK.tolist()) for i in range(E)]
    balance = communication = 0
    for i in range(devices):
        experts = range(i * own, (i + 1) * own)
        p = sum(p_TE[t, j] for t in range(tokens) for j in experts) / tokens
        balance += sum(f[j] for j in experts) / own * p
        communication += devices / (most * tokens) * sum(i in there for there in device_of) * p
    counts_E = chosen_TK.flatten().bincount(minlength=E)
    visits_D = visits(chosen_TK // own, devices)[0].bincount(minlength=devices)
    parts = p_TE.chunk(ranks)
    found = (
        sum(device_loss(part_TE, counts_E, k, devices, ranks) for part_TE in parts) / ranks,
        sum(communication_loss(part_TE, visits_D, most, ranks) for part_TE in parts) / ranks,
    )
    for ours, wanted in zip(found, (balance, communication), strict=True):
        torch.testing.assert_close(ours, wanted)
        slopes = (torch.autograd.grad(each, logits_TE, retain_graph=True)[0] for each in (ours, wanted))
        torch.testing.assert_close(*slopes, atol=1e-14, rtol=1e-10)


def test_a_bias_rises_where_an_expert_got_less_than_the_mean():
    bias_E = torch.tensor([0.5, 0.5, -0.25, 0.0])
    counts_E = torch.tensor([2, 3, 10, 5])
    torch.testing.assert_close(new_bias(bias_E, counts_E, 0.1), torch.tensor([0.6, 0.6, -0.35, 0.0]))
    assert bias_E.tolist() == [0.5, 0.5, -0.25, 0.0]
    huge_E = torch.tensor([2**40, 2**40 + 1, 2**40 - 1, 2**40])
    assert new_bias(torch.zeros(4), huge_E, 1.0).tolist() == [0, -1, 1, 0], "counts are compared exactly"


def test_counts_are_of_training_only_and_are_taken_once():
    routers = [copy.deepcopy(router(auxiliary=0.3)), router(bias_speed=0.5)]
    for of in routers:
        of(draw(T, H))
        of(draw(2, H))
        of.eval()(draw(T, H))
    assert copy.deepcopy(routers[0]).loss is None, "a router may be copied after a forward"
    counts_LE = take_counts(routers)
    assert counts_LE.sum(1).tolist() == [3 * (T + 2)] * 2
    assert not take_counts(routers).any()
    move_biases(routers, counts_LE)
    assert not routers[0].bias_E.any()
    assert torch.equal(routers[1].bias_E, 0.5 * (counts_LE[1].double().mean() - counts_LE[1]).sign())
    assert "bias_E" in routers[0].state_dict()
    assert "counts_E" not in routers[0].state_dict()


@pytest.mark.parametrize("how", [{"auxiliary": 1.0}, {"bias_speed": 0.002}])
def test_both_ways_bring_a_router_with_favourites_to_balance(how):
    of, x_TH = router(scores="sigmoid", top_k=1, normalise=False, **how), draw(200, H) + 1
    with torch.no_grad():
        of.weight.mul_(0.3)
    steps, loads = torch.optim.Adam(of.parameters(), lr=0.02), []
    for _ in range(150):
        of(x_TH)
        counts_LE = take_counts([of])
        loads.append((counts_LE.max() / counts_LE.double().mean()).item())
        if of.loss is not None:
            of.loss.backward()
            steps.step()
            steps.zero_grad()
        move_biases([of], counts_LE)
    assert loads[0] > 4
    assert min(loads[-5:]) < 1.2


# Experts


def experts() -> Experts:
    made = Experts(E, H, F_).double()
    with torch.no_grad():
        for seed, p in enumerate(made.parameters()):
            p.copy_(draw(*p.shape, seed=seed))
    return made


SPREAD = choose(scores_of(0), 3)


@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 0, 6, 0], [0, 0, 0, 0]])
def test_gradients_of_grouped_products_are_those_of_finite_differences(counts):
    x_RI, weight_EOI = draw(sum(counts), 3).requires_grad_(), draw(4, 2, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(partial(grouped, counts=counts), (x_RI, weight_EOI))


@pytest.mark.parametrize("frozen", [("gate", "up", "down"), ("up",), ("down",)])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(frozen):
    of, routing = experts(), Routing(SPREAD, torch.ones(T, 3, dtype=torch.float64))
    x_TH = draw(T, H).requires_grad_()
    wanted = torch.autograd.grad(of(x_TH, routing).square().sum(), [x_TH, *of.parameters()])
    for name in frozen:
        getattr(of, name).requires_grad_(False)
    of(x_TH, routing).square().sum().backward()
    found = dict(zip(("x", "gate", "up", "down"), (x_TH.grad, *(p.grad for p in of.parameters())), strict=True))
    for (name, ours), theirs in zip(found.items(), wanted, strict=True):
        assert ours is None if name in frozen else torch.equal(ours, theirs), name


def test_products_under_autocast_are_in_bfloat16_and_gradients_in_float32():
    of = experts().float()
    routing = Routing(SPREAD, torch.ones(T, 3))
    x_TH = draw(T, H).float().requires_grad_()
    exact = of(x_TH, routing)
    wanted = torch.autograd.grad(exact.sum(), of.gate)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y_TH = of(x_TH, routing)
    y_TH.float().sum().backward()
    assert y_TH.dtype == torch.bfloat16
    assert {p.grad.dtype for p in (x_TH, *of.parameters())} == {torch.float32}
    assert (y_TH.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert (of.gate.grad - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert not torch.equal(y_TH.float(), exact)
    of, routing = experts(), Routing(SPREAD, torch.ones(T, 3, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        left = of(draw(T, H), routing)
    assert torch.equal(left, of(draw(T, H), routing)), "float64 stays as it is"


def test_grouped_equals_pytorch_s():
    counts, width = [2, 0, 3, 1], 4  # rows of 16 bytes
    x_RI, weight_EOI = draw(6, width).float().requires_grad_(), draw(4, width, width, seed=1).float().requires_grad_()
    ours = grouped(x_RI, weight_EOI, counts)
    theirs = F.grouped_mm(x_RI, weight_EOI.mT, offs=torch.tensor(counts).cumsum(0).int())
    torch.testing.assert_close(ours, theirs)
    weights_RO = draw(6, width, seed=2).float()
    pairs = zip(*(torch.autograd.grad((y * weights_RO).sum(), (x_RI, weight_EOI)) for y in (ours, theirs)), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scores": "tanh"}, "scores='tanh': choose one of softmax, sigmoid"),
        ({"top_k": 0}, "top_k=0: a token goes to 1 to 12 experts"),
        ({"top_k": 13}, "top_k=13: a token goes to 1 to 12 experts"),
        ({"top_k": 1}, "top_k=1 with normalise=True: the only gate is 1 .*; say normalise=False"),
        ({"groups": 5}, "groups=5 does not divide 12 experts: give a divisor"),
        ({"groups": 0}, "groups=0 does not divide 12 experts"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token=5: 1 to groups=4"),
        ({"groups": 4, "groups_per_token": 0}, "groups_per_token=0: 1 to groups=4"),
        ({"groups": 12, "groups_per_token": 2}, "top_k=3: 2 of 12 groups have 2 experts; give more groups_per_token"),
        ({"capacity": 0.0}, "capacity=0.0: a factor above 0, or None to drop nothing"),
        ({"capacity": math.nan}, "capacity=nan: a factor above 0"),
        ({"capacity": math.inf}, "capacity=inf: a factor above 0"),
        ({"auxiliary": -1.0}, "auxiliary=-1.0: give 0 or more"),
        ({"bias_speed": math.inf}, "bias_speed=inf: give 0 or more"),
    ],
)
def test_a_router_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        router(**wrong)


def test_choices_and_capacities_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="top_k=13: a token goes to 1 to 12 experts"):
        choose(scores_of(0), 13)
    with pytest.raises(ValueError, match="capacity=-1: a factor above 0"):
        capacity(4, 2, 8, -1)
