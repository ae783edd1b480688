"""training.trainer on real ranks: equal to one process, bit-equal after a resume, and from the command line."""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manyranks.parallel import data_parallel
from manyranks.training import corpus
from manyranks.training.__main__ import main
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer, train
from tests.conftest import matrix

GPT = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=16)
STEPS = 20
TRAINING = TrainingConfig(steps=STEPS, batch=7, warmup=5)  # 7: uneven shards on 2, 3 and 4 ranks
WRAPPERS = ["NaiveDataParallel", "FlatDataParallel", "BucketedDataParallel", "OverlappedDataParallel"]


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.module.named_parameters()}


def trained(
    gpt: GPTConfig, training: TrainingConfig, steps: int | None = None, **options
) -> tuple[list[float], dict[str, Tensor]]:
    trainer = Trainer(gpt, training, **options)
    return trainer.run(steps), parameters(trainer)


def in_float64(gpt: GPTConfig, training: TrainingConfig, wrapper: str = WRAPPERS[-1]) -> tuple[list[float], dict[str, Tensor]]:
    return trained(gpt, training, wrapper=getattr(data_parallel, wrapper), dtype=torch.float64)


alone = functools.cache(in_float64)  # in this process, once


def assert_close(found: tuple, wanted: tuple) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-10)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-10)


# Equal to one process on the whole batch


def test_20_steps_equal_one_process_on_the_whole_batch(shared_worlds):
    wanted = alone(GPT, TRAINING)
    for found in shared_worlds.run(in_float64, GPT, TRAINING):
        assert_close(found, wanted)
    assert wanted[0][-1] < wanted[0][0] - 0.4, "it learns"  # from the source of this Python's library, which differs


@pytest.mark.parametrize("wrapper", WRAPPERS[:-1])
@pytest.mark.few(1)
def test_so_they_do_with_the_other_wrappers(shared_world, wrapper):
    assert_close(shared_world.run(in_float64, GPT, TRAINING, wrapper)[0], alone(GPT, TRAINING))


def test_the_gradient_is_cut_to_the_length_that_is_allowed():
    trainer, lengths = Trainer(GPT, replace(TRAINING, clip=0.05)), []

    def measure(*_) -> None:
        lengths.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm().item())

    trainer.optimizer.register_step_pre_hook(measure)
    trainer.run(3)
    assert lengths == pytest.approx([0.05] * 3, rel=1e-3)


def test_a_step_sends_its_gradients_and_nothing_else(shared_world):
    calls = shared_world.measure(trained, GPT, TRAINING).calls[0]
    gradients = ("all_reduce", 4 * GPT.shape().parameters)
    sent = [(call.op, call.bytes) for call in calls if call.op != "broadcast"][-STEPS - 1 :]
    assert sent[:-1] == [gradients] * STEPS
    assert sent[-1] == ("all_gather", 4 * STEPS), "the losses, once, at the end"


def held_out(sequences: int) -> float:
    return Trainer(GPT, TRAINING, dtype=torch.float64).evaluate(sequences)


@pytest.mark.parametrize("sequences", [1, 2, 50])
def test_the_held_out_loss_does_not_depend_on_the_ranks(shared_world, sequences):
    assert shared_world.run(held_out, sequences) == pytest.approx([held_out(sequences)] * 3, abs=1e-12)


def first_dropped() -> Tensor:
    """The activations that are left out where every rank has the same sequences."""
    trainer = Trainer(replace(GPT, dropout=0.5), replace(TRAINING, batch=3))
    kept = []
    trainer.model.module.embedding.register_forward_hook(lambda *args: kept.append(args[-1][0] != 0))
    trainer.run(2)
    return torch.stack(kept)


def test_dropout_differs_between_ranks_and_steps_and_comes_again(shared_world):
    masks = shared_world.run(first_dropped)
    assert all(torch.equal(*pair) for pair in zip(masks, shared_world.run(first_dropped), strict=True))
    rows = [row for mask in masks for row in mask]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_evaluation_is_without_dropout_and_changes_nothing():
    plain, dropping, again = (Trainer(replace(GPT, dropout=rate), TRAINING) for rate in (0.0, 0.5, 0.5))
    assert dropping.evaluate() == plain.evaluate()
    assert dropping.run(3) == again.run(3)


def reports() -> tuple[list[float], list[tuple[int, float]]]:
    seen: list[tuple[int, float]] = []
    losses = Trainer(GPT, TRAINING).run(3, report=lambda *args: seen.append(args))
    return losses, seen


def test_a_rank_reports_the_mean_loss_of_its_own_sequences(shared_world):
    found = shared_world.run(reports)
    sizes = [len(corpus.batch(0, 7, 16, rank, 3)) for rank in range(3)]
    for step in range(3):
        parts = [seen[step] for _, seen in found]
        assert [number for number, _ in parts] == [step + 1] * 3
        mean = sum(loss * size for (_, loss), size in zip(parts, sizes, strict=True)) / 7
        assert mean == pytest.approx(found[0][0][step], rel=1e-5)


def test_bfloat16_keeps_float32_weights_and_learns_alike():
    plain, mixed = trained(GPT, TRAINING), trained(GPT, replace(TRAINING, bf16=True))
    assert {p.dtype for p in mixed[1].values()} == {torch.float32}
    assert mixed[0] != plain[0]
    assert mixed[0] == pytest.approx(plain[0], rel=0.02)


# Checkpoints

WITH_DROPOUT = replace(GPT, dropout=0.1)


def in_two_parts(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    first = Trainer(WITH_DROPOUT, TRAINING)
    before = first.run(8)
    first.save(folder)
    second = Trainer(WITH_DROPOUT, TRAINING)
    with torch.no_grad():
        for parameter in second.model.module.parameters():
            parameter.fill_(7.0)  # nothing of what it begins with may be left
    second.resume(folder)
    assert second.step == 8
    return before + second.run(), parameters(second)


@pytest.mark.few(1)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(shared_worlds, tmp_path):
    whole, parts = shared_worlds.run(trained, WITH_DROPOUT, TRAINING), shared_worlds.run(in_two_parts, str(tmp_path))
    for (losses, weights), (losses_again, weights_again) in zip(whole, parts, strict=True):
        assert losses == losses_again
        assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())


def test_the_newest_complete_checkpoint_is_read(tmp_path):
    trainer = Trainer(GPT, TRAINING)
    for steps in (2, 1):
        trainer.run(steps)
        trainer.save(tmp_path)
    (tmp_path / "step-00000009").mkdir()  # a run that died while it wrote
    again = Trainer(GPT, TRAINING)
    with pytest.warns(UserWarning, match="step-00000009 is passed over: .* has no checkpoint"):
        again.resume(tmp_path)
    assert again.step == 3
    again.resume(tmp_path / "nothing there")
    assert again.step == 3


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    Trainer(GPT, TRAINING).save(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)was written by a run with.*seed=\d+, .*\nand this one has.*seed=77"):
        Trainer(GPT, replace(TRAINING, seed=77)).resume(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)was written by a run with.*kv_heads=2.*and this one has.*kv_heads=4"):
        Trainer(replace(GPT, kv_heads=4), TRAINING).resume(tmp_path)


# The command

SMALL = ["--steps", "4", "--batch", "5", "--layers", "1", "--hidden", "16", "--seq", "16", "--warmup", "2"]


def test_the_command_starts_ranks_saves_and_resumes(tmp_path, capsys):
    main([*SMALL, "--dp", "3", "--checkpoint", str(tmp_path), "--save-every", "3"])
    assert sorted(place.name for place in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    first = capsys.readouterr()
    assert "5 sequences a step" in first.out
    assert "on 3 ranks" in first.out
    assert "step      4" in first.out
    assert "after 4 steps" in first.out
    assert first.err == "", "no progress where stderr is no terminal"
    main([*SMALL, "--steps", "6", "--dp", "2", "--checkpoint", str(tmp_path), "--resume"])
    assert "step      5" in (again := capsys.readouterr().out)
    assert f"goes on after step 4, from the checkpoint in {tmp_path}" in again
    with pytest.raises(SystemExit):
        main([*SMALL, "--seed", "1", "--checkpoint", str(tmp_path)])
    assert f"{tmp_path} has the checkpoints of a run: go on with it" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has the checkpoints of a run"):
        train(GPT, TRAINING, str(tmp_path))
    assert "after 2 steps" in again


@pytest.mark.whole
def test_the_command_goes_on_under_other_axes(tmp_path, capsys):
    axes = [*SMALL, "--layers", "2", "--batch", "4", "--checkpoint", str(tmp_path)]
    main([*axes, "--steps", "2", "--tp", "2", "--pp", "2"])
    assert "on 4 ranks (dp 1 · pp 2 · cp 1 · tp 2); 4 sequences a step" in capsys.readouterr().out
    main([*axes, "--steps", "4", "--cp", "2", "--zero", "3", "--resume"])
    second = capsys.readouterr().out
    assert "on 2 ranks (dp 1 · pp 1 · cp 2 · tp 1)" in second
    assert "after 2 steps" in second
    main([*SMALL, "--layers", "2", "--batch", "4", "--dp", "1"])
    alone = [line for line in capsys.readouterr().out.splitlines() if "step      3" in line or "step      4" in line]
    assert [line for line in second.splitlines() if line.startswith("  step")] == alone


@pytest.mark.parametrize("axes", matrix(["", "--tp 2"], ["--tp 2"]), ids=["data parallelism", "tensor parallelism"])
@pytest.mark.whole
def test_under_torchrun_the_same_run_gives_the_same_losses(capsys, axes):
    main([*SMALL, *(axes or "--dp 2").split()])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "manyranks.training", *SMALL, *axes.split(), "--mfu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, used = done.stdout.splitlines()
    assert without_seconds("\n".join(lines)) == without_seconds(capsys.readouterr().out)
    assert "GFLOP/s in float32 (2 × CPU with 1 thread, measured: the best of a few large products)" in used


def without_seconds(text: str) -> str:
    return text.rpartition(" in ")[0]


def test_a_whole_run_gives_every_rank_the_same_result(shared_world):
    results = shared_world.run(train, GPT, TRAINING)
    assert all(result[:3] + result[4:] == results[0][:3] + results[0][4:] for result in results)
    assert results[0].parameters == GPT.shape().parameters
    assert results[0].ranks == 3
    assert results[0].held_out < results[0].losses[0] - 0.5


def test_pairs_are_this_ranks_part_of_the_batch_as_inputs_and_what_follows(shared_world):
    parts = shared_world.run(corpus.pairs, 5, 8, 16)
    for rank, (inputs_BS, targets_BS) in enumerate(parts):
        tokens_BT = corpus.batch(5, 8, 16, rank, 3)
        assert torch.equal(inputs_BS, tokens_BT[:, :-1])
        assert torch.equal(targets_BS, tokens_BT[:, 1:])
    assert [len(inputs_BS) for inputs_BS, _ in parts] == [3, 3, 2]
