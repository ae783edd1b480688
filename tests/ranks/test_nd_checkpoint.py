"""Checkpoints across plans: what any ranks write under one plan, any others read under another, bit for bit."""

import functools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import manyranks as mr
from manyranks.parallel import saving
from manyranks.parallel.boxes import Box
from manyranks.theory import Plan
from manyranks.training import checkpoint
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT
from manyranks.training.trainer import Trainer
from tests.conftest import matrix

SMALL = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=16, vocab=257)  # 257: uneven on any ranks
MOE = replace(SMALL, experts=4, expert_ffn=8, shared_experts=1, dense_layers=1)
STEPS, LEFT = 6, 3
Tensors = dict[str, Tensor]


@pytest.fixture
def ranks(world_of):
    """A function that runs another one on so many ranks, one being this process."""
    return lambda n, function, *args: [function(*args)] if n == 1 else world_of(n).run(function, *args)


def plan(**fields) -> Plan:
    usual = {"seq": SMALL.seq, "batch": 8, "zero": 0, "precision": "fp32", "recompute": "none"}
    return Plan(**usual | fields)


def trainer(gpt: GPTConfig, plan: Plan | None, seed: int = 0, dtype: torch.dtype | None = torch.float64) -> Trainer:
    return Trainer(gpt, TrainingConfig(steps=STEPS, batch=8, warmup=3, clip=0.5, seed=seed, plan=plan), dtype=dtype)


@functools.cache
def alone(gpt: GPTConfig) -> tuple[float, ...]:
    """The losses of one process that never stops."""
    return tuple(trainer(gpt, None).run())


def begun(gpt: GPTConfig, plan: Plan | None, folder: str, dtype: torch.dtype | None = torch.float64) -> None:
    run = trainer(gpt, plan, dtype=dtype)
    run.run(LEFT)
    run.save(folder)


def gone_on(
    gpt: GPTConfig, plan: Plan | None, folder: str, again: str, dtype: torch.dtype | None = torch.float64
) -> list[float]:
    """Saves at once what it has read, then trains; of the first weights nothing may be left."""
    run = trainer(gpt, plan, seed=9, dtype=dtype)
    run.training = replace(run.training, seed=0)
    run.resume(folder)
    run.save(again)
    return run.run()


def written(folder: Path) -> Tensors:
    """All tensors of a folder's newest checkpoint, whole."""
    return stored(checkpoint.newest(folder))


def stored(place: Path) -> Tensors:
    shapes = {box.name: (box.shape, box.tensor.dtype) for box in saving._stored(place)}
    found = {name: torch.full(shape, 7, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    saving.load(place, [Box(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in found.items()])
    return found


class Case(NamedTuple):
    first: Plan | None
    then: Plan | None
    gpt: GPTConfig = SMALL


CASES = {
    "tp2 pp2 → dp4, ZeRO 1": Case(plan(tp=2, pp=2, microbatch=2), plan(dp=4, zero=1)),
    "dp2 cp2, ZeRO 3 → tp4": Case(plan(dp=2, cp=2, zero=3), plan(tp=4)),
    "HSDP → pp2, a V, ZeRO 1": Case(
        plan(dp=4, dp_shard=2, zero=3),
        plan(dp=2, pp=2, schedule="zb-v", zero=1),
        replace(SMALL, layers=4, style="gpt2", kv_heads=None),
    ),
    "experts: ep2 pp2 → dp2 cp2 ep4, ZeRO 1": Case(plan(dp=2, ep=2, pp=2), plan(dp=2, cp=2, ep=4, zero=1), MOE),
    "experts on axes of their own: tp2 etp2 ep2, ZeRO 3 → dp4 ep4": Case(
        plan(dp=2, tp=2, etp=2, ep=2, zero=3), plan(dp=4, ep=4), MOE
    ),
    "experts on axes of their own: dp2 ep2 → tp2 etp1 ep4": Case(plan(dp=2, ep=2), plan(dp=2, tp=2, etp=1, ep=4), MOE),
    "experts, ZeRO 3 → one process": Case(plan(dp=4, ep=2, zero=3), None, MOE),
    "one process → dp2 tp2 pp2, ZeRO 1": Case(None, plan(dp=2, tp=2, pp=2, zero=1)),
}
KEPT = (
    "tp2 pp2 → dp4, ZeRO 1",
    "dp2 cp2, ZeRO 3 → tp4",
    "experts, ZeRO 3 → one process",
    "experts on axes of their own: tp2 etp2 ep2, ZeRO 3 → dp4 ep4",
)


@pytest.mark.parametrize("name", matrix(CASES, KEPT))
@pytest.mark.few(1)
def test_what_one_plan_leaves_another_goes_on_with_bit_for_bit(ranks, tmp_path, name):
    first, then, gpt = CASES[name]
    old, new = tmp_path / "old", tmp_path / "new"
    ranks(first.gpus if first else 1, begun, gpt, first, str(old))
    losses = ranks(then.gpus if then else 1, gone_on, gpt, then, str(old), str(new))
    left, read = written(old), written(new)
    assert left.keys() == read.keys()
    assert all(torch.equal(left[name], read[name]) for name in left)
    untouched = dict(GPT(gpt).named_parameters())
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        assert {x: left[f"{kind}.{x}"].shape for x in untouched} == {x: p.shape for x, p in untouched.items()}
    assert len([name for name in left if not name.startswith("buffer.")]) == 3 * len(untouched)
    assert left["exp_avg_sq.head.norm.weight"].min() > 0
    for found in losses:
        assert found == pytest.approx(list(alone(gpt)[LEFT:]), abs=1e-12)


def test_the_file_has_what_one_process_has(ranks, tmp_path):
    """By their names, and in the right place: a swap of two heads or experts would come back unseen by its own reader."""
    run = trainer(MOE, None)
    run.run(LEFT)
    ranks(4, begun, MOE, plan(dp=2, ep=2, tp=2, zero=1), str(tmp_path))
    left = written(tmp_path)
    for name, parameter in run.model.module.named_parameters():
        state = run.optimizer.state[parameter]
        for kind, values in {"parameter": parameter, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            torch.testing.assert_close(left[f"{kind}.{name}"], values.detach(), rtol=0, atol=1e-11)


def test_in_16_bits_the_masters_are_kept(ranks, tmp_path):
    old, new, half = tmp_path / "old", tmp_path / "new", {"precision": "bf16"}
    ranks(4, begun, SMALL, plan(dp=2, tp=2, **half), str(old), None)
    first = ranks(4, gone_on, SMALL, plan(dp=2, pp=2, zero=1, **half), str(old), str(new), None)
    left, read = written(old), written(new)
    assert {x.dtype for x in left.values()} == {torch.float32}
    assert all(torch.equal(left[name], read[name]) for name in left)
    weight = left["parameter.layers.0.mlp.up.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
    assert first[0] == pytest.approx(list(alone(SMALL)[LEFT:]), rel=0.02)


def held(plan: Plan) -> tuple[int, int, bool]:
    """Elements that this rank writes from, those that it trains with, and whether they are in the same memory."""
    run = trainer(SMALL, plan)
    own = list(checkpoint.boxes_of(run.spread))
    shards = [shard for unit in run.spread.units for shard in unit.shards]
    stepped = [*shards, *(x for state in run.optimizer.state.values() for x in state.values() if x.dim())]
    memory = {x.untyped_storage().data_ptr() for x in stepped}
    return sum(box.tensor.numel() for box in own), sum(x.numel() for x in stepped), memory >= addresses(own)


def addresses(parts: list[Box]) -> set[int]:
    return {box.tensor.untyped_storage().data_ptr() for box in parts}


def test_no_rank_has_more_of_the_model_than_it_trains_with(ranks):
    found, p = ranks(4, held, plan(dp=4, zero=3)), SMALL.shape().parameters
    assert sum(written for written, _, _ in found) == 3 * p
    for written, trains, same in found:
        assert 3 * p / 4 - 100 < written <= trains < 3 * p / 4 + 100
        assert same


def test_each_rank_writes_a_part(ranks, tmp_path):
    """Also of what all ranks have: PyTorch's checkpoint deals it to them."""
    ranks(4, begun, SMALL, plan(dp=4), str(tmp_path))
    sizes = [path.stat().st_size for path in sorted(checkpoint.newest(tmp_path).glob("*.safetensors"))]
    assert len(sizes) == 4
    assert max(sizes) < 0.6 * sum(sizes)


# Folders that are no checkpoints, or another model's


def damaged(place: Path, how: str) -> str:
    """Does it to a file, and says what is to be read of it."""
    file = saving.files(place)[0]
    stored = bytearray(file.read_bytes())
    if how == "short":
        os.truncate(file, len(stored) - 1)
        return f"{file.name} has {len(stored) - 1:,} bytes instead of {len(stored):,}"
    if how == "missing":
        file.unlink()
        return "has no checkpoint"
    if how == "empty":
        file.write_bytes(b"")
        return f"{file.name} is corrupt: its checksum doesn't match"
    at = {"a bit of a number": len(stored) - 100, "a bit of the header": 300, "the checksum": len(stored) - 2}[how]
    stored[at] ^= 4
    file.write_bytes(stored)
    return f"{file.name} is corrupt: its checksum doesn't match"


@pytest.mark.parametrize("how", ["short", "missing", "empty", "a bit of a number", "a bit of the header", "the checksum"])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, how):
    run = trainer(SMALL, None)
    run.save(tmp_path)
    run.run(1)
    said = damaged(run.save(tmp_path), how)
    again = trainer(SMALL, None)
    with pytest.warns(UserWarning, match=f"step-00000001 is passed over: .*{re.escape(said)}"):
        again.resume(tmp_path)
    assert again.step == 0


def test_the_files_are_those_of_safetensors(tmp_path):
    """Its own reader finds the same numbers."""
    run = trainer(SMALL, None)
    run.run(1)
    (file,) = saving.files(run.save(tmp_path))
    there = load_file(file)
    for name, parameter in run.model.module.named_parameters():
        assert torch.equal(there[f"parameter.{name}{[0] * parameter.dim()}"], parameter)


def test_another_gpt_is_refused_on_every_rank(ranks, tmp_path):
    begun(SMALL, None, str(tmp_path))
    with pytest.raises(
        mr.RankFailed, match=r"(?s)all 4 ranks.*was written by a run with.*layers=2.*and this one has.*layers=4"
    ):
        ranks(4, gone_on, replace(SMALL, layers=4), plan(tp=2, pp=2), str(tmp_path), str(tmp_path))
