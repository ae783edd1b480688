"""Named model shapes, `models["llama3-405b"]`: sizes from published tables and from the models' own configurations.

tables/models.csv has most of them. The others are in the tables of the papers whose runs theory predicts. `hybrids` has
models with layers that ModelShape has no words for.
"""

import functools
from collections.abc import Iterator

from manyranks.theory import tables
from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.hybrid import CompressedAttention, DeltaNet, HybridShape, Mamba2, Mixer
from manyranks.theory.names import Named, UnknownName, lazily

# Fields that models of the family "gpt" share, unless their row says otherwise.
_GPT = {"gated": False, "tied": True, "norm": "layernorm", "bias": True, "positions": 2048, "dropout": True}
_SIZES = ("name", "layers", "hidden", "ffn", "heads", "vocab", "kv_heads", "head_size", "source")


@functools.cache
def _models() -> Named:
    found = (*_llama3(), *map(_of_row, tables.rows("models")), _deepseek_v3(), *_megatron())
    return _Models("model", {shape.name: shape for shape in found})


class _Models(Named):
    def __missing__(self, name: object):
        if name in _hybrids():
            fix = f"theory.hybrids[{name!r}] counts its parameters; its layers' time and memory aren't modeled"
            raise UnknownName(f"model {name!r} is a hybrid: {fix}")
        return super().__missing__(name)


@functools.cache
def _hybrids() -> Named:
    found = {}
    for row in tables.rows("hybrids"):
        mixers = tuple(_mixer(*mixer.split()) for mixer in row["mixers"].split(","))
        layers, streams = _integers(row, "mlp_layers streams")
        gate = tables.value(row["output_gate"])
        found[row["name"]] = HybridShape(_of_row(row), mixers, layers, gate, streams, row["source"])
    return Named("hybrid", found)


def _mixer(layers: str, kind: str, sizes: str) -> tuple[Mixer, int]:
    kinds = {"deltanet": DeltaNet, "mamba2": Mamba2, "compressed": CompressedAttention}
    return kinds[kind](*map(int, sizes.split("/"))), int(layers)


__getattr__ = lazily(__name__, models=_models, hybrids=_hybrids)


def _of_row(row: dict[str, str]) -> ModelShape:
    """Reads a shape. latent: five sizes between slashes; `more`: other fields of ModelShape."""
    more = {name: tables.value(text) for name, text in tables.pairs(row["more"]).items()}
    if sizes := more.get("latent"):
        more["latent"] = LatentAttention(*map(int, sizes.split("/")))
    given = {name: tables.value(row[name]) for name in _SIZES if row[name]}
    return ModelShape(**given | (_GPT if row["family"] == "gpt" else {}) | more)


def _llama3() -> Iterator[ModelShape]:
    for row in tables.rows("llama3_architecture"):
        sizes = _integers(row, "layers hidden ffn heads vocab_released kv_heads")
        yield ModelShape(f"llama3-{row['model'].lower()}", *sizes, source=row["source"])


def _deepseek_v3() -> ModelShape:
    row = {line["key"]: line["value"] for line in tables.rows("deepseek_v3_config")}
    experts = ("top_k", "expert_ffn", "shared_experts", "dense_layers", "expert_groups", "groups_per_token", "mtp_depth")
    return ModelShape(
        "deepseek-v3",
        *_integers(row, "layers hidden dense_ffn attention_heads vocab"),
        experts=int(row["routed_experts"]),
        latent=LatentAttention(*_integers(row, "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")),
        router_bias=True,
        source="arXiv 2412.19437 sec. 4.2; DeepSeek-V3 inference/configs/config_671B.json",
        **{name: int(row[name]) for name in experts},
    )


def _megatron() -> Iterator[ModelShape]:
    named = [(row["shape"], row) for row in tables.rows("megatron_sc21_table1")]
    named += [(f"megatron-{row['model'].split()[0].lower()}", row) for row in tables.rows("korthikanti_configs")]
    note = "; vocabulary not printed: 32000, tied, gives the paper's parameter counts"
    for row in tables.rows("zb_models"):
        named.append((f"zb-{row['model'].lower()}", row | {"vocab": "32000", "source": row["source"] + note}))
    for name, row in named:
        layers, hidden, heads, vocab, positions = _integers(row, "layers hidden heads vocab seq")
        gpt = _GPT | {"positions": positions, "source": row["source"]}
        yield ModelShape(name, layers, hidden, 4 * hidden, heads, vocab, **gpt)


def _integers(row: dict[str, str], columns: str) -> list[int]:
    return [int(row[column]) for column in columns.split()]
