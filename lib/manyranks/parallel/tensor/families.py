"""Models of transformers: the table is made for those whose layers have Llama's names.

    model = parallelize_transformers(LlamaForCausalLM(config), mesh)

Routers, experts and norms are whole on every rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.tensor.apply import TensorParallel, parallelize
from manyranks.parallel.tensor.cuts import Column, Group, Row, Style, Vocabulary, size
from manyranks.parallel.tensor.gpt2 import parallelize_gpt2
from manyranks.parallel.tensor.layers import gather_in

LIKE_LLAMA = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")


def parallelize_transformers(
    model: nn.Module,
    mesh: DeviceMesh | None,
    axis: str = "tp",
    sequence_parallel: bool = False,
) -> TensorParallel:
    """As parallelize, with the table for a causal language model of transformers.

    Where t exceeds the key/value heads, each rank has one, and a copy of it is on others.
    GPT-2's layers become nn.Linear first: see gpt2.with_linear.
    sequence_parallel: between attention and MLP each rank has S/t tokens. It's for dense
    models without windows whose attention is "sdpa", called without an attention mask.
    Raises ValueError as parallelize does, for a model_type that is neither in LIKE_LLAMA
    nor gpt2, and for a model that sequence_parallel is not for.
    """
    config = getattr(model, "config", None)
    if (kind := getattr(config, "model_type", None)) not in (*LIKE_LLAMA, "gpt2"):
        raise ValueError(
            f"model_type={kind!r}: there are tables for {', '.join(LIKE_LLAMA)} and gpt2; "
            "write one for another model, and give it to parallelize"
        )
    if kind == "gpt2":
        if sequence_parallel:
            raise ValueError(
                "sequence_parallel=True: GPT-2 adds positions of all tokens to its "
                "embedding's; leave it out"
            )
        return parallelize_gpt2(model, mesh, axis)
    table = styles_of(model, entered=sequence_parallel)
    if sequence_parallel and (why := _why_not(model, table)):
        raise ValueError(f"sequence_parallel=True: {why}; leave it out")
    cut = parallelize(model, mesh, table, axis, sequence_parallel=sequence_parallel)
    query, key = config.num_attention_heads, config.num_key_value_heads
    t = size(cut.group)
    for name, module in model.named_modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = query // t // max(1, key // t)
        if not sequence_parallel or t == 1:
            continue
        if name.endswith((".self_attn", ".mlp")):
            module.register_forward_pre_hook(_gathers(cut.group), with_kwargs=True)
        if name.endswith(".rotary_emb"):
            module.register_forward_pre_hook(_whole(cut.group), with_kwargs=True)
    return cut


def styles_of(model: nn.Module, entered: bool = False) -> dict[str, Style]:
    """The table, by names of its layers. An embedding with a padding row stays whole.

    entered: whether attention and MLP gather their input, and not the layers in them.
    """
    query, key = model.config.num_attention_heads, model.config.num_key_value_heads
    in_layer: dict[str, Style] = {
        "self_attn.q_proj": Column(query, entered=entered),
        "self_attn.k_proj": Column(key, entered=entered),
        "self_attn.v_proj": Column(key, entered=entered),
        "self_attn.o_proj": Row(heads=query),
    }
    if any(name.endswith(".mlp.gate_proj") for name, _ in model.named_modules()):
        names = ("mlp.gate_proj", "mlp.up_proj")
        in_layer |= dict.fromkeys(names, Column(entered=entered))
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


def _why_not(model: nn.Module, table: dict[str, Style]) -> str:
    """What keeps this model's ranks from having S/t tokens between its parts."""
    config, layers = model.config, model.model.layers
    if not all(hasattr(layer.mlp, "gate_proj") for layer in layers):
        return f"{config.model_type} has experts, which need all tokens in one place"
    if getattr(config, "sliding_window", None):
        return "transformers makes the mask of a window for a rank's own tokens only"
    if config._attn_implementation != "sdpa":
        return f"the attention is {config._attn_implementation!r}, not 'sdpa'"
    if not any(isinstance(table.get(name), Vocabulary) for name in _embeddings(model)):
        return "the embedding is scaled or has a padding row, so that it stays whole"
    return ""


def _embeddings(model: nn.Module) -> list[str]:
    own = model.get_input_embeddings()
    return [name for name, module in model.named_modules() if module is own]


def _gathers(group: Group):
    """Attention and MLP get all tokens, from the shards of the group's ranks."""

    def hook(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        if named.get("attention_mask") is not None:
            raise ValueError(
                "attention_mask with sequence_parallel=True: transformers makes it for a "
                "rank's own tokens; call the model without one, or leave the option out"
            )
        if "hidden_states" in named:
            named = named | {"hidden_states": gather_in(named["hidden_states"], group)}
            return inputs, named
        return (gather_in(inputs[0], group), *inputs[1:]), named

    return hook


def _whole(group: Group):
    """Rotary positions are those of all tokens, for transformers counts a rank's own."""

    def hook(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        x_BsH, positions_Bs = (*inputs, named.get("position_ids"))[:2]
        if positions_Bs.shape[1] == x_BsH.shape[1]:  # nobody gave those of all tokens
            positions_Bs = _counted(positions_Bs, size(group))
        return (x_BsH,), {"position_ids": positions_Bs}

    return hook


def _counted(positions_Bs: Tensor, t: int) -> Tensor:
    tokens = t * positions_Bs.shape[1]
    return torch.arange(tokens, device=positions_Bs.device)[None]
