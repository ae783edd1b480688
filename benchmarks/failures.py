"""Times saves during training, and a start that resumes: the small GPT on 4 ranks, every save flushed to disk."""

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import manyranks as mr
from benchmarks.compare import Row
from benchmarks.training import slowest
from manyranks.training import GPTConfig, TrainingConfig
from manyranks.training.checkpoint import Checkpoints
from manyranks.training.trainer import Trainer

RANKS, ROUNDS, WINDOWS, STARTS = 4, 5, 24, 9
MOST, MOST_START = 0.2, 2.0  # of what a blocking save adds; of a fresh start
Save = Callable[[int], None]


def rows() -> Iterator[Row]:
    with mr.World(RANKS, backend="gloo") as world:
        folder = tempfile.mkdtemp()
        try:
            added = world.run(_added, folder)[0]
            blocking = {"theirs": added["blocking"]}
            yield Row("a save, added to training: beside it; blocking", added["background"], **blocking, ratio_at_most=MOST)
            yield Row("blocking; torch.distributed.checkpoint.save", added["blocking"], added["dcp.save"])
            yield Row("beside it; torch.distributed.checkpoint.async_save", added["background"], added["dcp.async_save"])
            starts = slowest(world.run(_starts, folder))
            yield Row("a start with its first step: resumed; fresh", **starts, ratio_at_most=MOST_START)
        finally:
            shutil.rmtree(folder)


def _added(folder: str) -> dict[str, tuple[float, ...]]:
    """Seconds that one save adds to a step, of each kind, by rounds: the median step with it less the median step without.

    Steps take turns. PyTorch's saves have a quarter of them, for they add far more than steps differ.
    """
    trainer = Trainer(GPTConfig(), TrainingConfig(steps=10**6))
    trainer.run(2)
    found: dict[str, tuple[float, ...]] = {}
    with Checkpoints(f"{folder}/ours", keep=1) as checkpoints:
        kinds = {"none": lambda step: None, **_ours(trainer, checkpoints), **_theirs(trainer, f"{folder}/theirs")}
        for save in kinds.values():
            save(0)
        for _ in range(ROUNDS):
            windows: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(WINDOWS):
                for kind, save in kinds.items():
                    if turn % 4 == 0 or "dcp" not in kind:
                        windows[kind].append(_window(trainer, save))
            for kind in kinds:
                found[kind] = (*found.get(kind, ()), median(windows[kind]) - median(windows["none"]))
        checkpoints.wait()
        trainer.save(checkpoints)
    return found


def _window(trainer: Trainer, save: Save) -> float:
    """Seconds of a save and the step beside or after it."""
    dist.barrier()
    started = time.perf_counter()
    save(trainer.step)
    trainer.run(1)
    dist.barrier()
    return time.perf_counter() - started


def _ours(trainer: Trainer, checkpoints: Checkpoints) -> dict[str, Save]:
    def blocking(step: int) -> None:
        trainer.save(checkpoints)
        checkpoints.wait()

    return {"background": lambda step: trainer.save(checkpoints), "blocking": blocking}


def _theirs(trainer: Trainer, folder: str) -> dict[str, Save]:
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    group, writing = dist.new_group(backend="gloo"), []

    def state() -> dict:
        model = trainer.model.module
        return {"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def background(step: int) -> None:
        if writing:
            writing.pop().result()
        writing.append(dcp.async_save(state(), checkpoint_id=f"{folder}/async", process_group=group))

    return {"dcp.save": lambda step: dcp.save(state(), checkpoint_id=f"{folder}/save"), "dcp.async_save": background}


def _starts(folder: str) -> dict[str, tuple[float, ...]]:
    """Seconds until the first step is done: of a run that goes on from a checkpoint, and of a new one."""
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(STARTS):
        for which, seconds in found.items():
            dist.barrier()
            started = time.perf_counter()
            trainer = Trainer(GPTConfig(), TrainingConfig(steps=10**6))
            if which == "ours":
                trainer.resume(f"{folder}/ours")
            trainer.run(1)
            dist.barrier()
            seconds.append(time.perf_counter() - started)
    return {which: tuple(seconds) for which, seconds in found.items()}
