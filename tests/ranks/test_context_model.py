"""ContextParallel: the GPT, applied from outside, trains as one process does with all tokens."""

from contextlib import nullcontext
from functools import cache, partial

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
from tests.ranks.test_tensor import lively, off
from tests.unit.attention_reference import largest

SEQ, CORES = 24, "layers.*.attention.core"
KINDS = {
    "gpt2": {"style": "gpt2"},
    "llama": {"kv_heads": 4, "tied": False},
    "frozen": {"style": "gpt2", "tied": False},
}
FROZEN = ("embedding.", "layers.0.attention.query", "layers.0.attention.value", "head.norm")
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=1e-2)}
MOST = 0.8  # the norm at which gradients are clipped


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


@cache
def trained(kind: str, optimizer: str, documents: bool, micro: int, steps: int = 20) -> tuple[dict, list[float]]:
    """One process's weights, and each step's norm before it was clipped. micro: micro-batches of a step."""
    model, norms = gpt(kind, layers=1), []
    steps_of = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        steps_of.zero_grad()
        (sum(alone(model, micro * step + part, documents) for part in range(micro)) / micro).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST).item())
        steps_of.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(kind: str, optimizer: str, documents: bool, micro: int, expected: dict, norms: list[float], **how) -> float:
    """The same on ranks; the largest difference of a weight."""
    if shape := how.pop("shape", None):
        how["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    model = ContextParallel(gpt(kind, layers=1), CORES, **how)
    steps_of = OPTIMIZERS[optimizer](model.parameters())
    for step, norm in enumerate(norms):
        steps_of.zero_grad()
        for part in range(micro):
            with nullcontext() if part == micro - 1 else model.no_sync():
                (ours(model, micro * step + part, documents) / micro).backward()
                model.finish()
        assert abs(nn.utils.clip_grad_norm_(model.parameters(), MOST).item() - norm) < 1e-9
        steps_of.step()
    return largest(off(p, expected[name]) for name, p in model.module.named_parameters())


WAYS = {  # model, optimizer, documents, micro-batches of a step
    2: [("llama", "sgd", True, 2, {"layout": "contiguous"}), ("gpt2", "adamw", False, 1, {"attention": "ulysses"})],
    3: [
        ("gpt2", "sgd", True, 1, {"attention": "all-gather"}),
        ("frozen", "sgd", False, 2, {"layout": "striped"}),
        ("llama", "adamw", False, 1, {}),
    ],
    4: [
        ("llama", "sgd", True, 1, {"attention": "ring-ulysses", "shape": (2, 2)}),
        ("gpt2", "sgd", False, 1, {"attention": "ulysses", "layout": "striped"}),
    ],
}
NEAR = {"sgd": 1e-12, "adamw": 1e-9}  # Adam divides a gradient by its own size: one that is nothing but rounding grows


@pytest.mark.whole
def test_20_steps_of_micro_batches_and_a_clipped_norm_are_those_of_one_process(shared_worlds):
    for *what, how in WAYS[shared_worlds.size]:
        weights, norms = trained(*what)
        assert min(norms) < MOST < max(norms)
        assert largest(shared_worlds.run(train, *what, weights, norms, **how)) < NEAR[what[1]], (what, how)


# Together with other techniques


def gaps(model: nn.Module, other: nn.Module) -> float:
    theirs = dict(other.named_parameters())
    return largest(off(p.grad, theirs[name].grad) for name, p in model.named_parameters())


def with_checkpoints() -> dict[str, float]:
    """Layers of which only the input is kept, with documents and a window: the ring goes round once more in backward."""
    found = {}
    for attention in ("ring", "all-gather", "ulysses"):
        one, model = gpt("gpt2"), ContextParallel(gpt("gpt2"), CORES, attention=attention, window=6)
        assert len(checkpoint_modules(model, lambda module: isinstance(module, Layer))) == 2
        alone(one, 0, documents=True, window=6).backward()
        ours(model, 0, documents=True).backward()
        model.finish()
        found[attention] = gaps(model.module, one)
    return found


def test_layers_may_be_checkpointed(shared_world):
    for found in shared_world.run(with_checkpoints):
        assert largest(found.values()) < 1e-12


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
