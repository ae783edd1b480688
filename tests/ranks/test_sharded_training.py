"""The trainer with ZeRO, and without: equal to one process that shards nothing."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import manyranks as mr
from manyranks.parallel.data_parallel import NaiveDataParallel
from manyranks.training.__main__ import main
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer
from tests.conftest import matrix
from tests.ranks.test_trainer import assert_close

GPT = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=16)
STEPS = 8
TRAINING = TrainingConfig(steps=STEPS, batch=7, warmup=3, clip=0.5)  # 7: uneven shards on 2, 3 and 4 ranks
F64 = torch.float64


def weights(trainer: Trainer) -> dict[str, Tensor]:
    if trainer.training.zero == 3:
        return trainer.model.full_state_dict()
    return {name: value.clone() for name, value in trainer.model.module.state_dict().items()}


def trained(
    gpt: GPTConfig, training: TrainingConfig, dtype: torch.dtype = F64, ranks: list[int] | None = None
) -> tuple[list[float], dict[str, Tensor]] | None:
    """The losses and the weights; ranks: of a group that trains alone."""
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    trainer = Trainer(gpt, training, group=group, dtype=dtype)
    return trainer.run(), weights(trainer)


alone = functools.cache(trained)  # in this process, once


# Equal to one process that shards nothing


@pytest.mark.parametrize("n", matrix([2, 3, 4], [3]))
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_losses_and_weights_are_those_of_one_process_on_the_whole_batch(sizes, n, zero):
    wanted = alone(GPT, TRAINING)
    for found in sizes[n].run(trained, GPT, replace(TRAINING, zero=zero)):
        assert_close(found, wanted)


@pytest.mark.parametrize(
    ("gpt", "training"),
    [
        pytest.param(replace(GPT, style="gpt2", kv_heads=None), replace(TRAINING, weight_decay=3.0), id="biases do not decay"),
        pytest.param(replace(GPT, tied=False), replace(TRAINING, clip=0.01), id="untied, clipped"),
        pytest.param(
            replace(GPT, experts=12, expert_ffn=6, shared_experts=1, dense_layers=1, scores="sigmoid"),
            replace(TRAINING, recompute="full"),
            id="experts, which all ranks have",
        ),
        pytest.param(GPT, replace(TRAINING, batch=13, accumulate=3), id="accumulated, uneven micro-batches"),
    ],
)
@pytest.mark.parametrize("zero", matrix([0, 1, 2, 3], [0, 2, 3]))
@pytest.mark.few(3)
def test_so_they_are_with_other_models_and_settings(sizes, gpt, training, zero):
    wanted = alone(gpt, replace(training, accumulate=1))
    for found in sizes[3].run(trained, gpt, replace(training, zero=zero)):
        assert_close(found, wanted)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_group_of_some_ranks_trains_by_itself(sizes, zero):
    first, nothing, last = sizes[3].run(trained, GPT, replace(TRAINING, zero=zero, accumulate=2), ranks=[0, 2])
    assert nothing is None
    assert_close(first, alone(GPT, TRAINING))
    assert_close(last, alone(GPT, TRAINING))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.few(1)
def test_in_32_and_16_bits_they_are_close(sizes, bf16):
    training = replace(TRAINING, bf16=bf16)
    wanted, plain = alone(GPT, training, torch.float32), alone(GPT, TRAINING, torch.float32)
    for zero in (1, 2, 3):
        losses, found = sizes[3].run(trained, GPT, replace(training, zero=zero), torch.float32)[0]
        assert losses == pytest.approx(wanted[0], rel=2e-3 if bf16 else 1e-5)
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert not bf16 or losses != plain[0]


def dtypes_of_products(zero: int) -> set[torch.dtype]:
    trainer = Trainer(GPT, replace(TRAINING, zero=zero, bf16=True))
    seen = set()
    trainer.model.module.layers[0].mlp.down.register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    trainer.run(1)
    return seen


def test_products_are_made_in_bfloat16_which_stage_3_also_gathers_in(sizes):
    for zero in (0, 1, 2):
        assert sizes[3].run(dtypes_of_products, zero) == [{torch.bfloat16}] * 3
    m = sizes[3].measure(dtypes_of_products, 3)
    assert m.results == [{torch.bfloat16}] * 3
    *gathered, losses = (call.dtype for call in m.calls[0] if call.op == "all_gather" and "float" in call.dtype)
    assert (set(gathered), losses) == ({"bfloat16"}, "float32")
    assert {call.dtype for call in m.calls[0] if call.op == "all_to_all"} == {"float32"}, "gradients"


def one_step(zero: int, accumulate: int) -> int:
    """Bytes of a rank's shards, with their padding."""
    trainer = Trainer(GPT, replace(TRAINING, zero=zero, batch=9, accumulate=accumulate))
    trainer.run(1)
    return sum(4 * one.row.size for one in (trainer.model.units if zero == 3 else trainer.optimizer.rows))


@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (2, 3), (3, 3)])
def test_gradients_of_micro_batches_are_held_whole_in_stage_1_only(sizes, zero, reductions):
    """So stages 2 and 3 reduce each of three micro-batches': a rank of three sends two shards' bytes each time."""
    m = sizes[3].measure(one_step, zero, accumulate=3)
    for rank in range(3):
        sent = sum(call.bytes for call in m.calls[rank] if call.op == "send")
        sent += sum(call.bytes for call in m.calls[rank] if call.op == "all_to_all") * 2 // 3
        assert sent == reductions * 2 * m.results[rank]


def holds(zero: int) -> tuple[list[int], list[int]]:
    """Bytes of gradients, masters and states just before the optimizer steps, and elements of the rows."""
    trainer, seen = Trainer(GPT, replace(TRAINING, zero=zero)), []
    stepping = trainer.optimizer.optimizer if zero < 3 else trainer.optimizer

    def look(*_) -> None:
        held = trainer.optimizer.held() if zero < 3 else trainer.model.held(trainer.optimizer)
        seen.append([sum(tensor.nbytes for tensor in part) for part in held])

    stepping.register_step_pre_hook(look)
    trainer.run(2)
    rows = trainer.model.units if zero == 3 else trainer.optimizer.rows
    return seen[1], [row.row.elements for row in rows], sum(1 for _ in trainer.model.parameters())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_before_it_steps_a_rank_holds_the_theory_s_bytes(sizes, zero):
    for rank, (held, rows, tensors) in enumerate(sizes[3].run(holds, zero)):
        each = {"parameter": 4, "gradient": 4, "master": 0, "counter": 4}
        shards = {"rank": rank, "tensors": tensors}
        theory = mr.theory.sharding.held(rows, 3, zero, **each, **shards)
        # The moment after stage 1 has reduced, its gradients are shards, too.
        owned = sum(mr.theory.sharding.owned([e], 3, rank)[0] for e in rows)  # no tensor shows padding
        assert held == [theory.parameters, 4 * owned, 0, theory.states, theory.counters]


def with_evaluation(zero: int) -> tuple[list[float], list[float]]:
    trainer = Trainer(GPT, replace(TRAINING, zero=zero), dtype=F64)
    losses = trainer.run(4)
    held_out = [trainer.evaluate(sequences) for sequences in (1, 2, 43)]  # 43: 15, 14 and 14, in parts of 7
    return losses + trainer.run(), held_out


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_evaluation_in_between_changes_nothing_and_does_not_depend_on_the_ranks(sizes, zero):
    wanted = with_evaluation(0)
    assert wanted[0] == alone(GPT, TRAINING)[0]
    for losses, held_out in sizes[3].run(with_evaluation, zero):
        assert losses == pytest.approx(wanted[0], abs=1e-10)
        assert held_out == pytest.approx(wanted[1], abs=1e-10)


def test_what_cannot_be_sharded_is_said(sizes):
    with pytest.raises(ValueError, match=r"zero=2: states are shared among ranks, and this process has none"):
        Trainer(GPT, replace(TRAINING, zero=2))
    with pytest.raises(mr.RankFailed, match=r"wrapper with zero=3, which takes its place"):
        sizes[3].run(Trainer, GPT, replace(TRAINING, zero=3), NaiveDataParallel)


# Checkpoints


def saved(zero: int, steps: int, folder: str) -> None:
    trainer = Trainer(GPT, replace(TRAINING, zero=zero), dtype=F64)
    trainer.run(steps)
    trainer.save(folder)


def resumed(zero: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = Trainer(GPT, replace(TRAINING, zero=zero, seed=9), dtype=F64)  # of what it begins with nothing may be left
    trainer.training = replace(trainer.training, seed=TRAINING.seed)
    trainer.resume(folder)
    return trainer.run(), weights(trainer)


@pytest.mark.parametrize(("zero", "then"), matrix([(1, 2), (2, 3), (3, 3), (3, 0), (0, 1)], [(2, 3), (3, 0), (0, 1)]))
@pytest.mark.few(1)
def test_another_number_of_ranks_goes_on_from_a_checkpoint_of_any_stage(sizes, tmp_path, zero, then):
    losses, final = alone(GPT, TRAINING)
    sizes[3].run(saved, zero, 5, str(tmp_path))
    for n in (2, 4):
        for found in sizes[n].run(resumed, then, str(tmp_path)):
            assert_close(found, (losses[5:], final))


# The command


@pytest.mark.whole
def test_the_command_trains_sharded_and_goes_on_with_other_ranks(tmp_path, capsys):
    small = ["--batch", "5", "--layers", "1", "--hidden", "16", "--seq", "16", "--warmup", "2", "--checkpoint", str(tmp_path)]
    main([*small, "--steps", "4", "--dp", "3", "--zero", "3"])
    assert "on 3 ranks" in capsys.readouterr().out
    main([*small, "--steps", "6", "--dp", "2", "--zero", "3", "--resume"])
    assert "after 2 steps" in capsys.readouterr().out
