"""theory.huggingface: shapes from public config.json files, against the weights of the released checkpoints."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from manyranks.theory.huggingface import from_hf_config
from manyranks.theory.shapes import models


def llama_like(kind: str, hidden: int, ffn: int, layers: int, heads: int, vocab: int, **others) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    usual = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1}
    return {"model_type": kind, "vocab_size": vocab, "transformers_version": "4.40.0"} | sizes | usual | others


WINDOW = {"use_sliding_window": False, "sliding_window": 131072}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1} | {
    "attention_bias": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
QWEN_MOE = {"decoder_sparse_step": 1, "norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001}
CONFIGS = {
    "Llama-2-7b": llama_like("llama", 4096, 11008, 32, 32, 32000, architectures=["LlamaForCausalLM"], pretraining_tp=1),
    "Llama-3.2-1B": llama_like(
        *("llama", 2048, 8192, 16, 32, 128256),
        **{"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "mlp_bias": False, "attention_bias": False},
        rope_scaling={"factor": 32.0, "rope_type": "llama3"},
    ),
    "Mistral-7B-v0.1": llama_like("mistral", 4096, 14336, 32, 32, 32000, num_key_value_heads=8, sliding_window=4096),
    "Mixtral-8x7B-v0.1": llama_like(
        *("mixtral", 4096, 14336, 32, 32, 32000),
        **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12}
    | {"n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "activation_function": "gelu_new", "attn_pdrop": 0.1}
    | {"task_specific_params": {"text-generation": {"do_sample": True}}, "summary_type": "cls_index"},
    "pythia-6.9b": llama_like("gpt_neox", 4096, 16384, 32, 32, 50432, rotary_pct=0.25, tie_word_embeddings=False)
    | {"use_parallel_residual": True, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5},
    "Qwen2-7B": llama_like("qwen2", 3584, 18944, 28, 28, 152064, num_key_value_heads=4, tie_word_embeddings=False, **WINDOW)
    | {"max_window_layers": 28},
    "Qwen3-8B": llama_like("qwen3", 4096, 12288, 36, 32, 151936, num_key_value_heads=8, head_dim=128, max_window_layers=36)
    | {"use_sliding_window": False, "sliding_window": None, "attention_bias": False, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": llama_like("qwen3_moe", 2048, 6144, 48, 32, 151936, num_key_value_heads=4, head_dim=128, **QWEN_MOE)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []},
    "gemma-2b": llama_like("gemma", 2048, 16384, 18, 8, 256000, num_key_value_heads=1, head_dim=256, hidden_act="gelu"),
    "gemma-7b": llama_like("gemma", 3072, 24576, 28, 16, 256000, num_key_value_heads=16, head_dim=256),
    "gemma-2-9b": llama_like("gemma2", 3584, 14336, 42, 16, 256000, num_key_value_heads=8, head_dim=256, sliding_window=4096)
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
    "DeepSeek-V2-Lite": llama_like("deepseek_v2", 2048, 10944, 27, 16, 102400, num_key_value_heads=16, **DEEPSEEK)
    | {"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1}
    | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_group": 1, "topk_method": "greedy", "ep_size": 1},
    "DeepSeek-V3": llama_like("deepseek_v3", 7168, 18432, 61, 128, 129280, num_key_value_heads=128, **DEEPSEEK)
    | {"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8}
    | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "topk_group": 4, "topk_method": "noaux_tc"}
    | {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}, "auto_map": {}},
}
GLM = {"attention_bias": True, "num_nextn_predict_layers": 1, "head_dim": 128, "n_shared_experts": 1, "n_group": 1} | {
    **{"topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
}
CONFIGS |= {
    "Kimi-K2-Base": CONFIGS["DeepSeek-V3"]
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840}
    | {"num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827},
    "GLM-4.5": llama_like("glm4_moe", 5120, 12288, 92, 96, 151552, num_key_value_heads=8, use_qk_norm=True, **GLM)
    | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    "GLM-4.5-Air": llama_like("glm4_moe", 4096, 10944, 46, 96, 151552, num_key_value_heads=8, use_qk_norm=False, **GLM)
    | {"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    "gpt-oss-20b": llama_like("gpt_oss", 2880, 2880, 24, 64, 201088, num_key_value_heads=8, head_dim=64, swiglu_limit=7.0)
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128}
    | {"layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "initial_context_length": 4096},
    "gpt-oss-120b": llama_like("gpt_oss", 2880, 2880, 36, 64, 201088, swiglu_limit=7.0, attention_bias=True),
}
RELEASED = {  # parameters of the checkpoint, and the shape of theory.models
    "Llama-2-7b": (6_738_415_616, "llama2-7b"),
    "Llama-3.2-1B": (1_235_814_400, "llama3.2-1b"),
    "Mistral-7B-v0.1": (7_241_732_096, "mistral-7b"),
    "Mixtral-8x7B-v0.1": (46_702_792_704, "mixtral-8x7b"),
    "gpt2": (124_439_808, "gpt2"),
    "pythia-6.9b": (6_857_302_016, "pythia-6.9b"),
    "Qwen2-7B": (7_615_616_512, "qwen2-7b"),
    "Qwen3-8B": (8_190_735_360, "qwen3-8b"),
    "Qwen3-30B-A3B": (30_532_122_624, "qwen3-30b-a3b"),
    "gemma-2b": (2_506_172_416, "gemma-2b"),
    "gemma-7b": (8_537_680_896, "gemma-7b"),
    "gemma-2-9b": (9_241_705_984, "gemma2-9b"),
    "DeepSeek-V2-Lite": (15_706_484_224, "deepseek-v2-lite"),
    "DeepSeek-V3": (671_026_419_200, "deepseek-v3"),
    "Kimi-K2-Base": (1_026_408_232_448, "kimi-k2"),
    "GLM-4.5": (352_797_829_024, "glm-4.5"),  # as DeepSeek-V3, without the prediction module
    "GLM-4.5-Air": (106_852_251_264, "glm-4.5-air"),
    "gpt-oss-20b": (20_914_757_184, "gpt-oss-20b"),
    "gpt-oss-120b": (116_829_156_672, "gpt-oss-120b"),
}


@pytest.fixture
def shape_of(tmp_path):
    def write(config, name: str = "model"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        return from_hf_config(folder)

    return write


def test_every_configuration_has_a_count_to_compare_with():
    assert CONFIGS.keys() == RELEASED.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_gives_the_weights_of_the_released_checkpoint_and_the_named_shape_field_by_field(shape_of, name):
    shape, (parameters, named) = shape_of(CONFIGS[name], name), RELEASED[name]
    assert shape.parameters == parameters
    assert shape.name == name
    vocab = 256128 if name == "gemma-2-9b" else shape.vocab  # padded in the table
    assert replace(shape, name="", source="", vocab=vocab) == replace(models[named], name="", source="")


def test_a_file_and_its_folder_give_the_same_shape(shape_of, tmp_path):
    shape = shape_of(CONFIGS["gpt2"], "gpt2")
    assert from_hf_config(str(tmp_path / "gpt2" / "config.json")) == shape


def test_layers_with_a_window_are_counted(shape_of):
    assert shape_of(CONFIGS["gemma-2-9b"]).window_layers == 21
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 14
    assert shape_of(CONFIGS["gemma-2-9b"] | {"layer_types": kinds}).window_layers == 14
    windowed = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 20}
    shape = shape_of(CONFIGS["Qwen2-7B"] | windowed)
    assert (shape.window, shape.window_layers) == (1024, 8)
    # The class's default where it is left out; null where there is none.
    mistral = {key: value for key, value in CONFIGS["Mistral-7B-v0.1"].items() if key != "sliding_window"}
    assert shape_of(mistral).window == 4096
    assert shape_of(mistral | {"sliding_window": None}).window == 0


def test_heads_of_their_own_size_need_not_divide_the_hidden_size(shape_of):
    nemo = llama_like("mistral", 5120, 14336, 40, 32, 131072, num_key_value_heads=8, head_dim=128, sliding_window=None)
    assert shape_of(nemo).parameters == 12_247_782_400  # Mistral-Nemo-Base-2407
    with pytest.raises(ValueError, match="num_attention_heads=48 does not divide hidden_size=5120: give head_dim"):
        shape_of(nemo | {"num_attention_heads": 48, "head_dim": None})


def test_dense_layers_of_qwen_may_be_the_first_ones(shape_of):
    config = CONFIGS["Qwen3-30B-A3B"]
    assert shape_of(config | {"mlp_only_layers": [0, 1]}).dense_layers == 2
    with pytest.raises(ValueError, match=r"mlp_only_layers=\[5\]"):
        shape_of(config | {"mlp_only_layers": [5]})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama-2-7b", {"model_type": "lama"}, "model_type='lama': did you mean 'llama'"),
        ("Llama-2-7b", {"model_type": None}, "model_type=None: choose from llama"),
        ("Llama-2-7b", {"model_type": "qwen3_next"}, "model_type='qwen3_next': its layers have Gated DeltaNet"),
        ("Llama-2-7b", {"model_type": "nemotron_h"}, "model_type='nemotron_h': its layers have Mamba-2"),
        ("Llama-2-7b", {"model_type": "deepseek_v4"}, "model_type='deepseek_v4': its layers have attention to compressed keys"),
        ("Llama-2-7b", {"model_type": ["llama"]}, "model_type="),
        ("Llama-2-7b", {"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*'LlamaForCausalLM'"),
        ("Llama-2-7b", {"num_key_value_head": 8}, "num_key_value_head=8: unknown.*did you mean 'num_key_value_heads'"),
        ("Llama-2-7b", {"rope_thetta": 1e4}, "rope_thetta=.*did you mean 'rope_theta'"),
        ("Llama-2-7b", {"num_experts": 8}, "num_experts=8: unknown"),
        ("Llama-2-7b", {"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
        ("Llama-2-7b", {"num_attention_heads": 24}, "num_attention_heads=24 does not divide hidden_size=4096: give"),
        ("Llama-2-7b", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ("Llama-2-7b", {"tie_word_embeddings": None}, "tie_word_embeddings=None: must be true or false"),
        ("Llama-2-7b", {"hidden_size": 4096.0}, "hidden_size=4096.0: must be a whole number, 1 or more"),
        ("Llama-2-7b", {"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number, 1 or more"),
        ("Llama-2-7b", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("Llama-2-7b", {"attention_bias": True}, "attention_bias=True, mlp_bias=False"),
        ("Llama-2-7b", {"is_encoder_decoder": True}, "is_encoder_decoder=True: must be false"),
        ("gpt2", {"n_head": 7}, "n_head=7 does not divide n_embd=768$"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True: must be false"),
        ("gpt2", {"attn_pdrop": 1.5}, "attn_pdrop=1.5: must be a number from 0 to 1"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("pythia-6.9b", {"attention_bias": False}, "attention_bias=False: must be true"),
        ("pythia-6.9b", {"num_attention_heads": 24}, "num_attention_heads=24 does not divide hidden_size=4096$"),
        ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: a token uses 1 to num_local_experts=8"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: must be 1"),
        ("gemma-2-9b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=42"),
        ("gemma-2-9b", {"layer_types": ["linear_attention"] * 42}, "layer_types=.*must be a list of"),
        ("DeepSeek-V3", {"first_k_dense_replace": 62}, "first_k_dense_replace=62: the model has num_hidden_layers=61"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group=7 does not divide n_routed_experts=256"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group=9: there are n_group=8"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2: must be 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(shape_of, name, changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of(CONFIGS[name] | changes)


@pytest.mark.parametrize(
    ("name", "key"),
    [("Llama-2-7b", "hidden_size"), ("gpt2", "n_layer"), ("Qwen2-7B", "num_key_value_heads"), ("DeepSeek-V3", "q_lora_rank")],
)
def test_a_missing_key_is_named(shape_of, name, key):
    with pytest.raises(ValueError, match=f"{key} is missing: must be a whole number, 1 or more"):
        shape_of({other: value for other, value in CONFIGS[name].items() if other != key})


def test_a_dictionary_and_a_configuration_of_transformers_count_as_its_file(shape_of):
    config = CONFIGS["Llama-3.2-1B"]
    for given in (config, SimpleNamespace(to_dict=lambda: config)):
        assert replace(from_hf_config(given), name="model", source="") == replace(shape_of(config), source="")
    with pytest.raises(ValueError, match=r"^the configuration: hidden_size is missing"):
        from_hf_config({key: value for key, value in config.items() if key != "hidden_size"})


def test_what_transformers_5_writes_counts_as_what_4_wrote(shape_of):
    qwen = dict(CONFIGS["Qwen3-30B-A3B"])
    new = {**qwen, "num_local_experts": qwen.pop("num_experts")}
    assert shape_of(qwen | {"num_local_experts": 128}) == shape_of(new) == shape_of(CONFIGS["Qwen3-30B-A3B"])
    with pytest.raises(ValueError, match=r"'num_experts': 128, 'num_local_experts': 64.*under one name or both"):
        shape_of(CONFIGS["Qwen3-30B-A3B"] | {"num_local_experts": 64})
    with pytest.raises(ValueError, match="must be one whole number"):
        shape_of(qwen)
    lite = CONFIGS["DeepSeek-V2-Lite"]
    assert shape_of(lite | {"mlp_bias": False}) == shape_of(lite)


def test_what_is_not_a_configuration_is_refused(shape_of, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        shape_of("hidden_size: 4096")
    with pytest.raises(ValueError, match="must hold a JSON object, has a list"):
        shape_of("[]")
    with pytest.raises(FileNotFoundError, match=r"nothing"):
        from_hf_config(tmp_path / "nothing")


def test_biases_on_all_linear_layers_of_a_llama_are_counted(shape_of):
    plain, biased = (shape_of(CONFIGS["Llama-2-7b"] | {"attention_bias": flag, "mlp_bias": flag}) for flag in (False, True))
    assert biased.parameters - plain.parameters == 32 * (4 * 4096 + 2 * 11008 + 4096)


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
MADE = {  # class of the configuration -> what is not its default
    "OPTConfig": {**SMALL, "ffn_dim": 96},
    "BloomConfig": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    **{f"{name}Config": {"num_hidden_layers": 3} for name in ("Llama", "GPTNeoX", "Mixtral", "Mistral")},
    **{f"{name}Config": {"num_hidden_layers": 3} for name in ("Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2")},
    "GPT2Config": {"n_layer": 3},
    "DeepseekV3Config": {"num_hidden_layers": 4, "num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize("name", MADE)
def test_parameters_are_as_many_as_transformers_makes(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name.partition(",")[0])(**MADE[name])
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    shape = from_hf_config(config)
    in_buffers = shape.experts * (shape.layers - shape.dense_layers) * name.startswith("Deepseek")  # its routers' biases
    assert shape.parameters - in_buffers == sum(p.numel() for p in made.parameters())
