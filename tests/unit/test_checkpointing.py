"""parallel.checkpointing, checkpoint_plan, recompute_policy in one process: gradients, bytes saved, FLOPs computed again."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as theirs

from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import PeakBytes, SavedBytes, saved_bytes
from manyranks.parallel.checkpoint_plan import run_plan
from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules, checkpoint_segments, selective_checkpoint
from manyranks.parallel.recompute_policy import products, weight_products
from manyranks.theory import checkpointing, memory
from manyranks.theory import flops as theory_flops
from manyranks.theory.optimal_checkpoints import optimal, strategies
from manyranks.theory.plan import Plan
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer, loss

SMALL = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "vocab": 32}
select = partial(selective_checkpoint, products)


def everything(operator):
    return True


def block(width: int = 8, dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    )


def blocks(count: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(block() for _ in range(count)))


def gradients(run, model, x, seed=1):
    """Of the model's parameters and of x, after a step whose dropout starts from this seed; and what comes next by chance."""
    torch.manual_seed(seed)
    model.zero_grad()
    x.grad = None
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), torch.rand(1)]


def same(ours, reference):
    assert len(ours) == len(reference)
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


# The same gradients, bit for bit


def model_gradients(model, tokens):
    torch.manual_seed(1)
    loss(model(tokens), tokens.roll(-1)).backward()
    return [p.grad for p in model.parameters()]


WAYS = {
    "every layer": (Layer, checkpoint),
    "attention's core": (CausalAttention, checkpoint),
    "checkpoints in each other": ((Layer, CausalAttention), checkpoint),
    "products kept": (Layer, select),
    "all but random operators kept": (Layer, partial(selective_checkpoint, everything)),
    "the whole model": (GPT, checkpoint),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_gpt_has_the_same_gradients_bit_for_bit(way, style, dropout):
    kinds, how = WAYS[way]
    model, tokens = GPT(GPTConfig(style=style, dropout=dropout, **SMALL)), torch.randint(32, (2, 8))
    checkpointed = copy.deepcopy(model)
    names = checkpoint_modules(checkpointed, lambda module: isinstance(module, kinds), how)
    assert names
    same(model_gradients(checkpointed, tokens), model_gradients(model, tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_segments_of_a_chain_have_the_same_gradients_as_without_and_as_torch_s(count):
    model, x = blocks(5), torch.randn(3, 8, requires_grad=True)
    reference = gradients(model, model, x)
    same(gradients(lambda x: checkpoint_segments(model, x, count), model, x), reference)
    by_torch = partial(theirs.checkpoint_sequential, model, count, use_reentrant=False)
    same(gradients(lambda x: by_torch(x), model, x), reference)


@pytest.mark.parametrize("name", ["keep everything", "every layer", "√N, once", "√N, nearest", "from the input", "optimal"])
def test_every_plan_has_the_same_gradients(name):
    model, x = blocks(6), torch.randn(3, 8, requires_grad=True)
    chain = [checkpointing.Layer(1, 2, 1, 5)] * 6
    plan = strategies(chain)[name]
    same(gradients(lambda x: run_plan(plan, model, x), model, x), gradients(model, model, x))


def test_plans_of_unequal_layers_have_the_same_gradients_at_any_budget():
    model, x = blocks(6), torch.randn(3, 8)  # which needs no gradient
    chain = [checkpointing.Layer(1 + k % 3, 2, 1 + k % 2, 4 + k) for k in range(6)]
    reference = gradients(model, model, x)[1:]
    for budget in range(16, 40, 4):
        same(gradients(lambda x, b=budget: run_plan(optimal(chain, b), model, x), model, x)[1:], reference)


def test_autocast_is_what_it_was_at_the_call():
    model, x = blocks(2), torch.randn(3, 8, requires_grad=True)

    def narrow(run, x):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x)

    assert narrow(model, x).dtype == torch.bfloat16
    reference = gradients(partial(narrow, model), model, x)
    for how in (checkpoint, select):
        same(gradients(partial(narrow, partial(how, model)), model, x), reference)


# What goes in and comes out


def test_arguments_and_results_may_be_nested_and_of_any_kind():
    w = torch.randn(4, requires_grad=True)

    def function(pair, scale, *, table, skip=None, name):
        a, (b, c) = pair
        assert (skip, name, c) == (None, "n", 3)
        y = (a * w * scale).sin() + table["b"].exp() * c
        return {"y": y, "index": b, "fixed": y.detach() * 2, "rest": [y.sum(), "text", None, (a * b).cos()]}

    a, b, scale, bias = torch.randn(4, requires_grad=True), torch.arange(4), 2.0, torch.randn(4, requires_grad=True)
    call = {"table": {"b": bias}, "name": "n"}
    results = [run((a, (b, 3)), scale, **call) for run in (function, partial(checkpoint, function))]
    grads = []
    for result in results:
        assert result["rest"][1:3] == ["text", None]
        assert not result["fixed"].requires_grad
        assert result["index"] is b
        grads.append(torch.autograd.grad(result["y"].sum() + 3 * result["rest"][3].sum(), [a, bias, w]))
    same(*grads)
    assert torch.equal(results[0]["y"], results[1]["y"])


def test_an_argument_may_come_twice_and_come_back():
    x = torch.randn(3, requires_grad=True)
    y, z = checkpoint(lambda a, b: (a * b, a), x, x)
    (grad,) = torch.autograd.grad(y.sum() + 5 * z.sum(), [x])
    torch.testing.assert_close(grad, 2 * x.detach() + 5)


def test_parameters_learn_where_no_argument_needs_a_gradient():
    model, x = blocks(2), torch.randn(3, 8)
    same(gradients(partial(checkpoint, model), model, x)[1:], gradients(model, model, x)[1:])


def test_only_what_is_asked_for_is_returned():
    model, x = blocks(1), torch.randn(3, 8, requires_grad=True)
    first, *_, last = model.parameters()
    last.requires_grad_(False)
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(x).sum(), [first])
    torch.manual_seed(1)
    same(torch.autograd.grad(checkpoint(model, x).sum(), [first]), expected)


def test_without_gradients_it_is_an_ordinary_call():
    calls, x = [], torch.randn(3, requires_grad=True)

    def function(x):
        calls.append(torch.is_grad_enabled())
        return x * 2

    with torch.no_grad():
        assert not checkpoint(function, x).requires_grad
    checkpoint(function, x.detach())
    assert checkpoint(lambda x: x.detach(), x).requires_grad is False
    assert calls == [False, True]
    checkpoint(function, x).sum().backward()
    assert calls == [False, True, True, True]


def test_backward_may_go_twice_over_a_retained_graph():
    model, x = blocks(1), torch.randn(3, 8, requires_grad=True)
    for how in (checkpoint, select):
        y = how(model, x).sum()
        first = torch.autograd.grad(y, [x], retain_graph=True)
        same(torch.autograd.grad(y, [x]), first)


# Hooks, and parameters that are used in several places


@pytest.mark.parametrize("run", ["twice", "nested", "plan"])
def test_a_parameter_of_two_checkpoints_gets_one_gradient_the_sum(run):
    model, x, arrived = block(dropout=0.3), torch.randn(3, 8, requires_grad=True), []
    plan = checkpointing.segments(2, 2)
    runs = {
        "twice": lambda x: checkpoint(model, checkpoint(model, x)),
        "nested": lambda x: checkpoint(lambda x: checkpoint(model, model(x)), x),
        "plan": lambda x: run_plan(plan, [model, model], x),
    }
    reference = gradients(lambda x: model(model(x)), model, x)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.clone()))
    same(gradients(runs[run], model, x), reference)
    assert len(arrived) == len(list(model.parameters()))


def test_a_hook_on_a_parameter_is_called_once_with_the_whole_gradient():
    model, x, seen = block(), torch.randn(3, 8, requires_grad=True), []

    def double(grad):
        seen.append(grad.clone())
        return 2 * grad

    reference = gradients(lambda x: model(model(x)), model, x)
    model[1].weight.register_hook(double)
    ours = gradients(lambda x: checkpoint(model, checkpoint(model, x)), model, x)
    assert len(seen) == 1
    assert torch.equal(seen[0], reference[3])
    assert torch.equal(ours[3], 2 * reference[3])


# What is refused


def test_a_tensor_computed_outside_that_is_no_argument_learns_or_is_refused():
    w, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def loss_of(how, again):
        outside = w.exp()
        y = how(lambda x: x * outside, x).sum()
        return y + outside.sum() if again else y

    for how in (lambda function, x: function(x), checkpoint):
        alone = torch.autograd.grad(loss_of(how, again=False), [w, x])
        assert torch.equal(alone[0], x.detach() * w.detach().exp())
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss_of(checkpoint, again=True), [w, x])


def test_a_function_that_differs_the_second_time_is_refused():
    calls = []

    def function(x):
        calls.append(0)
        return (x, x * 2) if len(calls) == 1 else x

    with pytest.raises(RuntimeError, match="gave 2 tensors that need a gradient, and then, in backward, 1"):
        sum(y.sum() for y in checkpoint(function, torch.ones(2, requires_grad=True))).backward()


def test_what_leaves_by_another_way_than_the_result_has_no_backward():
    x, seen = torch.randn(3, requires_grad=True), []

    def function(x):
        seen.append(x.exp())
        return x * 2

    checkpoint(function, x)
    with pytest.raises(RuntimeError, match="by another way than its result"):
        seen[0].sum().backward()


def test_an_argument_that_changes_in_place_before_backward_is_refused():
    for run in (partial(checkpoint, torch.exp), lambda x: run_plan(checkpointing.every_layer(1), [torch.exp], x)):
        x = torch.randn(3, requires_grad=True) * 1
        y = run(x)
        x += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_gradient_of_the_gradient_is_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True: a checkpoint has no gradient of its gradient"):
        torch.autograd.grad(checkpoint(torch.exp, x).sum(), [x], create_graph=True)


@pytest.mark.parametrize("count", [0, 4])
def test_segments_must_have_layers(count):
    with pytest.raises(ValueError, match="give a number from 1 to 3"):
        checkpoint_segments(blocks(3), torch.ones(1, 8), count)


def test_plans_that_do_not_fit_the_layers_are_refused():
    x = torch.ones(1, 8, requires_grad=True)
    with pytest.raises(ValueError, match="where layer 3 is to be computed first"):
        run_plan(checkpointing.every_layer(2), blocks(3), x)
    lost = [step for step in checkpointing.every_layer(3) if step.kind != "store"]
    with pytest.raises(RuntimeError, match="computes layer 3 without its input: store it"):
        run_plan(lost, blocks(3), x).sum().backward()
    y = run_plan(checkpointing.every_layer(2), blocks(2), x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a plan is good for one backward"):
        y.backward()


# Operators that are kept


def test_products_that_are_kept_are_not_computed_again():
    model, x = blocks(2), torch.randn(3, 8, requires_grad=True)
    counted = {}
    for name, run in {"plain": model, "kept": partial(select, model), "again": partial(checkpoint, model)}.items():
        with WorkCounter() as work:
            run(x).sum().backward()
        counted[name] = work.flops
    assert counted["plain"] == counted["kept"]
    assert counted["again"] == counted["plain"] * 4 // 3


def test_a_result_that_is_changed_in_place_is_not_kept():
    model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4, requires_grad=True)

    def function(x):
        y = model(x)
        y += 1
        return model(y.sin())

    same(gradients(partial(select, function), model, x), gradients(function, model, x))
    assert saved_bytes(partial(select, function), x, parameters=model.parameters()) == 2 * x.nbytes  # x and the second product


def test_random_operators_run_again_so_that_those_after_them_draw_the_same():
    x = torch.randn(64, requires_grad=True)

    def function(x):
        return torch.native_dropout(x.exp(), 0.5, True)[0] * torch.rand_like(x)

    keeps = partial(selective_checkpoint, lambda operator: operator.overloadpacket is torch.ops.aten.native_dropout)
    same(gradients(partial(keeps, function), nn.Identity(), x), gradients(function, nn.Identity(), x))


def test_other_operators_the_second_time_are_refused():
    calls, w = [], torch.randn(4, 4, requires_grad=True)

    def function(x):
        calls.append(0)
        return x @ w if len(calls) == 1 else torch.bmm(x[None], w[None])[0]

    y = select(function, torch.ones(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"ran aten.mm.default the first time and aten.bmm.default now"):
        y.sum().backward()


# Bytes saved, against the theory

SIZES = [(1, 16, 32, 4), (2, 32, 64, 4), (3, 8, 32, 2), (1, 48, 64, 8), (2, 24, 96, 6), (4, 16, 64, 16)]  # b, s, h, a


def paper_layer(s, h, a, dropout=0.1):
    """gpt.py's layer in bfloat16, and what it keeps beside the paper's: a byte for each pair of tokens, the causal mask."""
    config = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=dropout, style="gpt2")
    return Layer(config).to(torch.bfloat16), config.shape(), s * s if dropout else 0


def inputs(b, s, h):
    return torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)


def statistics(shape, b, s):
    return checkpointing.statistics(shape, Plan(seq=s, microbatch=b), itemsize=2)  # a CPU's, of norms in bfloat16


@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_layer_saves_34_sbh_and_5_as_s_b_and_the_norms_statistics(b, s, h, a):
    layer, shape, mask = paper_layer(s, h, a)
    plan = Plan(seq=s, microbatch=b, flash=False, recompute="none")
    measured = saved_bytes(layer, inputs(b, s, h)) - mask - statistics(shape, b, s)
    assert measured == memory.layer_activations(shape, plan) == 34 * s * b * h + 5 * a * s * s * b


@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_with_its_attention_core_computed_again_a_layer_saves_34_sbh(b, s, h, a):
    layer, shape, _ = paper_layer(s, h, a)
    assert checkpoint_modules(layer, lambda module: isinstance(module, CausalAttention)) == ["attention.core"]
    plan = Plan(seq=s, microbatch=b, flash=False, recompute="selective")
    measured = saved_bytes(layer, inputs(b, s, h)) - statistics(shape, b, s)
    assert measured == memory.layer_activations(shape, plan) == 34 * s * b * h


@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_a_checkpointed_layer_saves_its_input(b, s, h, a):
    layer, shape, _ = paper_layer(s, h, a)
    plan = Plan(seq=s, microbatch=b, flash=False, recompute="full")
    measured = saved_bytes(partial(checkpoint, layer), inputs(b, s, h), parameters=layer.parameters())
    assert measured == memory.layer_activations(shape, plan) == 2 * s * b * h


@pytest.mark.parametrize(("b", "s", "h", "a"), SIZES)
def test_with_flash_attention_a_layer_saves_no_scores(b, s, h, a):
    layer, shape, _ = paper_layer(s, h, a, dropout=0.0)
    plan = Plan(seq=s, microbatch=b, flash=True, recompute="none")
    measured = saved_bytes(layer, inputs(b, s, h)) - statistics(shape, b, s)
    assert measured == memory.layer_activations(shape, plan) == 32 * s * b * h + 4 * a * s * b  # no masks; log-sum-exps


def test_keeping_products_lies_between_and_attention_s_are_the_long_ones():
    b, s, h, a = 2, 64, 32, 4
    layer, *_ = paper_layer(s, h, a)
    ways = {
        name: partial(selective_checkpoint, keeps, layer) for name, keeps in (("all", products), ("weights", weight_products))
    }
    saved = {name: saved_bytes(way, inputs(b, s, h), parameters=layer.parameters()) for name, way in ways.items()}
    sbh = s * b * h
    # The input, then query, key, value, output, up (4 wide) and down; of attention the scores and their product with V.
    assert saved["weights"] == 2 * sbh + 2 * (3 + 1 + 4 + 1) * sbh
    assert saved["all"] == saved["weights"] + 2 * a * s * s * b + 2 * sbh


def test_saved_bytes_counts_a_storage_once_and_what_is_dropped_not_at_all():
    x, w = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda x: x[:50] * x[50:], x) == 400
    assert saved_bytes(lambda x: (x * w, x * w), x, parameters=[w]) == 400
    assert saved_bytes(lambda x: x.exp().detach(), x) == 0
    assert saved_bytes(nn.Linear(100, 3), x) == 400
    with SavedBytes() as saved:
        y = x.exp()
        assert saved.bytes == 400
        y.sum().backward()
        del y
    assert saved.bytes == 0


# FLOPs and peaks


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_layer_again_is_a_third_more_flops_and_torch_s_early_stop_saves_some(dropout):
    config = GPTConfig(layers=2, hidden=64, heads=4, seq=32, dropout=dropout, style="gpt2")
    torch.manual_seed(0)
    layers, x = nn.Sequential(Layer(config), Layer(config)), torch.randn(2, 32, 64, requires_grad=True)

    def flops(how):
        with WorkCounter() as work:
            y = x
            for layer in layers:
                y = how(layer, y)
            y.sum().backward()
        return work.flops

    by_torch = partial(theirs.checkpoint, use_reentrant=False)
    plain, ours, early = flops(lambda layer, x: layer(x)), flops(checkpoint), flops(by_torch)
    with theirs.set_checkpoint_early_stop(False):
        whole = flops(by_torch)
    shape, seq, batch = config.shape(), 32, 2
    assert ours == whole == plain + batch * seq * theory_flops.forward(shape, seq).layers
    assert 0.32 < ours / plain - 1 < 0.34
    assert early == whole if dropout else early < whole  # a dropout at the end makes it run to the end


def selected():
    keeps = theirs.CheckpointPolicy.MUST_SAVE, theirs.CheckpointPolicy.PREFER_RECOMPUTE
    return theirs.create_selective_checkpoint_contexts(lambda _, operator, *rest, **more: keeps[not products(operator)])


@pytest.mark.parametrize(
    ("how", "by_torch"), [(checkpoint, {}), (select, {"context_fn": selected})], ids=["every layer", "products kept"]
)
def test_a_step_s_peak_is_not_above_torch_s(how, by_torch):
    """What a layer has kept goes while its backward computes, not when the whole backward is over."""

    def peak(way):
        model, tokens = GPT(GPTConfig(**SMALL | {"hidden": 64, "seq": 32}, dropout=0.1)), torch.randint(32, (4, 32))
        checkpoint_modules(model, lambda module: isinstance(module, Layer), way)
        with PeakBytes() as memory:
            loss(model(tokens), tokens).backward()
        return memory.peak_bytes

    assert peak(how) <= peak(partial(theirs.checkpoint, use_reentrant=False, **by_torch))


def measured_peak(plan, layers, x) -> int:
    with PeakBytes() as peak:
        run_plan(plan, layers, x).sum().backward()
    return peak.peak_bytes


@pytest.mark.parametrize("name", ["keep everything", "every layer", "√N, once", "√N, nearest", "from the input", "optimal"])
def test_the_measured_peak_grows_with_the_depth_as_the_plan_s_does(name):
    """Beside it: operators' working memory, of two activations at most, and the input; the parameters are negligible."""
    x = torch.randn(2048, 4)
    for n in (4, 9, 16):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(n)))
        chain = [checkpointing.Layer(1, 2, 1, 2)] * n  # GELU's input and output
        plan = strategies(chain)[name]
        beside = measured_peak(plan, layers, x) / x.nbytes - checkpointing.run(chain, plan).peak
        assert -0.01 < beside < 2.1
