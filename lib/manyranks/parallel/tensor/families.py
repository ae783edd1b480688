"""Models of transformers whose layers have Llama's names: the table is made for them.

    model = parallelize_transformers(LlamaForCausalLM(config), mesh)

Routers, experts and norms are whole on every rank.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.tensor.apply import TensorParallel, parallelize
from manyranks.parallel.tensor.mappings import size
from manyranks.parallel.tensor.styles import Column, Row, Style, Vocabulary

LIKE_LLAMA = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")


def parallelize_transformers(
    model: nn.Module, mesh: DeviceMesh | None, axis: str = "tp"
) -> TensorParallel:
    """As parallelize, with the table for a causal language model of transformers.

    Where t exceeds the key/value heads, each rank has one, and a copy of it is on others.
    Raises ValueError as parallelize does, and for a model_type that is not in LIKE_LLAMA.
    """
    config = getattr(model, "config", None)
    if (kind := getattr(config, "model_type", None)) not in LIKE_LLAMA:
        raise ValueError(
            f"model_type={kind!r}: there are tables for {', '.join(LIKE_LLAMA)}; write one "
            "for another model, and give it to parallelize"
        )
    cut = parallelize(model, mesh, styles_of(model), axis)
    query, key = config.num_attention_heads, config.num_key_value_heads
    t = size(cut.group)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = query // t // max(1, key // t)
    return cut


def styles_of(model: nn.Module) -> dict[str, Style]:
    """The table, by names of its layers. An embedding with a padding row stays whole."""
    query, key = model.config.num_attention_heads, model.config.num_key_value_heads
    in_layer: dict[str, Style] = {
        "self_attn.q_proj": Column(heads=query),
        "self_attn.k_proj": Column(heads=key),
        "self_attn.v_proj": Column(heads=key),
        "self_attn.o_proj": Row(heads=query),
    }
    if any(name.endswith(".mlp.gate_proj") for name, _ in model.named_modules()):
        in_layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), Column())
        in_layer["mlp.down_proj"] = Row()
    table = {f"model.layers.*.{name}": style for name, style in in_layer.items()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None
    names = {module: name for name, module in model.named_modules()}
    if plain:
        table[names[embedding]] = Vocabulary()
    if plain or head.weight is not embedding.weight:
        table[names[head]] = Vocabulary()
    return table
