"""measure.parity: the first tensor that departs is named, and a rounding is told from a bug."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from manyranks.measure.parity import BUG, GRADIENT, REASSOCIATION, Part, Trace, compare, compare_ranks, gathered, record, ulps
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


def test_a_sum_that_canceled_is_measured_by_its_neighbors():
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


# Ranks that have parts.


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


WHOLE = Trace(
    {
        "core": [drawn(4, 2, 8, 3)],  # rows, heads, tokens, features of a head
        "layer": [drawn(4, 8, 6)],  # rows, tokens, features
        "place": [drawn(8, 6)],  # tokens, features
        "router": [drawn(32, 5)],
        "layer" + GRADIENT: [drawn(4, 8, 6, seed=1)],
        "up.weight" + GRADIENT: [drawn(6, 12, seed=2)],
        "norm.weight" + GRADIENT: [drawn(8, seed=3)],
    }
)
ROWS_OF_RANK, TOKENS_OF_RANK = [2, 3], [0, 1, 6, 7]
PART = Part(ROWS_OF_RANK, TOKENS_OF_RANK, cut=(1, 2), averaged=4)


def parts_of_rank(between: str = "whole") -> dict[str, torch.Tensor]:
    """By hand, of the second of two tensor-parallel ranks; between: what it has of a layer's output."""
    core, layer, place, _, gradient, up, norm = (WHOLE[name] for name in WHOLE)
    of_layer = {"whole": slice(None), "tokens": [6, 7], "features": slice(None)}[between]
    tokens = of_layer if between == "tokens" else TOKENS_OF_RANK
    features = slice(3, 6) if between == "features" else slice(None)
    return {
        "core": core[ROWS_OF_RANK][:, 1:, TOKENS_OF_RANK],
        "layer": layer[ROWS_OF_RANK][:, tokens][..., features],
        "place": place[tokens],
        "layer" + GRADIENT: 4 * gradient[ROWS_OF_RANK][:, tokens][..., features],
        "up.weight" + GRADIENT: up[:, 6:],
        "norm.weight" + GRADIENT: norm,
    }


def as_trace(tensors: dict[str, torch.Tensor]) -> Trace:
    return Trace({name: [tensor] for name, tensor in tensors.items()})


@pytest.mark.parametrize("between", ["whole", "tokens", "features"])
def test_a_rank_s_part_is_found_by_its_shape(between):
    own = parts_of_rank(between)
    found = PART.of(WHOLE, as_trace(own))
    assert list(found) == [name for name in WHOLE if name in own]
    for name, tensor in own.items():
        assert torch.equal(found[name], tensor), name


def test_a_part_may_come_in_micro_batches():
    own = as_trace(parts_of_rank())
    own.calls["layer"] = [row[None] for row in own["layer"]]
    assert torch.equal(PART.of(WHOLE, own)["layer"], own["layer"])


def test_what_is_no_such_part_is_left_out():
    own = parts_of_rank() | {"router": drawn(7, 5), "up.weight" + GRADIENT: drawn(36), "of its own": drawn(2)}
    assert set(parts_of_rank()) - set(PART.of(WHOLE, as_trace(own))) == {"up.weight" + GRADIENT}
    assert not set(PART.of(WHOLE, as_trace(own))) & {"router", "of its own"}


def test_without_parts_all_is_compared_as_it_is(model):
    whole = traced(model)
    assert list(Part().of(whole, whole)) == list(whole)
    assert compare_ranks(whole, [whole, traced(model)], [Part(), Part()]) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_copy_that_differs_is_found_on_its_rank(model, rank):
    traces = [traced(model) for _ in range(3)]
    traces[rank].calls["layers.1.mlp_norm.weight" + GRADIENT][0][3] += 1e-6
    departure = compare_ranks(traced(model), traces, [Part()] * 3)
    assert (departure.name, departure.rank) == ("layers.1.mlp_norm.weight" + GRADIENT, rank)
    assert (departure.index, departure.verdict) == ((3,), BUG)
    assert f"{departure.name} on rank {rank}: " in repr(departure)


def test_of_several_ranks_the_first_tensor_counts_and_a_bug_more_than_a_rounding(model):
    whole = traced(model)
    traces = [traced(model) for _ in range(3)]
    traces[0].calls["layers.2.mlp"][0][0, 0, 0] += 1e-6
    traces[1].calls["layers.1.mlp"][0][0, 0, 0] += 1e-6
    traces[2].calls["layers.0.mlp"][0] *= 1 + 2**-52
    departure = compare_ranks(whole, traces, [Part()] * 3)
    assert (departure.name, departure.rank, departure.verdict) == ("layers.1.mlp", 1, BUG)
    departure = compare_ranks(whole, traces[2:], [Part()])
    assert (departure.name, departure.rank, departure.verdict) == ("layers.0.mlp", 0, REASSOCIATION)


def test_as_many_parts_as_traces_are_asked_for(model):
    with pytest.raises(ValueError, match="2 traces and 1 parts: give one of each for every rank"):
        compare_ranks(traced(model), [traced(model)] * 2, [Part()])
