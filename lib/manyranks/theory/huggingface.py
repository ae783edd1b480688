"""The shape of a model from its Hugging Face config.json. A key that is not known is refused: it may change the shape.

Each family's keys, with their defaults, and those that don't matter (positions and their scaling, numerics, dropout, router
losses, tokens, generation, files) stand in published/hugging_face_keys.csv; its source are the configuration classes of
transformers.
"""

import functools
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from manyranks.theory import published
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
    """The shape that a config.json describes.

    path: of the file or of its folder; or what is in it, as a dictionary or a configuration of transformers. model_type: one of
    the families in theory.models: llama, mistral, mixtral, gpt2, gpt_neox, opt, bloom, qwen2, qwen3, qwen3_moe, gemma, gemma2,
    deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, gpt_oss. A key that may be left out has its class's default. The shape takes
    the folder's name.
    Raises ValueError, naming the key, for an unknown architecture or key, a missing key, and values that are not allowed or do
    not fit together; FileNotFoundError where there is no such file.
    """
    config = path.to_dict() if hasattr(path, "to_dict") else path
    if not isinstance(config, Mapping | str | Path):
        raise ValueError(f"path={path!r}: give a config.json's path, its folder's, or what is in it")
    file = None if isinstance(config, Mapping) else _file(Path(path))
    try:
        config = config if file is None else _load(file)
        family = _family(config)
        fields = family.fields(checked(config, keys_of(config["model_type"])))
        name = file.resolve().parent.name if file else ""
        return ModelShape(name=name or config["model_type"], source=f"{file or 'a configuration'}", **fields)
    except ValueError as error:
        raise ValueError(f"{file or 'the configuration'}: {error}") from None


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _load(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"must hold a JSON object, has a {type(config).__name__}")
    return config


class Family(NamedTuple):
    """Models of one model_type: the class of the whole model, and the fields of ModelShape made of its keys."""

    architecture: str
    fields: Callable[[Config], Fields]


def _family(config: Config) -> Family:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _BEYOND:
        raise ValueError(f"model_type={kind!r}: {_BEYOND[kind]}, which ModelShape has no words for")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"model_type={kind!r}: {nearest(kind, _FAMILIES)}")
    expected = _FAMILIES[kind].architecture
    if (given := config.get("architectures")) not in (None, [expected]):
        raise ValueError(f"architectures={given!r}: of {kind}, only [{expected!r}] is supported")
    return _FAMILIES[kind]


def _dense(config: Config) -> Fields:
    """The fields that have the same names in every family but GPT-2."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size, kv_heads = config.get("head_dim"), config.get("num_key_value_heads")
    if head_size is None and hidden % heads and "kv_lora_rank" not in config:
        fix = ": give head_dim, or other sizes" if "head_dim" in config else ""
        raise ValueError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}{fix}")
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "heads": heads,
        "vocab": config["vocab_size"],
        "kv_heads": kv_heads,
        "head_size": head_size,
        "tied": config["tie_word_embeddings"],
        "window": config.get("sliding_window") or 0,
    }


def _llama(config: Config) -> Fields:
    attention, mlp = config["attention_bias"], config["mlp_bias"]
    if attention != mlp:
        raise ValueError(f"attention_bias={attention}, mlp_bias={mlp}: supported are biases on all linear layers, or on none")
    return _dense(config) | {"bias": attention}


_GPT = {"gated": False, "norm": "layernorm", "bias": True}


def _gpt2(config: Config) -> Fields:
    hidden, heads = config["n_embd"], config["n_head"]
    if hidden % heads:
        raise ValueError(f"n_embd={hidden} is not a multiple of n_head={heads}")
    sizes = {"layers": config["n_layer"], "hidden": hidden, "ffn": config["n_inner"] or 4 * hidden, "heads": heads}
    others = {"vocab": config["vocab_size"], "positions": config["n_positions"], "tied": config["tie_word_embeddings"]}
    return sizes | others | _GPT | _dropout(config, "attn_pdrop", "resid_pdrop", "embd_pdrop")


def _gpt_neox(config: Config) -> Fields:
    parallel = {"parallel_layers": config["use_parallel_residual"]}
    return _dense(config) | _GPT | parallel | _dropout(config, "attention_dropout", "hidden_dropout")


def _opt(config: Config) -> Fields:
    hidden, wide = config["hidden_size"], config["word_embed_proj_dim"]
    if wide not in (None, hidden):
        raise ValueError(f"word_embed_proj_dim={wide}: supported is hidden_size={hidden}, without a projection")
    sizes = {"layers": config["num_hidden_layers"], "hidden": hidden, "ffn": config["ffn_dim"]}
    sizes |= {"heads": config["num_attention_heads"], "vocab": config["vocab_size"], "tied": config["tie_word_embeddings"]}
    rows = config["max_position_embeddings"] + 2  # the first two belong to no position
    return sizes | _GPT | {"positions": rows} | _dropout(config, "dropout", "attention_dropout")


def _bloom(config: Config) -> Fields:
    hidden = _one_of(config, "hidden_size", "n_embed")
    sizes = {"layers": _one_of(config, "n_layer", "num_hidden_layers"), "hidden": hidden, "ffn": 4 * hidden}
    sizes |= {"heads": _one_of(config, "n_head", "num_attention_heads"), "vocab": config["vocab_size"]}
    others = {"tied": config["tie_word_embeddings"], "embedding_norm": True}
    return sizes | _GPT | others | _dropout(config, "hidden_dropout", "attention_dropout")


def _one_of(config: Config, *names: str) -> int:
    """A number that goes by one of these names, or by several."""
    found = {config[name] for name in names} - {None}
    if len(found) != 1:
        raise ValueError(f"{' and '.join(names)}: must be one whole number, under one name or both")
    return found.pop()


def _dropout(config: Config, *rates: str) -> Fields:
    return {"dropout": any(config[rate] > 0 for rate in rates)}


def _qwen2(config: Config) -> Fields:
    return _windowed_above(config) | {"qkv_bias": True}


def _qwen3(config: Config) -> Fields:
    return _windowed_above(config) | {"qk_norm": True}


def _windowed_above(config: Config) -> Fields:
    """Layers from max_window_layers on look back sliding_window tokens, if use_sliding_window says so."""
    if not (config["use_sliding_window"] and config["sliding_window"]):
        return _dense(config) | {"window": 0}
    return _dense(config) | {"window_layers": max(0, config["num_hidden_layers"] - (config["max_window_layers"] or 0))}


def _gemma2(config: Config) -> Fields:
    return _dense(config) | {"norms_per_layer": 4, "window_layers": _sliding_layers(config)}


def _sliding_layers(config: Config) -> int:
    """Layers with a window: those that layer_types names, or else every other."""
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    sliding = layers - layers // 2 if kinds is None else kinds.count("sliding_attention")
    return sliding if config["sliding_window"] else 0


def _experts(config: Config, number: str, size: str) -> Fields:
    experts, top_k = config[number], config["num_experts_per_tok"]
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok={top_k}: there are {number}={experts}")
    return {"experts": experts, "top_k": top_k, "expert_ffn": config[size]}


def _mixtral(config: Config) -> Fields:
    return _dense(config) | _experts(config, "num_local_experts", "intermediate_size")


def _qwen3_moe(config: Config) -> Fields:
    return _qwen3(config) | _qwen_experts(config)


def _qwen_experts(config: Config) -> Fields:
    dense = sorted(config["mlp_only_layers"] or [])
    if dense != list(range(len(dense))) or len(dense) > config["num_hidden_layers"]:
        raise ValueError(f"mlp_only_layers={dense}: supported are the first ones, [0, 1, …], and none")
    number = "num_experts" if config["num_experts"] is not None else "num_local_experts"
    if (experts := config[number]) is None or config["num_local_experts"] not in (None, experts):
        given = {key: config[key] for key in ("num_experts", "num_local_experts")}
        raise ValueError(f"{given}: must be one whole number, under one name or both")
    return _experts(config, number, "moe_intermediate_size") | {"dense_layers": len(dense)}


def _deepseek(config: Config) -> Fields:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentAttention(config["q_lora_rank"] or 0, *(config[size] for size in sizes))
    attention = {"latent": latent, "kv_heads": None, "head_size": None}  # both follow from latent
    routed = _experts(config, "n_routed_experts", "moe_intermediate_size")
    return _dense(config) | attention | routed | _deepseek_layers(config) | _deepseek_groups(config)


def _deepseek_layers(config: Config) -> Fields:
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"] or 0
    if dense > layers:
        raise ValueError(f"first_k_dense_replace={dense}: the model has num_hidden_layers={layers}")
    return {"dense_layers": dense, "shared_experts": config["n_shared_experts"] or 0}


def _deepseek_groups(config: Config) -> Fields:
    """A token's experts come from topk_group of n_group groups; null: there is one."""
    experts, groups, chosen = config["n_routed_experts"], config["n_group"] or 1, config["topk_group"] or 1
    if experts % groups:
        raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}")
    if chosen > groups:
        raise ValueError(f"topk_group={chosen}: there are n_group={groups}")
    return {"expert_groups": groups, "groups_per_token": chosen}


def _deepseek_v3(config: Config) -> Fields:
    return _deepseek(config) | {"router_bias": True, "mtp_depth": config["num_nextn_predict_layers"] or 0}


def _glm4_moe(config: Config) -> Fields:
    routed = _experts(config, "n_routed_experts", "moe_intermediate_size")
    attention = {"qkv_bias": config["attention_bias"], "qk_norm": config["use_qk_norm"]}
    balance = {"router_bias": True, "mtp_depth": config["num_nextn_predict_layers"] or 0}
    return _dense(config) | attention | routed | _deepseek_layers(config) | _deepseek_groups(config) | balance


def _gpt_oss(config: Config) -> Fields:
    routed = _experts(config, "num_local_experts", "intermediate_size")
    biases = {"bias": True, "sinks": True, "router_bias": True, "clamped": True}
    return _dense(config) | routed | biases | {"window_layers": _sliding_layers(config)}


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


# The values that a key may hold, by its kind in published/hugging_face_keys.csv.
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
    for row in published.rows("hugging_face_keys"):
        if kind == row["kind"] or (row["kind"] != "ignored" and kind in row["families"].split()):
            found |= {key: _key(row["kind"], row["default"]) if kind != "ignored" else None for key in row["keys"].split()}
    return found


_HYBRID = "its layers have {} in place of attention (theory.hybrids counts the parameters of some)"
_BEYOND = {
    "qwen3_next": _HYBRID.format("Gated DeltaNet"),
    "nemotron_h": _HYBRID.format("Mamba-2"),
    "deepseek_v4": _HYBRID.format("attention to compressed keys"),
}
_FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _dense),
    "mixtral": Family("MixtralForCausalLM", _mixtral),
    "gpt2": Family("GPT2LMHeadModel", _gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", _gpt_neox),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": Family("GemmaForCausalLM", _dense),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    "opt": Family("OPTForCausalLM", _opt),
    "bloom": Family("BloomForCausalLM", _bloom),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "glm4_moe": Family("Glm4MoeForCausalLM", _glm4_moe),
    "gpt_oss": Family("GptOssForCausalLM", _gpt_oss),
}
