"""parallel.context and PyTorch's own context parallelism have the same tokens on each rank, outputs and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from manyranks.parallel.context import all_gather_attention, ring_attention, shard
from tests.unit.attention_reference import draw, gap, largest

SEQ, HEADS, KV_HEADS = 24, 4, 2
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def over_ranks(op, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    """What PyTorch's ring makes of the CPU's kernel: it has handlers for kernels of GPUs only."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    mesh, tensors = args[0].device_mesh, [x.to_local() for x in args if isinstance(x, DTensor)]
    how = {"is_causal": args[-1] is True, "dropout_p": 0.0, **kwargs}
    if op is FORWARD:
        found = theirs._templated_ring_attention(mesh.get_group(), 2, op, *tensors, **how)
    else:
        grad, *saved = tensors
        found = theirs._templated_ring_attention_backward(mesh.get_group(), 2, op, grad, "grad_out", *saved, **how)
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


def both(causal: bool, rotation: str) -> list[float]:
    """The largest differences: of the tokens that a rank has, of the output, of the gradients of q, k and v."""
    from torch.distributed.tensor.experimental import _attention as public
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    n, rank = dist.get_world_size(), dist.get_rank()
    layout = "zigzag" if causal else "contiguous"
    attention = ring_attention if rotation == "alltoall" else all_gather_attention
    theirs.custom_ops |= {FORWARD: over_ranks, BACKWARD: over_ranks}
    theirs._cp_options.convert_to_f32, theirs._cp_options.enable_load_balance = False, causal
    public.set_rotate_method(rotation)
    whole = [draw(2, heads, SEQ, 8, seed=k) for k, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))]
    *ours, weights = (shard(x, layout, rank, n, dim=2) for x in whole)
    buffers = [x.clone() for x in whole]  # they are cut in place
    mesh = init_device_mesh("cpu", (n,))
    with public.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        qkv = [x.clone().requires_grad_() for x in buffers[:3]]
        o = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=True)
        (o * buffers[3]).sum().backward()
        found = [*(x.detach() for x in qkv), o.detach(), *(x.grad for x in qkv)]
    for x in ours:
        x.requires_grad_()
    o = attention(*ours, causal=causal, layout=layout, tile=5)
    expected = [*ours, o, *torch.autograd.grad((o * weights).sum(), ours)]
    return [gap([pair]) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize("rotation", ["alltoall", "allgather"])
@pytest.mark.parametrize("causal", [True, False])
def test_tokens_outputs_and_gradients_are_those_of_context_parallel(shared_worlds, causal, rotation):
    for found in shared_worlds.run(both, causal, rotation):
        assert found[:3] == [0, 0, 0]
        assert largest(found) < 1e-12
