"""mr.attempt tells readers what their code did, on real ranks and without any."""

import math
import os

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks import attempt

NOT_WRITTEN = "Not written yet. Fill in the cell above and run it again; until then the answer below steps in.\n"


@pytest.fixture(scope="module")
def two():
    with mr.World(2, backend="gloo", timeout=30) as world:
        yield world


def stub(x):
    """Adds up x over all ranks."""
    x = x.clone()
    raise NotImplementedError  # your 1 line


def total(x):
    dist.all_reduce(x)
    return x


def broken(x):
    return x + torch.ones(5)


def lonely(x):
    if dist.get_rank() == 0:
        dist.recv(x, 1)
    return x


def measured(world, function):
    return lambda: world.measure(lambda: function(torch.ones(3)))


def test_a_right_answer_is_right(two, capsys):
    checks = (
        (lambda m: m.results[0].tolist() == [2, 2, 2], "The sum is wrong."),
        (lambda m: len(m.calls[0]) == 1, "More than one call."),
    )
    assert attempt(measured(two, total), *checks) is True
    assert capsys.readouterr().out == "Right.\n"


def test_the_first_condition_that_fails_says_its_sentence(two, capsys):
    checks = (
        (lambda m: True, "Never said."),
        (lambda m: m.results[0][0] == 3, lambda m: f"The sum is {m.results[0][0]:g}, not 3."),
        (lambda m: False, "Not reached."),
    )
    assert attempt(measured(two, total), *checks) is False
    assert capsys.readouterr().out == "Not yet: The sum is 2, not 3.\n"


def test_a_stub_on_a_rank_is_not_written_yet(two, capsys):
    assert attempt(measured(two, stub)) is False
    assert capsys.readouterr().out == NOT_WRITTEN


def test_a_stub_in_the_notebook_is_not_written_yet(capsys):
    assert attempt(lambda: stub(torch.ones(3))) is False
    assert capsys.readouterr().out == NOT_WRITTEN


def test_an_error_of_pytorch_that_something_is_not_implemented_is_no_stub(capsys):
    assert attempt(lambda: torch.autograd.Function.apply(torch.ones(1))) is False
    assert capsys.readouterr().out.startswith("Not yet: NotImplementedError: You must implement")


@pytest.mark.parametrize("on_ranks", [True, False])
def test_an_error_is_told_in_two_lines_with_its_place(two, capsys, on_ranks):
    run = measured(two, broken) if on_ranks else (lambda: broken(torch.ones(3)))
    assert attempt(run) is False
    what, where = capsys.readouterr().out.splitlines()
    assert what.startswith(
        "Not yet: both ranks raised RuntimeError: The size" if on_ranks else "Not yet: RuntimeError: The size"
    )
    line = broken.__code__.co_firstlineno + 1
    assert where == f"  test_attempt.py, line {line}: return x + torch.ones(5)"


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (("cell 3, line 9", "cell 2, line 4", "zero.py, line 1"), "  cell 2, line 4: line\n"),
        (("zero.py, line 1",), "  zero.py, line 1: line\n"),
        ((), ""),
    ],
)
def test_of_places_the_innermost_cell_is_told(capsys, places, told):
    traceback = "".join(f"  {place}, in f\n    line\n" for place in places)

    def run():
        raise mr.RankFailed("rank 0 raised.", 0, ValueError(), traceback)

    assert attempt(run) is False
    assert capsys.readouterr().out == f"Not yet: rank 0 raised.\n{told}"


def test_a_deadlock_is_told_in_two_lines(two, capsys):
    assert attempt(measured(two, lonely)) is False
    what, who = capsys.readouterr().out.splitlines()
    assert what.startswith("Not yet: ")
    assert "rank 0" in who
    assert "recv" in who


def test_a_rank_that_dies_is_told(two, capsys):
    assert attempt(lambda: two.run(lambda: os._exit(3) if dist.get_rank() == 1 else None)) is False
    assert capsys.readouterr().out.startswith("Not yet: rank 1 died")


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan), None, torch.tensor(False)])
def test_a_condition_that_is_not_a_number_does_not_hold(capsys, value):
    assert attempt(lambda: value, (lambda value: value, "It isn't a number.")) is False
    assert capsys.readouterr().out == "Not yet: It isn't a number.\n"


def test_results_may_hold_nan(capsys):
    assert (
        attempt(lambda: torch.tensor([math.nan, 1.0]), (lambda x: (x == 1).all(), lambda x: f"You got {x.tolist()}.")) is False
    )
    assert capsys.readouterr().out == "Not yet: You got [nan, 1.0].\n"


def test_a_result_that_the_check_cannot_read_is_told(capsys):
    assert attempt(lambda: None, (lambda x: x.sum() == 2, "The sum is wrong.")) is False
    said = "Not yet: the check can't use what your code returned (AttributeError: 'NoneType' object has no attribute 'sum').\n"
    assert capsys.readouterr().out == said


def test_an_interrupt_passes_through():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
