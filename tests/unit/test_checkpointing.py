"""parallel.checkpointing, checkpoint_plan, recompute_policy in one process: gradients, bytes saved, FLOPs computed again."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as theirs

from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import PeakBytes, SavedBytes, saved_bytes
from manyranks.parallel.checkpoint_plan import run_plan
from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules, checkpoint_segments, cut, selective_checkpoint
from manyranks.parallel.recompute_policy import products, weight_products
from manyranks.theory import checkpointing, memory
from manyranks.theory import flops as theory_flops
from manyranks.theory.optimal_checkpoints import optimal, strategies
from manyranks.theory.plan import Plan
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer, loss

select = partial(selective_checkpoint, products)
whole = partial(selective_checkpoint, lambda operator: True)
by_torch = partial(theirs.checkpoint, use_reentrant=False)


def block(width: int = 8) -> nn.Module:
    first, last = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return nn.Sequential(nn.LayerNorm(width), first, nn.GELU(), nn.Dropout(0.3), last)


def same(ours, reference):
    return len(ours) == len(reference) and all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


# The same gradients, bit for bit

UNEQUAL = [checkpointing.Layer(1 + k % 3, 2, 1 + k % 2, 4 + k) for k in range(6)]
PLANS = strategies([checkpointing.Layer(1, 2, 1, 5)] * 6) | {f"within {b}": optimal(UNEQUAL, b) for b in range(16, 40, 4)}
RUNS = {
    "checkpoint": checkpoint,
    "products kept": select,
    "all but random operators kept": whole,
    "in each other": lambda layers, x: checkpoint(lambda x: checkpoint(layers[3:], layers[:3](x)), x),
    **{f"{n} segments": lambda layers, x, n=n: checkpoint_segments(layers, x, n) for n in (1, 2, 4, 6)},
    **{name: lambda layers, x, plan=plan: run_plan(plan, layers, x) for name, plan in PLANS.items()},
}


def trained(run, layers, x, autocast):
    """Returns the result, x's and the parameters' gradients, which arrive once and whole, and what's drawn next."""
    layers, x, arrived, hooked = copy.deepcopy(layers), x.clone().detach().requires_grad_(x.requires_grad), [], []
    parameters = [p for p in layers.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: arrived.append((p, p.grad.clone())))
    parameters[-1].register_hook(lambda grad: hooked.append(grad.clone()) or 2 * grad)
    torch.manual_seed(1)
    with autocast():
        y = run(layers, x)
    y.square().sum().backward()
    assert len(arrived) == len(parameters)
    assert all(torch.equal(p.grad, grad) for p, grad in arrived)
    return [y.detach(), *hooked, *(leaf.grad for leaf in (x, *parameters) if leaf.requires_grad), torch.rand(1)]


@pytest.mark.parametrize("situation", ["x learns", "x is given", "given, layer 1 is frozen", "layer 6 is layer 1", "autocast"])
def test_a_chain_has_the_same_gradients_bit_for_bit(situation):
    torch.manual_seed(0)
    layers, x = nn.Sequential(*(block() for _ in range(6))), torch.randn(3, 8, requires_grad="given" not in situation)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if situation == "autocast" else contextlib.nullcontext
    if situation == "layer 6 is layer 1":
        layers[5] = layers[0]
    layers[0].requires_grad_("frozen" not in situation)
    expected = trained(lambda layers, x: layers(x), layers, x, autocast)
    assert (expected[0].dtype == torch.bfloat16) == (situation == "autocast")
    assert [name for name, run in RUNS.items() if not same(trained(run, layers, x, autocast), expected)] == []


# What goes in and comes out


@pytest.mark.parametrize("how", [checkpoint, select])
def test_arguments_and_results_are_nested_and_of_any_kind_and_backward_goes_twice_for_what_is_asked(how):
    w = torch.randn(4, requires_grad=True)

    def function(pair, scale, *, table, skip=None, name):
        a, (b, c) = pair
        assert (skip, name, c) == (None, "n", 3)
        y = (a * w * scale).sin() + table["b"].exp() * table["again"] * c
        return {"y": y, "index": b, "fixed": y.detach() * 2, "rest": [y.sum(), "text", None, (a * b).cos()], "a": a}

    a, b, bias = torch.randn(4, requires_grad=True), torch.arange(4), torch.randn(4, requires_grad=True)
    found = []
    for run in (function, partial(how, function)):
        result = run((a, (b, 3)), 2.0, table={"b": bias, "again": bias}, name="n")
        assert result["rest"][1:3] == ["text", None]
        assert not result["fixed"].requires_grad
        assert result["index"] is b
        total = result["y"].sum() + 3 * result["rest"][3].sum() + 5 * result["a"].sum()
        twice = [torch.autograd.grad(total, [a, bias, w], retain_graph=True), torch.autograd.grad(total, [w])]
        found.append([result["y"], result["fixed"], *(grad for grads in twice for grad in grads)])
    assert same(*reversed(found))


def test_without_gradients_it_is_an_ordinary_call():
    calls, x = [], torch.randn(3, requires_grad=True)

    def function(x):
        calls.append(torch.is_grad_enabled())
        return x * 2

    with torch.no_grad():
        assert not any(run(x).requires_grad for run in (partial(checkpoint, function), partial(run_plan, [], [function])))
    assert not checkpoint(lambda x: function(x).detach(), x).requires_grad
    assert calls == [False, False, True]
    checkpoint(function, x).sum().backward()
    assert calls[3:] == [True, True]


def test_a_segment_is_a_layer_longer_at_most_the_longer_ones_first():
    assert [len(segment) for segment in cut(range(11), 4)] == [3, 3, 3, 2]


# What is refused


def then(*functions):
    """Another function each time that it's called."""
    calls = iter(functions)
    return lambda x: next(calls)(x)


W = torch.ones(3, 3, requires_grad=True)


def tensor_from_outside(x):
    outside = x.exp()
    return checkpoint(lambda x: x * outside, x) + outside


def by_another_way(x):
    seen = []
    checkpoint(lambda x: seen.append(x.exp()) or x, x)
    return seen[0]


def changed(run, x):
    x = x * 1
    y = run(x)
    x += 1
    return y


EVERY = {n: checkpointing.every_layer(n) for n in (1, 2, 3)}
LOST = [step for step in EVERY[3] if step.kind != "store"]
IN_PLACE = "modified by an inplace operation"
REFUSED = [
    (lambda x: sum(checkpoint(then(lambda x: (x, x * 2), lambda x: x), x)), "gave 2 tensors .* and then, in backward, 1"),
    (lambda x: select(then(lambda x: x @ W, lambda x: (x[None] @ W[None])[0]), x), "ran aten.mm.* and aten.bmm.* now"),
    (tensor_from_outside, "a second time"),
    (by_another_way, "by another way than its result"),
    (partial(changed, partial(checkpoint, torch.exp)), IN_PLACE),
    (partial(changed, lambda x: run_plan(EVERY[1], [torch.exp], x)), IN_PLACE),
    (lambda x: torch.autograd.grad(checkpoint(torch.exp, x).sum(), [x], create_graph=True), "has no gradient of its gradient"),
    (lambda x: checkpoint_segments([torch.exp] * 3, x, 0), "give a number from 1 to 3"),
    (lambda x: checkpoint_segments([torch.exp] * 3, x, 4), "give a number from 1 to 3"),
    (lambda x: run_plan(EVERY[2], [torch.exp] * 3, x), "where layer 3 is to be computed first"),
    (lambda x: run_plan(LOST, [torch.exp] * 3, x), "computes layer 3 without its input: store it"),
    (lambda x: [run_plan(EVERY[2], [torch.exp] * 2, x).sum()] * 2, "a plan is good for one backward"),
]


@pytest.mark.parametrize(("run", "said"), REFUSED)
def test_what_would_be_wrong_is_refused(run, said):
    def step(x):
        ys = run(x)
        for y in ys if isinstance(ys, list) else [ys]:
            y.sum().backward(retain_graph=True)

    with pytest.raises((ValueError, RuntimeError), match=said):
        step(torch.randn(3, 3, requires_grad=True))


# Operators that are kept


def in_place(x):
    y = x @ W
    y += 1
    return y.sin() @ W


def random(x):
    return torch.native_dropout(x.exp(), 0.5, True)[0] * torch.rand_like(x)


dropouts = partial(selective_checkpoint, lambda operator: operator.overloadpacket is torch.ops.aten.native_dropout)


@pytest.mark.parametrize(("function", "how"), [(in_place, select), (random, dropouts)])
def test_what_changes_in_place_is_not_kept_and_what_is_random_runs_again(function, how):
    x, found = torch.randn(2, 3, requires_grad=True), []
    for run in (function, partial(how, function)):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run(x).square().sum(), [x]))
    assert same(*found)
    if function is in_place:
        assert saved_bytes(partial(how, function), x, parameters=[W]) == 2 * x.nbytes  # x and the second product


# Bytes saved, against the theory

SIZES = [(1, 16, 32, 4), (2, 32, 64, 4), (3, 8, 32, 2), (1, 48, 64, 8), (2, 24, 96, 6), (4, 16, 64, 16)]  # b, s, h, a
KEPT = {  # what a layer keeps beside sbh and as²b: its flash and recompute, the multiples of sbh, of as²b and of asb
    "everything": (False, "none", 34, 5, 0),
    "attention's core again": (False, "selective", 34, 0, 0),
    "its input": (False, "full", 2, 0, 0),
    "with flash attention": (True, "none", 32, 0, 4),  # no masks; log-sum-exps
}


def paper_layer(s, h, a, dropout=0.1):
    """gpt.py's layer in bfloat16, and the theory's."""
    config = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=dropout, style="gpt2")
    return Layer(config).to(torch.bfloat16), config.shape()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_layer_saves_what_the_paper_says_and_its_norms_statistics(b, s, h, a, kept):
    flash, recompute, of_sbh, of_scores, of_sums = KEPT[kept]
    layer, shape = paper_layer(s, h, a, dropout=0.0 if flash else 0.1)
    beside = checkpointing.statistics(shape, Plan(seq=s, microbatch=b), itemsize=2)  # a CPU's, of norms in bfloat16
    beside += s * s * (kept == "everything")  # the causal mask, a byte for each pair of tokens
    run = partial(checkpoint, layer) if recompute == "full" else layer
    if recompute == "selective":
        assert checkpoint_modules(layer, lambda module: isinstance(module, CausalAttention)) == ["attention.core"]
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    measured = saved_bytes(run, x, parameters=layer.parameters()) - beside * (recompute != "full")
    expected = of_sbh * s * b * h + of_scores * a * s * s * b + of_sums * a * s * b
    assert measured == memory.layer_activations(shape, Plan(seq=s, microbatch=b, flash=flash, recompute=recompute)) == expected


def test_keeping_products_lies_between_and_attention_s_are_the_long_ones():
    b, s, h, a = 2, 64, 32, 4
    layer, _ = paper_layer(s, h, a)
    x, sbh = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True), s * b * h
    runs = (partial(selective_checkpoint, keeps, layer) for keeps in (products, weight_products))
    all_, weights = (saved_bytes(run, x, parameters=layer.parameters()) for run in runs)
    # The input, then query, key, value, output, up (4 wide) and down; of attention the scores and their product with V.
    assert weights == 2 * sbh + 2 * (3 + 1 + 4 + 1) * sbh
    assert all_ == weights + 2 * a * s * s * b + 2 * sbh


def test_saved_bytes_counts_a_storage_once_and_what_is_dropped_not_at_all():
    x, w = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda x: x[:50] * x[50:], x) == saved_bytes(nn.Linear(100, 3), x) == 400
    assert saved_bytes(lambda x: (x * w, x * w), x, parameters=[w]) == 400
    assert saved_bytes(lambda x: x.exp().detach(), x) == 0
    with SavedBytes() as saved:
        x.exp().sum().backward()
    assert saved.bytes == 0


# FLOPs and peaks


def test_every_layer_again_is_a_third_more_flops_and_none_where_products_are_kept():
    config = GPTConfig(layers=2, hidden=64, heads=4, seq=32, dropout=0.1, style="gpt2")
    layers, x, flops = [Layer(config) for _ in range(2)], torch.randn(2, 32, 64, requires_grad=True), []
    for how in (lambda layer, x: layer(x), select, checkpoint):
        with WorkCounter() as work:
            how(layers[1], how(layers[0], x)).sum().backward()
        flops.append(work.flops)
    assert flops[0] == flops[1] == flops[2] - 2 * 32 * theory_flops.forward(config.shape(), 32).layers
    assert 0.32 < flops[2] / flops[0] - 1 < 0.34


def selected():
    keeps = theirs.CheckpointPolicy.MUST_SAVE, theirs.CheckpointPolicy.PREFER_RECOMPUTE
    return theirs.create_selective_checkpoint_contexts(lambda _, operator, *rest, **more: keeps[not products(operator)])


@pytest.mark.parametrize(("how", "torch_s"), [(checkpoint, {}), (select, {"context_fn": selected})])
def test_a_step_s_peak_is_not_above_torch_s(how, torch_s):
    """A layer lets go while its backward computes, not when the whole backward is over."""
    peaks, tokens = [], torch.randint(32, (4, 32))
    for way in (how, partial(by_torch, **torch_s)):
        model = GPT(GPTConfig(layers=4, hidden=64, heads=4, seq=32, vocab=32, dropout=0.1))
        checkpoint_modules(model, lambda module: isinstance(module, Layer), way)
        with PeakBytes() as memory:
            loss(model(tokens), tokens).backward()
        peaks.append(memory.peak_bytes)
    assert peaks[0] <= peaks[1]


@pytest.mark.parametrize("n", [4, 16])
def test_the_measured_peak_grows_with_the_depth_as_the_plan_s_does(n):
    """Beside it: operators' working memory, of two activations at most, and the input; the parameters are negligible."""
    x, chain = torch.randn(2048, 4), [checkpointing.Layer(1, 2, 1, 2)] * n  # GELU's input and output
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in chain))
    for name, plan in strategies(chain).items():
        with PeakBytes() as peak:
            run_plan(plan, layers, x).sum().backward()
        beside = peak.peak_bytes / x.nbytes - checkpointing.run(chain, plan).peak
        assert -0.01 < beside < 2.1, name
