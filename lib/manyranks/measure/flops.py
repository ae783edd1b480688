"""Floating-point operations, counted by PyTorch's FlopCounterMode, with the CPU's attention that it leaves out."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def _attention(query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


def _attention_backward(grad_shape, query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_shape, query_shape, key_shape, value_shape)


CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counter() -> FlopCounterMode:
    """A context manager; afterwards `.get_total_flops()` is the work of matmuls, convolutions and attention inside it.

    A multiply-add counts as two. Attention counts in full, also under a causal mask.
    """
    return FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
