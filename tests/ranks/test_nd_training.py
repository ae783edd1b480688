"""The trainer under any plan: every axis, alone and with the others, equals one process, in its gradients too."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from manyranks.theory.architecture import LatentAttention
from manyranks.training import trainer as trainer_module
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT as Model
from manyranks.training.trainer import Trainer
from tests.conftest import matrix
from tests.ranks.composed import GPT, SETTINGS, Run, alone, assert_equal_to_one_process, plan, trained, whole

THREES = replace(GPT, hidden=48, heads=6, kv_heads=3, ffn=96, seq=48)
SIX = replace(GPT, layers=6, tied=False)
ONE_KEY = replace(GPT, kv_heads=1, vocab=259)  # a vocabulary that nothing divides
GPT2 = replace(GPT, style="gpt2", kv_heads=None, vocab=257)
MOE = replace(GPT, experts=4, expert_ffn=32, shared_experts=1, dense_layers=1)
UNTIED_MOE = replace(MOE, tied=False)
LATENT = replace(MOE, kv_heads=None, latent=LatentAttention(12, 8, 6, 4, 5))

# By what they show, in the order of worlds: 8 ranks, 2, 3, 4.
CASES: dict[str, tuple[GPTConfig, dict]] = {
    # Three axes
    "dp × pp × cp": (GPT, {"dp": 2, "pp": 2, "cp": 2, "zero": 0}),
    "dp × pp × tp": (GPT, {"dp": 2, "pp": 2, "tp": 2, "schedule": "zb-h1"}),
    "dp × cp × tp, ZeRO 3": (GPT, {"dp": 2, "cp": 2, "tp": 2, "zero": 3}),
    "pp × cp × tp": (ONE_KEY, {"pp": 2, "cp": 2, "tp": 2, "schedule": "zb-v"}),
    "ep × pp × dp": (MOE, {"dp": 4, "ep": 2, "pp": 2, "recompute": "full"}),
    "ep × cp × tp": (MOE, {"dp": 2, "cp": 2, "ep": 2, "tp": 2, "zero": 2}),
    "HSDP with tp, ZeRO 2": (GPT, {"dp": 4, "dp_shard": 2, "tp": 2, "zero": 2}),
    "HSDP with pp, ZeRO 3": (SIX, {"dp": 4, "dp_shard": 2, "pp": 2, "zero": 3}),
    # One axis: each schedule
    "naive": (SIX, {"pp": 2, "schedule": "naive"}),
    "gpipe": (SIX, {"pp": 2, "schedule": "gpipe", "microbatch": 2}),
    "interleaved": (SIX, {"pp": 2, "virtual": 2, "zero": 3}),
    "zb-h1": (SIX, {"pp": 2, "schedule": "zb-h1", "zero": 3}),
    "zb-h2": (SIX, {"pp": 2, "schedule": "zb-h2", "recompute": "selective"}),
    "zb-v": (GPT, {"pp": 2, "schedule": "zb-v", "zero": 0}),
    "dualpipe-v": (GPT, {"pp": 2, "schedule": "dualpipe-v"}),
    # Three of each
    "tp 3": (THREES, {"tp": 3, "batch": 3}),
    "cp 3": (THREES, {"cp": 3, "batch": 3, "zero": 0}),
    "pp 3": (SIX, {"pp": 3, "batch": 3}),
    "dp 3": (GPT, {"dp": 3, "batch": 3, "zero": 0}),
    # Two axes
    "dp × tp": (GPT, {"dp": 2, "tp": 2, "zero": 0}),
    "dp × tp, ZeRO 1": (GPT, {"dp": 2, "tp": 2}),
    "dp × tp, ZeRO 2": (GPT, {"dp": 2, "tp": 2, "zero": 2, "regather": False}),
    "dp × tp, ZeRO 3": (ONE_KEY, {"dp": 2, "tp": 2, "zero": 3}),
    "dp × pp": (GPT, {"dp": 2, "pp": 2, "zero": 0}),
    "dp × pp, a V, ZeRO 3": (SIX, {"dp": 2, "pp": 2, "schedule": "zb-v", "zero": 3}),
    "dp × cp": (GPT, {"dp": 2, "cp": 2, "zero": 0}),
    "dp × cp, ZeRO 2": (GPT, {"dp": 2, "cp": 2, "zero": 2, "context": "ulysses"}),
    "pp × cp": (GPT, {"pp": 2, "cp": 2, "context": "all-gather", "recompute": "selective"}),
    "pp × tp": (GPT2, {"pp": 2, "tp": 2, "zero": 0}),
    "cp × tp": (GPT2, {"cp": 2, "tp": 2, "recompute": "full"}),
    "keys that have copies": (ONE_KEY, {"tp": 4}),
    "keys that have copies, without sequence parallelism": (replace(GPT2, kv_heads=1), {"tp": 4, "sequence_parallel": False}),
    "slots for embedding and head": (replace(GPT, layers=2), {"pp": 4, "embedding_slots": True, "recompute": "full"}),
    "HSDP, ZeRO 1": (GPT, {"dp": 4, "dp_shard": 2}),
    "HSDP, ZeRO 3": (GPT, {"dp": 4, "dp_shard": 2, "zero": 3}),
    "HSDP with cp, ZeRO 3": (GPT, {"dp": 2, "dp_shard": 1, "cp": 2, "zero": 3, "recompute": "full"}),
    # Experts
    "ep, ZeRO 3": (MOE, {"dp": 4, "ep": 2, "zero": 3}),
    "ep × tp": (MOE, {"dp": 2, "ep": 2, "tp": 2}),
    "ep × tp without sequence parallelism": (MOE, {"dp": 2, "ep": 2, "tp": 2, "zero": 0, "sequence_parallel": False}),
    "ep over dp and cp": (MOE, {"dp": 2, "cp": 2, "ep": 4, "zero": 2}),
    "ep × cp": (MOE, {"dp": 2, "cp": 2, "ep": 2, "zero": 0}),
    "ep × pp, zb-h1, ZeRO 3": (UNTIED_MOE, {"dp": 2, "ep": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"}),
    # Experts on axes of their own
    "ep over tp and dp": (MOE, {"dp": 2, "tp": 2, "etp": 1, "ep": 4, "zero": 0}),
    "ep over tp and dp, ZeRO 3": (MOE, {"dp": 2, "tp": 2, "etp": 1, "ep": 4, "zero": 3}),
    "ep over tp and cp": (MOE, {"cp": 2, "tp": 2, "etp": 1, "ep": 4}),
    "ep over tp × pp, ZeRO 3": (UNTIED_MOE, {"pp": 2, "tp": 2, "etp": 1, "ep": 2, "zero": 3, "schedule": "zb-h1"}),
    "etp as tp": (MOE, {"dp": 2, "tp": 2, "etp": 2, "ep": 2}),
    "etp as tp, with copies, ZeRO 3": (MOE, {"dp": 2, "tp": 2, "etp": 2, "zero": 3}),
    "etp as tp without sequence parallelism": (MOE, {"dp": 2, "tp": 2, "etp": 2, "ep": 2, "sequence_parallel": False}),
    "etp as tp × pp": (MOE, {"pp": 2, "tp": 2, "etp": 2, "recompute": "full"}),
    "etp above tp": (MOE, {"dp": 2, "tp": 2, "etp": 4, "zero": 2}),
    "etp without tp": (MOE, {"dp": 4, "etp": 2, "ep": 2, "zero": 3}),
    "etp 3": (replace(MOE, expert_ffn=33, experts=5), {"dp": 3, "etp": 3, "batch": 3}),
    "ep 3 over tp": (replace(THREES, experts=6, expert_ffn=7), {"tp": 3, "etp": 1, "ep": 3, "batch": 3}),
    # Latent attention
    "latent, ep × cp": (LATENT, {"dp": 2, "cp": 2, "ep": 4, "recompute": "selective"}),
    "latent, etp × pp": (replace(LATENT, tied=False), {"dp": 2, "pp": 2, "etp": 2, "zero": 3}),
}

KEPT = (
    *("dp × pp × tp", "dp × cp × tp, ZeRO 3", "ep × pp × dp", "HSDP with tp, ZeRO 2", "zb-v", "tp 3", "cp 3", "pp 3"),
    *("dp × tp, ZeRO 2", "cp × tp", "keys that have copies", "HSDP, ZeRO 3", "ep, ZeRO 3", "ep × pp, zb-h1, ZeRO 3"),
    *("ep over tp and dp, ZeRO 3", "etp as tp", "etp as tp without sequence parallelism", "etp without tp", "ep 3 over tp"),
    *("latent, ep × cp",),
)


def under(gpt: GPTConfig, fields: dict) -> TrainingConfig:
    chosen = plan(gpt, **fields)
    return replace(SETTINGS, batch=chosen.batch, plan=chosen)


@pytest.mark.parametrize(
    ("steps", "gpt", "fields"),
    matrix([(10, GPT, {}), (3, GPT, {}), (2, UNTIED_MOE, {"ep": 4})], [(3, GPT, {}), (2, UNTIED_MOE, {"ep": 4})]),
    ids=["dense, 10 steps", "dense", "experts"],
)
@pytest.mark.few(1)
def test_two_by_two_by_two_by_two_equals_one_process(world_of, steps, gpt, fields):
    training = under(gpt, {"dp": 2, "pp": 2, "cp": 2, "tp": 2} | fields)
    assert_equal_to_one_process(world_of(16).run(trained, gpt, training, steps), gpt)


@pytest.mark.parametrize("name", matrix(CASES, KEPT))
@pytest.mark.few(4)
def test_a_plan_equals_one_process(world_of, name):
    gpt, fields = CASES[name]
    training = under(gpt, fields)
    ranks = world_of(training.plan.gpus).run(trained, gpt, training)
    assert_equal_to_one_process(ranks, gpt, training.batch)


# Frozen parameters

FROZEN = ("embedding.", "layers.1.", "layers.2.attention.", "layers.3.mlp_norm.", "head.norm.")


def partly_frozen(*arguments) -> Model:
    model = Model(*arguments)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def trained_in_part(gpt: GPTConfig, training: TrainingConfig) -> Run:
    with mock.patch.object(trainer_module, "GPT", partly_frozen):
        return trained(gpt, training)


@pytest.mark.parametrize(
    ("gpt", "fields"),
    [
        (GPT, {"dp": 2, "tp": 2}),
        (SIX, {"pp": 2, "tp": 2, "zero": 3, "schedule": "zb-h1"}),
        (GPT, {"pp": 2, "cp": 2, "zero": 0}),
        (MOE, {"dp": 2, "ep": 2, "tp": 2, "zero": 3}),
        (MOE, {"dp": 2, "ep": 2, "tp": 2, "etp": 2}),
    ],
    ids=["dp × tp", "pp × tp, ZeRO 3", "pp × cp", "ep × tp, ZeRO 3", "etp × tp, ZeRO 1"],
)
@pytest.mark.few(2)
def test_frozen_parameters_stay_and_the_others_learn_as_in_one_process(world_of, gpt, fields):
    training = under(gpt, fields)
    found = whole(world_of(4).run(trained_in_part, gpt, training))
    wanted = whole([trained_in_part(gpt, replace(training, plan=None, zero=0, accumulate=1))])
    first = dict(Model(gpt).double().named_parameters())
    for name, parameter in first.items():
        assert torch.equal(found[f"parameter.{name}"], parameter) == name.startswith(FROZEN), name
        torch.testing.assert_close(found[f"parameter.{name}"], wanted[f"parameter.{name}"], rtol=0, atol=1e-11)


# Dropout and 16 bits, which no other process repeats bit for bit


def dropped(gpt: GPTConfig, training: TrainingConfig, folder: str) -> tuple[Run, list[float]]:
    """Also the losses of a run that stops after two steps, and goes on."""
    whole_run, first = trained(gpt, training, 4, None), Trainer(gpt, training)
    losses = first.run(2)
    first.save(folder)
    again = Trainer(gpt, training)
    again.resume(folder)
    return whole_run, losses + again.run(2)


@pytest.mark.parametrize(
    "fields",
    [{"dp": 2, "tp": 2, "zero": 3}, {"pp": 2, "tp": 2, "sequence_parallel": False, "recompute": "full", "schedule": "zb-h1"}],
    ids=["sequence parallelism", "stages, without sequence parallelism"],
)
@pytest.mark.few(1)
def test_dropout_comes_again_and_is_the_same_where_activations_are_the_same(world_of, tmp_path, fields):
    gpt = replace(GPT, dropout=0.2)
    ranks = world_of(4).run(dropped, gpt, under(gpt, fields), str(tmp_path))
    whole([run for run, _ in ranks])  # raises where copies differ
    losses = ranks[0][0].losses
    assert all(run.losses == resumed == losses for run, resumed in ranks)
    assert losses[:2] != pytest.approx(alone(GPT).losses[:2], abs=1e-4)
    assert losses == pytest.approx(alone(GPT, steps=4).losses, rel=0.05)


@pytest.mark.parametrize("zero", matrix([0, 1, 3], [3]))
def test_in_16_bits_it_learns_as_in_64(world_of, zero):
    gpt = replace(GPT, tied=False)
    ranks = world_of(4).run(trained, gpt, under(gpt, {"pp": 2, "tp": 2, "zero": zero, "precision": "bf16"}), 4, None)
    assert {tensor.dtype for tensor in whole(ranks).values()} == {torch.float32}, "masters, moments"
    wanted = alone(gpt, steps=4)
    assert ranks[0].losses != wanted.losses
    for run in ranks:
        assert run.losses == pytest.approx(wanted.losses, rel=0.01)
        assert run.norms == pytest.approx(wanted.norms, rel=0.05)
