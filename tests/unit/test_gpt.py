"""training.gpt: against a slow reference in float64, against itself, and against the theory's counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyranks.measure.flops import WorkCounter
from manyranks.theory import flops
from manyranks.theory.architecture import LatentAttention, parameters_of
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Attention, CausalAttention, Layer, loss, rotated
from tests.unit.gpt_reference import reference

SMALL = GPTConfig(layers=2, hidden=24, ffn=20, heads=6, vocab=50, seq=12, style="llama")
CONFIGS = {
    "llama": SMALL,
    "llama, grouped": replace(SMALL, kv_heads=2),
    "llama, one key/value head, untied": replace(SMALL, kv_heads=1, tied=False),
    "gpt2": replace(SMALL, style="gpt2"),
    "gpt2, grouped, untied": replace(SMALL, style="gpt2", kv_heads=3, tied=False),
    "experts": replace(SMALL, experts=6, expert_ffn=9),
    "experts in groups, shared ones, a dense layer": replace(
        SMALL,
        **{"experts": 6, "top_k": 3, "expert_ffn": 7, "shared_experts": 2, "dense_layers": 1},
        **{"scores": "sigmoid", "expert_groups": 3, "groups_per_token": 2},
    ),
    "latent": replace(SMALL, latent=LatentAttention(7, 5, 3, 4, 6)),
    "latent, whole queries, experts": replace(SMALL, latent=LatentAttention(0, 9, 4, 2, 3), experts=6, expert_ffn=9),
    "default": GPTConfig(),
    "default, experts": GPTConfig(experts=8, shared_experts=1, dense_layers=1),
    "default gpt2": GPTConfig(style="gpt2"),
}
LATENT = LatentAttention(0, 8, 4, 2, 4)
SMALL_CONFIGS = [pytest.param(config, id=name) for name, config in CONFIGS.items() if config.vocab == 50]


def made(config: GPTConfig, spread: float = 8.0) -> GPT:
    """In float64, with weights larger than at the start, and none of them 0 or 1, so that every part counts."""
    model = GPT(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(spread if parameter.ndim > 1 else 1)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def tokens(config: GPTConfig, batch: int = 3, seq: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(config.vocab, (batch, seq or config.seq), generator=generator)


# What it computes


@pytest.mark.parametrize("config", SMALL_CONFIGS)
def test_logits_equal_a_slow_reference(config):
    model, ids = made(config), tokens(config, batch=2, seq=7)
    wanted = torch.stack([reference(model, row) for row in ids.tolist()])
    torch.testing.assert_close(model(ids), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", SMALL_CONFIGS)
def test_gradients_equal_finite_differences(config):
    model, ids = made(config, spread=3.0), tokens(config)
    parameters = list(model.parameters())

    def value() -> torch.Tensor:
        return loss(model(ids[:, :-1]), ids[:, 1:])

    gradients = torch.autograd.grad(value(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction, step = torch.randn_like(parameter), 2e-6
        with torch.no_grad():
            parameter.add_(step * direction)
            above = value()
            parameter.sub_(2 * step * direction)
            below = value()
            parameter.add_(step * direction)
        torch.testing.assert_close((above - below) / (2 * step), (gradient * direction).sum(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("config", SMALL_CONFIGS)
def test_a_token_changes_its_own_and_later_logits_and_no_earlier_one(config):
    model, ids = made(config), tokens(config)
    near = 1e-12 if config.experts else 0  # an expert's product of another number of rows may round otherwise
    for place in (1, 5, config.seq - 1):
        other = ids.clone()
        other[:, place] = (ids[:, place] + 1) % config.vocab
        before, after = model(ids), model(other)
        torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=near)
        assert (before[:, place:] != after[:, place:]).any(-1).all()


def test_the_loss_is_the_mean_negative_log_of_the_targets_probabilities():
    logits, targets = torch.randn(2, 3, 7, dtype=torch.float64), torch.tensor([[0, 6, 2], [5, 5, 1]])
    chosen = [math.log(torch.softmax(logits[b, s], -1)[targets[b, s]]) for b in range(2) for s in range(3)]
    assert loss(logits, targets).item() == pytest.approx(-sum(chosen) / 6, rel=1e-12)
    assert loss(logits, targets, "sum").item() == pytest.approx(-sum(chosen), rel=1e-12)
    assert loss(logits.bfloat16(), targets).dtype == torch.float32


# Positions


def test_a_rotary_product_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product(s: int, t: int) -> torch.Tensor:
        return (rotated(q, torch.tensor([s])) * rotated(k, torch.tensor([t]))).sum()

    torch.testing.assert_close(product(5, 3), product(100_005, 100_003), rtol=1e-9, atol=1e-9)
    assert (product(5, 3) - product(5, 4)).abs() > 1e-3
    torch.testing.assert_close(rotated(q, torch.tensor([77])).norm(), q.norm())
    assert torch.equal(rotated(q, torch.tensor([0])), q)


def test_a_llama_sees_only_differences_of_positions_and_a_gpt2_the_rows_it_is_given():
    llama, gpt2 = made(SMALL), made(replace(SMALL, style="gpt2"))
    ids = tokens(SMALL, seq=6)
    torch.testing.assert_close(llama(ids), llama(ids, torch.arange(6) + 4096), rtol=1e-8, atol=1e-8)
    spread = torch.tensor([0, 1, 2, 9, 10, 11])  # a zigzag's two pieces
    assert not torch.allclose(llama(ids), llama(ids, spread), atol=1e-3)
    moved = gpt2(ids, spread)
    with torch.no_grad():
        rows = gpt2.embedding.positions.weight
        rows[:6] = rows[spread].clone()
    torch.testing.assert_close(gpt2(ids), moved)


def test_positions_are_exact_in_bfloat16():
    x = torch.randn(1, 1, 2, 32)
    positions = torch.tensor([131_071, 99_999])
    torch.testing.assert_close(rotated(x.bfloat16(), positions).float(), rotated(x, positions), rtol=0, atol=0.03)


# Heads


def test_grouped_heads_equal_repeated_ones():
    grouped, full = Attention(replace(SMALL, kv_heads=2)).double(), Attention(SMALL).double()
    state = grouped.state_dict()
    for name in ("key.weight", "value.weight"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x))


def test_attention_works_on_the_heads_that_its_linear_layers_hold():
    whole = Attention(SMALL).double()
    x, parts = torch.randn(2, 5, 24, dtype=torch.float64), []
    for rows in (slice(0, 8), slice(8, 24)):
        part = Attention(SMALL).double()
        for name in ("query", "key", "value"):
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight[rows])
        part.output.weight = nn.Parameter(whole.output.weight[:, rows])
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), whole(x))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attention_with_dropout_takes_the_way_that_gives_the_same_without(groups):
    q = torch.randn(2, 6, 9, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 9, 4, dtype=torch.float64)
    core = CausalAttention(0.0)
    torch.testing.assert_close(core._with_dropout(q, k, v), core(q, k, v))


# Experts


def test_a_router_is_what_the_configuration_says():
    limits = {"expert_groups": 4, "groups_per_token": 2}
    rest = {"top_k": 3, "scores": "sigmoid", "capacity": 1.5, "auxiliary": 0.1, "bias_speed": 0.01}
    router = GPT(GPTConfig(experts=8, **rest, **limits)).layers[0].mlp.router
    assert {name: getattr(router, name) for name in rest} == rest
    assert (router.groups, router.groups_per_token, router.weight.shape) == (4, 2, (8, 128))


# Dropout


def test_dropout_works_in_training_only_and_depends_on_the_seed_only():
    model, ids = GPT(replace(SMALL, dropout=0.3)), tokens(SMALL)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
    assert torch.equal(model(ids), GPT(SMALL)(ids))


def test_dropout_works_after_the_embedding_too_and_keeps_the_mean():
    torch.manual_seed(0)
    model, ids = GPT(replace(SMALL, dropout=0.25)), tokens(SMALL, batch=50)
    dropped, whole = model.embedding(ids), model.eval().embedding(ids)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(dropped[dropped != 0], whole[dropped != 0] / 0.75)


def test_a_layer_keeps_the_bytes_for_backward_that_the_paper_counts():
    """sbh(34 + 5as/h): Korthikanti et al., arXiv 2205.05198, equation 2, plus two numbers a token and norm, and the mask."""
    b, s, h, a = 2, 64, 128, 4
    layer = Layer(GPTConfig(hidden=h, heads=a, seq=s, dropout=0.1, style="gpt2")).bfloat16()
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    found = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    statistics = 2 * 2 * b * s * min(t.element_size() for t in kept.values() if t.shape[-1] == 1)
    assert out.requires_grad
    assert found - statistics - s * s == s * b * h * (34 + 5 * a * s // h)


# Beginning


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_first_loss_is_that_of_a_guess(config):
    ids = tokens(config, batch=4)
    first = loss(GPT(config)(ids[:, :-1]), ids[:, 1:]).item()
    assert first == pytest.approx(math.log(config.vocab), abs=0.1)


def test_first_weights_depend_on_seed_and_name_only():
    torch.manual_seed(0)
    first = GPT(SMALL).state_dict()
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        again = GPT(SMALL).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    deeper = GPT(replace(SMALL, layers=3, tied=False)).state_dict()
    for name, value in first.items():
        assert torch.equal(value.double(), again[name]), name
        if not name.endswith(("attention.output.weight", "mlp.down.weight", "head.projection.weight")):
            assert torch.equal(value, deeper[name]), name
    other = GPT(SMALL, seed=1).state_dict()
    assert all(not torch.equal(value, other[name]) for name, value in first.items() if value.ndim > 1)


def test_each_matrix_has_the_deviation_it_should():
    config = GPTConfig(style="gpt2", tied=False)
    for name, parameter in GPT(config).named_parameters():
        if parameter.ndim > 1:
            last = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(8) if last else 0.02, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_so_have_those_of_experts_and_a_router_has_scores_of_about_1():
    model = GPT(GPTConfig(layers=2, experts=8, shared_experts=1))
    for name, parameter in model.layers[1].mlp.named_parameters():
        expected = 128**-0.5 if name.startswith("router") else 0.02 / (2 if "down" in name else 1)
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    assert not model.layers[0].mlp.router.bias_E.any()


# Counts


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_has_exactly_the_parameters_that_the_theory_counts(config):
    model, shape = GPT(config), config.shape()
    assert count(model) == shape.parameters
    assert count(model.layers[0]) == shape.layer_parameters(0)
    inner = shape.norms[-2:] if shape.latent else []
    assert count(model.layers[0].attention) == parameters_of(shape.attention + inner)
    assert count(model.layers[0].mlp) == shape.layer_parameters(0) - parameters_of(shape.attention + shape.norms)
    if not shape.is_moe(0):
        assert count(model.layers[0].mlp) == parameters_of(shape.mlp)
    if shape.experts:
        moe = model.layers[-1].mlp
        assert count(moe) == shape.layer_parameters(config.layers - 1) - parameters_of(shape.attention + shape.norms)
        assert count(moe.router) == parameters_of(shape.router)
        assert count(moe.experts) == shape.experts * shape.expert_parameters
    assert count(model.embedding) == shape.embedding_parameters
    assert count(model.head) == parameters_of(shape.final_norm) + shape.vocab * shape.hidden


def test_experts_are_as_large_as_an_mlp_together_where_their_size_is_left_out():
    assert GPTConfig(experts=8).shape().expert_ffn == 160, "352 / 2, in whole 32"
    assert GPTConfig(experts=8, top_k=4, ffn=512).shape().expert_ffn == 128
    assert GPTConfig(experts=64, top_k=8, ffn=64).shape().expert_ffn == 32


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_defaults_are_the_course_s_models():
    assert GPTConfig().shape().parameters == 836_736
    assert GPTConfig(style="gpt2").shape().parameters == 842_496


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_does_exactly_the_flops_that_the_theory_counts(config):
    model, ids = GPT(config), tokens(config)
    with WorkCounter() as work:
        value = loss(model(ids), ids)
        forward = work.flops
        value.backward()
    parts = flops.forward(config.shape(), config.seq)
    assert forward == ids.numel() * sum(parts)
    # Fused attention keeps no score matrix, so its backward makes it again: half of what the core does forward. On the CPU it
    # is fused only where values are as large as keys.
    wanted = flops.per_token(config.shape(), config.seq, "full") + (0 if config.latent else parts.core / 2)
    assert work.flops == ids.numel() * wanted


# Bad input


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"style": "lama"}, "style='lama': did you mean 'llama'"),
        ({"seq": 0}, "seq=0: must be a whole number, 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0: a probability"),
        ({"hidden": 12, "heads": 4}, "a head has 3 numbers"),
        ({"heads": 5}, "heads=5 does not divide hidden=128"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"layers": 0}, "layers=0: must be a whole number"),
        ({"hidden": 128.0}, "hidden=128.0: must be a whole number"),
        ({"latent": LATENT, "style": "gpt2"}, "latent with style='gpt2'"),
        ({"latent": LATENT, "kv_heads": 2}, "kv_heads=2, .*: leave them out, latent decides them"),
        ({"latent": replace(LATENT, rope_size=3)}, "latent.rope_size=3: rotary positions turn pairs; give an even size"),
        ({"latent": 512}, "latent=512: must be a LatentAttention or None"),
        ({"experts": 8, "style": "gpt2"}, "experts=8 with style='gpt2': experts are gated and have no biases"),
        ({"experts": 8, "expert_ffn": 0}, "expert_ffn=0 with experts=8: give the feed-forward size"),
        ({"experts": 8, "scores": "sigmoids"}, "scores='sigmoids': did you mean 'sigmoid'"),
        ({"experts": 8, "capacity": 0}, "capacity=0: a factor above 0, or None"),
        ({"experts": 8, "auxiliary": -0.1}, "auxiliary=-0.1: give 0 or more"),
        ({"experts": 8, "bias_speed": float("inf")}, "bias_speed=inf: give 0 or more"),
        ({"expert_ffn": 4}, "expert_ffn=4 without experts: give experts, or leave it out"),
        ({"bias_speed": 0.1}, "bias_speed=0.1 without experts"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        GPTConfig(**wrong)


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="13 tokens a sequence: this model takes at most seq=12"):
        GPT(SMALL)(torch.zeros(1, 13, dtype=torch.long))
