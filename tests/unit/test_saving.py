"""Checkpoints of one process: what stays in their folder, how often they're made, and what a file may hold."""

import errno
import os
import resource
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel import saving
from manyranks.parallel.boxes import Box
from manyranks.training import checkpoint
from manyranks.training.checkpoint import Checkpoints
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer, train
from tests.conftest import start_script, wait_until

SMALL = GPTConfig(layers=1, hidden=8, heads=2, seq=8)
TRAINING = TrainingConfig(steps=12, batch=2, warmup=3)


def names(folder: Path) -> list[int]:
    """The steps that have a folder."""
    return sorted(int(place.name.removeprefix("step-")) for place in folder.glob("step-*"))


def damage(place: Path) -> None:
    for file in saving.files(place):
        stored = bytearray(file.read_bytes())
        stored[-100] ^= 4
        file.write_bytes(stored)


def unharmed(place: Path) -> bool:
    try:
        return not any(map(saving.damage, saving.files(place)))
    except ValueError:
        return False


@pytest.fixture
def removals(monkeypatch):
    """Notes each removal, with the number of newer unharmed checkpoints at that moment."""
    seen, remove = [], shutil.rmtree

    def removed(place: Path, **options) -> None:
        if isinstance(place, Path):  # and no folder of an earlier test's world, which ends in a thread
            newer = [one for one in place.parent.glob("step-*") if one.name > place.name]
            seen.append((place.name, sum(map(unharmed, newer))))
        remove(place, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    return seen


# What stays


@pytest.mark.parametrize("keep", [1, 2, 3, None])
def test_so_many_checkpoints_stay_and_none_goes_before_as_many_newer_ones_are_whole(tmp_path, monkeypatch, removals, keep):
    """Old ones are removed while the new one has a folder and isn't whole."""
    starts, replaces = saving.Saver.start, os.replace

    def started(saver: saving.Saver, place: Path, *parts, **facts) -> None:
        starts(saver, place, *parts, **facts)
        assert wait_until(place.exists, 20)

    monkeypatch.setattr(saving.Saver, "start", started)
    monkeypatch.setattr(os, "replace", lambda *paths: (time.sleep(0.05), replaces(*paths)))
    train(SMALL, TRAINING, str(tmp_path), every=2, keep=keep)
    assert names(tmp_path) == [2, 4, 6, 8, 10, 12][-(keep or 6) :]
    assert [name for name, _ in removals] == [f"step-{step:08}" for step in (2, 4, 6, 8, 10)[: 6 - (keep or 6)]]
    assert all(newer >= keep for _, newer in removals)


def held_back(monkeypatch) -> threading.Event:
    """Has the next file wait under its other name until the event is set."""
    go, replaces = threading.Event(), os.replace

    def replace(*paths) -> None:
        go.wait(20)
        replaces(*paths)

    monkeypatch.setattr(os, "replace", replace)
    return go


@pytest.mark.parametrize("left", ["damaged", "whole, but ahead"])
def test_what_another_run_left_does_not_count_as_newer(tmp_path, monkeypatch, removals, left):
    """The run that goes on writes in the damaged one's folder, or below it."""
    train(SMALL, replace(TRAINING, steps=4), str(tmp_path), every=2)
    run = Trainer(SMALL, TRAINING)
    run.resume(tmp_path)
    if left == "damaged":
        damage(tmp_path / "step-00000004")
    else:
        shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000009")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        go = held_back(monkeypatch)
        run.save(checkpoints)
        assert wait_until(lambda: list(tmp_path.glob(f"*/*{saving.UNFINISHED}")), 20)
        checkpoints._remove_old()
        assert not removals
        go.set()
    assert [name for name, _ in removals] == ["step-00000002"]
    assert names(tmp_path) == ([4] if left == "damaged" else [4, 9])


def test_folders_of_other_names_are_neither_read_nor_removed(tmp_path):
    run = Trainer(SMALL, TRAINING)
    best = run.save(tmp_path).rename(tmp_path / "step-best")
    (tmp_path / "step-notes.txt").write_text("the loss falls")
    assert checkpoint.newest(tmp_path) is None
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for _ in range(3):
            run.run(1)
            place = tmp_path / f"step-{run.step:08}"
            place.mkdir()
            for name in ("notes.txt", "export.safetensors", "another-1-of-1.safetensors"):
                (place / name).write_text("no file of ours")
            run.save(checkpoints)
    (place / "another-1-of-1.safetensors").touch()
    assert checkpoint.newest(tmp_path) == place == tmp_path / "step-00000003"
    assert {place.name for place in tmp_path.glob("step-*")} == {"step-00000003", "step-best", "step-notes.txt"}
    assert saving.files(best)


def test_what_a_dead_run_was_writing_is_removed_by_the_next(tmp_path):
    run = Trainer(SMALL, TRAINING)
    (file,) = saving.files(run.save(tmp_path))
    unfinished = file.rename(file.with_suffix(saving.UNFINISHED))
    with pytest.warns(UserWarning, match="has no checkpoint"):
        assert checkpoint.newest(tmp_path) is None
    with Checkpoints(tmp_path):
        assert not unfinished.exists()


def test_the_later_of_two_saves_in_one_folder_counts_once_it_is_whole(tmp_path, monkeypatch):
    """Files of two saves are never mixed, although one saver wrote both."""
    parts = [Box("x", (3,), (0,), x := torch.zeros(3))]
    saver = saving.Saver()
    saver.start(tmp_path, parts, step=0)
    saver.wait()
    go = held_back(monkeypatch)
    saver.start(tmp_path, parts, step=1)
    assert saving.facts(tmp_path) == {"step": 0}
    go.set()
    saver.wait()
    saver.close()
    assert saving.facts(tmp_path) == {"step": 1}
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert x.sum() == 0


# Locks


def test_a_folder_without_locks_is_no_folder_of_another_run(tmp_path, monkeypatch):
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match=r"can't be locked \(No locks available\): see that no other run"):
        Trainer(SMALL, TRAINING).save(tmp_path)
    assert names(tmp_path) == [0]


def test_an_interrupt_while_a_run_opens_its_folder_leaves_it_free(tmp_path, monkeypatch):
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path)
    monkeypatch.undo()
    with Checkpoints(tmp_path):
        pass


# How often


@pytest.mark.parametrize(("mtbf", "steps"), [(1e15, [10, 12]), (1e-15, [10, 11, 12])])
def test_a_run_finds_out_how_often_to_save(tmp_path, mtbf, steps):
    result = train(SMALL, TRAINING, str(tmp_path), every="auto", mtbf=mtbf)
    assert names(tmp_path) == steps
    assert (result.every == 1) == (mtbf < 1)


def test_the_interval_is_youngs_in_whole_steps_and_never_0():
    assert checkpoint.due(seconds_per_step=2.0, stall=3.0, mtbf=600.0) == 30
    assert checkpoint.due(seconds_per_step=1e6, stall=3.0, mtbf=600.0) == 1


def test_a_run_that_never_fails_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mtbf=inf: give seconds, above 0 and finite, or None"):
        train(SMALL, TRAINING, str(tmp_path), every="auto", mtbf=float("inf"))


# What can go wrong in the thread


@pytest.fixture
def full_disk():
    """Has the system refuse files longer than 5,000 bytes, until it's called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))

    def room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield room
    room()


def test_a_failed_write_ends_the_run_at_the_next_step_and_not_at_the_next_save(tmp_path, full_disk):
    run = Trainer(SMALL, TRAINING)
    with Checkpoints(tmp_path) as checkpoints:
        run.save(checkpoints)
        assert wait_until(checkpoints._saver._writing.done, 20)
        full_disk()
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/step-00000000/\w+-0-of-1.safetensors'"):
            run.run()
    assert run.step == 1
    assert list(tmp_path.rglob("*.*")) == [tmp_path / ".lock"]


def test_a_last_write_that_failed_is_an_error_too(tmp_path, full_disk):
    with pytest.raises(OSError, match="File too large"):
        train(SMALL, replace(TRAINING, steps=1), str(tmp_path))


@pytest.mark.whole
def test_a_process_that_ends_writes_what_it_has_begun(tmp_path):
    source = (
        "import os, sys, time, torch; from pathlib import Path; from manyranks.parallel import boxes, saving\n"
        "replace = os.replace; os.replace = lambda *paths: (time.sleep(0.3), replace(*paths))\n"
        f"saving.Saver().start(Path({str(tmp_path)!r}), boxes.of_range('x', torch.ones(3), 0, (3,)), step=7)\n"
    )
    with start_script(source) as process:
        assert process.wait(60) == 0
    assert saving.facts(tmp_path) == {"step": 7}


# What a file may hold


@pytest.mark.parametrize("dtype", list(saving._CODES), ids=str)
def test_numbers_of_every_kind_come_back_bit_for_bit(tmp_path, dtype):
    there = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    if dtype.is_floating_point:
        there[0] = torch.tensor([float("nan"), float("-inf"), 1 / 3])
    parts = [Box("mixed", (2, 3), (0, 0), there), Box("bytes", (3,), (0,), torch.arange(3, dtype=torch.uint8))]
    saving.save(tmp_path, parts)
    back = [Box(*box[:3], torch.zeros_like(box.tensor)) for box in parts]
    saving.load(tmp_path, back)
    for box, read in zip(parts, back, strict=True):
        assert torch.equal(read.tensor.view(torch.uint8), box.tensor.view(torch.uint8))


def test_a_number_without_dimensions_comes_back(tmp_path):
    saving.save(tmp_path, [Box("x", (), (), torch.tensor(5.0))])
    saving.load(tmp_path, [Box("x", (), (), x := torch.tensor(0.0))])
    assert x == 5


def test_parts_without_elements_take_no_part(tmp_path):
    """They begin where others do, and would take their place in the file."""
    parts = [Box("x", (2, 3), (0, 0), torch.ones(2, 3)), Box("x", (2, 3), (0, 0), torch.empty(0, 3))]
    parts.append(Box("nothing", (0, 3), (0, 0), torch.empty(0, 3)))
    saving.save(tmp_path, parts)
    back = [Box(*box[:3], torch.zeros_like(box.tensor)) for box in parts]
    saving.load(tmp_path, back)
    assert back[0].tensor.sum() == 6


def test_a_process_with_nothing_to_save_makes_a_whole_checkpoint(tmp_path):
    saving.save(tmp_path, [], step=3)
    (file,) = saving.files(tmp_path)
    assert saving.damage(file) == ""
    assert saving.facts(tmp_path) == {"step": 3}


def test_parameters_that_are_frozen_are_saved_and_read(tmp_path):
    def frozen() -> Trainer:
        run = Trainer(SMALL, TRAINING)
        run.model.module.embedding.requires_grad_(False)
        return run

    whole, first, again = frozen(), frozen(), frozen()
    losses = whole.run()
    first.run(3)
    first.save(tmp_path)
    with torch.no_grad():
        again.model.module.embedding.tokens.weight.zero_()
    again.resume(tmp_path)
    assert again.run() == losses[3:]


@given(st.data())
def test_boxes_overlap_if_they_share_an_element(data):
    """Against a count of how often each element is given."""
    dims = data.draw(st.integers(1, 3))
    size, whole = st.integers(1, 3), torch.zeros([5] * dims)
    boxes = [data.draw(st.tuples(st.tuples(*[st.integers(0, 2)] * dims), st.tuples(*[size] * dims))) for _ in range(4)]
    for offsets, sizes in boxes:
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    parts = [saving._Key("x", (5,) * dims, offsets, sizes, torch.float32) for offsets, sizes in boxes]
    assert saving._overlap(parts) == (whole.max() > 1)


def test_other_boxes_than_those_of_the_first_save_are_refused(tmp_path):
    saver = saving.Saver()
    saver.start(tmp_path / "1", [Box("x", (2,), (0,), torch.ones(2))])
    with pytest.raises(ValueError, match="these differ from the first call's boxes: make another Saver"):
        saver.start(tmp_path / "2", [Box("x", (3,), (0,), torch.ones(3))])
    saver.close()


@pytest.mark.parametrize("starts", [(0, 1), (0, 3)])
def test_parts_that_overlap_or_leave_something_out_are_refused(tmp_path, starts):
    parts = [Box("x", (5,), (start,), torch.ones(2)) for start in starts]
    with pytest.raises(ValueError, match="the ranks' parts of x overlap or don't fill it: give each element once"):
        saving.save(tmp_path, parts)
    assert not list(tmp_path.iterdir())
