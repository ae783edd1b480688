"""parallel.tensor with data parallelism, under autocast, copied, written out by hand, and against PyTorch's DTensor."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_in,
    gather_in,
    parallelize,
    reduce_out,
    reduce_scatter_out,
)
from manyranks.parallel.tensor.cuts import own_part
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer, loss
from tests.ranks.test_tensor import SIZES, lively, off, random

CONFIG = GPTConfig(layers=1, hidden=16, heads=4, kv_heads=1, ffn=24, vocab=13, seq=8)
SP = {"sequence_parallel": True}


def tokens_of(replica: int, batch: int = 0) -> torch.Tensor:
    return torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(10 * batch + replica))


def overlapped(tp, group):
    wrapped = OverlappedDataParallel(tp, group, bucket_bytes=1000)
    return wrapped, wrapped.finish


def pytorch_s(tp, group):
    return DistributedDataParallel(tp, process_group=group), lambda: None


def two_by_two(wrap, how: dict, steps: int = 3) -> float:
    """Two replicas of a model cut in two, trained; the largest difference of a weight to one process's on both batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = lively(GPT(CONFIG))
    tp = parallelize(lively(GPT(CONFIG)), mesh, tensor_styles.styles(CONFIG), **how)
    model, finish = wrap(tp, mesh.get_group("dp"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, tp)]
    for step in range(steps):
        for replica in range(2):
            tokens = tokens_of(replica, step)
            (loss(alone(tokens[:, :-1]), tokens[:, 1:]) / 2).backward()
        tokens = tokens_of(mesh.get_local_rank("dp"), step)
        tp.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        finish()
        tp.finish()
        assert off(tp.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(alone.parameters(), 1.0)) < 1e-10
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(alone.named_parameters())
    assert {len(cut.spans) for cut in tp.cuts.values()} == {2}
    return max(off(p, tp.cuts[n].own(whole[n].detach()) if n in tp.cuts else whole[n]) for n, p in tp.module.named_parameters())


def in_the_wrong_order() -> None:
    """What the inner finish() says while the outer one's buckets are on their way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = parallelize(GPT(CONFIG), mesh, tensor_styles.styles(CONFIG), **SP)
    wrapped = OverlappedDataParallel(tp, mesh.get_group("dp"))
    tokens = tokens_of(0)
    tp.loss(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
    with pytest.raises(ValueError, match=r"call the outer wrapper's finish\(\) first"):
        tp.finish()
    wrapped.finish()
    tp.finish()


def test_the_inner_finish_waits_for_the_outer_one_s(four):
    four.run(in_the_wrong_order)


@pytest.mark.lenient
@pytest.mark.parametrize("how", [{}, SP], ids=["plain", "sequence"])
@pytest.mark.parametrize("wrap", [overlapped, pytorch_s])
def test_two_replicas_of_two_ranks_train_as_one_process_on_both_batches(four, wrap, how):
    assert max(four.run(two_by_two, wrap, how)) < 1e-10


def in_bfloat16(how: dict) -> tuple[float, float, list[torch.dtype]]:
    """Under autocast: how far the loss and the gradients are from those of 32 bits, relative; the gradients' dtypes."""
    config, results = replace(CONFIG, style="gpt2", kv_heads=4), []
    alone = lively(GPT(config)).float()
    tokens = tokens_of(0)
    loss(alone(tokens[:, :-1]), tokens[:, 1:]).backward()
    whole = {name: p.grad for name, p in alone.named_parameters()}
    tp = parallelize(lively(GPT(config)).float(), None, tensor_styles.styles(config), **how)
    with torch.autocast("cpu", torch.bfloat16):
        logits = tp(tokens[:, :-1])
        assert logits.dtype == torch.bfloat16
        results.append(tp.loss(logits, tokens[:, 1:]))
    results[0].backward()
    tp.finish()
    expected = loss(alone(tokens[:, :-1]), tokens[:, 1:])
    named = dict(tp.module.named_parameters())
    parts = {n: tp.cuts[n].own(whole[n]) if n in tp.cuts else whole[n] for n in named if "key.bias" not in n}  # which has none
    far = max(((named[n].grad - parts[n]).norm() / parts[n].norm()).item() for n in parts)
    return abs(results[0] / expected - 1).item(), far, [p.grad.dtype for p in named.values()]


@pytest.mark.parametrize("how", [{}, SP, SP | {"regather": False}, SP | {"overlap": True}], ids=str)
def test_products_in_bfloat16_are_near_32_bits_and_gradients_are_in_32(four, how):
    for of_loss, of_gradients, dtypes in four.run(in_bfloat16, how):
        assert of_loss < 0.01
        assert of_gradients < 0.05
        assert set(dtypes) == {torch.float32}


def linears_under_autocast() -> list[tuple]:
    """What each layer gives under autocast: the dtype, against nn.Linear's."""
    found, t = [], dist.get_world_size()
    for made in (ColumnParallelLinear, RowParallelLinear):
        with torch.autocast("cpu", torch.bfloat16):
            y = made(4 * t, 4 * t)(torch.ones(2, 3, 4 * t if made is ColumnParallelLinear else 4))
            found.append((y.dtype, nn.Linear(4, 4)(torch.ones(2, 4)).dtype))
    return found


def test_under_autocast_layers_give_the_dtype_that_nn_linear_gives(shared_world):
    assert shared_world.run(linears_under_autocast) == [[(torch.bfloat16,) * 2] * 2] * 3


def copied(how: dict) -> tuple[float, bool]:
    """A copy has the same groups and weights of its own; its state, pickled, is loaded by another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = parallelize(lively(GPT(CONFIG)), mesh, tensor_styles.styles(CONFIG), **how)
    other, fresh = copy.deepcopy(tp), parallelize(GPT(CONFIG, seed=9).double(), mesh, tensor_styles.styles(CONFIG), **how)
    fresh.load_state_dict(pickle.loads(pickle.dumps(tp.state_dict())))
    copy.deepcopy(tp.module)(tokens_of(0)[:, :-1])
    tokens, found = tokens_of(0), []
    for model in (tp, other, fresh):
        result = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        result.backward()
        model.finish()
        found.append([result.detach(), *(p.grad for p in model.parameters())])
    with torch.no_grad():
        next(other.parameters()).zero_()
    unlike = not torch.equal(next(other.parameters()), next(tp.parameters()))
    return max(off(*pair) for others in found[1:] for pair in zip(others, found[0], strict=True)), unlike


@pytest.mark.parametrize("how", [{}, SP], ids=["plain", "sequence"])
def test_a_model_is_copied_and_its_state_is_pickled(four, how):
    assert four.run(copied, how) == [(0.0, True)] * 4


def by_hand(sequence_parallel: bool) -> float:
    """Megatron's f and g written out, on a plain chain, against one process."""
    alone, x, grad = (
        lively(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))),
        random(2, 12, 6),
        random(2, 12, 6, seed=1),
    )
    t, r = dist.get_world_size(), dist.get_rank()
    rows = slice(r * 12 // t, (r + 1) * 12 // t)
    whole = x.clone().requires_grad_()
    alone(whole).backward(grad)
    expected = alone[0].weight.grad[rows].clone()
    cut = own_part if sequence_parallel else torch.clone
    own = cut(x).requires_grad_()
    there = (gather_in if sequence_parallel else copy_in)(own)
    y = alone[1](there @ alone[0].weight[rows].T + alone[0].bias[rows]) @ alone[2].weight[:, rows].T
    alone.zero_grad()
    if sequence_parallel:
        reduce_scatter_out(y).backward(own_part(grad))
    else:
        reduce_out(y).backward(grad)
    return max(off(own.grad, cut(whole.grad)), off(alone[0].weight.grad[rows], expected))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_mappings_alone_make_a_parallel_chain(shared_world, four, sequence_parallel):
    assert max(shared_world.run(by_hand, sequence_parallel) + four.run(by_hand, sequence_parallel)) < 1e-12


def second_derivatives() -> list[str]:
    found = []
    for layer in (ColumnParallelLinear(4, 6), RowParallelLinear(4 * dist.get_world_size(), 6)):
        x = torch.randn(2, 4, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        try:
            first.sum().backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_second_derivative_is_refused_and_not_wrong(shared_world):
    for messages in shared_world.run(second_derivatives):
        assert len(messages) == 2
        assert all("once_differentiable" in message for message in messages)


# DTensor


def dtensor_gpt() -> list[float]:
    """Loss and gradients against parallelize_module on the same modules."""
    config = GPTConfig(**SIZES, style="gpt2", vocab=12, tied=False)
    tokens = torch.randint(12, (3, 13), generator=torch.Generator().manual_seed(0))
    theirs, tp = lively(GPT(config)), parallelize(lively(GPT(config)), None, tensor_styles.styles(config))
    plan = {f"layers.*.{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "mlp.up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.output", "mlp.down")}
    plan |= {"embedding.tokens": RowwiseParallel(input_layouts=Replicate())}
    plan |= {"head.projection": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(theirs, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    results = loss(theirs(tokens[:, :-1]), tokens[:, 1:]), tp.loss(tp(tokens[:, :-1]), tokens[:, 1:])
    for result in results:
        result.backward()
    return [off(*results), *against(tp, theirs)]


def dtensor_layer() -> list[float]:
    """A layer with sequence parallelism against theirs."""
    config = GPTConfig(**SIZES, style="gpt2")
    styles = tensor_styles.styles_of(config, "layers.*")
    theirs, tp = lively(Layer(config)), parallelize(lively(Layer(config)), None, styles, **SP)
    plan = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "mlp.up")}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.output", "mlp.down")}
    plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    gather = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    plan |= {"attention": PrepareModuleInput(**gather)}
    plan |= {"mlp": PrepareModuleInput(**{name: value[:1] for name, value in gather.items()})}
    parallelize_module(theirs, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    x = own_part(random(2, 12, 24))
    outputs = theirs(x), tp(x)
    for y in outputs:
        y.backward(own_part(random(2, 12, 24, seed=1)))
    tp.finish()
    return [off(*outputs), *against(tp, theirs)]


def against(tp: nn.Module, theirs: nn.Module) -> list[float]:
    whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in theirs.named_parameters()}
    named = dict(tp.module.named_parameters())
    return [off(p.grad, tp.cuts[name].own(whole[name]) if name in tp.cuts else whole[name]) for name, p in named.items()]


@pytest.mark.parametrize("compared", [dtensor_gpt, dtensor_layer])
@pytest.mark.few(1)
def test_pytorch_s_parallelize_module_gives_the_same(shared_worlds, compared):
    for found in shared_worlds.run(compared):
        assert max(found) < 1e-12
