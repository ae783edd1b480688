"""Models of transformers with experts: theirs in the form that ExpertParallel deals out.

    take_over(model)                # Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss, …
    model = ExpertParallel(model, "model.layers.*.mlp.experts")

The router stays the model's own.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyranks.parallel.expert.dispatch import Experts, Routing, grouped, here

_WEIGHTS = {"gate_up_proj", "down_proj"}
_SCALES = 2.0 ** torch.arange(-2, 9, device="cpu")  # of tokens, so that clamps show


class OfTransformers(Experts):
    """The experts of one layer, with their weights' names: gate and up are in one tensor.

    forward takes tokens, each one's choices, and their gates, as transformers calls it.
    How gate and up become one is their own function, with its clamps.
    """

    sliced = None  # gate and up lie in one tensor, in each model in another order

    def __init__(self, theirs: nn.Module):
        nn.Module.__init__(self)
        self.hop = partial(here, experts=len(theirs.gate_up_proj))
        for name, part in (*theirs._parameters.items(), *theirs.named_children()):
            setattr(self, name, part)
        self.transposed = getattr(theirs, "is_transposed", False)
        shell = copy.copy(theirs)  # without the weights, which are this module's alone
        shell._parameters = {}
        self.gated = getattr(shell, "_apply_gate", self._gated)
        self.training = theirs.training

    @property
    def gate(self) -> nn.Parameter:
        """A parameter with one row per expert: ExpertParallel counts them."""
        return self.gate_up_proj

    def forward(self, x_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return super().forward(x_TH, Routing(experts_TK, gates_TK))

    def compute(self, x_RH: Tensor, counts: list[int]) -> Tensor:
        both_RF = self._linear(x_RH, "gate_up_proj", counts)
        return self._linear(self.gated(both_RF), "down_proj", counts)

    def _gated(self, both_RF: Tensor) -> Tensor:
        gate_RF, up_RF = both_RF.chunk(2, dim=1)
        return self.act_fn(gate_RF) * up_RF

    def _linear(self, x_RI: Tensor, name: str, counts: list[int]) -> Tensor:
        weight = getattr(self, name)
        y_RO = grouped(x_RI, weight.mT if self.transposed else weight, counts)
        if (bias_EO := getattr(self, f"{name}_bias", None)) is None:
            return y_RO
        rows_E = torch.tensor(counts, device=x_RI.device)
        bias_RO = bias_EO.repeat_interleave(rows_E, 0, output_size=len(x_RI))
        return y_RO + bias_RO.to(y_RO.dtype)


def take_over(model: nn.Module) -> list[str]:
    """Puts OfTransformers in the place of the model's experts, with the same weights.

    Returns their names. First both run on random tokens and random weights, layer by layer;
    this takes memory for one layer's weights and gradients.
    Raises ValueError, and changes nothing, where there are none with the weights
    gate_up_proj and down_proj, or where outputs or gradients differ, as with a norm after
    each expert.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if _WEIGHTS.issubset(n for n, p in module._parameters.items() if p is not None)
        and not isinstance(module, Experts)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts with the weights gate_up_proj and "
            "down_proj: derive a class from parallel.expert.Experts for its own"
        )
    made = {module: OfTransformers(module) for module in found.values()}
    for name, module in found.items():
        if said := _difference(module, made[module]):
            raise ValueError(
                f"{name}, a {type(module).__name__}, isn't what take_over would put in its "
                f"place: {said}; derive a class from parallel.expert.Experts that computes "
                "what it does, and put that in its place"
            )
    for name, module in found.items():
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, made[module])
    return list(found)


def _difference(theirs: nn.Module, made: OfTransformers) -> str:
    """Says what differs by more than rounding, on random weights and tokens, or "".

    In 32 bits; where theirs has no such products, in the precision of its weights.
    """
    for dtype in dict.fromkeys((torch.float32, theirs.down_proj.dtype)):
        try:
            expected = _seen(theirs, made, dtype)
            break
        except Exception as error:  # whatever code of others raises
            said = f"called with tokens, choices and gates, it fails: {error}"
    else:
        return said
    try:
        found = _seen(made, made, dtype)
    except Exception as error:
        return f"with its weights, this fails: {error}"
    for name, x in expected.items():
        norm = torch.linalg.vector_norm
        off, size = norm(found[name] - x, dim=-1), norm(x, dim=-1)
        if not (off <= 4 * torch.finfo(dtype).eps ** 0.5 * size).all():
            return f"the {name} differs"
    return ""


def _seen(module: nn.Module, made: OfTransformers, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of one of the two, in rows that are compared one by one.

    Each expert gets tokens of each scale.
    """
    weight_EOI = made.gate_up_proj.mT if made.transposed else made.gate_up_proj
    device = torch.device("cpu") if weight_EOI.is_meta else weight_EOI.device
    experts, _, hidden = weight_EOI.shape
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    order_T = torch.arange(experts * len(_SCALES), device=device)
    choices_TK = torch.stack([order_T, order_T + 1], 1)[:, :experts] % experts
    scales_T = _SCALES.to(device, dtype).repeat_interleave(experts)
    x_TH = random(len(order_T), hidden) * scales_T[:, None]
    gates_TK, direction_TH = random(choices_TK.shape), random(x_TH.shape)
    weights = {
        name: random(p.shape) * (p.shape[-1] ** -0.5 if p.dim() > 2 else 1)
        for name, p in made.named_parameters()
    }
    learn = [x.requires_grad_() for x in (x_TH, gates_TK, *weights.values())]
    with torch.enable_grad():
        y_TH = functional_call(module, weights, (x_TH, choices_TK, gates_TK))
        args = y_TH, learn, direction_TH.to(y_TH)
        x, gates, *rest = torch.autograd.grad(*args, materialize_grads=True)
    rows = {"output": y_TH.detach(), "gradient of its tokens": x}
    rows["gradient of its gates"] = gates.view(len(_SCALES), -1)
    for name, grad in zip(weights, rest, strict=True):
        rows[f"gradient of {name}"] = grad.reshape(grad.shape[:1].numel(), -1)
    return rows
