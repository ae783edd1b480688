"""Models of transformers with experts: theirs in the form that ExpertParallel deals out.

    take_over(model)                                  # Mixtral, Qwen3-MoE, DeepSeek-V3, …
    model = ExpertParallel(model, "model.layers.*.mlp.experts")

The router stays the model's own.
"""

from functools import partial

from torch import Tensor, nn

from manyranks.parallel.expert.experts import Experts, grouped, here
from manyranks.parallel.expert.routing import Routing

_WEIGHTS = ("gate_up_proj", "down_proj")


class OfTransformers(Experts):
    """The experts of one layer, with their weights' names: gate and up are in one tensor.

    forward takes tokens, each one's choices, and their gates, as transformers calls it.
    """

    def __init__(self, theirs: nn.Module):
        nn.Module.__init__(self)
        self.hop = partial(here, experts=theirs.num_experts)
        for name in _WEIGHTS:
            setattr(self, name, getattr(theirs, name))
        self.act = theirs.act_fn

    @property
    def gate(self) -> nn.Parameter:
        """Where ExpertParallel counts the experts."""
        return self.gate_up_proj

    def forward(self, x_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return super().forward(x_TH, Routing(experts_TK, gates_TK))

    def compute(self, x_RH: Tensor, counts: list[int]) -> Tensor:
        gate_RF, up_RF = grouped(x_RH, self.gate_up_proj, counts).chunk(2, dim=1)
        return grouped(self.act(gate_RF) * up_RF, self.down_proj, counts)


def take_over(model: nn.Module) -> list[str]:
    """Puts OfTransformers in the place of the model's experts, with the same weights.

    Returns their names. Raises ValueError where there are none of this form, as in gpt-oss,
    whose experts have biases, or in Llama 4, whose weights are transposed.
    """
    found = {
        name: module for name, module in model.named_modules() if _is_like_ours(module)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts with the weights gate_up_proj and "
            "down_proj alone, [E, 2F, H] and [E, H, F]: derive a class from "
            "parallel.expert.Experts for its own"
        )
    for name, module in found.items():
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, OfTransformers(module))
    return list(found)


def _is_like_ours(module: nn.Module) -> bool:
    """Whether it has both weights alone, [E, 2F, H] and [E, H, F], and an activation."""
    own = dict(module.named_parameters(recurse=False))
    if own.keys() != set(_WEIGHTS) or not hasattr(module, "act_fn"):
        return False
    (e, both, hidden), down = own["gate_up_proj"].shape, own["down_proj"].shape
    return down == (e, hidden, both // 2)
