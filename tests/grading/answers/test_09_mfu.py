"""Exercise 09, and that what is right there is what WorkCounter counts while real modules and operators run."""

from collections import Counter
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import nn

from manyranks.given import mfu as given
from manyranks.grade import mfu, trial
from manyranks.grade.check import shipped
from manyranks.measure.flops import WorkCounter, as_one_operator
from manyranks.parallel.checkpointing import checkpoint
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from tests.grading import records
from tests.grading.answered import *  # noqa: F403

HARDLY = 1e-30  # a rate of dropout that drops nothing, and builds the score matrix
STEP = {158976: 2, 186624: 6, 165888: 3}  # FLOPs of a layer's products -> its key/value heads
SUMS = {"sums": -1, "columns": 0}  # -> over which dimension


def test_the_judge_draws_cases_of_its_own_and_asks_them_first(exercise, task, monkeypatch):
    own, drawn = records.tasks(exercise)[task], []
    for seed in (0, 1, 2):
        monkeypatch.setattr(trial, "seed", seed)
        drawn.append([repr(case) for case in own.cases_on(3)])
    assert not {*drawn[1][:2]} & {*drawn[0], *drawn[2]}


def right(task: str, i: int) -> dict:
    return shipped("09_mfu")[task].right[f"1/{i}"][0].results


def counts(module: nn.Module, part: str, found: Counter) -> None:
    """From now on, adds what the module does."""
    forward = module.forward

    def counted(*args):
        with WorkCounter() as work:
            result = forward(*args)
        found[part] += work.flops
        return result

    module.forward = counted


def run(model: GPT, batch: int, seq: int, predicted: int) -> torch.Tensor:
    x_BSH = model.embedding(torch.arange(batch * seq).view(batch, seq) % model.config.vocab)
    for layer in model.layers:
        x_BSH = layer(x_BSH)
    return model.head(x_BSH[:, -predicted:])


@pytest.mark.parametrize("i", range(len(mfu.forward_flops.cases)))
def test_a_forward_pass_has_the_flops_that_are_counted(i):
    m, *sizes = mfu.forward_flops.cases[i]
    config = GPTConfig(m.layers, m.hidden, m.heads, m.ffn, m.vocab, sizes[1], m.kv_heads, style="llama" if m.gated else "gpt2")
    if m.experts:
        experts = {name: getattr(m, name) for name in ("experts", "top_k", "expert_ffn", "shared_experts", "dense_layers")}
        config = GPTConfig(m.layers, m.hidden, m.heads, m.ffn, m.vocab, sizes[1], m.kv_heads, style="llama", **experts)
    model, found = GPT(config), Counter()
    for layer in model.layers:
        counts(layer.attention, "attention", found)
        counts(layer.attention.core, "scores", found)
        counts(layer.mlp, "mlp", found)
        if router := getattr(layer.mlp, "router", None):
            counts(router, "router", found)
    counts(model.head, "head", found)
    with torch.no_grad():
        run(model, *sizes)
    found["attention"] -= found["scores"]
    found["mlp"] -= found["router"]
    assert right("forward_flops", i) == {name: found[name] for name in right("forward_flops", i)}


@pytest.mark.parametrize("i", range(len(mfu.step_flops.cases)))
def test_a_step_has_the_flops_that_are_counted(i):
    layers, _, recompute, flash = mfu.step_flops.cases[i]
    products, learns = layers[0].products, [one.learns for one in layers]

    def counted(recompute: str, flash: bool) -> float:
        model = GPT(GPTConfig(len(learns), 24, 6, 40, 50, 9, STEP[products], tied=False))
        model.embedding.requires_grad_(False)
        for layer, its in zip(model.layers, learns, strict=True):
            layer.requires_grad_(its)
            layer.attention.core.dropout.rate = 0.0 if flash else HARDLY
            if recompute != "none":
                again = layer if recompute == "full" else layer.attention.core
                again.forward = partial(checkpoint, again.forward)
        with WorkCounter() as work:
            run(model, 2, 9, 9).sum().backward()
        return work.flops

    assert [*right("step_flops", i).values()] == [counted("none", False), counted(recompute, flash)]


def test_a_share_under_full_has_the_flops_that_are_counted():
    case = mfu.mfu.cases[0]
    model = GPT(case.config)
    for layer in model.layers:
        layer.attention.core.dropout.rate = HARDLY
    with WorkCounter() as work:
        run(model, 1, case.config.seq, case.config.seq).sum().backward()
    sequences, accumulate, replicas, chips = case.counts
    peak = case.sheet[case.dtype].flops / 2
    share = work.flops * sequences * accumulate * replicas / case.seconds / (replicas * chips * peak)
    assert right("mfu", 0)['the MFU under "full"'] == pytest.approx(share)


@pytest.mark.parametrize("i", range(2))
def test_operators_and_fused_runs_move_the_bytes_that_are_counted(i):
    steps, shapes, needed, _, bandwidth = [*given.KERNELS.values()][i]
    tensors = {name: torch.ones(shape) for shape, names in shapes.items() for name in names.split()}
    operators, saved = given.operators(steps, shapes), 0
    for one in operators:
        with WorkCounter() as work:
            made = computed(one, tensors)
        assert (work.flops, work.bytes) == (one.flops, sum([*one.reads.values(), *one.writes.values()]))
        assert [made.shape] == [tensors[name].shape for name in one.writes]
        saved += 0 if one.flops else work.bytes
    at = 0
    for product, group in groupby(operators, lambda one: one.flops > 0):
        members = [*group]
        at += len(members)
        kept = {*needed.split(), *(name for one in operators[at:] for name in one.reads)}
        if not product:
            saved -= fused(members, tensors, kept)
    assert right("lost_time", i)["saved"] == pytest.approx(saved / bandwidth)


def fused(members: list, tensors: dict, kept: set[str]) -> int:
    """Bytes of a kernel that does all of them, and returns what is kept."""
    made = {name for one in members for name in one.writes}
    takes = [*dict.fromkeys(name for one in members for name in one.reads if name not in made)]

    def kernel(*given):
        have = dict(zip(takes, given, strict=True))
        for one in members:
            have |= {name: computed(one, have) for name in one.writes}
        return tuple(have[name] for name in have if name in made & kept)

    with WorkCounter() as work:
        as_one_operator(kernel)(*(tensors[name] for name in takes))
    return work.bytes


def computed(one, tensors: dict) -> torch.Tensor:
    reads, (makes,) = [tensors[name] for name in one.reads], one.writes
    if one.name == "sum":
        return reads[0].sum(SUMS[makes], keepdim=True)
    return reads[0] * 2.0 if one.name == "mul" and len(reads) == 1 else getattr(torch, one.name)(*reads)
