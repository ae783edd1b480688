"""theory.architecture: parameters against modules built from the same sizes, and sizes that are refused."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyranks.theory.architecture import LatentAttention, ModelShape

TINY = {"name": "tiny", "layers": 3, "hidden": 12, "ffn": 20, "heads": 4, "vocab": 11}
LATENT = LatentAttention(q_rank=5, kv_rank=6, nope_size=3, rope_size=2, value_size=4)
EXPERTS = {"experts": 6, "top_k": 2, "expert_ffn": 7}
SHAPES = {
    "dense, gated, grouped queries": ModelShape(**TINY, kv_heads=2),
    "GPT-2": ModelShape(**TINY, gated=False, tied=True, norm="layernorm", bias=True, positions=9, dropout=True),
    "four norms, wide heads, tied": ModelShape(**TINY, kv_heads=1, head_size=8, norms_per_layer=4, tied=True),
    "norms of queries and keys": ModelShape(**TINY, kv_heads=2, head_size=5, qk_norm=True),
    "biases of queries, keys and values": ModelShape(**TINY, kv_heads=2, qkv_bias=True),
    "embedding norm": ModelShape(**TINY, norm="layernorm", embedding_norm=True, bias=True),
    "no norms": ModelShape(**TINY, norm="none"),
    "experts": ModelShape(**TINY, **EXPERTS),
    "experts with biases": ModelShape(**TINY, **EXPERTS, bias=True, gated=False),
    "shared experts": ModelShape(**TINY, **EXPERTS, shared_experts=2, dense_layers=1, router_bias=True),
    "shared experts of another size, gated": ModelShape(
        **TINY, **EXPERTS, shared_experts=1, shared_ffn=9, shared_gate=True, dense_layers=2
    ),
    "latent": ModelShape(**TINY, latent=LATENT),
    "latent, queries not compressed": ModelShape(**TINY, latent=LatentAttention(0, 6, 3, 2, 4)),
    "latent with experts": ModelShape(**TINY, **EXPERTS, shared_experts=2, dense_layers=1, latent=LATENT),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_count_is_that_of_modules_of_the_same_sizes(shape):
    assert shape.parameters == count(model(shape))
    for layer in range(shape.layers):
        assert shape.layer_parameters(layer) == count(transformer_layer(shape, layer)), layer


@st.composite
def shapes(draw):
    size, flag = st.integers(1, 9), st.booleans()
    kv_heads, layers, experts = draw(size), draw(st.integers(1, 4)), draw(size)
    sizes = {"hidden": draw(size), "ffn": draw(size), "vocab": draw(size), "head_size": draw(size), "positions": draw(size)}
    flags = {name: draw(flag) for name in ("gated", "tied", "bias", "qkv_bias", "qk_norm", "embedding_norm")}
    routed = {"experts": experts, "top_k": draw(st.integers(1, experts)), "expert_ffn": draw(size)}
    routed |= {"dense_layers": draw(st.integers(0, layers)), "router_bias": draw(flag)}
    norm = draw(st.sampled_from(["rmsnorm", "layernorm", "none"]))
    heads = {"heads": kv_heads * draw(size), "kv_heads": kv_heads, "norms_per_layer": draw(st.integers(1, 4))}
    return ModelShape("drawn", layers, norm=norm, **sizes, **heads, **flags, **(routed if draw(flag) else {}))


@settings(max_examples=40)
@given(shapes())
def test_any_count_is_that_of_modules_of_the_same_sizes(shape):
    assert shape.parameters == count(model(shape))


@pytest.mark.parametrize("name", ["experts", "shared experts", "latent with experts"])
def test_a_token_leaves_out_the_routed_experts_that_it_is_not_sent_to(name):
    shape = SHAPES[name]
    # With as few experts as a token uses, and a router of the full width, nothing is left out.
    used = replace(shape, experts=shape.top_k)
    wider_router = (shape.experts - shape.top_k) * (shape.hidden + shape.router_bias) * shape.moe_layers
    assert shape.active_parameters == used.parameters + wider_router


def test_a_prediction_module_has_a_projection_three_norms_and_a_layer():
    shape = replace(SHAPES["latent with experts"], mtp_depth=2)
    module = nn.ModuleList([linear(24, 12), *(norm("rmsnorm", 12) for _ in range(3)), transformer_layer(shape, 2)])
    assert shape.mtp_parameters == 2 * count(module)
    assert shape.parameters == replace(shape, mtp_depth=0).parameters


def test_left_out_sizes_are_whole_numbers_after_construction():
    shape = ModelShape(**TINY)
    assert (shape.kv_heads, shape.head_size, shape.window_layers) == (4, 3, 0)
    assert ModelShape(**TINY, window=5).window_layers == 3
    latent = SHAPES["latent"]
    assert (latent.kv_heads, latent.head_size) == (4, 5)
    assert SHAPES["shared experts"].shared_ffn == 7


@pytest.mark.parametrize("field", ["layers", "hidden", "ffn", "heads", "vocab", "kv_heads", "head_size", "norms_per_layer"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_a_size_that_is_not_a_positive_whole_number_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value!r}: must be a whole number"):
        ModelShape(**(TINY | {field: value}))


@pytest.mark.parametrize("field", [field.name for field in fields(ModelShape) if field.type is bool])
def test_a_flag_must_be_true_or_false(field):
    with pytest.raises(ValueError, match=f"{field}=1: must be True or False"):
        ModelShape(**TINY, **{field: 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"heads": 5}, "heads=5 does not divide hidden=12"),
        ({"norm": "layer_norm"}, "norm='layer_norm'.*did you mean 'layernorm'"),
        ({"positions": -1}, "positions=-1"),
        ({"top_k": 2}, "top_k=2 without experts"),
        ({"dense_layers": 1}, "dense_layers=1 without experts"),
        ({"shared_experts": 1}, "shared_experts=1 without experts"),
        ({"expert_groups": 2}, "expert_groups=2 does not divide experts=0"),
        ({"experts": 6, "top_k": 2}, "expert_ffn=0 with experts=6"),
        (EXPERTS | {"top_k": 0}, "top_k=0"),
        (EXPERTS | {"top_k": 7}, "top_k=7: a token uses 1 to experts=6"),
        (EXPERTS | {"dense_layers": 4}, "dense_layers=4: the model has layers=3"),
        (EXPERTS | {"expert_groups": 4}, "expert_groups=4 does not divide experts=6"),
        (EXPERTS | {"expert_groups": 2, "groups_per_token": 3}, "groups_per_token=3"),
        (EXPERTS | {"expert_groups": 6}, "top_k=2: 1 groups have 1 experts"),
        (EXPERTS | {"shared_ffn": 3}, "shared_ffn=3.*give shared_experts"),
        ({"latent": (0, 6, 3, 2, 4)}, "latent=.*must be a LatentAttention"),
        ({"latent": LATENT, "bias": True}, "bias, qkv_bias, qk_norm"),
        ({"latent": LATENT, "head_size": 3}, "kv_heads=4, head_size=3"),
        ({"latent": LATENT, "kv_heads": 2}, "kv_heads=2, head_size=5"),
        ({"window_layers": 1}, "window_layers=1: with window=0"),
        ({"window": 8, "window_layers": 4}, "window_layers=4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelShape(**(TINY | changes))


def test_latent_sizes_must_be_whole_numbers():
    with pytest.raises(ValueError, match=r"latent\.kv_rank=0: must be a whole number, 1 or more"):
        LatentAttention(0, 0, 3, 2, 4)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ValueError, match=f"layer={layer}: tiny has layers 0 to 2"):
        SHAPES["experts"].layer_parameters(layer)


# The oracle: a module for every weight, on the meta device, so that nothing is allocated.


def count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def norm(kind: str, size: int) -> nn.Module:
    kinds = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}
    return kinds[kind](size, device="meta") if kind in kinds else nn.Identity()


def attention(shape: ModelShape) -> list[nn.Module]:
    h, heads, width, groups = shape.hidden, shape.heads, shape.head_size, shape.kv_heads
    inner = shape.bias or shape.qkv_bias
    parts = [linear(h, heads * width, inner), linear(h, groups * width, inner), linear(h, groups * width, inner)]
    parts += [norm(shape.norm, width), norm(shape.norm, width)] if shape.qk_norm else []
    return [*parts, linear(heads * width, h, shape.bias)]


def latent_attention(shape: ModelShape) -> list[nn.Module]:
    h, heads, latent = shape.hidden, shape.heads, shape.latent
    key = latent.nope_size + latent.rope_size
    parts = [linear(h, latent.kv_rank), linear(h, latent.rope_size), norm(shape.norm, latent.kv_rank)]
    parts += [linear(latent.kv_rank, heads * latent.nope_size), linear(latent.kv_rank, heads * latent.value_size)]
    if latent.q_rank:
        parts += [linear(h, latent.q_rank), norm(shape.norm, latent.q_rank), linear(latent.q_rank, heads * key)]
    else:
        parts += [linear(h, heads * key)]
    return [*parts, linear(heads * latent.value_size, h)]


def mlp(shape: ModelShape, ffn: int) -> nn.Module:
    up = [linear(shape.hidden, ffn, shape.bias) for _ in range(2 if shape.gated else 1)]
    return nn.ModuleList([*up, linear(ffn, shape.hidden, shape.bias)])


def moe(shape: ModelShape) -> list[nn.Module]:
    parts = [mlp(shape, shape.expert_ffn) for _ in range(shape.experts)]
    parts += [mlp(shape, shape.shared_ffn) for _ in range(shape.shared_experts)]
    parts += [linear(shape.hidden, shape.experts, bias=shape.router_bias)]
    return parts + ([linear(shape.hidden, 1)] if shape.shared_gate else [])


def transformer_layer(shape: ModelShape, layer: int) -> nn.Module:
    parts = latent_attention(shape) if shape.latent else attention(shape)
    parts += moe(shape) if shape.experts and layer >= shape.dense_layers else [mlp(shape, shape.ffn)]
    return nn.ModuleList([*parts, *(norm(shape.norm, shape.hidden) for _ in range(shape.norms_per_layer))])


def model(shape: ModelShape) -> nn.Module:
    embedding = nn.Embedding(shape.vocab, shape.hidden, device="meta")
    head = linear(shape.hidden, shape.vocab)
    if shape.tied:
        head.weight = embedding.weight
    parts = [embedding, head, norm(shape.norm, shape.hidden)]
    parts += [nn.Embedding(shape.positions, shape.hidden, device="meta")] if shape.positions else []
    parts += [norm(shape.norm, shape.hidden)] if shape.embedding_norm else []
    return nn.ModuleList([*parts, *(transformer_layer(shape, layer) for layer in range(shape.layers))])
