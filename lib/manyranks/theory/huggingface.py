"""The shape of a model from its Hugging Face config.json. A key that is not known is refused: it may change the shape.

Source of keys' names and defaults: the configuration classes of transformers (src/transformers/models/*/configuration_*.py).
"""

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.names import nearest

Config = Mapping[str, Any]
Fields = dict[str, Any]


class Key(NamedTuple):
    """What a key may hold, in words and as a test, and its value where it is left out; without one, it must be given."""

    allowed: str
    test: Callable[[Any], bool]
    default: Any = ...


def from_hf_config(path: str | Path | Config) -> ModelShape:
    """The shape that a config.json describes.

    path: of the file or of its folder; or what is in it, as a dictionary or a configuration of transformers. model_type: one of
    the families in theory.models: llama, mistral, mixtral, gpt2, gpt_neox, opt, bloom, qwen2, qwen3, qwen3_moe, gemma, gemma2,
    deepseek_v2, deepseek_v3. A key that may be left out has its class's default. The shape takes the folder's name.
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
        fields = family.fields(checked(config, family.keys))
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
    """Models of one model_type: the class of the whole model, the keys, and the fields of ModelShape made of them."""

    architecture: str
    keys: dict[str, Key]
    fields: Callable[[Config], Fields]


def _family(config: Config) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"model_type={kind!r}: {nearest(kind, _FAMILIES)}")
    expected = _FAMILIES[kind].architecture
    if (given := config.get("architectures")) not in (None, [expected]):
        raise ValueError(f"architectures={given!r}: of {kind}, only [{expected!r}] is supported")
    return _FAMILIES[kind]


def _dense(config: Config) -> Fields:
    """The fields that every family but GPT-2 names alike."""
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


# Keys, a family of models at a time.


def checked(config: Config, keys: Mapping[str, Key]) -> dict[str, Any]:
    """The value of each of the keys, defaults filled in.

    Raises ValueError for a key of the config that is neither one of them nor known not to matter, a missing one, and a value
    that is not allowed.
    """
    for key in config:
        if key not in keys and key not in IGNORED and config[key] is not None:
            known = [*keys, *get_close_matches(key, IGNORED, n=1)]
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


def _size(default: Any = ...) -> Key:
    return Key("a whole number, 1 or more", lambda value: _whole(value, 1), default)


def _given_or_null() -> Key:
    return Key("a whole number, 1 or more, or null", lambda value: value is None or _whole(value, 1))


def _count(default: Any = None) -> Key:
    return Key("a whole number, 0 or more, or null", lambda value: value is None or _whole(value, 0), default)


def _flag(default: Any = ...) -> Key:
    return Key("true or false", lambda value: isinstance(value, bool), default)


def _rate(default: float) -> Key:
    return Key("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1, default)


def _layer_types() -> Key:
    kinds = ("full_attention", "sliding_attention")
    return Key(f"a list of {kinds}", lambda value: isinstance(value, list) and all(kind in kinds for kind in value), None)


def _layer_numbers() -> Key:
    return Key("a list of layers", lambda value: isinstance(value, list) and all(_whole(layer, 0) for layer in value), None)


def _only(value: Any) -> Key:
    # Type and value: to Python, true is 1 and false is 0.
    return Key(f"{json.dumps(value)} to be supported", lambda given: (type(given), given) == (type(value), value), value)


# Of every family; each is a decoder without cross-attention.
_COMMON = {
    "vocab_size": _size(),
    "is_encoder_decoder": _only(False),
    "add_cross_attention": _only(False),
    "pruned_heads": _only({}),
}
_SIZES = _COMMON | {key: _size() for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
_UNTIED, _TIED = ({"tie_word_embeddings": _flag(default)} for default in (False, True))
_NO_BIAS = {"attention_bias": _only(False)}
_HEADS = {"num_key_value_heads": _size(), "head_dim": _size(None)}

LLAMA = {
    **_SIZES,
    **_UNTIED,
    **_HEADS,
    # Absent from configurations that are older than grouped-query attention.
    "num_key_value_heads": _size(None),
    "attention_bias": _flag(False),
    "mlp_bias": _flag(False),
}
MISTRAL = _SIZES | _UNTIED | _HEADS | {"num_key_value_heads": _size(8), "sliding_window": _count(4096)}
MIXTRAL = MISTRAL | {"sliding_window": _count(), "num_local_experts": _size(8), "num_experts_per_tok": _size(2)}
GPT2 = {
    **_COMMON,
    **_TIED,
    **{key: _size() for key in ("n_embd", "n_layer", "n_head", "n_positions")},
    **{key: _rate(0.1) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")},
    "n_inner": _size(None),
}
GPT_NEOX = {
    **_SIZES,
    **_UNTIED,
    "attention_bias": _only(True),
    "attention_dropout": _rate(0.0),
    "hidden_dropout": _rate(0.0),
    "use_parallel_residual": _flag(True),
}
QWEN2 = {
    **_SIZES,
    **_UNTIED,
    **_HEADS,
    "use_sliding_window": _flag(False),
    "sliding_window": _count(4096),
    "max_window_layers": _count(28),
}
QWEN3 = QWEN2 | _NO_BIAS | {"head_dim": _size(128)}
_QWEN_EXPERTS = {
    **{key: _size() for key in ("num_experts_per_tok", "moe_intermediate_size")},
    # One of both: transformers 5 writes the second.
    **{key: _size(None) for key in ("num_experts", "num_local_experts")},
    "decoder_sparse_step": _only(1),
    "mlp_only_layers": _layer_numbers(),
}
QWEN3_MOE = QWEN2 | _QWEN_EXPERTS | _NO_BIAS
GEMMA = _SIZES | _TIED | _NO_BIAS | _HEADS | {"head_dim": _size(256)}
GEMMA2 = GEMMA | {"sliding_window": _count(4096), "layer_types": _layer_types()}
DEEPSEEK = {
    **_SIZES,
    **_UNTIED,
    **_NO_BIAS,
    **{key: _size() for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    **{key: _size() for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
    **{key: _size(None) for key in ("n_group", "topk_group", "num_key_value_heads", "head_dim", "qk_head_dim")},
    "q_lora_rank": _given_or_null(),
    "n_shared_experts": _count(),
    "first_k_dense_replace": _count(),
    "moe_layer_freq": _only(1),
    "mlp_bias": _only(False),
    "num_nextn_predict_layers": _count(0),
}

OPT = {
    **_COMMON,
    **_TIED,
    **{key: _size() for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")},
    **{key: _rate(rate) for key, rate in (("dropout", 0.1), ("attention_dropout", 0.0))},
    **{key: _only(True) for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")},
    "max_position_embeddings": _size(2048),
    "word_embed_proj_dim": _size(None),
    "_remove_final_layer_norm": _only(False),
}
BLOOM = {
    **_COMMON,
    **_TIED,
    # n_layer is called num_hidden_layers in some, n_head num_attention_heads, and hidden_size n_embed.
    **{key: _size(None) for key in ("hidden_size", "n_embed", "n_layer", "num_hidden_layers", "n_head", "num_attention_heads")},
    **{key: _rate(0.0) for key in ("hidden_dropout", "attention_dropout")},
}
# Keys that leave the shape as it is: positions and their scaling, numerics, dropout, router losses, tokens, generation, files.
_IGNORED = """
    architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype auto_map torchscript
    use_bfloat16 tf_legacy_loss quantization_config tokenizer_class attn_implementation _attn_implementation
    _attn_implementation_autoset gradient_checkpointing chunk_size_feed_forward pretraining_tp ep_size
    use_cache cache_implementation return_dict output_attentions output_hidden_states output_scores is_decoder
    max_position_embeddings n_ctx rope_theta rope_scaling rope_parameters rope_local_base_freq rope_interleave
    rotary_pct rotary_emb_base partial_rotary_factor use_mrope layer_types rope_interleaved max_sequence_length
    sliding_window_size is_llama_config unsloth_version output_past attention_probs_dropout_prob hidden_dropout_prob
    query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping use_bidirectional_attention
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
    hidden_act hidden_activation activation_function rms_norm_eps layer_norm_eps layer_norm_epsilon
    initializer_range attention_dropout hidden_dropout classifier_dropout
    layerdrop activation_dropout embd_pdrop resid_pdrop init_std original_max_position_embeddings
    slow_but_exact masked_softmax_fusion apply_residual_connection_post_layernorm offset_alibi alibi activation seq_length
    swiglu_alpha swiglu_limit experts_per_token initial_context_length
    use_qk_norm attn_temperature_tuning floor_scale attn_scale for_llm_compressor
    router_aux_loss_coef router_jitter_noise output_router_logits norm_topk_prob aux_loss_alpha seq_aux scoring_func
    topk_method routed_scaling_factor
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id bad_words_ids
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens prefix
    temperature top_k top_p typical_p do_sample num_beams num_beam_groups num_return_sequences max_length min_length
    early_stopping length_penalty repetition_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size exponential_decay_length_penalty remove_invalid_values return_dict_in_generate
    task_specific_params finetuning_task problem_type num_labels id2label label2id
    summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
    cross_attention_hidden_size tie_encoder_decoder
"""
IGNORED = frozenset(_IGNORED.split())

_FAMILIES = {
    "llama": Family("LlamaForCausalLM", LLAMA, _llama),
    "mistral": Family("MistralForCausalLM", MISTRAL, _dense),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL, _mixtral),
    "gpt2": Family("GPT2LMHeadModel", GPT2, _gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", GPT_NEOX, _gpt_neox),
    "qwen2": Family("Qwen2ForCausalLM", QWEN2, _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", QWEN3, _qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN3_MOE, _qwen3_moe),
    "gemma": Family("GemmaForCausalLM", GEMMA, _dense),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA2, _gemma2),
    "opt": Family("OPTForCausalLM", OPT, _opt),
    "bloom": Family("BloomForCausalLM", BLOOM, _bloom),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", DEEPSEEK, _deepseek),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", DEEPSEEK, _deepseek_v3),
}
