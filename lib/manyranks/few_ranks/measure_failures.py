"""A run whose ranks are killed, small: steps that are done twice against a replay of the same failures."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import torch.distributed as dist

from manyranks.few_ranks.ranks import OnRanks, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.theory.failures import young
from manyranks.timeline.failures import Failure, History, poisson, survive
from manyranks.training.checkpoint import Checkpoints
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer
from manyranks.world.errors import RankDied

_CONFIG = GPTConfig(layers=1, hidden=32, heads=2, seq=32)
_STEPS, _MTBF, _MOST, _RESTART = 60, 24, 3, 0.5  # in steps; at most so many failures


@OnRanks
def failures(values, ranks, say):
    """The course's GPT on 2 or 3 ranks, killed as often per save as the explorer's run, or up to eight times as rarely."""
    mtbf = values["hours"] * 3600 / values["gpus"]
    interval = values["interval"] or young(values["stall"], mtbf)
    every = max(1, min(_MTBF, round(_MTBF * interval / mtbf)))
    trace = [Failure(int(each.seconds) + 0.75) for each in poisson(_MTBF, 10 * _STEPS, seed=7)][:_MOST]
    history = survive(trace, _STEPS, every, 0, _RESTART)
    world, done = ranks(few(values["gpus"], 3)), 0
    with tempfile.TemporaryDirectory() as folder:
        for k, steps in enumerate([*_attempts(history), None]):
            say((k + 1) / (_MOST + 2), f"{done} steps done, {k} ranks killed")
            with contextlib.suppress(RankDied):
                world.run(_train, folder, every, steps)
            done = len(Path(folder, "done").read_text())
    again = sum(int(period.finished - period.started) for period in history.periods if period.kind == "lost")
    rows = (
        Compared("steps done twice", again, done - _STEPS, "number"),
        Compared("steps in all", _STEPS + again, done, "number"),
    )
    return SmallRun(f"{world.size} ranks, {_STEPS} steps, a save every {every}, {len(history.failures)} ranks killed", rows)


def _attempts(history: History) -> list[int]:
    """Returns for each failure how many whole steps were made since the restart before it."""
    made, since = [], 0.0
    for period in history.periods:
        if period.kind == "restart":
            made.append(int(since))
            since = 0.0
        else:
            since += period.finished - period.started
    return made


def _train(folder: str, every: int, dies_after: int | None) -> None:
    trainer = Trainer(_CONFIG, TrainingConfig(steps=_STEPS, batch=4, warmup=1))
    trainer.resume(folder)
    rank, begun = dist.get_rank(), trainer.step
    with Checkpoints(folder) as checkpoints:
        while trainer.step < _STEPS:
            if trainer.step - begun == dies_after:
                dist.barrier()
                checkpoints.wait()
                if rank == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            trainer.run(1)
            if rank == 0:
                with open(Path(folder, "done"), "a") as file:
                    file.write(".")
            if trainer.step % every == 0:
                trainer.save(checkpoints)
