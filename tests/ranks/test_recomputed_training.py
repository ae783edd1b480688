"""The trainer with recomputation: the same losses and weights bit for bit, the same messages, less memory."""

from dataclasses import replace

import pytest
import torch

from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer
from tests.conftest import matrix
from tests.ranks.test_sharded_training import weights

GPT = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=32, dropout=0.2)
TRAINING = TrainingConfig(steps=3, batch=14, accumulate=2, warmup=2)


def trained(training: TrainingConfig, evaluate: bool = True) -> tuple | None:
    """Losses, weights, and the loss on held-out text; a peak is of training alone, for Python 3.12's hides it else."""
    trainer = Trainer(GPT, training)
    losses = trainer.run()
    return (losses, trainer.evaluate(4), weights(trainer)) if evaluate else None


@pytest.mark.parametrize("zero", matrix([0, 1, 2, 3], [3]))
def test_what_is_learnt_and_sent_is_the_same_and_less_is_held(shared_world, zero):
    runs = {how: replace(TRAINING, zero=zero, recompute=how) for how in ("none", "selective", "full")}
    plain, *others = (shared_world.measure(trained, run) for run in runs.values())
    for run in others:
        for (*losses, found), (*wanted, expected) in zip(run.results, plain.results, strict=True):
            assert (losses, found.keys()) == (wanted, expected.keys())
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert run.payload_bytes == plain.payload_bytes
    peaks = [shared_world.measure(trained, run, False, memory=True).peak_bytes[0] for run in runs.values()]
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize(("before", "after"), [("none", "full"), ("full", "none")])
def test_a_run_goes_on_with_another_setting(tmp_path, before, after):
    first, whole = (Trainer(GPT, replace(TRAINING, recompute=how)) for how in (before, "none"))
    first.run(2)
    first.save(tmp_path)
    second = Trainer(GPT, replace(TRAINING, recompute=after))
    second.resume(tmp_path)
    assert second.run() == whole.run()[2:]
