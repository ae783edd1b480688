"""GPT-2 of transformers: its Conv1D layers become nn.Linear, and a table cuts these.

One Conv1D makes queries, keys and values. A rank has its heads of each of these, so that
layer becomes three.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.tensor.apply import TensorParallel, parallelize
from manyranks.parallel.tensor.cuts import Column, Row, Vocabulary, size


class QueryKeyValue(nn.Module):
    """Three layers for one input, and what they make end to end, as c_attn gives it."""

    def __init__(self, weight_IO: Tensor, bias_O: Tensor, learns: bool):
        super().__init__()
        parts = zip(weight_IO.chunk(3, 1), bias_O.chunk(3), strict=True)
        self.query, self.key, self.value = (linear(*each, learns) for each in parts)
        self.project = lambda x, *layers: [layer(x) for layer in layers]

    def forward(self, x_BSH: Tensor) -> Tensor:
        return torch.cat(self.project(x_BSH, self.query, self.key, self.value), -1)


def linear(weight_IO: Tensor, bias_O: Tensor, learns: bool) -> nn.Linear:
    """The nn.Linear that computes what a Conv1D with these does."""
    made = nn.Linear(*weight_IO.shape, device="meta")
    made.weight, made.bias = (
        nn.Parameter(each.detach().clone(memory_format=torch.contiguous_format), learns)
        for each in (weight_IO.T, bias_O)
    )
    return made


def with_linear(model: nn.Module) -> nn.Module:
    """Puts nn.Linear layers that compute the same in place of Conv1D; returns the model.

    Its weight is transposed. c_attn becomes c_attn.query, c_attn.key and c_attn.value.
    Make the optimizer afterwards.
    """
    named = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "Conv1D"]
    for name, layer in named:
        above, _, own = name.rpartition(".")
        learns = layer.weight.requires_grad
        made = QueryKeyValue if own == "c_attn" else linear
        setattr(model.get_submodule(above), own, made(layer.weight, layer.bias, learns))
    return model


def parallelize_gpt2(
    model: nn.Module, mesh: DeviceMesh | None, axis: str = "tp"
) -> TensorParallel:
    """As parallelize, with the table for a GPT2LMHeadModel, after with_linear.

    Raises ValueError as parallelize does, for cross-attention, and for attn_pdrop above 0.
    """
    config = model.config
    if config.add_cross_attention or config.attn_pdrop:
        raise ValueError(
            f"add_cross_attention={config.add_cross_attention}, "
            f"attn_pdrop={config.attn_pdrop}: cross-attention cannot be cut, and with "
            "dropout ranks would draw the same masks for different heads; set "
            "add_cross_attention=False and attn_pdrop=0"
        )
    heads = config.num_attention_heads
    names = [f"attn.c_attn.{name}" for name in ("query", "key", "value")]
    in_layer = {
        **dict.fromkeys(names, Column(heads)),
        "attn.c_proj": Row(heads=heads),
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
    table = {f"transformer.h.*.{name}": style for name, style in in_layer.items()}
    table |= {"transformer.wte": Vocabulary(), "lm_head": Vocabulary()}
    cut = parallelize(with_linear(model), mesh, table, axis)
    for block in model.transformer.h:
        block.attn.split_size //= size(cut.group)
    return cut
