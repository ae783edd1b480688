"""Lets a CPU keep what a GPU would: norms, rotary positions and gated products, each fused.

PyTorch's own RMSNorm and SiLU keep results on the way, operator by operator. A fused kernel
keeps its inputs and computes the rest again in backward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyranks.training.gpt import MLP, Attention, rotated
from manyranks.training.moe import MoE


def fuse(model: nn.Module) -> nn.Module:
    """Makes a llama-style model keep for backward what it would on a GPU. Returns the model.

    model: a GPT, or a part of one, as training.gpt.Layer(config)
    Raises ValueError if no part of it is llama-style, and for experts, which aren't fused here.
    """
    if any(isinstance(part, MoE) for part in model.modules()):
        raise ValueError("the model has experts, which fuse() doesn't know: give one without")
    kinds = {nn.RMSNorm: _norm, MLP: _gated, Attention: _attention}
    found = [(part, kinds[type(part)]) for part in model.modules() if type(part) in kinds]
    if not any(isinstance(part, nn.RMSNorm) for part, _ in found):
        raise ValueError("no RMSNorm in the model: give one with style='llama'")
    for part, forward in found:
        part.forward = forward.__get__(part)
    return model


def _norm(self: nn.RMSNorm, x_BSH: Tensor) -> Tensor:
    return _RMSNorm.apply(x_BSH, self.weight, self.eps)


def _gated(self: MLP, x_BSH: Tensor) -> Tensor:
    up_BSF, gate_BSF = self.project(x_BSH, self.up, self.gate)
    return self.down(_SwiGLU.apply(gate_BSF, up_BSF))


def _attention(self: Attention, x_BSH: Tensor, positions_S: Tensor | None = None) -> Tensor:
    if positions_S is None:
        positions_S = torch.arange(x_BSH.shape[1], device=x_BSH.device)
    q_BSAD, k_BSGD, v_BSGD = (
        y_BSE.unflatten(-1, (-1, self.head_size))
        for y_BSE in self.project(x_BSH, self.query, self.key, self.value)
    )
    q_BSAD, k_BSGD = (_Rotary.apply(each, positions_S) for each in (q_BSAD, k_BSGD))
    o_BASD = self.core(*(each.transpose(1, 2) for each in (q_BSAD, k_BSGD, v_BSGD)))
    return self.output(o_BASD.transpose(1, 2).flatten(2))


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number per token."""

    @staticmethod
    def forward(ctx, x_BSH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        precise_BSH = x_BSH.to(torch.promote_types(x_BSH.dtype, torch.float32))
        scale_BS1 = precise_BSH.square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x_BSH, weight_H, scale_BS1)
        return (precise_BSH * scale_BS1).to(x_BSH.dtype) * weight_H

    @staticmethod
    def backward(ctx, grad_BSH: Tensor):
        x_BSH, weight_H, scale_BS1 = ctx.saved_tensors
        unit_BSH = x_BSH.to(scale_BS1.dtype) * scale_BS1
        of_unit_BSH = (grad_BSH * weight_H).to(scale_BS1.dtype)
        along_BS1 = (of_unit_BSH * unit_BSH).mean(-1, keepdim=True)
        grad_x_BSH = (of_unit_BSH - unit_BSH * along_BS1) * scale_BS1
        grad_weight_H = (grad_BSH * unit_BSH.to(grad_BSH.dtype)).flatten(0, -2).sum(0)
        return grad_x_BSH.to(x_BSH.dtype), grad_weight_H, None


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) · up. Keeps both inputs, not the product."""

    @staticmethod
    def forward(ctx, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_BSF, up_BSF)
        return F.silu(gate_BSF) * up_BSF

    @staticmethod
    def backward(ctx, grad_BSF: Tensor):
        gate_BSF, up_BSF = ctx.saved_tensors
        with torch.enable_grad():
            leaf_BSF = gate_BSF.detach().requires_grad_()
            silu_BSF = F.silu(leaf_BSF)
        (grad_gate_BSF,) = torch.autograd.grad(silu_BSF, leaf_BSF, grad_BSF * up_BSF)
        return grad_gate_BSF, grad_BSF * silu_BSF.detach()


class _Rotary(torch.autograd.Function):
    """Rotates each head's pairs of numbers by position. Keeps no tensor."""

    @staticmethod
    def forward(ctx, x_BSAD: Tensor, positions_S: Tensor) -> Tensor:
        ctx.positions_S = positions_S
        return rotated(x_BSAD.transpose(1, 2), positions_S).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx, grad_BSAD: Tensor):
        return rotated(grad_BSAD.transpose(1, 2), -ctx.positions_S).transpose(1, 2), None
