"""parallel.tensor: the calls and bytes of a layer and of the whole GPT, and what a layer keeps, as the theory counts them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import parallelize
from manyranks.parallel.tensor.cuts import own_part
from manyranks.theory import collectives, tensor
from manyranks.theory.plan import Plan
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer
from tests.conftest import matrix

BATCH, SEQ = 2, 12
CONFIG = GPTConfig(layers=2, hidden=24, heads=12, ffn=36, vocab=24, seq=SEQ, style="gpt2", tied=False)
LLAMA = replace(CONFIG, style="llama", kv_heads=1)
SP = {"sequence_parallel": True}
WAYS = {"plain": {}, "sequence": SP, "kept": SP | {"regather": False}}
OVERLAP = SP | {"overlap": True}


def layer_of(config: GPTConfig, dtype: torch.dtype = torch.float32, **how):
    return parallelize(Layer(config).to(dtype), None, tensor_styles.styles_of(config, "layers.*"), **how)


def layer_step(config: GPTConfig, how: dict, backward: bool) -> None:
    model, x = layer_of(config, **how), torch.randn(BATCH, SEQ, config.hidden)
    y = model((own_part(x) if how else x).requires_grad_())
    if backward:
        y.sum().backward()


def gpt_step(config: GPTConfig, how: dict, *after: str) -> None:
    """after: what follows the backward pass."""
    model = parallelize(GPT(config), None, tensor_styles.styles(config), **how)
    tokens = torch.ones(BATCH, SEQ, dtype=torch.long)
    model.loss(model(tokens), tokens).backward()
    if "nothing, for the gradients add up" in after:
        with model.no_sync():
            with model.no_sync():
                pass
            model.finish()
    if "finish" in after:
        model.finish()
    if "clip" in after:
        model.clip_grad_norm_(1.0)


def counts(m, rank: int, t: int, before: int = 0) -> tuple[int, int, int]:
    """All-reduces, all-gathers, and reduce-scatters, each of which is on gloo a ring of t − 1 messages."""
    ops = Counter(call.op for call in m.calls[rank][before:])
    assert ops.keys() <= {"all_reduce", "all_gather", "send", "recv"}
    assert ops["send"] == ops["recv"]
    scatters, rest = divmod(ops["send"], t - 1)
    assert rest == 0
    return ops["all_reduce"], ops["all_gather"], scatters


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_s_calls_and_payload_are_the_theory_s_forward_and_backward(shared_worlds, way, config):
    t, how = shared_worlds.size, WAYS[way]
    forward, both = (shared_worlds.measure(layer_step, config, how, backward) for backward in (False, True))
    for r in range(t):
        expected = tensor.layer(BATCH * SEQ, config.hidden, t, itemsize=4, rank=r, **how)
        for m, passes in ((forward, expected.forward), (both, expected.both)):
            assert counts(m, r, t) == passes[:3]
            assert m.payload_bytes[r] == passes.bytes
        assert counts(both, r, t) == {"plain": (4, 0, 0), "sequence": (0, 6, 4), "kept": (0, 4, 4)}[way]


def test_each_collective_of_a_layer_moves_one_activation(shared_worlds):
    t, whole = shared_worlds.size, 4 * BATCH * SEQ * CONFIG.hidden
    plain, sequence = (shared_worlds.measure(layer_step, CONFIG, WAYS[way], True) for way in ("plain", "sequence"))
    for r in range(t):
        assert {call.bytes for call in plain.calls[r]} == {whole}  # of an all-reduce, what a rank puts in
        assert {call.bytes for call in sequence.calls[r]} == {whole // t}  # a shard, in each gather and each message of a ring
        assert sequence.payload_bytes[r] == 10 * whole * (t - 1) / t
        assert plain.payload_bytes[r] == 8 * whole * (t - 1) / t


def test_overlapped_messages_carry_the_bytes_of_the_collectives_that_they_replace(shared_worlds):
    m, t = shared_worlds.measure(layer_step, CONFIG, OVERLAP, True), shared_worlds.size
    for r in range(t):
        assert {call.op for call in m.calls[r]} == {"send", "recv"}
        assert m.payload_bytes[r] == tensor.layer(BATCH * SEQ, CONFIG.hidden, t, itemsize=4, rank=r, **SP).both.bytes


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_gpt_s_calls_and_payload_are_the_theory_s(shared_worlds, way):
    t, how = shared_worlds.size, WAYS[way]
    m = shared_worlds.measure(gpt_step, CONFIG, how)
    for r in range(t):
        options = how | {"itemsize": 4, "loss_itemsize": 4, "rank": r}
        expected = tensor.model(CONFIG.shape(), BATCH * SEQ, t, **options).both
        assert counts(m, r, t) == expected[:3]
        assert m.payload_bytes[r] == expected.bytes


@pytest.mark.parametrize("how", [{}, SP], ids=["plain", "sequence"])
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.few(1)
def test_finish_makes_one_all_reduce_for_what_one_group_holds(shared_worlds, config, how):
    t = shared_worlds.size
    before, nothing, after = (
        shared_worlds.measure(gpt_step, config, how, *calls)
        for calls in ([], ["nothing, for the gradients add up"], ["finish", "clip"])
    )
    partial = tensor.partial_gradients(config.shape(), t, **how)
    assert (partial.sequence > 0, partial.copies > 0) == (bool(how), config is LLAMA)
    for r in range(t):
        assert len(nothing.calls[r]) == len(before.calls[r])
        calls = after.calls[r][len(before.calls[r]) :]
        # The one key/value head has copies on all ranks: one group, and one message, for both.
        elements = [n] if (n := partial.sequence + partial.copies) else []
        assert [(call.op, call.bytes, len(call.ranks)) for call in calls] == [
            *(("all_reduce", 4 * n, t) for n in elements),
            ("all_reduce", 8, t),  # the norm, in 64 bits
        ]
        expected = tensor.finish(config.shape(), t, itemsize=4, copies_rank=r, rank=r, **how)
        assert expected.count == len(elements)
        norm = collectives.sent_bytes("all_reduce", 1, 8, t)[r]
        assert after.payload_bytes[r] - before.payload_bytes[r] == expected.bytes + norm


def test_heads_that_only_some_ranks_share_are_summed_over_these():
    config = replace(LLAMA, kv_heads=2)
    with mr.World(4, backend="gloo", timeout=30) as world:
        m = world.measure(gpt_step, config, SP, "finish")
        for r in range(4):
            last = m.calls[r][-1]
            assert last.ranks == (r // 2 * 2, r // 2 * 2 + 1)
            assert last.bytes == 4 * tensor.partial_gradients(config.shape(), 4, **SP).copies


def test_one_rank_sends_nothing():
    with mr.World(1, backend="gloo", timeout=30) as world:
        for how in (*WAYS.values(), OVERLAP):
            assert world.measure(gpt_step, LLAMA, how, "finish").calls[0] == []


# What a layer keeps


SIZES = [(1, 16, 32, 4), (2, 8, 64, 8), (3, 24, 48, 12), (1, 48, 64, 4)]  # b, s, h, a


def kept_bytes(b: int, s: int, h: int, a: int, dropout: float) -> list[int]:
    """The bytes that a layer in bfloat16 saves, without the causal mask, a byte for each pair of tokens."""
    config, found = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=dropout, style="gpt2"), []
    for how in WAYS.values():
        model, x = layer_of(config, torch.bfloat16, **how), torch.randn(b, s, h, dtype=torch.bfloat16)
        own = own_part(x) if how else x
        found.append(saved_bytes(model, own.requires_grad_()) - (s * s if dropout else 0))
    return found


@pytest.mark.parametrize("shared_worlds", matrix([1, 2, 4], [4]), indirect=True, scope="module")
def test_a_layer_keeps_what_the_paper_says_and_the_norms_statistics(shared_worlds):
    t = shared_worlds.size
    for b, s, h, a in SIZES:
        sbh, statistics = s * b * h, 2 * 2 * 2 * s * b  # of two norms mean and deviation, in 16 bits
        expected = {
            "plain": sbh * (10 + 24 / t + 5 * a * s / (h * t)) + statistics,
            "sequence": sbh / t * (34 + 5 * a * s / h) + statistics / t,
        }
        expected["kept"] = expected["sequence"] + 4 * sbh * (1 - 1 / t)
        shape = GPTConfig(layers=1, hidden=h, heads=a, seq=s, dropout=0.1, style="gpt2").shape()
        for way, how in WAYS.items():
            how = {"sequence_parallel": False} | how
            plan = Plan(tp=t, seq=s, microbatch=b, batch=b, flash=False, recompute="none", **how)
            assert tensor.saved(shape, plan, itemsize=2).total == expected[way]
        assert shared_worlds.run(kept_bytes, b, s, h, a, 0.1) == [list(expected.values())] * t


@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [4]), indirect=True, scope="module")
def test_flash_attention_and_no_dropout_are_counted_by_the_theory_too(shared_worlds):
    t, (b, s, h, a) = shared_worlds.size, SIZES[2]
    shape, expected = GPTConfig(layers=1, hidden=h, heads=a, seq=s, style="gpt2").shape(), []
    for how in WAYS.values():
        plan = Plan(tp=t, seq=s, microbatch=b, batch=b, flash=True, recompute="none", **({"sequence_parallel": False} | how))
        expected.append(tensor.saved(shape, plan, itemsize=2).total)
    assert shared_worlds.run(kept_bytes, b, s, h, a, 0.0) == [expected] * t


def mlp_step(learns: bool, how: dict) -> int:
    """A backward pass through an MLP; the bytes that it saved."""
    model = layer_of(CONFIG, **how).module.mlp.requires_grad_(learns)
    x = torch.randn(BATCH, SEQ, CONFIG.hidden)
    x = (own_part(x) if how else x).requires_grad_()
    saved = saved_bytes(model, x)
    model(x).sum().backward()
    return saved


@pytest.mark.parametrize("way", WAYS)
def test_frozen_matrices_keep_no_inputs_and_gather_none_again(shared_world, way):
    t, whole, how = shared_world.size, 4 * BATCH * SEQ * CONFIG.hidden, WAYS[way]
    learning, frozen = (shared_world.measure(mlp_step, learns, how) for learns in (True, False))
    for r in range(t):
        inputs = {"plain": whole, "sequence": whole // t, "kept": whole}[way] + whole * CONFIG.ffn // CONFIG.hidden // t
        assert learning.results[r] - frozen.results[r] == inputs
        again = (0, 1, 0) if way == "sequence" else (0, 0, 0)
        assert [a - b for a, b in zip(counts(learning, r, t), counts(frozen, r, t), strict=True)] == list(again)
