"""The keys of a Hugging Face config.json, a family of models at a time: what each may hold, and its value where it is left out.

Source of names and defaults: the configuration classes of transformers (src/transformers/models/*/configuration_*.py).
"""

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from manyranks.theory.names import nearest

Config = Mapping[str, Any]


class Key(NamedTuple):
    """What a key may hold, in words and as a test, and its value where it is left out; without one, it must be given."""

    allowed: str
    test: Callable[[Any], bool]
    default: Any = ...


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


def _layer_types(short: str = "sliding_attention") -> Key:
    kinds = ("full_attention", short)
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
QWEN2_MOE = QWEN2 | _QWEN_EXPERTS | {"shared_expert_intermediate_size": _size(), "qkv_bias": _only(True)}
QWEN3_MOE = QWEN2 | _QWEN_EXPERTS | _NO_BIAS
GEMMA = _SIZES | _TIED | _NO_BIAS | _HEADS | {"head_dim": _size(256)}
GEMMA2 = GEMMA | {"sliding_window": _count(4096), "layer_types": _layer_types()}
# The class's defaults of Gemma 3's language model, which the configurations with images rely on.
GEMMA3 = GEMMA2 | {
    "vocab_size": _size(262208),
    "num_attention_heads": _size(8),
    "num_key_value_heads": _size(4),
    "sliding_window_pattern": _size(None),
    "_sliding_window_pattern": _size(6),
}
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
FALCON = {
    **_COMMON,
    **_TIED,
    **{key: _size() for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{key: _size(None) for key in ("num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn")},
    **{key: _flag(default) for key, default in (("new_decoder_architecture", False), ("multi_query", True), ("bias", False))},
    **{key: _rate(0.0) for key in ("hidden_dropout", "attention_dropout")},
    "parallel_attn": _flag(True),
}
PHI3 = _SIZES | _UNTIED | {"num_key_value_heads": _size(None), "sliding_window": _count()}
GLM = _SIZES | _UNTIED | {"num_key_value_heads": _size(2), "head_dim": _size(128), "attention_bias": _flag(True)}

GPT_OSS = {
    **_SIZES,
    **_UNTIED,
    "num_key_value_heads": _size(8),
    "head_dim": _size(64),
    "attention_bias": _only(True),
    "sliding_window": _count(128),
    "layer_types": _layer_types(),
    "num_local_experts": _size(128),
    "num_experts_per_tok": _size(4),
}

LLAMA4 = {
    **_SIZES,
    **_UNTIED,
    **_NO_BIAS,
    **{
        key: _size(default)
        for key, default in (("num_key_value_heads", 8), ("head_dim", 128), ("intermediate_size_mlp", 16384))
    },
    **{key: _size(default) for key, default in (("num_local_experts", 16), ("num_experts_per_tok", 1))},
    "moe_layers": _layer_numbers(),
    "interleave_moe_layer_step": _size(1),
    "attention_chunk_size": _count(8192),
    "layer_types": _layer_types("chunked_attention"),
    "no_rope_layers": _layer_numbers(),
    "no_rope_layer_interval": _size(4),
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
