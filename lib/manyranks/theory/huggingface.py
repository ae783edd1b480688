"""The shape of a model from its Hugging Face config.json. A key that is not known is refused: it may change the shape.

Each family's keys, with their defaults, and those that don't matter (positions and their scaling, numerics, dropout, router
losses, tokens, generation, files) stand in tables/hugging_face_keys.csv, and what they mean in hugging_face_families.csv;
their source are the configuration classes of transformers.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from manyranks.theory import tables
from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.names import nearest

Config = Mapping[str, Any]
Fields = dict[str, Any]


class Key(NamedTuple):
    """The values that a key may hold, in words and as a test, and the one where it is left out; without it, give the key."""

    allowed: str
    test: Callable[[Any], bool]
    default: Any = ...


def from_hf_config(path: str | Path | Config) -> ModelShape:
    """Reads the shape that a config.json describes.

    path: of the file or of its folder; or what is in it, as a dictionary or a configuration of transformers

    Its model_type is llama, mistral, mixtral, gpt2, gpt_neox, opt, bloom, qwen2, qwen3, qwen3_moe, gemma, gemma2, deepseek_v2,
    deepseek_v3, kimi_k2, glm4_moe or gpt_oss. A key that may be left out has its class's default. The shape takes the folder's
    name.
    Raises ValueError, naming the key, for an unknown architecture or key, a missing key, and values that are not allowed or do
    not fit together; FileNotFoundError where there is no such file.
    """
    config = path.to_dict() if hasattr(path, "to_dict") else path
    if not isinstance(config, Mapping | str | Path):
        raise ValueError(f"path={path!r}: give a config.json's path, its folder's, or what is in it")
    file = None if isinstance(config, Mapping) else Path(path)
    file = file / "config.json" if file and file.is_dir() else file
    try:
        config = config if file is None else _load(file)
        family, kind = _family(config), config["model_type"]
        name = file.resolve().parent.name if file else ""
        return _shape(checked(config, keys_of(kind)), family, name or kind, f"{file or 'a configuration'}")
    except ValueError as error:
        raise ValueError(f"{file or 'the configuration'}: {error}") from None


def _load(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"must hold a JSON object, has a {type(config).__name__}")
    return config


class Family(NamedTuple):
    """Models of one model_type.

    architecture: the class of the whole model
    keys: field of ModelShape -> the key it has, or the keys that it may have, where these aren't the usual ones
    fields: those that no key says
    """

    architecture: str
    keys: dict[str, str]
    fields: Fields


@functools.cache
def _families() -> dict[str, Family]:
    found = {}
    for row in tables.rows("hugging_face_families"):
        fields = {name: tables.value(text) for name, text in tables.pairs(row["fields"]).items()}
        found[row["model_type"]] = Family(row["architecture"], tables.pairs(row["keys"]), fields)
    return found


def _family(config: Config) -> Family:
    kind, known = config.get("model_type"), _families()
    if isinstance(kind, str) and kind in _BEYOND:
        raise ValueError(f"model_type={kind!r}: {_BEYOND[kind]}, which ModelShape has no words for")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"model_type={kind!r}: {nearest(kind, known)}")
    expected = known[kind].architecture
    if (given := config.get("architectures")) not in (None, [expected]):
        raise ValueError(f"architectures={given!r}: of {kind}, only [{expected!r}] is supported")
    return known[kind]


# Fields of ModelShape and the keys that they have in most families.
_USUAL = {"layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size"}
_USUAL |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_size": "head_dim"}
_USUAL |= {"tied": "tie_word_embeddings", "window": "sliding_window"}
_USUAL |= {"experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
_USUAL |= {"dense_layers": "first_k_dense_replace", "shared_experts": "n_shared_experts"}
_USUAL |= {"expert_groups": "n_group", "groups_per_token": "topk_group"}
_DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout", "dropout")


def _shape(config: Config, family: Family, name: str, source: str) -> ModelShape:
    """The shape of these values, which are checked one by one; what does not go together is said in the keys' words."""
    keys = {field: _given(config, names.split("/")) for field, names in (_USUAL | family.keys).items()}
    found = {field: config[key] for field, key in keys.items() if key in config}
    found["ffn"] = found.get("ffn") or 4 * found["hidden"]
    found["dropout"] = any(config.get(rate, 0) > 0 for rate in _DROPOUT)
    found |= family.fields | _biases_and_positions(config) | _windows(config) | _dense_layers(config) | _latent(config)
    try:
        return ModelShape(name=name, source=source, **{field: value for field, value in found.items() if value is not None})
    except ValueError as error:
        said = str(error) if "head_dim" in config else str(error).partition(": give head_size")[0]
        raise ValueError(re.sub(r"(\w+)(?==)|head_size", lambda word: keys.get(word[0]) or word[0], said)) from None


def _given(config: Config, names: list[str]) -> str:
    """The one of these keys that holds a value, or the first. Raises ValueError for several values."""
    given = {name: config[name] for name in names if name in config}
    if len(names) > 1 and len({*given.values()} - {None}) != 1:
        raise ValueError(f"{given}: must be one whole number, under one name or both")
    return next((name for name, value in given.items() if value is not None), names[0])


def _biases_and_positions(config: Config) -> Fields:
    if "mlp_bias" in config and config["mlp_bias"] != (attention := config["attention_bias"]):
        both = f"attention_bias={attention}, mlp_bias={config['mlp_bias']}"
        raise ValueError(f"{both}: supported are biases on all linear layers, or on none")
    if "word_embed_proj_dim" not in config:
        return {}
    wide, hidden = config["word_embed_proj_dim"], config["hidden_size"]
    if wide not in (None, hidden):
        raise ValueError(f"word_embed_proj_dim={wide}: supported is hidden_size={hidden}, without a projection")
    return {"positions": config["max_position_embeddings"] + 2}  # the first two belong to no position


def _windows(config: Config) -> Fields:
    """Layers from max_window_layers on look back sliding_window tokens, if use_sliding_window says so; or those that
    layer_types names do, or else every other."""
    layers = config.get("num_hidden_layers")
    if "use_sliding_window" in config:
        if not config["use_sliding_window"]:
            return {"window": 0}
        return {"window_layers": max(0, layers - (config["max_window_layers"] or 0)) if config["sliding_window"] else 0}
    if "layer_types" not in config:
        return {}
    kinds = config["layer_types"]
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    sliding = layers - layers // 2 if kinds is None else kinds.count("sliding_attention")
    return {"window_layers": sliding if config["sliding_window"] else 0}


def _dense_layers(config: Config) -> Fields:
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))) or len(dense) > (config.get("num_hidden_layers") or 0):
        raise ValueError(f"mlp_only_layers={dense}: supported are the first ones, [0, 1, …], and none")
    return {"dense_layers": len(dense)} if dense else {}


def _latent(config: Config) -> Fields:
    if "kv_lora_rank" not in config:
        return {}
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentAttention(config["q_lora_rank"] or 0, *(config[size] for size in sizes))
    return {"latent": latent, "kv_heads": None, "head_size": None}  # both follow from latent


def checked(config: Config, keys: Mapping[str, Key]) -> dict[str, Any]:
    """The value of each of the keys, defaults filled in.

    Raises ValueError for a key of the config that is neither one of them nor known not to matter, a missing one, and a value
    that is not allowed.
    """
    for key in config:
        if key not in keys and key not in (ignored := keys_of("ignored")) and config[key] is not None:
            known = [*keys, *get_close_matches(key, ignored, n=1)]
            raise ValueError(f"{key}={config[key]!r}: unknown, so it may change the shape; {nearest(key, known)}")
    return {key: _value(config, key, rule) for key, rule in keys.items()}


def _value(config: Config, key: str, rule: Key) -> Any:
    if key not in config:
        if rule.default is ...:
            raise ValueError(f"{key} is missing: must be {rule.allowed}")
        return rule.default
    value = config[key]
    if not rule.test(value) and (value is not None or rule.default is not None):
        raise ValueError(f"{key}={value!r}: must be {rule.allowed}{' or null' if rule.default is None else ''}")
    return value


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# The values that a key may hold, by its kind in tables/hugging_face_keys.csv.
_LAYERS = ("full_attention", "sliding_attention")
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number, 1 or more", lambda value: _whole(value, 1)),
    "size or null": ("a whole number, 1 or more, or null", lambda value: value is None or _whole(value, 1)),
    "count": ("a whole number, 0 or more, or null", lambda value: value is None or _whole(value, 0)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "rate": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "layers": ("a list of layers", lambda value: isinstance(value, list) and all(_whole(each, 0) for each in value)),
    "layer types": (f"a list of {_LAYERS}", lambda value: isinstance(value, list) and all(each in _LAYERS for each in value)),
}


def _key(kind: str, default: str) -> Key:
    value = json.loads(default) if default else ...
    if kind == "only":  # type and value: to Python, true is 1 and false is 0
        return Key(f"{default} to be supported", lambda given: (type(given), given) == (type(value), value), value)
    return Key(*_KINDS[kind], value)


@functools.cache
def keys_of(kind: str) -> dict[str, Key]:
    """Reads the keys of a model_type, or for "ignored" those that leave the shape of every model as it is."""
    found = {}
    for row in tables.rows("hugging_face_keys"):
        if kind == row["kind"] or (row["kind"] != "ignored" and kind in row["families"].split()):
            found |= {key: _key(row["kind"], row["default"]) if kind != "ignored" else None for key in row["keys"].split()}
    return found


_HYBRID = "its layers have {} in place of attention (theory.hybrids counts the parameters of some)"
_BEYOND = {
    "qwen3_next": _HYBRID.format("Gated DeltaNet"),
    "nemotron_h": _HYBRID.format("Mamba-2"),
    "deepseek_v4": _HYBRID.format("attention to compressed keys"),
}
