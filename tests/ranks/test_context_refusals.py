"""What parallel.context refuses: on all ranks, before any message, so that none waits, and with what to do."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import manyranks as mr
from manyranks.parallel.context import (
    ContextParallel,
    all_gather_attention,
    ring_attention,
    ring_ulysses_attention,
    ulysses_attention,
)
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention
from tests.ranks import refused

AXES = ("ring", "ulysses")


def mesh(*shape: int, names: tuple[str, ...] | None = AXES) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=names)


def of_ranks(ranks: list) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=AXES)


def qkv(heads: int = 4, kv_heads: int = 4, tokens: int = 4) -> list[Tensor]:
    return [torch.zeros(2, h, tokens, 8) for h in (heads, kv_heads, kv_heads)]


def with_other(k: int, change) -> list[Tensor]:
    """One of q, k and v is not as it should be."""
    return [change(x) if place == k else x for place, x in enumerate(qkv())]


def each(*given, **options) -> str:
    """What all four say to the same arguments."""
    said, attentions = set(), (ring_attention, all_gather_attention, ulysses_attention)
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


def model(cores: str = "layers.*.attention.core", dropout: float = 0.0, **how) -> ContextParallel:
    return ContextParallel(GPT(GPTConfig(layers=2, hidden=16, heads=4, vocab=7, seq=16, dropout=dropout)), cores, **how)


def tokens(length: int) -> Tensor:
    return torch.zeros(2, length, dtype=torch.long)


REFUSED = {
    "dims": (lambda: each(*with_other(0, lambda q: q[0])), r"shapes \(4, 4, 8\), \(2, 4, 4, 8\) and .*: give \[B, heads,"),
    "k's tokens": (lambda: each(*with_other(1, lambda k: k[:, :, :2])), r"k and v must be alike, B, S and D the same in all"),
    "q's heads": (lambda: each(*qkv(4, 8)), r"the heads of q a multiple of theirs"),
    "dtype": (lambda: each(*with_other(2, Tensor.double)), r"are torch\.float32, torch\.float32, torch\.float64: give one"),
    "device": (lambda: each(*with_other(1, lambda k: k.to("meta"))), r"q, k and v are on cpu, meta: give one device"),
    "tile": (lambda: each(tile=0), r"tile=0: give a whole number of tokens, 1 or more"),
    "layout": (lambda: each(layout="zig-zag"), r"layout='zig-zag': choose one of 'contiguous', 'striped', 'zigzag'"),
    "own documents": (lambda: each(documents_BT=tokens(4)), r"shape \(2, 4\): .* whole sequence, \[2, 16\] or \[1, 16\]"),
    "documents' rows": (lambda: each(documents_BT=tokens(16).repeat(2, 1)), r"documents of shape \(4, 16\)"),
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
    def outside() -> list[str]:
        group, said = dist.new_group([1, 3]), []
        calls = [partial(attention, *qkv()) for attention in (ring_attention, all_gather_attention, ulysses_attention)]
        for call in (*calls, model):
            try:
                call(group=group)
                said.append("")
            except ValueError as error:
                said.append(str(error))
        return said

    refused = "this rank is not in the group: call the collective on the ranks of the group only"
    assert four.run(outside) == [[refused] * 4, [""] * 4] * 2


def test_a_model_of_which_a_part_does_not_fit_stays_as_it_was():
    """Nothing is replaced before all is checked. In a process of its own: the group has one rank."""

    def half() -> list[str]:
        gpt = GPT(GPTConfig(layers=2, hidden=16, heads=4, vocab=7, seq=16))
        gpt.layers[1].attention.core = CausalAttention(0.5)
        with pytest.raises(ValueError, match=r"layers\.1\.attention\.core drops 0\.5"):
            ContextParallel(gpt, "layers.*.attention.core")
        return [type(layer.attention.core).__name__ for layer in gpt.layers]

    with mr.World(1, backend="gloo") as world:
        assert world.run(half) == [["CausalAttention"] * 2]
