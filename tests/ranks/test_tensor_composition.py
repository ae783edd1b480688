"""parallel.tensor with data parallelism, in a group that is not the world, under autocast, and copied."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.tensor import parallelize
from manyranks.theory import tensor
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from tests.ranks.test_tensor import SP, WAYS, lively, off

CONFIG = GPTConfig(layers=1, hidden=16, heads=4, kv_heads=1, ffn=24, vocab=13, seq=8)
HOW = pytest.mark.parametrize("how", [{}, SP], ids=["plain", "sequence"])
EVERY_WAY = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def tokens_of(replica: int, batch: int = 0) -> torch.Tensor:
    return torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(10 * batch + replica))


def two_by_two(how: dict, seed: int | None = None):
    """This rank's part of one of two models, each on two ranks; and the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = lively(GPT(CONFIG)) if seed is None else GPT(CONFIG, seed=seed).double()
    return parallelize(model, mesh, tensor_styles.styles(CONFIG), **how), mesh


def overlapped(tp, group):
    wrapped = OverlappedDataParallel(tp, group, bucket_bytes=1000)
    return wrapped, wrapped.finish


def pytorch_s(tp, group):
    return DistributedDataParallel(tp, process_group=group), lambda: None


def trained(wrap, how: dict) -> float:
    """Two replicas, three steps; the largest difference of a weight to one process's on both batches."""
    (tp, mesh), alone = two_by_two(how), lively(GPT(CONFIG))
    model, finish = wrap(tp, mesh.get_group("dp"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, tp)]
    for step in range(3):
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
    whole = {name: p.detach() for name, p in alone.named_parameters()}
    assert {len(cut.spans) for cut in tp.cuts.values()} == {2}
    return max(off(p, tp.cuts[n].own(whole[n]) if n in tp.cuts else whole[n]) for n, p in tp.module.named_parameters())


@pytest.mark.lenient
@HOW
@pytest.mark.parametrize("wrap", [overlapped, pytorch_s])
def test_two_replicas_of_two_ranks_train_as_one_process_on_both_batches(four, wrap, how):
    assert max(four.run(trained, wrap, how)) < 1e-10


def in_the_wrong_order() -> None:
    """Calls the inner finish() while the outer one's buckets are on their way."""
    tp, mesh = two_by_two(SP)
    wrapped = OverlappedDataParallel(tp, mesh.get_group("dp"))
    tokens = tokens_of(0)
    tp.loss(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
    with pytest.raises(ValueError, match=r"call the outer wrapper's finish\(\) first"):
        tp.finish()
    wrapped.finish()
    tp.finish()


def test_the_inner_finish_waits_for_the_outer_one_s(four):
    four.run(in_the_wrong_order)


def step(how: dict, config: GPTConfig = CONFIG, ranks: tuple[int, int] = (2, 2)) -> None:
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    tp, tokens = parallelize(GPT(config), mesh, tensor_styles.styles(config), **how), tokens_of(0)
    tp.loss(tp(tokens[:, :-1]), tokens[:, 1:]).backward()
    tp.finish()
    tp.clip_grad_norm_(1.0)


@EVERY_WAY
def test_all_messages_stay_in_the_group_and_a_group_of_one_has_none(four, how):
    m = four.measure(step, how)
    for r in range(4):
        assert {call.ranks for call in m.calls[r]} == {(r // 2 * 2, r // 2 * 2 + 1)}
    assert not any(four.measure(step, how, CONFIG, (4, 1)).calls.values())


@HOW
def test_heads_that_only_some_ranks_share_are_summed_over_these(four, how):
    m, config = four.measure(step, how, replace(CONFIG, kv_heads=2), (1, 4)), replace(CONFIG, kv_heads=2)
    copies = tensor.partial_gradients(config.shape(), 4, **how).copies
    for r in range(4):
        assert [call.bytes for call in m.calls[r] if call.ranks == (r // 2 * 2, r // 2 * 2 + 1)] == [4 * copies]


def in_bfloat16(how: dict) -> tuple[float, float, set[torch.dtype]]:
    """Under autocast: how far the loss and the gradients are from 32 bits', relative; the gradients' dtypes."""
    config, tokens = replace(CONFIG, style="gpt2", kv_heads=4), tokens_of(0)
    alone = lively(GPT(config)).float()
    tp = parallelize(copy.deepcopy(alone), None, tensor_styles.styles(config), **how)
    (expected := loss(alone(tokens[:, :-1]), tokens[:, 1:])).backward()
    with torch.autocast("cpu", torch.bfloat16):
        logits = tp(tokens[:, :-1])
        assert logits.dtype == torch.bfloat16
        (found := tp.loss(logits, tokens[:, 1:])).backward()
    tp.finish()
    whole = {name: p.grad for name, p in alone.named_parameters() if "key.bias" not in name}  # which has none
    parts = {name: tp.cuts[name].own(grad) if name in tp.cuts else grad for name, grad in whole.items()}
    named = dict(tp.module.named_parameters())
    far = max(((named[name].grad - part).norm() / part.norm()).item() for name, part in parts.items())
    return abs(found / expected - 1).item(), far, {p.grad.dtype for p in named.values()}


@EVERY_WAY
def test_products_in_bfloat16_are_near_32_bits_and_gradients_are_in_32(four, how):
    for of_loss, of_gradients, dtypes in four.run(in_bfloat16, how):
        assert of_loss < 0.01
        assert of_gradients < 0.05
        assert dtypes == {torch.float32}


def copied(how: dict) -> tuple[float, bool]:
    """A copy has the same groups and its own weights; its state, pickled, is loaded by another one."""
    (tp, _), (fresh, _) = two_by_two(how), two_by_two(how, seed=9)
    other = copy.deepcopy(tp)
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


@HOW
def test_a_model_is_copied_and_its_state_is_pickled(four, how):
    assert four.run(copied, how) == [(0.0, True)] * 4
