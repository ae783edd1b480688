"""An object that stays with the judge answers a rank's calls, and nothing that comes through its pipe does harm."""

import math
import os
from pathlib import Path

import pytest

from manyranks.given.mfu import MOST, Device, Timing
from manyranks.measure.journal import Stopped
from manyranks.world.strangers.kept import Kept, _pipe, answering

OVER = Stopped("too many calls", "end the loop")


def counted(most: int) -> Kept:
    """One that counts its calls, and one that answers no more after `most` of them."""
    calls: list[int] = []
    return Kept("given", (lambda: calls.append(1) or 1.5 * len(calls), lambda: math.nan if len(calls) > most else 7.0), calls)


def test_each_rank_asks_its_own_and_the_rest_is_given_as_it_is(tmp_path):
    kept = counted(9), counted(9)
    with answering([kept[0], "as it is", kept[1]], str(tmp_path), str(tmp_path)) as (first, second, third):
        assert (first.given, second, third.functions) == ("given", "as it is", 2)
        for asks in (first, third, first):
            with asks.calls(OVER) as (count, other):
                assert other() == 7.0
                assert count() == 1.5 * len(kept[0 if asks is first else 1].by)
    assert [len(one.by) for one in kept] == [2, 1]


def test_who_asks_too_often_is_told(tmp_path):
    with answering([counted(2)], str(tmp_path), str(tmp_path)) as (asks,), asks.calls(OVER) as (count, other):
        assert [count(), count(), other(), count()] == [1.5, 3.0, 7.0, 4.5]
        with pytest.raises(Stopped, match="too many calls"):
            other()


def test_who_asks_for_nothing_that_is_there_or_reads_no_result_keeps_nobody_waiting(tmp_path):
    kept = counted(9)
    with answering([kept], str(tmp_path), str(tmp_path)) as (asks,):
        with open(asks.pipes[0], "wb", 0) as calls:
            calls.write(bytes([7, 255, 0]) + bytes(60_000))
        with asks.calls(OVER) as (count, _):
            assert count() == 1.5  # the first of all results, which nobody has read
    assert len(kept.by) > 1


def test_a_file_in_the_pipe_s_place_is_not_opened(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    make, ways = os.mkfifo, [lambda path: Path(path).symlink_to(mine), lambda path: Path(path).write_text(""), lambda _: None]
    times = iter([*ways, lambda path: make(path, 0o600), *ways * 7])
    monkeypatch.setattr(os, "mkfifo", lambda path, mode: next(times)(path))
    pipe = _pipe(f"{tmp_path}")  # by another name, once nobody takes it away
    with pipe, pytest.raises(ValueError, match="files of the check's were taken away"):
        _pipe(f"{tmp_path}")
    assert mine.read_text() == "mine"


def test_a_device_that_is_called_without_end_notes_no_more_than_a_right_answer_needs():
    device = Device(Timing(2, 7, 3), 0, 1, 0)
    results = [call() for _ in range(MOST) for call in (device.launch, device.clock)]
    assert [math.isnan(one) for one in results] == [False] * MOST + [True] * MOST
    assert sum(map(len, device.log)) == MOST
