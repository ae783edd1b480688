"""The one table of layers' names: the models whose layers are cut, and how.

    model = parallelize_transformers(LlamaForCausalLM(config), mesh)

Routers, experts and norms are whole on every rank.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor import checks
from manyranks.parallel.tensor.apply import TensorParallel, group_of, parallelize
from manyranks.parallel.tensor.cuts import Column, Row, Style, Vocabulary, size
from manyranks.parallel.tensor.layers import gather_in
from manyranks.parallel.wrappers import saves

# By where a model has its layers: what in them makes queries, keys and so on. No model has
# all of them; one layer may make several, end to end.
LAYERS = {
    "model.layers.*": {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "query, key, value": "self_attn.qkv_proj",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "gate, up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    },
    "transformer.h.*": {
        "query, key, value": "attn.c_attn",
        "output": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    "layers.*": {  # the course's own
        "query": "attention.query",
        "key": "attention.key",
        "value": "attention.value",
        "output": "attention.output",
        "gate": "mlp.gate",
        "up": "mlp.up",
        "down": "mlp.down",
    },
}
LIKE_LLAMA = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
LIKE_LLAMA += ("phi3", "glm4")


def in_layers(
    layers: str, has: Collection[str], heads: int, kv_heads: int, entered: bool = False
) -> dict[str, Style]:
    """Makes the table of a model's layers.

    layers: the pattern of their names, as in LAYERS
    has: the parts that they have, in words of LAYERS
    heads, kv_heads: of attention, in the whole model
    entered: whether attention and MLP gather their input, and not the layers in them
    """
    column = partial(Column, entered=entered)
    styles = {
        **{"query": column(heads), "key": column(kv_heads), "value": column(kv_heads)},
        "query, key, value": column((heads, kv_heads, kv_heads)),
        "output": Row(heads),
        **{"gate": column(), "up": column(), "gate, up": column(parts=2), "down": Row()},
    }
    named = LAYERS[layers].items()
    return {f"{layers}.{name}": styles[what] for what, name in named if what in has}


def parallelize_transformers(
    model: nn.Module,
    mesh: DeviceMesh | None,
    axis: str = "tp",
    sequence_parallel: bool = False,
    example: bool | Mapping[str, Any] = True,
) -> TensorParallel:
    """Cuts a causal language model of transformers as parallelize does, with its table.

    Where t exceeds the key/value heads, each rank has one, and a copy of it is on others.
    GPT-2's layers become nn.Linear first: see with_linear.
    sequence_parallel: between attention and MLP each rank has S/t tokens. It's for dense
    models without windows whose attention is "sdpa", called without an attention mask.
    example: what the model is called with before it's cut and after, as in parallelize;
    True for a few tokens, False for none. It takes a forward and a backward pass of each,
    and for a moment memory for the whole model's gradients.
    Raises ValueError as parallelize does, for a model_type that is neither in LIKE_LLAMA
    nor gpt2, for dropout in attention, and for a model that sequence_parallel is not for.
    """
    config = getattr(model, "config", None)
    if (kind := getattr(config, "model_type", None)) not in (*LIKE_LLAMA, "gpt2"):
        raise ValueError(
            f"model_type={kind!r}: there are tables for {', '.join(LIKE_LLAMA)} and gpt2; "
            "write one for another model, and give it to parallelize"
        )
    _check(model)
    group = group_of(mesh, axis)
    if kind == "gpt2":
        with_linear(model)
    table = styles_of(model, entered=sequence_parallel)
    if sequence_parallel and (why := _why_not(model, table)):
        raise ValueError(f"sequence_parallel=True: {why}; leave it out")
    if example is True:
        tokens = torch.arange(8 * size(group), device=next(model.parameters()).device)
        example = {"input_ids": tokens[None] % config.vocab_size, "use_cache": False}
    whole = checks.Whole(model, example, group)
    cut = parallelize(model, mesh, table, axis, False, sequence_parallel=sequence_parallel)
    for name, module in model.named_modules() if size(group) > 1 else ():
        _count_own_heads(module, config, size(group))
        if sequence_parallel and name.endswith((".self_attn", ".mlp")):
            module.register_forward_pre_hook(_gathers(group), with_kwargs=True)
        if sequence_parallel and name.endswith(".rotary_emb"):
            module.register_forward_pre_hook(_whole(group), with_kwargs=True)
    whole.check(cut)
    return cut


def styles_of(model: nn.Module, entered: bool = False) -> dict[str, Style]:
    """Makes the table of a whole model. An embedding with a padding row stays whole.

    entered: as in in_layers.
    """
    config, names = model.config, {module: name for name, module in model.named_modules()}
    layers = next((at for at in LAYERS if any(map(_in(at), names.values()))), None)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} has no {' or '.join(LAYERS)}: give the model itself, "
            "without what is around it, or write a table for parallelize"
        )
    found = {_in(layers)(name) for name in names.values()}
    has = [what for what, name in LAYERS[layers].items() if name in found]
    key = getattr(config, "num_key_value_heads", config.num_attention_heads)
    table = in_layers(layers, has, config.num_attention_heads, key, entered)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None
    if plain:
        table[names[embedding]] = Vocabulary()
    if plain or head.weight is not embedding.weight:
        table[names[head]] = Vocabulary()
    return table


def _in(layers: str) -> Callable[[str], str]:
    """Says what a module's name is in its layer; empty for one that's in none."""
    pattern = re.compile(re.escape(layers).replace(r"\*", r"\d+") + r"\.(.+)")
    return lambda name: found[1] if (found := pattern.fullmatch(name)) else ""


def with_linear(model: nn.Module) -> nn.Module:
    """Puts nn.Linear layers that compute the same in place of Conv1D; returns the model.

    Its weight is transposed, and in what save_pretrained writes it's as it was. Make the
    optimizer afterwards.
    """
    named = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "Conv1D"]
    for name, layer in named:
        above, _, own = name.rpartition(".")
        made = nn.Linear(*layer.weight.shape, device="meta")
        for which, tensor in (("weight", layer.weight.T), ("bias", layer.bias)):
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            theirs = getattr(layer, which)
            setattr(made, which, nn.Parameter(copied, theirs.requires_grad))
            checks.refuse_steps(theirs, f"{name}.{which}")
        made.training = layer.training
        setattr(model.get_submodule(above), own, made)
    if named:
        saves(model, partial(_as_conv1d, {f"{name}.weight" for name, _ in named}))
    return model


def _as_conv1d(
    weights: set[str], model: nn.Module, state: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    state = (model.state_dict() if state is None else state).items()
    return {name: x.T.contiguous() if name in weights else x for name, x in state}


def _check(model: nn.Module) -> None:
    config = model.config
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no head that makes logits: give a causal language "
            "model, …ForCausalLM, or write a table for parallelize"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError("add_cross_attention=True: cross-attention cannot be cut")
    for name in ("attention_dropout", "attn_pdrop"):
        if rate := getattr(config, name, 0):
            raise ValueError(
                f"{name}={rate}: ranks would draw the same masks for different heads; "
                f"set {name}=0 before the model is made"
            )


def _count_own_heads(module: nn.Module, config: Any, t: int) -> None:
    """Attention that counts heads counts this rank's."""
    if hasattr(module, "num_key_value_groups"):
        query, key = config.num_attention_heads, config.num_key_value_heads
        module.num_key_value_groups = query // t // max(1, key // t)
    if hasattr(module, "split_size"):  # GPT-2's
        module.split_size //= t
    if hasattr(module, "qkv_proj"):  # Phi-3's reads these where it takes the three apart
        module.num_key_value_heads //= t
        module.config = copy.copy(config)
        module.config.num_attention_heads //= t


def _why_not(model: nn.Module, table: dict[str, Style]) -> str:
    """Says what keeps this model's ranks from having S/t tokens between its parts."""
    config, layers = model.config, getattr(model.base_model, "layers", ())
    if config.model_type == "gpt2":
        return "GPT-2 adds positions of all tokens to its embedding's"
    if any(hasattr(layer.mlp, "experts") for layer in layers):
        return f"{config.model_type} has experts, which need all tokens in one place"
    if getattr(config, "sliding_window", None):
        return "transformers makes the mask of a window for a rank's own tokens only"
    if config._attn_implementation != "sdpa":
        return f"the attention is {config._attn_implementation!r}, not 'sdpa'"
    own = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is own]
    if not any(isinstance(table.get(name), Vocabulary) for name in names):
        return "the embedding is scaled or has a padding row, so that it stays whole"
    return ""


def _gathers(group: Group):
    """Attention and MLP get all tokens, from the shards of the group's ranks."""

    def hook(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        if named.get("attention_mask") is not None:
            raise ValueError(
                "attention_mask with sequence_parallel=True: transformers makes it for a "
                "rank's own tokens, and unasked where the whole model is compiled; call "
                "the model without one, compile its layers, or leave the option out"
            )
        if "hidden_states" in named:
            named = named | {"hidden_states": gather_in(named["hidden_states"], group)}
            return inputs, named
        return (gather_in(inputs[0], group), *inputs[1:]), named

    return hook


def _whole(group: Group):
    """Makes rotary positions cover all tokens, for transformers counts a rank's own."""

    def hook(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        x_BsH, positions_Bs = (*inputs, named.get("position_ids"))[:2]
        if positions_Bs.shape[1] == x_BsH.shape[1]:  # nobody gave all tokens' positions
            tokens = size(group) * positions_Bs.shape[1]
            positions_Bs = torch.arange(tokens, device=positions_Bs.device)[None]
        return (x_BsH,), {"position_ids": positions_Bs}

    return hook
