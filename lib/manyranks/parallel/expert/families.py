"""Models of transformers with experts: theirs in the form that ExpertParallel deals out.

    take_over(model)                # Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss, …
    model = ExpertParallel(model, "model.layers.*.mlp.experts")

The router stays the model's own.
"""

from functools import partial

import torch
from torch import Tensor, nn

from manyranks.parallel.expert.experts import Experts, grouped, here
from manyranks.parallel.expert.routing import Routing

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


class OfTransformers(Experts):
    """The experts of one layer, with their weights' names: gate and up are in one tensor.

    forward takes tokens, each one's choices, and their gates, as transformers calls it.
    """

    kept = ("act_fn",)  # beside the parameters

    def __init__(self, theirs: nn.Module):
        nn.Module.__init__(self)
        self.hop = partial(here, experts=theirs.num_experts)
        for name in (*dict(theirs.named_parameters(recurse=False)), *self.kept):
            setattr(self, name, getattr(theirs, name))

    @property
    def gate(self) -> nn.Parameter:
        """Where ExpertParallel counts the experts."""
        return self.gate_up_proj

    def forward(self, x_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return super().forward(x_TH, Routing(experts_TK, gates_TK))

    def compute(self, x_RH: Tensor, counts: list[int]) -> Tensor:
        gate_RF, up_RF = grouped(x_RH, self.gate_up_proj, counts).chunk(2, dim=1)
        return grouped(self.act_fn(gate_RF) * up_RF, self.down_proj, counts)


class OfGptOss(OfTransformers):
    """Those of gpt-oss: weights transposed, with biases; gate and up take turns."""

    kept = ("alpha", "limit")

    def compute(self, x_RH: Tensor, counts: list[int]) -> Tensor:
        both_RF = self._linear(x_RH, "gate_up_proj", counts)
        gate_RF = both_RF[:, ::2].clamp(max=self.limit)
        up_RF = both_RF[:, 1::2].clamp(-self.limit, self.limit)
        swish_RF = gate_RF * torch.sigmoid(self.alpha * gate_RF)
        return self._linear((up_RF + 1) * swish_RF, "down_proj", counts)

    def _linear(self, x_RI: Tensor, name: str, counts: list[int]) -> Tensor:
        weight_EIO, bias_EO = getattr(self, name), getattr(self, f"{name}_bias")
        y_RO = grouped(x_RI, weight_EIO.mT, counts)
        rows_E = torch.tensor(counts, device=x_RI.device)
        bias_RO = bias_EO.repeat_interleave(rows_E, 0, output_size=len(x_RI))
        return y_RO + bias_RO.to(y_RO.dtype)


def take_over(model: nn.Module) -> list[str]:
    """Puts OfTransformers in the place of the model's experts, with the same weights.

    Returns their names. Raises ValueError where there are none of a known form, as in
    Llama 4, whose weights are transposed.
    """
    named = ((name, module, _kind(module)) for name, module in model.named_modules())
    found = {name: (module, kind) for name, module, kind in named if kind is not None}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts with the weights gate_up_proj and "
            "down_proj alone, [E, 2F, H] and [E, H, F], nor gpt-oss's: derive a class "
            "from parallel.expert.Experts for its own"
        )
    for name, (module, kind) in found.items():
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, kind(module))
    return list(found)


def _kind(module: nn.Module) -> type[OfTransformers] | None:
    """What takes this module's place, by its parameters' names and shapes; or None."""
    own = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    if not {*_WEIGHTS} <= own.keys():
        return None
    up, down = (tuple(own[name]) for name in _WEIGHTS)
    if own.keys() == {*_WEIGHTS} and hasattr(module, "act_fn"):
        return OfTransformers if down == (up[0], up[2], up[1] // 2) else None
    theirs = own.keys() == {*_WEIGHTS, *_BIASES} and hasattr(module, "limit")
    return OfGptOss if theirs and down == (up[0], up[2] // 2, up[1]) else None
