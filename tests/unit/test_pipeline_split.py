"""parallel.pipeline.split and split_backward: balanced stages, and a backward in two halves that is the same to the bit."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from manyranks.parallel.pipeline.split import Stage, balanced, cost, split
from manyranks.parallel.pipeline.split_backward import SplitBackward
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss


def gpt(layers: int = 4, **options) -> GPT:
    return GPT(GPTConfig(layers, 8, 2, vocab=11, seq=5, **options)).double()


def sums(costs: list[float], sizes: tuple[int, ...]) -> list[float]:
    ends = [0, *itertools.accumulate(sizes)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_cheaper_largest_stage_nor_a_more_even_one(costs, data):
    n = len(costs)
    stages = data.draw(st.integers(1, n))

    def worth(sizes):
        own = sums(costs, sizes)
        return max(own), sum(c * c for c in own)

    cuts = ((0, *cut, n) for cut in itertools.combinations(range(1, n), stages - 1))
    best = min(worth(tuple(b - a for a, b in itertools.pairwise(cut))) for cut in cuts)
    sizes = balanced(costs, stages)
    assert sum(sizes) == n
    assert min(sizes) >= 1
    assert worth(tuple(sizes)) == best


SIX = r"the model has 6 parts \(the embedding, 4 layers and the head\).*give 1 to 6"


@pytest.mark.parametrize(
    ("stages", "costs", "said"),
    [
        (0, None, SIX),
        (7, None, SIX),
        (2.0, None, SIX),
        (True, None, SIX),
        (2, [1, 2], "2 costs for 6"),
        (2, 6 * [-1], "a cost of -1"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(stages, costs, said):
    with pytest.raises(ValueError, match=said):
        split(gpt(), stages, costs)


def test_the_embedding_is_looked_up_and_costs_nothing_but_the_head_does():
    model = gpt()
    assert cost(model.embedding) == 0
    assert cost(model.head) == 11 * 8
    assert cost(model.layers[0]) == sum(p.numel() for p in model.layers[0].parameters() if p.dim() == 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_the_stages_one_after_another_are_the_model_and_share_its_parameters(stages):
    model, x = gpt(), torch.randint(0, 11, (2, 5))
    parts = split(model, stages)
    y = x
    for stage in parts:
        y = stage(y)
    assert torch.equal(y, model(x))
    theirs = set(model.parameters())
    assert {p for stage in parts for p in stage.parameters()} == theirs


def test_every_stage_knows_which_of_its_parameters_others_have():
    model = gpt(tied=True)
    first, *between, last = split(model, 4)
    for stage in (first, last):
        assert [(one.parameter is model.head.projection.weight, one.stages) for one in stage.shared] == [(True, (0, 3))]
    assert not any(stage.shared for stage in between)
    assert not any(stage.shared for stage in split(gpt(tied=False), 4))


# A backward in two halves.


def both_ways(model: nn.Module, x: torch.Tensor, grad: torch.Tensor | None = None, autocast: bool = False) -> None:
    """Twice: gradients of a plain backward, and of I then W, which add up to the same bits."""
    own, found = list(model.parameters()), []
    for halves in (False, True):
        model.zero_grad()
        found.append([])
        for _ in range(2):
            leaf, split = x.detach().requires_grad_(x.is_floating_point()), SplitBackward(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), split if halves else nullcontext():
                y = model(leaf.view_as(leaf))
            y = loss(y, leaf) if grad is None else y
            if halves:
                before = [p.grad if p.grad is None else p.grad.clone() for p in own]
                found[-1].append(split.input_gradient(y, grad, leaf if leaf.requires_grad else None))
                assert all(map(same, before, (p.grad for p in own)))
                split.weight_gradients()
            else:
                y.backward(grad)
                found[-1].append(leaf.grad)
        found[-1] += [p.grad for p in own]
    assert all(map(same, *found))


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gpt_s_gradients_are_the_same_to_the_bit(style, tied):
    both_ways(gpt(style=style, tied=tied), torch.randint(0, 11, (3, 5)))


class Half(nn.Module):
    def forward(self, parameter):
        return parameter / 2


class Odd(nn.Module):
    """A linear layer used twice, one that is frozen, one with a frozen bias, a convolution, and one that nothing uses.

    Further ones whose weight or bias is computed, by a parametrization and in a functional call; one called by keyword.
    """

    def __init__(self):
        super().__init__()
        self.twice, self.frozen, self.bias, self.call = (nn.Linear(6, 6) for _ in range(4))
        self.computed = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("weight", "bias")})
        for name, linear in self.computed.items():
            parametrize.register_parametrization(linear, name, Half())
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.nobody = nn.Linear(6, 6)
        self.free = nn.Parameter(torch.ones(6, 6))
        self.frozen.requires_grad_(False)
        self.bias.bias.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.twice(input=x))
        for linear in self.computed.values():
            x = torch.tanh(linear(x))
        x = torch.func.functional_call(self.call, {"weight": self.call.weight / 2}, (x,))
        x = torch.func.functional_call(self.call, {"weight": self.call.weight.detach()}, (x,))
        x = self.frozen(self.twice(x)) + nn.functional.linear(x, self.free)
        return self.bias(self.convolution(x)[..., None, :]).squeeze(-2)


def doubling() -> nn.Module:
    """Modules whose hooks change each gradient."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
    for p in model.parameters():
        p.register_hook(lambda grad: 2 * grad)
    return model


@pytest.mark.parametrize(
    ("make", "rows"),
    [(Odd, (4, 2)), (lambda: nn.Sequential(Odd()), (4, 2)), (lambda: nn.Linear(6, 6), ()), (doubling, (4,))],
    ids=["odd", "odd, in another", "no batch", "hooks"],
)
def test_any_module_s_gradients_are_the_same_to_the_bit(make, rows):
    torch.manual_seed(0)
    both_ways(make().double(), *torch.randn(2, *rows, 6).double())


def test_under_autocast_they_are_too_and_no_gradients_at_all_work():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    both_ways(model, torch.randn(6, 8), torch.ones(6, 4).bfloat16(), autocast=True)
    with torch.no_grad(), SplitBackward(model):
        assert not model(torch.ones(2, 8)).requires_grad


def test_the_weights_product_is_not_made_before_w_and_what_is_set_aside_goes_with_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(3, 4)
    split, products = SplitBackward(model), []
    with split:
        y = model(x).sum()
    for half in (lambda: split.input_gradient(y, None, None), split.weight_gradients):
        with torch.profiler.profile() as profile:
            half()
        products.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert products == [1, 2]  # the first layer's input needs no gradient
    assert split._aside == []


def test_after_i_the_inputs_of_linear_layers_are_kept_and_nothing_else_of_the_forward_pass():
    kept = {}

    def note(name, tensor):
        kept[name] = StorageWeakRef(tensor.untyped_storage())

    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.Tanh())  # tanh keeps its output
    model[1].register_forward_pre_hook(lambda module, inputs: note("linear", inputs[0]))
    model[2].register_forward_hook(lambda module, inputs, y: note("tanh", y))
    x, split = torch.ones(2, 3, requires_grad=True), SplitBackward(model)
    with split:
        y = get_gradient_edge(model(x).sum())
    assert not any(storage.expired() for storage in kept.values())
    split.input_gradient(y, torch.ones(()), x)
    del y
    assert {name: storage.expired() for name, storage in kept.items()} == {"linear": False, "tanh": True}
    split.weight_gradients()
    assert kept["linear"].expired()


def test_hooks_on_a_parameter_see_its_gradient_once_and_in_w():
    model, seen = gpt(tied=True), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    x, split = torch.randint(0, 11, (2, 5)), SplitBackward(model)
    with split:
        y = loss(model(x), x)
    split.input_gradient(y, None, None)
    assert seen == []
    split.weight_gradients()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_the_module_is_as_before_after_a_forward_that_raised():
    model = Stage([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError), SplitBackward(model):
        model(torch.ones(3, 3))
    assert "forward" not in vars(model.parts[0])


def test_i_may_come_inside_the_block_of_its_forward():
    model = nn.Sequential(nn.Linear(3, 2))
    with SplitBackward(model) as split:
        split.input_gradient(model(torch.ones(1, 3)).sum(), None, None)
    assert "forward" not in vars(model[0])
    split.weight_gradients()
    assert model[0].weight.grad.tolist() == [[1.0] * 3] * 2
