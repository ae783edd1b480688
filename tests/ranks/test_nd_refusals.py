"""The composed trainer where things go wrong: plans that cannot be, before any message; ranks that fail in a step."""

import os
import re
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

import manyranks as mr
from manyranks.parallel.data_parallel import NaiveDataParallel
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer
from tests.conftest import gone, pids, wait_until
from tests.ranks.composed import GPT, SETTINGS, plan
from tests.ranks.refused import said

ALL = {"dp": 2, "pp": 2, "cp": 2, "tp": 2}


def made(gpt: GPTConfig = GPT, **fields) -> Trainer:
    return Trainer(gpt, replace(SETTINGS, plan=plan(gpt, **fields)))


REFUSED = {
    "ranks": (partial(made, **ALL), r"dp·cp·tp·pp = 2·2·2·2 = 16 ranks for 4 GPUs: choose degrees whose product is 4"),
    "heads": (
        partial(made, replace(GPT, hidden=48, heads=6), tp=4),
        "tp=4 does not divide the 6 heads of .*: choose a divisor",
    ),
    "stages": (partial(made, pp=4, virtual=2), "4 layers of .* on 8 stages: lower pp=4 or virtual=2"),
    "chunks": (partial(made, replace(GPT, seq=36), cp=4), "zigzag has 2·cp = 8 chunks: give 32 or 40"),
    "gradients": (partial(made, dp=2, pp=2, zero=2), "say zero=1"),
    "experts": (partial(made, dp=4, ep=4), "has no experts; say ep=1"),
    "tokens": (partial(made, replace(GPT, vocab=99), tp=4), "vocab=99: the corpus has 256"),
    "a group": (lambda: Trainer(GPT, TrainingConfig(plan=plan(tp=4)), group=dist.group.WORLD), "a group with a plan"),
}


def test_a_plan_that_cannot_be_is_refused_on_every_rank_before_any_message(four):
    m = four.measure(said, REFUSED)
    for errors in m.results:
        for name, (_, pattern) in REFUSED.items():
            assert re.search(pattern, errors[name]), f"{name}: {errors[name]}"
    assert not any(m.calls.values())


def test_a_wrapper_is_refused_where_states_are_sharded(four):
    def wrapped():
        Trainer(GPT, replace(SETTINGS, plan=plan(dp=2, tp=2, zero=1)), NaiveDataParallel)

    assert "wrapper with zero=1" in four.run(said, {"": (wrapped, "")})[0][""]


def test_too_few_sequences_to_evaluate_are_refused_on_every_rank(four):
    refused = {"": (lambda: made(dp=2, pp=2).evaluate(1), "")}
    assert all("sequences=1 for 2 data-parallel ranks" in errors[""] for errors in four.run(said, refused))


def test_a_plan_takes_ranks():
    with pytest.raises(ValueError, match="a plan takes a process group: train on a world's ranks"):
        made(tp=2)


# In the middle of a step


def step_that_fails(rank: int, how: str) -> None:
    """In the second step, in the forward of this rank's last micro-batch."""
    trainer, calls = made(dp=2, pp=2, cp=2, tp=1), []

    def fails(*_) -> None:
        calls.append(None)
        if dist.get_rank() == rank and len(calls) == 4:
            os._exit(3) if how == "dies" else raising()

    stage = trainer.spread.pipeline.stages[trainer.here.coordinates["pp"]]
    stage.parts[1].register_forward_pre_hook(fails)
    trainer.run(3)


def raising() -> None:
    raise ArithmeticError("no such number")


@pytest.mark.parametrize(("how", "kind"), [("raises", mr.RankFailed), ("dies", mr.RankDied)])
def test_a_rank_that_fails_in_a_step_is_named_and_leaves_no_process(how, kind):
    with mr.World(8, timeout=100) as world:
        before = pids(world)
        with pytest.raises(kind) as caught:
            world.run(step_that_fails, 5, how)
        assert caught.value.rank == 5
        assert "rank 5 " + ("raised ArithmeticError: no such number" if how == "raises" else "died") in str(caught.value)
    assert wait_until(lambda: all(map(gone, before)), 20)
