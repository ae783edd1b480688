"""Functions that exercises hand out, used as a learner would."""

import os
import re
import tempfile
from dataclasses import replace

import pytest
import torch

from manyranks import given
from manyranks.given.disk import FOLDER, Disk
from manyranks.grade import zero
from manyranks.measure.journal import Stopped


def test_the_reports_of_exercise_00_name_the_lines_of_its_programs(capsys):
    """The text says so, and two of three answers can be read off them."""
    given.start_here.hangs("B")
    said = capsys.readouterr().out
    assert re.findall(r"\((\S+), line \d+\)", said) == ["start_here.py"] * 4
    assert "which has returned" in said


def test_what_a_task_is_given_tells_nothing_of_anothers():
    shard, gather = (replace(task, seed=5) for task in (zero.shard, zero.gather))
    assert shard.own_seed != gather.own_seed
    assert replace(shard, seed=0).own_seed == 0  # records are of these numbers


def test_other_ranks_units_and_heads_are_other_numbers():
    """So nobody computes the whole alone. A rank's own are those of one process."""
    case = given.tensor.cases_of_mlp(3)[0]
    first, second = (given.tensor.of_mlp(case, rank, 3, 1)[1][0] for rank in (0, 1))
    alike = (first.gate_up.weight == second.gate_up.weight).all(1)
    assert not alike.any()
    assert torch.equal(first.down.bias, second.down.bias)
    case = given.tensor.cases_of_attention(4)[2]  # one head of keys and values, for all
    first, second = (given.tensor.of_attention(case, rank, 4, 1)[1][0] for rank in (0, 2))
    assert torch.equal(first.key.weight, second.key.weight)
    assert not (first.query.weight == second.query.weight).any()


def test_the_disk_counts_what_is_read_however_it_is_opened(tmp_path):
    disk = Disk({f"{FOLDER}/a.bin": bytes(100)}, None, str(tmp_path / "notes"))
    with disk.mounted(lambda: None):
        with open(f"{FOLDER}/a.bin", "a+b") as file:
            file.seek(0)
            assert len(file.read()) == disk.opened == 100
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(f"{folder}/x/y")  # it's removed by file descriptors
        with pytest.raises(Stopped, match="doesn't reach this disk"):
            os.open("given-0", 0, dir_fd=os.open(FOLDER, 0))
