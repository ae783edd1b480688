"""ContextParallel: the GPT, applied from outside, has the gradients of one process with all tokens, and its loss."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.context import ContextParallel, blockwise_attention
from manyranks.parallel.tensor import parallelize
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer, loss
from tests.conftest import matrix
from tests.ranks.test_tensor import lively, off
from tests.unit.attention_reference import largest

SEQ, CORES = 24, "layers.*.attention.core"
KINDS = {
    "gpt2": {"style": "gpt2"},
    "llama": {"kv_heads": 4, "tied": False},
    "frozen": {"style": "gpt2", "tied": False},
}
FROZEN = ("embedding.", "layers.0.attention.query", "layers.0.attention.value", "head.norm")


def gpt(kind: str, layers: int = 2) -> GPT:
    model = lively(GPT(GPTConfig(layers=layers, hidden=24, heads=12, ffn=24, vocab=13, seq=SEQ, **KINDS[kind])))
    for name, p in model.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    return model


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and documents. Of the first half of the sequence only a few targets count."""
    random = torch.Generator().manual_seed(number)
    tokens_BT = torch.randint(13, (2, SEQ + 1), generator=random)
    targets_BT = tokens_BT[:, 1:].clone()
    targets_BT[:, : SEQ // 2 - number % 3] = -100
    documents_BT = torch.arange(SEQ).expand(2, -1) // torch.tensor([[5 + number], [11]])
    return tokens_BT[:, :-1], targets_BT, documents_BT


class Masked(nn.Module):
    """What one process needs for documents and windows."""

    def __init__(self, **mask):
        super().__init__()
        self.mask = mask

    def forward(self, *qkv: Tensor) -> Tensor:
        return blockwise_attention(*qkv, **self.mask)


def alone(model: GPT, number: int, documents: bool, window: int | None = None) -> Tensor:
    inputs, targets, rows = batch(number)
    if documents:
        for layer in model.layers:
            layer.attention.core = Masked(documents_BT=rows, window=window)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def ours(model: ContextParallel, number: int, documents: bool) -> Tensor:
    inputs, targets, rows = batch(number)
    logits_BSV = model(model.shard(inputs), rows if documents else None)
    return model.loss(logits_BSV, model.shard(targets))


WAYS = [  # model, whether with documents, whether layers keep only their input, and how
    ("gpt2", False, False, {}),
    ("gpt2", True, True, {"window": 6}),
    ("llama", True, False, {"layout": "contiguous", "window": 7}),
    ("frozen", False, False, {"layout": "striped"}),
    ("gpt2", True, True, {"attention": "all-gather"}),
    ("gpt2", True, True, {"attention": "ulysses"}),
    ("llama", True, False, {"attention": "ring-ulysses"}),
]


def micro_batches(kind: str, documents: bool, checkpointed: bool, how: dict) -> float:
    """Gradients of two micro-batches, which are summed once: the largest difference."""
    n, one = dist.get_world_size(), gpt(kind)
    if how.get("attention") == "ring-ulysses":
        how = how | {"mesh": init_device_mesh("cpu", (2, 2) if n == 4 else (n, 1), mesh_dim_names=("ring", "ulysses"))}
    model = ContextParallel(gpt(kind), CORES, **how)
    assert not checkpointed or len(checkpoint_modules(model, lambda module: isinstance(module, Layer))) == 2
    for number, where in enumerate((model.no_sync(), nullcontext())):
        (alone(one, number, documents, how.get("window")) / 2).backward()
        with where:
            (ours(model, number, documents) / 2).backward()
            model.finish()
    theirs = dict(one.named_parameters())
    assert [p.grad is None for p in theirs.values()] == [p.grad is None for p in model.module.parameters()]
    return largest(off(p.grad, theirs[name].grad) for name, p in model.module.named_parameters())


@pytest.mark.parametrize("shared_worlds", matrix([2, 3, 4], [4]), indirect=True, scope="module")
def test_gradients_of_micro_batches_are_those_of_one_process(shared_worlds):
    for way in WAYS:
        assert largest(shared_worlds.run(micro_batches, *way)) < 1e-12, way


def with_tensor_parallelism(**how) -> dict[str, float]:
    """Heads and features are cut over two ranks, the sequence over two others."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), {}
    for kind in ("gpt2", "llama"):
        one = gpt(kind)
        alone(one, 0, documents=True).backward()
        tp = parallelize(gpt(kind), mesh, tensor_styles.styles(one.config), **how)
        model = ContextParallel(tp, f"module.{CORES}", mesh.get_group("cp"))
        inputs, targets, rows = batch(0)
        count = (targets != -100).sum()
        (tp.loss(model(model.shard(inputs), rows), model.shard(targets), reduction="sum") / count).backward()
        tp.finish()
        model.finish()
        theirs = dict(one.named_parameters())
        for name, p in tp.module.named_parameters():
            whole = theirs[name].grad
            found[f"{kind} {name}"] = off(p.grad, tp.cuts[name].own(whole) if name in tp.cuts else whole)
    return found


@pytest.mark.parametrize("how", [{}, {"sequence_parallel": True}], ids=["plain", "sequence"])
def test_it_goes_with_tensor_parallelism(four, how):
    for found in four.run(with_tensor_parallelism, **how):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


# The loss


def losses() -> list[float]:
    """Of a rank all of whose targets are left out, too; in 32 bits for logits of 16."""
    model, found = ContextParallel(gpt("llama"), CORES, layout="contiguous"), []
    for dtype in (torch.float64, torch.bfloat16):
        logits_BTV = torch.randn(2, SEQ, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
        targets_BT = batch(0)[1]
        share = model.loss(model.shard(logits_BTV), model.shard(targets_BT))
        assert share.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        if dist.get_rank() == 0:
            assert share.item() == 0
        dist.all_reduce(share)
        found.append(off(share, loss(logits_BTV, targets_BT)))
    return found


def test_the_ranks_shares_add_up_to_the_mean_over_all_tokens_that_count(shared_worlds):
    m = shared_worlds.measure(losses)
    assert largest(map(largest, m.results)) < 1e-6
    assert largest(found[0] for found in m.results) < 1e-14
    assert (m.calls[0][0].op, m.calls[0][0].bytes) == ("all_reduce", 8)
