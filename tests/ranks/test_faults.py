"""A rank dies at every bad moment of a run, and the run goes on from a whole checkpoint as if nothing had happened.

Faults strike when all ranks have written the save before. So a fault between two saves loses the steps since the last one. A
fault in a save loses one interval, and the steps that were made beside the write. If a write takes longer than an interval, a
rank may die in the next save while another one still writes the last: that loses two intervals.
"""

import errno
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import manyranks as mr
from manyranks.parallel import saving
from manyranks.parallel.boxes import Box
from manyranks.theory import Plan
from manyranks.training import checkpoint
from manyranks.training.checkpoint import Checkpoints
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Result, Trainer
from tests.conftest import gone, matrix, pids, wait_until
from tests.ranks import faults
from tests.ranks.faults import EVERY, Fault
from tests.ranks.test_nd_checkpoint import stored, written

SMALL = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=16)
DROPPING = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, seq=16, dropout=0.1)
STEPS = 6


class Ranks(NamedTuple):
    """Some ranks, and how they train."""

    count: int
    training: TrainingConfig


def ranks(count: int, **how) -> Ranks:
    return Ranks(count, TrainingConfig(steps=STEPS, batch=8, warmup=3, clip=0.5, **how))


TWO_AXES = Plan(tp=2, pp=2, seq=SMALL.seq, batch=8, microbatch=4, zero=0, precision="fp32", recompute="none")
PLANS = {
    "dp on 2": ranks(2),
    "dp on 3": ranks(3),
    "fsdp on 3": ranks(3, zero=3),
    "fsdp on 4": ranks(4, zero=3),
    "tp × pp on 4": ranks(4, plan=TWO_AXES),
}
DEATHS = ("SIGKILL", "SIGSEGV", "exit", "out of memory")
PLACES = ("forward", "backward", "reduce", "optimizer", "copy", "half a file", "before its name", "after its name")
MATRIX = list(itertools.product(DEATHS, PLACES, PLANS))
FIVE = [  # all deaths, and each place but those of SOME below; backward is one place between two that are here
    ("SIGKILL", "forward", "tp × pp on 4"),
    ("SIGSEGV", "reduce", "fsdp on 3"),
    ("out of memory", "half a file", "tp × pp on 4"),
    ("SIGSEGV", "before its name", "dp on 2"),
    ("exit", "after its name", "dp on 3"),
]


class Whole(NamedTuple):
    """The end of a run that nothing happened to."""

    result: Result
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def undisturbed(sizes, tmp_path_factory):
    """From a GPT and a plan to the run that nothing happens to."""
    runs: dict[tuple, Whole] = {}

    def undisturbed(gpt: GPTConfig, name: str) -> Whole:
        if (gpt, name) not in runs:
            folder = tmp_path_factory.mktemp("whole")
            results = sizes[PLANS[name].count].run(faults.train, gpt, PLANS[name].training, str(folder))
            runs[gpt, name] = Whole(results[0], written(folder))
        return runs[gpt, name]

    return undisturbed


def found(folder: Path) -> Path | None:
    """The newest whole checkpoint, whatever has to be passed over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.newest(folder)


def strike(world, gpt: GPTConfig, training: TrainingConfig, folder: Path, fault: Fault) -> None:
    """Lets the fault end a run. Afterwards the world has fresh ranks, and none of before is left."""
    if fault.kind == "out of memory" and sys.platform != "linux":
        pytest.skip("only Linux limits a process's memory")
    before = pids(world)
    with pytest.raises(mr.RankDied if fault.kind in faults.CODES else mr.RankFailed) as caught:
        world.run(faults.train, gpt, training, str(folder), fault)
    assert caught.value.rank == fault.rank
    if fault.kind in faults.CODES:
        assert caught.value.exit_code == faults.CODES[fault.kind]
    else:
        assert "can't allocate memory" in str(caught.value)
    left = saving.facts(found(folder))["step"]
    assert left == fault.left
    assert fault.step - left <= EVERY
    pids(world)
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)


@pytest.mark.parametrize(("kind", "place", "name"), matrix(MATRIX, FIVE))
def test_after_a_fault_the_same_ranks_go_on_bit_for_bit(sizes, undisturbed, tmp_path, kind, place, name):
    count, training = PLANS[name]
    fault, world = Fault(kind, place, MATRIX.index((kind, place, name)) % count), sizes[count]
    strike(world, DROPPING, training, tmp_path, fault)
    unfinished = f"step-{fault.step:08}/*-{fault.rank}-of-{count}{saving.UNFINISHED}"
    assert bool(list(tmp_path.glob(unfinished))) == (place in ("half a file", "before its name"))
    whole = undisturbed(DROPPING, name)
    for result in world.run(faults.train, DROPPING, training, str(tmp_path)):
        assert (result.first, result.losses) == (fault.left, whole.result.losses[fault.left :])
        assert result.held_out == whole.result.held_out
    assert checkpoint.newest(tmp_path).name == f"step-{STEPS:08}"
    left = written(tmp_path)
    assert left.keys() == whole.tensors.keys()
    assert all(torch.equal(left[name], whole.tensors[name]) for name in left)
    assert not list(tmp_path.glob(f"*/*{saving.UNFINISHED}"))


STAYS = [("SIGKILL", "optimizer"), ("exit", "half a file"), ("out of memory", "copy")]
CHANGES = [(*death, name, then) for death in STAYS for name in PLANS for then in PLANS if name != then]
SOME = [
    ("SIGKILL", "optimizer", "fsdp on 4", "dp on 3"),
    ("exit", "half a file", "tp × pp on 4", "fsdp on 3"),
    ("out of memory", "copy", "dp on 3", "tp × pp on 4"),
]


@pytest.mark.parametrize(("kind", "place", "name", "then"), matrix(CHANGES, SOME))
def test_after_a_fault_other_ranks_go_on_under_another_plan(sizes, undisturbed, tmp_path, kind, place, name, then):
    first, second = PLANS[name], PLANS[then]
    fault = Fault(kind, place, 1)
    strike(sizes[first.count], SMALL, first.training, tmp_path, fault)
    whole = undisturbed(SMALL, name)
    for result in sizes[second.count].run(faults.train, SMALL, second.training, str(tmp_path)):
        assert result.first == fault.left
        assert result.losses == pytest.approx(whole.result.losses[fault.left :], abs=1e-9)
    left = written(tmp_path)
    assert left.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(left[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("place", ["forward", "half a file"])
def test_an_interrupted_run_goes_on_bit_for_bit(sizes, undisturbed, tmp_path, place):
    training, before = PLANS["dp on 2"].training, pids(sizes[2])

    def press() -> None:
        if wait_until(lambda: list(tmp_path.glob("step-00000004/*")), 30):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt, match="the next one works, on fresh ranks"):
        sizes[2].run(faults.train, DROPPING, training, str(tmp_path), Fault("waits", place, 1))
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)
    whole = undisturbed(DROPPING, "dp on 2")
    for result in sizes[2].run(faults.train, DROPPING, training, str(tmp_path)):
        assert result.losses == whole.result.losses[result.first :]
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in written(tmp_path).items())


# The writer is killed


def saves(folder: str, last: int | None = None) -> None:
    """Saves at every step, up to the last, numbers that are all equal to the step."""
    trainer = Trainer(SMALL, PLANS["fsdp on 3"].training, dtype=torch.float64)
    place, parts = checkpoint.newest(Path(folder)), list(checkpoint.boxes_of(trainer.spread))
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in itertools.count(saving.facts(place)["step"] + 1 if place else 1):
            for box in parts:
                box.tensor.fill_(step)
            checkpoints.save(trainer.spread, step, "a run")
            dist.barrier()
            if step == last:
                break


@pytest.mark.parametrize("kills", matrix([5, 50], [5]))
def test_a_writer_killed_at_random_points_leaves_a_whole_checkpoint(sizes, tmp_path, kills):
    world, drawn, newest = sizes[2], random.Random(kills), 3
    world.run(saves, str(tmp_path), newest)

    def kill(pid: int, seconds: float, later: bool) -> None:
        wait_until(lambda: not later or max(int(place.name[5:]) for place in tmp_path.glob("step-*")) > newest + 1, 60)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    for number in range(kills):  # every second one comes when something new has been saved, however slow the machine is
        dies = pids(world)[drawn.randrange(2)], drawn.uniform(0.1, 0.4), number % 2 == 1
        threading.Thread(target=kill, args=dies).start()
        with pytest.raises(mr.RankDied):
            world.run(saves, str(tmp_path))
        place = found(tmp_path)
        step = saving.facts(place)["step"]
        assert place.name == f"step-{step:08}"
        assert {float(number) for tensor in stored(place).values() for number in tensor.unique()} == {step}
        assert step >= newest
        newest = step
    assert newest > 3


# The disk is full, or has lost a file


@pytest.mark.parametrize("name", matrix(PLANS, ["fsdp on 3"]))
def test_a_full_disk_is_named_with_its_rank_and_file_and_leaves_the_checkpoint_before(sizes, undisturbed, tmp_path, name):
    count, training = PLANS[name]
    with pytest.raises(mr.RankFailed) as caught:
        sizes[count].run(faults.train, DROPPING, training, str(tmp_path), Fault("full disk", "before the file", 1))
    assert caught.value.rank == 1
    assert caught.value.exception.errno == errno.EFBIG
    file = rf"{tmp_path}/step-00000004/\w+-1-of-{count}\.safetensors"
    assert re.search(rf"rank 1 raised OSError: \[Errno {errno.EFBIG}\] File too large: '{file}'", str(caught.value))
    assert not list(tmp_path.glob(f"*/*-1-of-*{saving.UNFINISHED}"))
    assert found(tmp_path).name == "step-00000002"
    for result in sizes[count].run(faults.train, DROPPING, training, str(tmp_path)):
        assert result.losses == undisturbed(DROPPING, name).result.losses[2:]


def unable(folder: str) -> str:
    """Each rank's error at the end of a save that only rank 1 can't write."""
    if dist.get_rank() == 1:
        folder = f"{folder}/a file"
    saver = saving.Saver()
    saver.start(Path(folder), [Box("x", (2,), (0,), torch.ones(2)), Box("y", (2,), (0,), torch.ones(2))])
    try:
        saver.wait()
    except OSError as error:
        return type(error).__name__ + (f" {error}" if dist.get_rank() != 1 else "")
    return "nothing"


def test_all_ranks_hear_that_one_could_not_write(sizes, tmp_path):
    (tmp_path / "a file").write_text("")
    said = sizes[2].run(unable, str(tmp_path))
    assert said == ["OSError 1 of 2 ranks couldn't write", "FileExistsError"]


def test_a_file_that_is_lost_is_named_and_its_checkpoint_passed_over(sizes, undisturbed, tmp_path):
    training = PLANS["dp on 3"].training
    sizes[3].run(faults.train, DROPPING, training, str(tmp_path))
    saving.files(checkpoint.newest(tmp_path))[1].unlink()
    with pytest.warns(UserWarning, match="step-00000006 is passed over: .* of 3 ranks, there's no file of 1"):
        assert checkpoint.newest(tmp_path).name == "step-00000004"
    for result in sizes[3].run(faults.train, DROPPING, training, str(tmp_path)):
        assert result.losses == undisturbed(DROPPING, "dp on 3").result.losses[4:]
    assert checkpoint.newest(tmp_path).name == "step-00000006"


def stale(folder: Path) -> Path | None:
    """The newest as ranks find it, where a rank's view of a network's folder is behind."""
    if dist.get_rank() == 1:
        names, checkpoint._steps = checkpoint._steps, lambda folder: names(folder)[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.newest(folder)


def test_ranks_agree_on_the_newest_although_one_sees_less(sizes, tmp_path):
    sizes[2].run(faults.train, SMALL, PLANS["dp on 2"].training, str(tmp_path))
    with mr.World(2, backend="gloo", timeout=30) as world:
        assert world.run(stale, tmp_path) == [tmp_path / "step-00000006"] * 2


# Two runs and one folder

kept: list[Checkpoints] = []  # on a rank


def opens(folder: str) -> None:
    kept.append(Checkpoints(folder))


def test_of_two_runs_the_second_is_refused_until_the_first_is_dead(sizes, tmp_path):
    training = PLANS["dp on 2"].training
    with mr.World(2, backend="gloo", timeout=30) as first:
        first.run(opens, str(tmp_path))
        there = sorted(tmp_path.rglob("*"))
        with pytest.raises(mr.RankFailed, match=r"both ranks raised ValueError: another run writes to .*: stop it"):
            sizes[2].run(faults.train, SMALL, training, str(tmp_path))
        with pytest.raises(ValueError, match="another run writes to"):
            Checkpoints(tmp_path)
        assert sorted(tmp_path.rglob("*")) == there
        rank = pids(first)[0]
        os.kill(rank, signal.SIGKILL)
        assert wait_until(lambda: gone(rank), 20)
        sizes[2].run(faults.train, SMALL, training, str(tmp_path))
        sizes[2].run(faults.train, SMALL, training, str(tmp_path))
    assert checkpoint.newest(tmp_path).name == f"step-{STEPS:08}"


# How often


def agreed(seconds: float, stall: float) -> int:
    return checkpoint.due(seconds * (1 + dist.get_rank()), stall / (1 + dist.get_rank()), mtbf=50.0)


def test_ranks_agree_how_often_to_save_by_the_longest_of_their_times(sizes):
    assert sizes[3].run(agreed, 0.1, 4.0) == [round((2 * 4 * 50) ** 0.5 / 0.3)] * 3
