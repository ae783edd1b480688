"""parallel.tensor: the calls and bytes of a layer and of the whole GPT, and what a layer keeps, as the theory counts them."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import overlapped, parallelize
from manyranks.parallel.tensor.cuts import own_part
from manyranks.theory import collectives, tensor
from manyranks.theory.plan import Plan
from manyranks.timeline import Compute, Recv, Send, Wait
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer
from tests.ranks.test_tensor import WAYS

BATCH, SEQ = 2, 12
CONFIG = GPTConfig(layers=2, hidden=24, heads=12, ffn=36, vocab=24, seq=SEQ, style="gpt2", tied=False)
LLAMA = replace(CONFIG, style="llama", kv_heads=1)
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def said(way: str) -> dict:
    """The same way in theory's words: asynchronous rings send what collectives do, and keep as much."""
    return {name: value for name, value in WAYS[way].items() if name != "overlap"}


def layer_of(config: GPTConfig, how: dict, dtype: torch.dtype = torch.float32) -> nn.Module:
    return parallelize(Layer(config).to(dtype), None, tensor_styles.styles_of(config, "layers.*"), **how)


def layer_step(how: dict, backward: bool) -> None:
    model, x = layer_of(LLAMA, how), torch.randn(BATCH, SEQ, LLAMA.hidden)
    y = model((own_part(x) if how else x).requires_grad_())
    if backward:
        y.sum().backward()


def counts(m, rank: int, t: int) -> tuple[int, int, int]:
    """All-reduces, all-gathers, and reduce-scatters; on gloo each is a ring of t − 1 messages."""
    ops = Counter(call.op for call in m.calls[rank])
    assert ops.keys() <= {"all_reduce", "all_gather", "send", "recv"}
    assert ops["send"] == ops["recv"]
    scatters, rest = divmod(ops["send"], t - 1)
    assert rest == 0
    return ops["all_reduce"], ops["all_gather"], scatters


@EVERY_WAY
def test_a_layer_s_calls_and_payload_are_the_theory_s_forward_and_backward(shared_worlds, way):
    t = shared_worlds.size
    forward, both = (shared_worlds.measure(layer_step, WAYS[way], backward) for backward in (False, True))
    for r in range(t):
        expected = tensor.layer(BATCH * SEQ, LLAMA.hidden, t, itemsize=4, rank=r, **said(way))
        for m, (reduces, gathers, scatters, sent, *_) in ((forward, expected.forward), (both, expected.both)):
            assert counts(m, r, t) == ((0, 0, gathers + scatters) if way == "overlap" else (reduces, gathers, scatters))
            assert m.payload_bytes[r] == sent


def gpt_step(config: GPTConfig, how: dict, finishes: str = "") -> None:
    """finishes: what follows the backward pass."""
    model = parallelize(GPT(config), None, tensor_styles.styles(config), **how)
    tokens = torch.ones(BATCH, SEQ, dtype=torch.long)
    model.loss(model(tokens), tokens).backward()
    if finishes == "gradients add up":
        with model.no_sync():
            with model.no_sync():
                pass
            model.finish()
    elif finishes:
        model.finish()
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("config", "way"),
    [(CONFIG, "plain"), (CONFIG, "kept"), (LLAMA, "plain"), (LLAMA, "sequence")],
    ids=["gpt2", "gpt2, kept", "llama", "llama, sequence"],
)
def test_the_whole_gpt_s_calls_and_payload_are_the_theory_s_and_so_is_finish_s_one_all_reduce(shared_worlds, config, way):
    t, how, shape = shared_worlds.size, WAYS[way], config.shape()
    before, nothing, after = (
        shared_worlds.measure(gpt_step, config, how, finishes) for finishes in ("", "gradients add up", "yes")
    )
    partial = tensor.partial_gradients(shape, t, sequence_parallel=bool(how))
    assert (partial.sequence > 0, partial.copies > 0) == (bool(how), config is LLAMA)
    for r in range(t):
        expected = tensor.model(shape, BATCH * SEQ, t, itemsize=4, rank=r, **how).both
        assert (*counts(before, r, t), before.payload_bytes[r]) == expected[:4]
        assert len(nothing.calls[r]) == len(before.calls[r])
        # The one key/value head has copies on all ranks: one group, and one message, for both.
        sums = [("all_reduce", 4 * n)] if (n := sum(partial)) else []
        calls = after.calls[r][len(before.calls[r]) :]
        assert [(call.op, call.bytes) for call in calls] == [*sums, ("all_reduce", 8)]  # the norm, in 64 bits
        summed = tensor.finish(shape, t, bool(how), itemsize=4, rank=r)
        assert summed.count == len(sums)
        norm = collectives.sent_bytes("all_reduce", 1, 8, t)[r]
        assert after.payload_bytes[r] - before.payload_bytes[r] == summed.bytes + norm


# What a layer keeps


SIZES = [(1, 12, 24, 12), (2, 24, 48, 12), (3, 36, 48, 24)]  # b, s, h, a


def kept_bytes(b: int, s: int, h: int, a: int, dropout: float) -> list[int]:
    """The bytes that a layer in bfloat16 saves, without the causal mask, a byte for each pair of tokens."""
    config, found = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=dropout, style="gpt2"), []
    for how in WAYS.values():
        model, x = layer_of(config, how, torch.bfloat16), torch.randn(b, s, h, dtype=torch.bfloat16)
        own = own_part(x) if how else x
        found.append(saved_bytes(model, own.requires_grad_()) - (s * s if dropout else 0))
    return found


@pytest.mark.parametrize("dropout", [0.1, 0.0], ids=["dropout", "flash attention"])
def test_a_layer_keeps_what_the_theory_says(shared_worlds, dropout):
    t = shared_worlds.size
    for b, s, h, a in SIZES:
        shape, expected = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=dropout, style="gpt2").shape(), []
        for way in WAYS:
            how = {"sequence_parallel": False, "flash": not dropout, "recompute": "none"} | said(way)
            expected.append(tensor.saved(shape, Plan(tp=t, seq=s, microbatch=b, batch=b, **how), itemsize=2).total)
        assert shared_worlds.run(kept_bytes, b, s, h, a, dropout) == [expected] * t


def mlp_step(learns: bool, how: dict, low: bool = False) -> tuple[int, torch.dtype]:
    """A backward pass through an MLP, under autocast if low; the bytes that it saved, and the dtype that it gave."""
    model = layer_of(CONFIG, how).module.mlp.requires_grad_(learns)
    x = torch.randn(BATCH, SEQ, CONFIG.hidden)
    x = (own_part(x) if how else x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
        saved = 0 if low else saved_bytes(model, x)
        y = model(x)
    y.sum().backward()
    return saved, y.dtype


@EVERY_WAY
def test_frozen_matrices_keep_no_inputs_and_gather_none_again(shared_world, way):
    t, whole, how = shared_world.size, 4 * BATCH * SEQ * CONFIG.hidden, WAYS[way]
    learning, frozen = (shared_world.measure(mlp_step, learns, how) for learns in (True, False))
    inputs = {"plain": whole, "sequence": whole // t, "kept": whole, "overlap": -1}[way]
    for r in range(t):
        again = (t - 1) * whole // t if way in ("sequence", "overlap") else 0
        assert learning.payload_bytes[r] - frozen.payload_bytes[r] == again
        if inputs >= 0:  # asynchronous layers keep theirs
            middle = whole * CONFIG.ffn // CONFIG.hidden // t
            assert learning.results[r][0] - frozen.results[r][0] == inputs + middle


@EVERY_WAY
def test_under_autocast_messages_and_what_a_layer_gives_have_its_dtype(shared_world, way):
    m = shared_world.measure(mlp_step, True, WAYS[way], True)
    assert {dtype for _, dtype in m.results} == {torch.bfloat16}
    assert {call.dtype for call in m.calls[0]} == {"bfloat16"}


# Messages beside products


def rings() -> None:
    """Rings of asynchronous layers: two column-parallel ones of one input, and a row-parallel one after them."""
    t, w = dist.get_world_size(), CONFIG.hidden
    x, weights = torch.ones(BATCH, SEQ // t, w, requires_grad=True), [torch.ones(w, w, requires_grad=True) for _ in range(3)]
    first, second = overlapped.column(x, [(weights[0], None), (weights[1], None)])
    (first.sum() + overlapped.row(second, weights[2]).sum()).backward()


def hidden(program: tuple) -> list[bool]:
    """For each message that this rank receives: is a product made between its issue and the wait for it?"""
    found = []
    for k, instruction in enumerate(program):
        if type(instruction) is Recv:
            until = program.index(Wait(instruction.handle), k)
            found.append(any(type(i) is Compute and i.work.flops for i in program[k:until]))
    return found


def open_messages(program: tuple) -> int:
    """The most sends of this rank that have been issued and not been waited for."""
    under_way, most = set(), 0
    for instruction in program:
        if type(instruction) is Send:
            under_way.add(instruction.handle)
        elif type(instruction) is Wait:
            under_way.discard(instruction.handle)
        most = max(most, len(under_way))
    return most


def test_a_product_is_made_while_each_message_travels_and_none_twice(shared_worlds):
    t, m = shared_worlds.size, shared_worlds.measure(rings, flops=True)
    for rank in m.program.ranks:
        assert hidden(rank) == [True] * (5 * (t - 1))
        # the input's gradient leaves while the input comes again, and neither ring is ahead of its products
        assert open_messages(rank) == 2
    assert set(m.flops.values()) == {3 * 3 * 2 * BATCH * SEQ * CONFIG.hidden**2}  # three products, forward and twice backward
