"""ContextParallel: the GPT, applied from outside, has the gradients of one process with all tokens, and its loss. It
and attention refuse on all ranks, before any message, so that none waits, and say what to do."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.context import (
    ContextParallel,
    all_gather_attention,
    blockwise_attention,
    ring_attention,
    ring_ulysses_attention,
    ulysses_attention,
)
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer, loss
from tests.conftest import matrix
from tests.ranks import refused
from tests.ranks.test_tensor import lively, off
from tests.unit.attention_reference import largest

AXES = ("ring", "ulysses")
SEQ, CORES = 24, "layers.*.attention.core"
KINDS = {"gpt2": {"style": "gpt2"}, "llama": {"kv_heads": 4, "tied": False}, "frozen": {"style": "gpt2", "tied": False}}
FROZEN = ("embedding.", "layers.0.attention.query", "layers.0.attention.value", "head.norm")


def gpt(kind: str) -> GPT:
    model = lively(GPT(GPTConfig(layers=2, hidden=24, heads=12, ffn=24, vocab=13, seq=SEQ, **KINDS[kind])))
    for name, p in model.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    return model


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and documents. In the first half of the sequence only a few targets count."""
    random = torch.Generator().manual_seed(number)
    tokens_BT = torch.randint(13, (2, SEQ + 1), generator=random)
    targets_BT = tokens_BT[:, 1:].clone()
    targets_BT[:, : SEQ // 2 - number % 3] = -100
    documents_BT = torch.arange(SEQ).expand(2, -1) // torch.tensor([[5 + number], [11]])
    return tokens_BT[:, :-1], targets_BT, documents_BT


WAYS = [  # model, whether with documents, whether layers keep only their input, and how
    ("gpt2", False, False, {}),
    ("gpt2", True, True, {"window": 6}),
    ("llama", True, False, {"layout": "contiguous", "window": 7}),
    ("frozen", False, False, {"layout": "striped"}),
    ("gpt2", True, True, {"attention": "all-gather"}),
    ("gpt2", True, True, {"attention": "ulysses"}),
    ("llama", True, False, {"attention": "ring-ulysses"}),
    ("llama", True, False, {"group": "every second"}),
]


def micro_batches(kind: str, documents: bool, checkpointed: bool, how: dict) -> float:
    """Gradients of two micro-batches, which are summed once: the largest difference."""
    n, one = dist.get_world_size(), gpt(kind)
    if how.get("attention") == "ring-ulysses":
        how = how | {"mesh": init_device_mesh("cpu", (2, 2) if n == 4 else (n, 1), mesh_dim_names=AXES)}
    if "group" in how:
        ranks = range(dist.get_rank() % 2, n, 2)
        how = how | {"group": dist.new_group([*ranks], use_local_synchronization=True)}
    model = ContextParallel(gpt(kind), CORES, **how)
    assert not checkpointed or len(checkpoint_modules(model, lambda module: isinstance(module, Layer))) == 2
    for number, where in enumerate((model.no_sync(), nullcontext())):
        inputs, targets, rows = batch(number)
        for layer in one.layers if documents else ():
            layer.attention.core = nn.Module()
            layer.attention.core.forward = partial(blockwise_attention, documents_BT=rows, window=how.get("window"))
        (nn.functional.cross_entropy(one(inputs).flatten(0, 1), targets.flatten()) / 2).backward()
        with where:
            logits_BSV = model(model.shard(inputs), rows if documents else None)
            (model.loss(logits_BSV, model.shard(targets)) / 2).backward()
            model.finish()
    theirs = dict(one.named_parameters())
    assert [p.grad is None for p in theirs.values()] == [p.grad is None for p in model.module.parameters()]
    return largest(off(p.grad, theirs[name].grad) for name, p in model.module.named_parameters())


@pytest.mark.parametrize("shared_worlds", matrix([2, 3, 4], [4]), indirect=True, scope="module")
def test_gradients_of_micro_batches_are_those_of_one_process(shared_worlds):
    for way in WAYS:
        assert largest(shared_worlds.run(micro_batches, *way)) < 1e-12, way


# The loss


def losses() -> list[float]:
    """Losses, also on a rank all of whose targets are left out; in 32 bits for logits of 16."""
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


def test_the_ranks_shares_add_up_to_the_mean_over_all_tokens_that_count(four):
    m = four.measure(losses)
    assert largest(map(largest, m.results)) < 1e-6
    assert largest(found[0] for found in m.results) < 1e-14
    assert (m.calls[0][0].op, m.calls[0][0].bytes) == ("all_reduce", 8)


# What is refused


def mesh(*shape: int, names: tuple[str, ...] | None = AXES) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=names)


def of_ranks(ranks: list) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=AXES)


def qkv(heads: int = 4, kv_heads: int = 4, tokens: int = 4) -> list[Tensor]:
    return [torch.zeros(2, h, tokens, 8) for h in (heads, kv_heads, kv_heads)]


def with_other(k: int, change) -> list[Tensor]:
    """One of q, k and v is not as it should be."""
    return [change(x) if place == k else x for place, x in enumerate(qkv())]


THREE = ring_attention, all_gather_attention, ulysses_attention


def each(*given, **options) -> str:
    """The words of all four about the same arguments."""
    said, attentions = set(), THREE
    for attention in (*attentions, lambda *x, **how: ring_ulysses_attention(*x, mesh(), **how)):
        try:
            attention(*(given or qkv()), **options)
            return "nothing was raised"
        except ValueError as error:
            said.add(str(error))
    (only,) = said
    raise ValueError(only)


def usp(on: DeviceMesh | None, **sizes):
    return ring_ulysses_attention(*qkv(**sizes), on)


def model(cores: str = CORES, dropout: float = 0.0, **how) -> ContextParallel:
    return ContextParallel(GPT(GPTConfig(layers=2, hidden=16, heads=4, vocab=7, seq=16, dropout=dropout)), cores, **how)


def tokens(length: int) -> Tensor:
    return torch.zeros(2, length, dtype=torch.long)


REFUSED = {
    "dims": (lambda: each(*with_other(0, lambda q: q[0])), r"shapes \(4, 4, 8\), \(2, 4, 4, 8\) and .*: give \[B, heads,"),
    "k's tokens": (lambda: each(*with_other(1, lambda k: k[:, :, :2])), r"k and v must have one shape, B, S and D the same"),
    "q's heads": (lambda: each(*qkv(4, 8)), r"the heads of q a multiple of theirs"),
    "dtype": (lambda: each(*with_other(2, Tensor.double)), r"are torch\.float32, torch\.float32, torch\.float64: give one"),
    "device": (lambda: each(*with_other(1, lambda k: k.to("meta"))), r"q, k and v are on cpu, meta: give one device"),
    "tile": (lambda: each(tile=0), r"tile=0: give a whole number of tokens, 1 or more"),
    "no tile": (lambda: each(tile=None), r"tile=None: give a whole number of tokens"),
    "layout": (lambda: each(layout="zig-zag"), r"layout='zig-zag': choose one of 'contiguous', 'striped', 'zigzag'"),
    "own documents": (lambda: each(documents_BT=tokens(4)), r"shape \(2, 4\): .* whole sequence, \[2, 16\] or \[1, 16\]"),
    "documents' rows": (lambda: each(documents_BT=tokens(16).repeat(2, 1)), r"documents of shape \(4, 16\)"),
    "documents' dims": (lambda: each(documents_BT=tokens(16)[0]), r"documents of shape \(16,\): give a number for each token"),
    "no tensor": (lambda: each(documents_BT=[0] * 16), r"documents are list: give a tensor of whole numbers"),
    "documents' dtype": (lambda: each(documents_BT=torch.zeros(1, 16)), r"documents are torch\.float32: give a tensor of"),
    "sequence": (lambda: ring_attention(*qkv(tokens=3)), r"12 tokens on 4 ranks: .* multiple of 8, .* are 8 and 16: pad"),
    "both": (lambda: usp(mesh(4, 1), tokens=3), r"12 tokens on 4 ranks: .* the nearest are 8 and 16"),
    "heads": (lambda: ulysses_attention(*qkv(6, 6)), r"6 query heads on 4 ranks: .* divides them \(1, 2, 3, 6\), or use"),
    "key/value heads": (lambda: ulysses_attention(*qkv(12, 6)), r"6 key/value heads on 4 ranks: .* is a multiple of"),
    "heads of a row": (lambda: usp(mesh(), heads=3, kv_heads=3), r"3 query heads on 2 ranks: .* divides them \(1, 3\)"),
    "no mesh": (lambda: usp(None), r"mesh=None: give init_device_mesh\(…, \(R, U\), mesh_dim_names=\('ring', 'ulysses'\)\)"),
    "no names": (lambda: usp(mesh(names=None)), r"mesh=DeviceMesh.*: give init_device_mesh"),
    "other names": (lambda: usp(mesh(names=("ulysses", "ring"))), r"mesh=DeviceMesh.*: give .*, whose rows are the ranks that"),
    "another order": (lambda: usp(of_ranks([[3, 1], [0, 2]])), r"ranks \[\[3, 1\], \[0, 2\]\]: they must rise in each row"),
    "window": (lambda: each(window=0), r"window=0: give a whole number of tokens, 1 or more"),
    "model's window": (lambda: model(window=2.5), r"window=2\.5: give a whole number of tokens"),
    "attention": (lambda: model(attention="flash"), r"attention='flash': choose one of ring, all-gather, ulysses, ring-u"),
    "pattern": (lambda: model("layers.*.attn"), r"'layers\.\*\.attn' matches no module: see the model's named_modules\(\)"),
    "dropout": (lambda: model(dropout=0.1), r"layers\.0\.attention\.core drops 0\.1 of its weights, .*: train without dropout"),
    "mesh of a ring": (lambda: model(mesh=mesh()), r"mesh with attention='ring': give a group, or ring-ulysses"),
    "mesh of two": (lambda: model(attention="ring-ulysses", mesh=mesh(2, 1, 2, names=("dp", *AXES))[AXES]),
                    r"a mesh of the ranks \[\[[02], [13]\]\] for a group of \[0, 1, 2, 3\]: give these, in this order"),
    "mesh's order": (lambda: model(attention="ring-ulysses", mesh=of_ranks([[0, 2], [1, 3]])), r"\[\[0, 2\], \[1, 3\]\] for"),
    "inputs": (lambda: model().shard(tokens(12)), r"12 tokens on 4 ranks: the zigzag layout .* the nearest are 8 and 16"),
    "model's documents": (lambda: model()(tokens(4), tokens(4)), r"documents of shape \(2, 4\): give .* whole sequence"),
    "whole targets": (lambda: model().loss(torch.zeros(2, 4, 7), tokens(16)),
                      r"targets of shape \(2, 16\) for logits of shape \(2, 4, 7\): give the own ones, shard\(targets\)"),
}  # fmt: skip


def refusals() -> dict[str, str]:
    return refused.said(REFUSED)


def test_what_does_not_fit_is_refused_on_all_ranks_with_what_to_do(four):
    m = four.measure(refusals)
    for found in m.results:
        assert {name: found[name] for name, (_, message) in REFUSED.items() if not re.search(message, found[name])} == {}
    assert all(not calls for calls in m.calls.values())


def test_a_rank_that_the_group_has_not_is_told_so(four):
    def outside() -> dict[str, str]:
        group = dist.new_group([1, 3])
        calls = [*(partial(attention, *qkv()) for attention in THREE), model]
        return refused.said({str(k): (partial(call, group=group), "") for k, call in enumerate(calls)})

    told = "this rank is not in the group: call the collective on the ranks of the group only"
    assert [{*found.values()} for found in four.run(outside)] == [{told}, {"nothing was raised"}] * 2


def test_a_model_of_which_a_part_does_not_fit_stays_as_it_was(four):
    """Nothing is replaced before all is checked."""

    def half() -> list[str]:
        half = gpt("gpt2")
        half.layers[1].attention.core = CausalAttention(0.5)
        with pytest.raises(ValueError, match=r"layers\.1\.attention\.core drops 0\.5"):
            ContextParallel(half, CORES)
        return [type(layer.attention.core).__name__ for layer in half.layers]

    assert four.run(half) == [["CausalAttention"] * 2] * 4
