"""measure.parity: the first tensor that departs is named, and a rounding is told from a bug."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from manyranks.measure.parity import BUG, GRADIENT, REASSOCIATION, Trace, compare, gathered, record, ulps
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss

ROWS = 4


@pytest.fixture
def model():
    return GPT(GPTConfig(layers=3, hidden=8, heads=2, vocab=11, seq=5, tied=False)).double()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 11, (ROWS, 5)), torch.randint(0, 11, (ROWS, 5))


def traced(model: nn.Module, m: int = 1) -> Trace:
    """One step in m micro-batches."""
    model = copy.deepcopy(model)
    with record(model) as trace:
        for x, y in zip(*(part.tensor_split(m) for part in tokens()), strict=True):
            (loss(model(x), y) * len(x) / ROWS).backward()
    return trace


def test_the_same_run_twice_does_not_depart(model):
    assert compare(traced(model), traced(model)) is None


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_micro_batches_differ_by_roundings_only(style):
    model = GPT(GPTConfig(layers=3, hidden=8, heads=2, vocab=11, seq=5, style=style)).double()
    departure = compare(traced(model), traced(model, m=3))
    assert departure is None or departure.verdict == REASSOCIATION


@pytest.mark.parametrize("wrong", ["layers.1.mlp.up.weight", "layers.2.attention.query.weight", "head.norm.weight"])
def test_the_first_module_that_gives_something_else_is_named_in_spite_of_roundings(model, wrong):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(wrong).view(-1)[0] += 1e-7
    departure = compare(traced(model), traced(other, m=2))
    assert (departure.name, departure.verdict) == (wrong.removesuffix(".weight"), BUG)
    assert departure.ulps > 1e5


def test_a_bug_in_backward_is_named_by_the_first_wrong_gradient(model):
    other = copy.deepcopy(model)
    other.layers[1].mlp.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
    departure = compare(traced(model), traced(other))
    # The hook doubles what goes into the module: the first gradient that shows it is that of its last product.
    assert departure.name == "layers.1.mlp.down" + GRADIENT
    assert departure.verdict == BUG


def test_a_gradient_counted_twice_is_named_by_its_parameter(model):
    other = copy.deepcopy(model)
    with record(other) as trace:
        inputs, targets = tokens()
        loss(other(inputs), targets).backward()
        other.layers[2].mlp.up.weight.grad *= 2
    departure = compare(traced(model), trace)
    assert departure.name == "layers.2.mlp.up.weight" + GRADIENT
    assert departure.verdict == BUG


def test_another_order_of_the_same_sum_is_reassociation():
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(64, 1000, dtype=torch.float64).to(dtype)
        trace = [Trace({"sum": [part]}) for part in (x.sum(1), sum(part.sum(1) for part in x.split(250, dim=1)))]
        departure = compare(*trace)
        assert departure is None or departure.verdict == REASSOCIATION
        assert compare(trace[0], Trace({"sum": [trace[1]["sum"] * 1.2]})).verdict == BUG


def test_a_unit_in_the_last_place_is_one():
    for dtype, epsilon in ((torch.float64, 2.0**-52), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7)):
        one, two = (torch.tensor([value], dtype=dtype) for value in (1.0, 2.0))
        assert ulps(one, one + epsilon).item() == 1
        assert ulps(two, two + 6 * epsilon).item() == 3
        assert ulps(one, -one).item() == 2 / epsilon


def test_a_sum_that_cancelled_is_measured_by_its_neighbours():
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert ulps(x, x + torch.tensor([0.0, 2.0**-52]))[1].item() == 2  # the root mean square lies between 0.5 and 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_a_bug_unless_the_reference_has_it_too(bad):
    x, y = (Trace({"x": [torch.tensor([1.0, value])]}) for value in (2.0, bad))
    assert compare(x, y).verdict == BUG
    assert compare(y, copy.deepcopy(y)) is None


def test_shapes_that_differ_and_other_integers_are_bugs():
    x = Trace({"x": [torch.ones(2, 3)]})
    assert "of shape [2, 2] instead of [2, 3]: bug" in repr(compare(x, Trace({"x": [torch.ones(2, 2)]})))
    ids = Trace({"x": [torch.tensor([5])]})
    assert compare(ids, Trace({"x": [torch.tensor([6])]})).verdict == BUG


def test_traces_travel_and_parts_of_ranks_are_put_together(model):
    whole = traced(model)
    first = {name: [t[:1] for t in tensors] for name, tensors in whole.calls.items()}
    rest = {name: [t[1:] for t in tensors] for name, tensors in whole.calls.items()}
    parts = pickle.loads(pickle.dumps([Trace(first), Trace(rest)]))
    assert compare(whole, gathered(parts)) is None


def test_the_report_can_be_read(model):
    other = Trace({"head": [torch.tensor([[1.0, 2.0]])]})
    departure = compare(Trace({"head": [torch.tensor([[1.0, 2.5]])]}), other)
    assert repr(departure) == "head: 2.1e+06 ulps at [0, 1], 2 instead of 2.5: bug"
    with pytest.raises(ValueError, match="no name in common: the reference has model, the other head"):
        compare(Trace({"model": [torch.ones(1)]}), other)


def test_after_the_block_nothing_is_noted_any_more(model):
    with record(model) as trace:
        pass
    model(tokens()[0])
    assert list(trace) == []
