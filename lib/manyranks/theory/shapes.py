"""Named model shapes, `models["llama3-405b"]`: sizes from published tables and from the models' own configurations."""

import functools
from collections.abc import Iterator

from manyranks.theory import published
from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.names import Named


@functools.cache
def _models() -> Named:
    families = (
        _llama3,
        _llama,
        _mistral,
        _deepseek,
        _qwen,
        _gemma,
        _gemma2,
        _gpt,
        _mpt,
        _megatron,
        _korthikanti,
        _zero_bubble,
        _palm,
    )
    return Named("model", {shape.name: shape for family in families for shape in family()})


def __getattr__(name: str):
    # Read from package data on first use, so that importing the theory reads no file.
    if name == "models":
        return _models()
    raise AttributeError(f"module 'manyranks.theory.shapes' has no attribute {name!r}")


def _llama3() -> Iterator[ModelShape]:
    for row in published.rows("llama3_architecture"):
        layers, hidden, ffn, heads, vocab, kv_heads = _integers(row, "layers hidden ffn heads vocab_released kv_heads")
        yield ModelShape(f"llama3-{row['model'].lower()}", layers, hidden, ffn, heads, vocab, kv_heads, source=row["source"])
    source = "Llama-3.2 config.json"
    yield ModelShape("llama3.2-1b", 16, 2048, 8192, 32, 128256, kv_heads=8, tied=True, source=source)
    yield ModelShape("llama3.2-3b", 28, 3072, 8192, 24, 128256, kv_heads=8, tied=True, source=source)


def _llama() -> Iterator[ModelShape]:
    yield ModelShape("llama-65b", 80, 8192, 22016, 64, 32000, source="arXiv 2302.13971 Table 2; config.json")
    source = "arXiv 2307.09288 Table 1; Llama-2 config.json"
    yield ModelShape("llama2-7b", 32, 4096, 11008, 32, 32000, source=source)
    yield ModelShape("llama2-13b", 40, 5120, 13824, 40, 32000, source=source)
    yield ModelShape("llama2-70b", 80, 8192, 28672, 64, 32000, kv_heads=8, source=source)
    yield ModelShape("yi-34b", 60, 7168, 20480, 56, 64000, kv_heads=8, source="arXiv 2403.04652 Table 1; Yi-34B config.json")


def _mistral() -> Iterator[ModelShape]:
    source = "arXiv 2310.06825 Table 1; Mistral-7B-v0.1 config.json"
    yield ModelShape("mistral-7b", 32, 4096, 14336, 32, 32000, kv_heads=8, window=4096, source=source)
    experts = {"kv_heads": 8, "experts": 8, "top_k": 2}
    source = "arXiv 2401.04088 Table 1; Mixtral-8x7B-v0.1 config.json"
    yield ModelShape("mixtral-8x7b", 32, 4096, 14336, 32, 32000, expert_ffn=14336, source=source, **experts)
    source = "Mixtral-8x22B-v0.1 config.json"
    yield ModelShape("mixtral-8x22b", 56, 6144, 16384, 48, 32000, expert_ffn=16384, source=source, **experts)


def _deepseek() -> Iterator[ModelShape]:
    row = {line["key"]: line["value"] for line in published.rows("deepseek_v3_config")}
    latent = LatentAttention(*_integers(row, "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"))
    experts = ("top_k", "expert_ffn", "shared_experts", "dense_layers", "expert_groups", "groups_per_token", "mtp_depth")
    yield ModelShape(
        "deepseek-v3",
        *_integers(row, "layers hidden dense_ffn attention_heads vocab"),
        experts=int(row["routed_experts"]),
        latent=latent,
        router_bias=True,
        source="arXiv 2412.19437 sec. 4.2; DeepSeek-V3 inference/configs/config_671B.json",
        **{name: int(row[name]) for name in experts},
    )
    groups = {"expert_groups": 8, "groups_per_token": 3}
    experts = {"experts": 160, "top_k": 6, "expert_ffn": 1536, "shared_experts": 2, "dense_layers": 1}
    source = "arXiv 2405.04434 sec. 3.1.2; DeepSeek-V2 config.json"
    yield ModelShape("deepseek-v2", 60, 5120, 12288, 128, 102400, latent=latent, source=source, **experts, **groups)
    experts |= {"experts": 64, "expert_ffn": 1408}
    latent = LatentAttention(0, 512, 128, 64, 128)
    source = "arXiv 2405.04434 appendix B; DeepSeek-V2-Lite config.json"
    yield ModelShape("deepseek-v2-lite", 27, 2048, 10944, 16, 102400, latent=latent, source=source, **experts)


def _qwen() -> Iterator[ModelShape]:
    source = "arXiv 2407.10671 Table 1; Qwen2 config.json"
    yield ModelShape("qwen2-7b", 28, 3584, 18944, 28, 152064, kv_heads=4, qkv_bias=True, source=source)
    yield ModelShape("qwen2-72b", 80, 8192, 29568, 64, 152064, kv_heads=8, qkv_bias=True, source=source)
    source = "arXiv 2505.09388 Tables 1 and 2; Qwen3 config.json"
    yield ModelShape("qwen3-8b", 36, 4096, 12288, 32, 151936, kv_heads=8, qk_norm=True, source=source)
    moe = {"kv_heads": 4, "head_size": 128, "qk_norm": True, "experts": 128, "top_k": 8}
    yield ModelShape("qwen3-30b-a3b", 48, 2048, 6144, 32, 151936, expert_ffn=768, source=source, **moe)
    yield ModelShape("qwen3-235b-a22b", 94, 4096, 12288, 64, 151936, expert_ffn=1536, source=source, **moe)


def _gemma() -> Iterator[ModelShape]:
    source = "arXiv 2403.08295 Table 1; Gemma config.json"
    yield ModelShape("gemma-2b", 18, 2048, 16384, 8, 256000, kv_heads=1, head_size=256, tied=True, source=source)
    yield ModelShape("gemma-7b", 28, 3072, 24576, 16, 256000, kv_heads=16, head_size=256, tied=True, source=source)


def _gemma2() -> Iterator[ModelShape]:
    sizes = {"2B": (26, 2304, 9216, 8, 4, 256), "9B": (42, 3584, 14336, 16, 8, 256), "27B": (46, 4608, 36864, 32, 16, 128)}
    vocab = 256128  # the report's embedding counts; the released configurations say 256000
    for model, (layers, hidden, ffn, heads, kv_heads, head_size) in sizes.items():
        yield ModelShape(
            f"gemma2-{model.lower()}",
            *(layers, hidden, ffn, heads, vocab, kv_heads, head_size),
            tied=True,
            norms_per_layer=4,
            window=4096,
            window_layers=layers // 2,
            source="arXiv 2408.00118 Tables 1 and 3; Gemma-2 config.json",
        )


def _gpt() -> Iterator[ModelShape]:
    gpt2 = "GPT-2 config.json"
    yield _gpt_shape("gpt2", 12, 768, 12, 50257, positions=1024, source=gpt2)
    yield _gpt_shape("gpt2-medium", 24, 1024, 16, 50257, positions=1024, source=gpt2)
    yield _gpt_shape("gpt2-large", 36, 1280, 20, 50257, positions=1024, source=gpt2)
    yield _gpt_shape("gpt2-xl", 48, 1600, 25, 50257, positions=1024, source=gpt2)
    source = "arXiv 2005.14165 Table 2.1; vocabulary of GPT-2"
    yield _gpt_shape("gpt3-175b", 96, 12288, 96, 50257, source=source)
    # Two rows of positions more than the context: the released weights start counting at 2.
    yield _gpt_shape("opt-175b", 96, 12288, 96, 50272, positions=2050, source="arXiv 2205.01068 Table 1; OPT config.json")
    plain = {"positions": 0, "dropout": False}
    source = "arXiv 2211.05100 Table 3; bloom config.json"  # positions are ALiBi: nothing to learn
    yield _gpt_shape("bloom-176b", 70, 14336, 112, 250880, embedding_norm=True, source=source, **plain)
    untied = plain | {"tied": False, "parallel_layers": True}
    yield _gpt_shape("gpt-neox-20b", 44, 6144, 64, 50432, source="arXiv 2204.06745 sec. 2; config.json", **untied)
    source = "arXiv 2304.01373 Table 1; pythia config.json"
    yield _gpt_shape("pythia-6.9b", 32, 4096, 32, 50432, source=source, **untied)
    yield _gpt_shape("pythia-12b", 36, 5120, 40, 50688, source=source, **untied)


def _mpt() -> Iterator[ModelShape]:
    sizes = {"760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32)}
    sizes |= {"13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}
    source = "mosaicml/llm-foundry scripts/train/yamls/pretrain"  # positions are learned: the table's parameter counts
    for model, (layers, hidden, heads) in sizes.items():
        yield _gpt_shape(f"mpt-{model}", layers, hidden, heads, 50368, dropout=False, source=source)


def _megatron() -> Iterator[ModelShape]:
    for row in published.rows("megatron_sc21_table1"):
        yield _megatron_shape(f"megatron-{row['params_B'].removesuffix('.0')}b", row)


def _korthikanti() -> Iterator[ModelShape]:
    for row in published.rows("korthikanti_configs"):
        yield _megatron_shape(f"megatron-{row['model'].split()[0].lower()}", row)


def _zero_bubble() -> Iterator[ModelShape]:
    for row in published.rows("zb_models"):
        note = "; vocabulary not printed: 32000, tied, gives the paper's parameter counts"
        row = row | {"vocab": "32000", "source": row["source"] + note}
        yield _megatron_shape(f"zb-{row['model'].lower()}", row)


def _palm() -> Iterator[ModelShape]:
    # Attention and MLP run side by side after one LayerNorm, which has no biases: as many numbers as an RMSNorm.
    yield ModelShape(
        "palm-540b",
        layers=118,
        hidden=18432,
        ffn=73728,
        heads=48,
        vocab=256000,
        kv_heads=1,
        head_size=256,
        tied=True,
        norms_per_layer=1,
        parallel_layers=True,
        source="arXiv 2204.02311 sec. 2 and Table 1",
    )


def _megatron_shape(name: str, row: dict[str, str]) -> ModelShape:
    layers, hidden, heads, vocab, positions = _integers(row, "layers hidden heads vocab seq")
    return _gpt_shape(name, layers, hidden, heads, vocab, positions=positions, source=row["source"])


def _gpt_shape(name: str, layers: int, hidden: int, heads: int, vocab: int, **others) -> ModelShape:
    gpt = {"gated": False, "tied": True, "norm": "layernorm", "bias": True, "positions": 2048, "dropout": True}
    return ModelShape(name, layers, hidden, 4 * hidden, heads, vocab, **(gpt | others))


def _integers(row: dict[str, str], columns: str) -> list[int]:
    return [int(row[column]) for column in columns.split()]
