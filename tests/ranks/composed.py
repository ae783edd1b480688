"""Composed runs as a whole: the parts that a plan's ranks have, put together, beside what one process has."""

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from manyranks.parallel.boxes import Box
from manyranks.theory import Plan
from manyranks.training.checkpoint import boxes_of
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer

GPT = GPTConfig(layers=4, hidden=32, heads=4, kv_heads=2, seq=32)
SETTINGS = TrainingConfig(steps=10, batch=4, warmup=2)  # clip: 1, which is less than the first gradients' norm


class Run(NamedTuple):
    """losses: of each step; norms: of each step's gradient, before it is cut; boxes: of parameters and Adam's moments."""

    losses: list[float]
    norms: list[float]
    held_out: float
    boxes: list[Box]


def plan(gpt: GPTConfig = GPT, **fields) -> Plan:
    return Plan(**{"seq": gpt.seq, "batch": 4, "zero": 1, "precision": "fp32", "recompute": "none"} | fields)


def trained(gpt: GPTConfig, training: TrainingConfig, steps: int = 2, dtype: torch.dtype | None = torch.float64) -> Run:
    """On a rank."""
    trainer = Trainer(gpt, training, dtype=dtype)
    clip, norms = trainer.spread.clip, []
    trainer.spread.clip = lambda most: norms.append(clip(most).item())
    losses = trainer.run(steps)
    boxes = [box._replace(tensor=box.tensor.clone()) for box in boxes_of(trainer.spread)]
    return Run(losses, norms, trainer.evaluate(4), boxes)


@functools.cache
def alone(gpt: GPTConfig, batch: int = 4, steps: int = 2) -> Run:
    """In this process, once."""
    return trained(gpt, replace(SETTINGS, batch=batch), steps)


def assert_equal_to_one_process(ranks: list[Run], gpt: GPTConfig, batch: int = 4) -> None:
    """Losses, norms, parameters and moments, on every rank. A gradient that is too large by a factor is one in exp_avg."""
    wanted = alone(gpt, batch, len(ranks[0].losses))
    for run in ranks:
        assert run.losses == pytest.approx(wanted.losses, abs=1e-11)
        assert run.norms == pytest.approx(wanted.norms, rel=1e-10)
        assert run.held_out == pytest.approx(wanted.held_out, abs=1e-11)
    found, left = whole(ranks), whole([wanted])
    assert found.keys() == left.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def whole(ranks: list[Run]) -> dict[str, Tensor]:
    """By name; ranks that have the same elements must have the same numbers, and NaN is where none has them."""
    found: dict[str, Tensor] = {}
    for box in (box for run in ranks for box in run.boxes):
        if box.name not in found:
            found[box.name] = box.tensor.new_full(box.shape, torch.nan)
        own = found[box.name][tuple(slice(at, at + size) for at, size in zip(box.offsets, box.tensor.shape, strict=True))]
        assert ((own == box.tensor) | own.isnan()).all(), f"copies of {box.name} differ"
        own.copy_(box.tensor)
    return found
