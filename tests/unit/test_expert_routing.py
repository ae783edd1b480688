"""parallel.expert on one process: a layer is what its papers say; what balances it, what precision it has, what is refused."""

import copy
import math

import pytest
import torch
from torch import Tensor

from manyranks.parallel.expert import (
    Experts,
    Router,
    Routing,
    auxiliary_loss,
    capacity,
    choose,
    communication_loss,
    device_loss,
    move_biases,
    new_bias,
    take_counts,
)
from manyranks.parallel.expert.two_hops import visits
from tests.unit.attention_reference import draw
from tests.unit.expert_reference import chosen, layer

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


# Gates


def router(**options) -> Router:
    made = Router(H, E, options.pop("top_k", 3), **options).double()
    with torch.no_grad():
        made.weight.copy_(draw(E, H, seed=1))
    return made


def experts() -> Experts:
    made = Experts(E, H, F_).double()
    with torch.no_grad():
        for seed, p in enumerate(made.parameters()):
            p.copy_(draw(*p.shape, seed=seed))
    return made


BIAS = [0.3 * ((5 * i) % 7) / 7 for i in range(E)]
LAYERS = {
    "softmax": {"k": 3, "scale": 2.5},
    "sigmoid": {"k": 3, "scores": "sigmoid", "scale": 2.5},
    "one choice": {"k": 1, "normalize": False},
    "biases": {"k": 3, "scores": "sigmoid", "normalize": False, "bias": BIAS},
    "capacity": {"k": 3, "capacity": 0.5},
    "groups, biases, capacity": {"k": 4, "scores": "sigmoid", "bias": BIAS, "groups": 4, "per_token": 2, "capacity": 0.6},
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_losses_counts_and_gradients_are_those_of_the_papers(name):
    how, x_TH = LAYERS[name], draw(T, H).requires_grad_()
    renamed = {{"k": "top_k", "per_token": "groups_per_token"}.get(key, key): value for key, value in how.items()}
    bias = renamed.pop("bias", [0.0] * E)
    of, own = router(auxiliary=0.3, **renamed), experts()
    of.bias_E += torch.tensor(bias)
    inputs = [x_TH, of.weight, *own.parameters()]
    routing = of(x_TH)
    (wanted_TH,), loss, counts = layer([x_TH], of.weight, list(own.parameters()), **how)
    found_TH = own(x_TH, routing)
    assert of.counts_E.tolist() == counts, "the load is what the router asked for, before capacity"
    assert not routing.gates_TK[routing.experts_TK < 0].any()
    pairs = (found_TH, of.loss), (wanted_TH, 0.3 * loss)
    torch.testing.assert_close(*pairs)
    ours, theirs = (torch.autograd.grad(y_TH.square().sum() + balance, inputs) for y_TH, balance in pairs)
    torch.testing.assert_close(ours, theirs)


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


# Balance


def test_devices_that_do_not_divide_the_experts_are_refused():
    even = torch.full((3, 6), 1 / 6)
    with pytest.raises(ValueError, match=r"devices=4 don't divide 6 experts: choose a divisor of 6"):
        device_loss(even, torch.ones(6), 1, devices=4)
    with pytest.raises(ValueError, match=r"devices=4 don't divide 6 experts: choose a divisor of 6"):
        communication_loss(even, torch.ones(4), 1)


def test_without_tokens_there_is_no_auxiliary_loss():
    assert auxiliary_loss(torch.zeros(0, E), torch.zeros(E, dtype=torch.int64), top_k=2).item() == 0


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


# Experts


SPREAD = choose(scores_of(0), 3)


def test_products_under_autocast_are_in_bfloat16_and_float64_stays_as_it_is():
    for dtype, under in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        of, x_TH, routing = experts().to(dtype), draw(T, H).to(dtype), Routing(SPREAD, torch.ones(T, 3, dtype=dtype))
        exact = of(x_TH, routing)
        with torch.autocast("cpu", torch.bfloat16):
            y_TH = of(x_TH, routing)
        assert y_TH.dtype == under
        assert torch.equal(y_TH.to(dtype), exact) == (dtype == under)
        assert (y_TH - exact).abs().max() < 0.05 * exact.abs().max()


# Bad input


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scores": "tanh"}, "scores='tanh': choose one of softmax, sigmoid"),
        ({"top_k": 0}, "top_k=0: a token goes to 1 to 12 experts"),
        ({"top_k": 13}, "top_k=13: a token goes to 1 to 12 experts"),
        ({"top_k": 1}, "top_k=1 with normalize=True: the only gate is 1 .*; say normalize=False"),
        ({"groups": 5}, "groups=5 does not divide 12 experts: give a divisor"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token=5: 1 to groups=4"),
        ({"groups": 12, "groups_per_token": 2}, "top_k=3: 2 of 12 groups have 2 experts; give more groups_per_token"),
        ({"capacity": 0.0}, "capacity=0.0: a factor above 0, or None to drop nothing"),
        ({"capacity": math.nan}, "capacity=nan: a factor above 0"),
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
