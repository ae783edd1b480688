"""Functions that exercises hand out, used as a learner would."""

import re
from dataclasses import replace

import torch

from manyranks import given
from manyranks.grade import zero


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
