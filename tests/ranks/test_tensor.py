"""parallel.tensor: at every degree the outputs, gradients and training of one process."""

import copy
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.measure import parity
from manyranks.parallel.tensor import Column, ColumnParallelLinear, Row, RowParallelLinear, parallelize
from manyranks.parallel.tensor.cuts import own_part
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, MLP, Attention, loss
from manyranks.training.tensor_styles import styles_of
from tests.conftest import matrix

SP = {"sequence_parallel": True}
WAYS = {"plain": {}, "sequence": SP, "kept": SP | {"regather": False}, "overlap": SP | {"overlap": True}}
DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 2, 3, 4], [3]), indirect=True, scope="module")
SIZES = {"layers": 2, "hidden": 24, "heads": 12, "ffn": 36, "seq": 12}
GROUPED = {1: 3, 2: 6, 3: 3, 4: 4}  # key/value heads by degree
FEW = {1: 2, 2: 1, 3: 1, 4: 2}  # so few that several ranks have each


def lively(model: nn.Module) -> nn.Module:
    """The same weights each time, in 64 bits: so large that a wrong one shows, and biases that are not zero."""
    for k, p in enumerate(model.double().parameters()):
        p.data = random(*p.shape, seed=k) / (p.shape[-1] ** 0.5 if p.ndim > 1 else 2)
    return model


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def off(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if ours is None or expected is None or ours.shape != expected.shape:
        return 0.0 if ours is expected else float("inf")
    return (ours - expected).abs().max().item() if ours.numel() else 0.0


def gaps(tp: nn.Module, alone: nn.Module) -> list[float]:
    """Each parameter's gradient against the same part of one process's."""
    whole = dict(alone.named_parameters())
    assert whole.keys() == dict(tp.module.named_parameters()).keys()
    return [
        off(
            p.grad,
            tp.cuts[name].own(whole[name].grad) if name in tp.cuts and whole[name].grad is not None else whole[name].grad,
        )
        for name, p in tp.module.named_parameters()
    ]


def block(make, styles, *shape: int, way: str = "plain") -> float:
    """The largest difference to one process: output, the input's gradient, each parameter's."""
    alone, x, grad, how = lively(make()), random(*shape).requires_grad_(), random(*shape, seed=1), WAYS[way]
    y = alone(x)
    y.backward(grad)
    tp = parallelize(lively(make()), None, styles, **how)
    own = own_part if how else torch.clone
    x_own = own(x.detach()).requires_grad_()
    y_own = tp(x_own)
    y_own.backward(own(grad))
    tp.finish()
    return max(off(y_own, own(y)), off(x_own.grad, own(x.grad)), *gaps(tp, alone))


def blocks() -> dict[str, float]:
    t, found = dist.get_world_size(), {}
    for way in WAYS:
        for style in ("gpt2", "llama"):
            config = GPTConfig(**SIZES, style=style)
            found[f"{style} mlp {way}"] = block(partial(MLP, config), styles_of(config, "layers.*.mlp"), 2, 12, 24, way=way)
        for kv in (None, GROUPED[t], FEW[t]):
            config = GPTConfig(**SIZES, style="llama" if kv else "gpt2", kv_heads=kv)
            table = styles_of(config, "layers.*.attention")
            found[f"attention {kv} {way}"] = block(partial(Attention, config), table, 2, 12, 24, way=way)
        chain = partial(nn.Sequential, nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7, bias=False), nn.Linear(7, 5))
        styles = {"0": Column(), "2": Row()}  # no module that says how it projects
        found[f"chain {way}"] = block(lambda chain=chain: copy.deepcopy(chain()), styles, 1, 24, 5, way=way)
    return found


@DEGREES
def test_mlp_and_attention_have_the_output_and_gradients_of_one_process(shared_worlds):
    for found in shared_worlds.run(blocks):
        assert {name: gap for name, gap in found.items() if not gap < 1e-12} == {}
        assert len(found) == 24


def linears() -> list[float]:
    """Single layers of odd sizes, made by a seed: the same rows and columns as nn.Linear of that seed has."""
    t, found = dist.get_world_size(), []
    for bias in (True, False):
        for shape in ((5,), (2, 5), (4, 1, 3)):
            for made, features in ((ColumnParallelLinear, (7, 5 * t)), (RowParallelLinear, (5 * t, 7))):
                torch.manual_seed(6)
                whole = nn.Linear(*features, bias).double()
                torch.manual_seed(6)
                ours = made(*features, bias).double()
                expected = torch.get_rng_state()
                torch.manual_seed(6)
                nn.Linear(*features, bias)
                assert torch.equal(expected, torch.get_rng_state())
                found += single(ours, whole, shape)
    return found


def single(ours: nn.Module, whole: nn.Module, shape: tuple[int, ...]) -> list[float]:
    start, stop = ours.cut.span
    columns = ours.cut.dim == 0
    x, grad = random(*shape, whole.in_features), random(*shape, whole.out_features, seed=1)
    x_own = x if columns else x[..., start:stop].clone()
    (y := whole(x.requires_grad_())).backward(grad)
    x_own = x_own.detach().requires_grad_()
    (y_own := ours(x_own)).backward(grad[..., start:stop] if columns else grad)
    pairs = [(y_own, y[..., start:stop] if columns else y), (x_own.grad, x.grad if columns else x.grad[..., start:stop])]
    pairs += [(ours.weight, ours.cut.own(whole.weight)), (ours.weight.grad, ours.cut.own(whole.weight.grad))]
    if whole.bias is not None:
        of_bias = ours.cut.own if columns else torch.clone
        pairs += [(ours.bias, of_bias(whole.bias)), (ours.bias.grad, of_bias(whole.bias.grad))]
    return [off(*pair) for pair in pairs]


@DEGREES
def test_one_layer_made_by_a_seed_is_the_cut_of_that_one_process_makes(shared_worlds):
    for found in shared_worlds.run(linears):
        assert len(found) == 60
        assert max(found) < 1e-12


# The whole GPT


ADAM, MOST = {"lr": 1e-2, "weight_decay": 0.1}, 0.6  # MOST: the norm at which gradients are clipped
FROZEN = ("embedding.", "layers.0.attention_norm", "layers.0.attention.output.bias", "layers.1.mlp.up.weight")
KINDS = {
    "gpt2": {"style": "gpt2", "vocab": 13},
    "llama": {"style": "llama", "vocab": 13, "tied": False},
    "a head for several ranks": {"style": "llama", "vocab": 17, "kv_heads": 1},
    "fewer tokens than ranks": {"style": "gpt2", "vocab": 2, "tied": False},
    "frozen": {"style": "gpt2", "vocab": 13, "tied": False},
}


def one_process_s(kind: str, **sizes) -> tuple[GPT, torch.Tensor]:
    """A model, and tokens for two micro-batches. Of a frozen one the first column-parallel layer's input needs no gradient."""
    config = GPTConfig(**SIZES | KINDS[kind] | sizes)
    model = lively(GPT(config))
    for name, p in model.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    return model, torch.randint(config.vocab, (2, 3, 13), generator=torch.Generator().manual_seed(0))


def cut_over_ranks(model: GPT, **how) -> nn.Module:
    return parallelize(copy.deepcopy(model), None, tensor_styles.styles(model.config), **how)


def whole_gpts(way: str) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        alone, tokens = one_process_s(kind)
        tp = cut_over_ranks(alone, **WAYS[way])
        expected = loss(alone(tokens[0, :, :-1]), tokens[0, :, 1:])
        expected.backward()
        got = tp.loss(tp(tokens[0, :, :-1]), tokens[0, :, 1:])
        got.backward()
        tp.finish()
        norms = tp.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
        found[kind] = max(off(got, expected), off(*norms) / norms[1].item(), *gaps(tp, alone))
    return found


@DEGREES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_the_whole_gpt_has_the_loss_gradients_and_norm_of_one_process(shared_worlds, way):
    for found in shared_worlds.run(whole_gpts, way):
        assert {kind: gap for kind, gap in found.items() if not gap < 1e-12} == {}


def at_other_places(way: str) -> list[float]:
    """A GPT that is told which places of a longer sequence its tokens have; positions by name, as a caller may say them."""
    found = []
    for kind in ("gpt2", "llama"):
        alone, tokens = one_process_s(kind)
        places_S, tokens_BS = torch.arange(12).flip(0), tokens[0, :, :-1]
        whole = alone(tokens_BS, positions_S=places_S)
        assert off(whole, alone(tokens_BS)) > 1e-3
        tp = cut_over_ranks(alone, **WAYS[way])
        cut = tp.cuts["head.projection.weight"]._replace(dim=2)
        found.append(off(tp(tokens_BS, positions_S=places_S), cut.own(whole)))
    return found


@pytest.mark.parametrize("way", ["plain", "sequence"])
def test_given_positions_are_those_of_the_whole_sequence(shared_world, way):
    assert max(max(found) for found in shared_world.run(at_other_places, way)) < 1e-12


@cache
def trained(kind: str, steps: int = 20) -> tuple[dict, list[float]]:
    """One process's weights, and each step's norm before it was clipped."""
    (model, tokens), norms = one_process_s(kind, layers=1), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(tokens.flatten(0, 1)[:, :-1]), tokens.flatten(0, 1)[:, 1:]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST).item())
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(kind: str, how: dict, expected: dict, norms: list[float]) -> float:
    """The same by two micro-batches a step; the largest difference of a weight."""
    alone, tokens = one_process_s(kind, layers=1)
    tp = cut_over_ranks(alone, **how)
    optimizer = torch.optim.AdamW(tp.parameters(), **ADAM)
    for norm in norms:
        optimizer.zero_grad()
        for batch, synchronises in zip(tokens, (tp.no_sync(), nullcontext()), strict=True):
            with synchronises:
                (tp.loss(tp(batch[:, :-1]), batch[:, 1:]) / 2).backward()
                tp.finish()
        assert abs(tp.clip_grad_norm_(MOST).item() - norm) < 1e-10
        optimizer.step()
    return max(off(p, tp.cuts[n].own(expected[n]) if n in tp.cuts else expected[n]) for n, p in tp.module.named_parameters())


@pytest.mark.parametrize(
    ("shared_worlds", "way", "kind"),
    matrix(
        [(2, "sequence", "gpt2"), (3, "plain", "a head for several ranks"), (4, "sequence", "a head for several ranks")],
        [(2, "sequence", "gpt2"), (3, "plain", "a head for several ranks")],
    ),
    indirect=["shared_worlds"],
    scope="module",
)
@pytest.mark.few(1)
def test_20_steps_of_two_micro_batches_and_a_clipped_norm_are_those_of_one_process(shared_worlds, way, kind):
    weights, norms = trained(kind)
    assert min(norms) < MOST < max(norms)
    assert max(shared_worlds.run(train, kind, WAYS[way], weights, norms)) < 1e-10


def first_departure() -> parity.Departure | None:
    """Of what each module gives and gets back, where that is whole on every rank: between the layers, and the norms'."""
    alone, tokens = one_process_s("gpt2")
    tp = cut_over_ranks(alone)
    traces = []
    for model, criterion in ((alone, loss), (tp.module, tp.loss)):
        with parity.record(model) as trace:
            criterion(model(tokens[0, :, :-1]), tokens[0, :, 1:]).backward()
        traces.append(trace)
    whole = {name: calls for name, calls in traces[1].calls.items() if calls[0].shape == traces[0].calls[name][0].shape}
    assert {"embedding", "layers.0", "layers.1.mlp.down", "layers.1.mlp_norm (gradient)"} <= whole.keys()
    return parity.compare(traces[0], parity.Trace(whole))


@DEGREES
def test_what_ranks_have_whole_differs_from_one_process_by_rounding_only(shared_worlds):
    for departure in shared_worlds.run(first_departure):
        assert departure is None or departure.verdict == parity.REASSOCIATION, departure
