"""%%ranks in an IPython shell: variables that stay, subsets, measuring, and errors with the cell's own line numbers."""

import os
import re
import signal
import time

import pytest
import torch
from IPython.testing.globalipapp import get_ipython

import manyranks as mr
from manyranks.world.counted.measurement import Measurement


@pytest.fixture(scope="module")
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = get_ipython() or InteractiveShell.instance()
    shell.run_line_magic("load_ext", "manyranks")
    yield shell
    InteractiveShell.clear_instance()


def ranks(shell, cell: str, line: str = "") -> None:
    shell.run_cell_magic("ranks", line, cell)


def test_a_cell_runs_on_every_rank_and_shows_its_last_value(shell, world, capsys):
    ranks(shell, "x = 10 * rank\nx")
    assert capsys.readouterr().out == "── rank 0 ──\n0\n── rank 1 ──\n10\n── rank 2 ──\n20\n"


def test_each_rank_keeps_its_variables_between_cells(shell, world, capsys):
    ranks(shell, "def double(v):\n    return 2 * v\nx = rank + 1")
    ranks(shell, "x = double(x)")
    assert world.get("x") == [2, 4, 6]
    assert capsys.readouterr().out == ""


def test_a_cell_can_run_on_some_ranks(shell, world):
    ranks(shell, "y = 0")
    ranks(shell, "y = 1\ndist.send(torch.ones(1), 2) if rank == 0 else dist.recv(torch.ones(1), 0)", "0, 2")
    assert world.get("y") == [1, 0, 1]


def test_a_collective_that_leaves_out_ranks_names_them(shell, world):
    with pytest.raises(mr.RankHung, match="for rank 1, which does not run this cell"):
        ranks(shell, "dist.barrier()", "0,2")


def test_a_cell_can_be_measured(shell, world):
    ranks(shell, "dist.all_reduce(torch.ones(1000))", "--measure m")
    measured = shell.user_ns["m"]
    assert isinstance(measured, Measurement)
    assert measured.calls[1][0].bytes == 4000
    assert measured.calls[1][0].where.startswith("cell ")
    assert measured.calls[1][0].where.endswith("line 2")


@pytest.mark.parametrize(
    ("line", "flops", "memory"), [("--flops", 2000, False), ("--memory --flops", 2000, True), ("", None, False)]
)
def test_a_measured_cell_counts_what_is_asked_for(shell, world, line, flops, memory):
    ranks(shell, "torch.ones(10, 10) @ torch.ones(10, 10)", f"--measure m {line}")
    assert (shell.user_ns["m"].flops or {1: None})[1] == flops
    assert (shell.user_ns["m"].peak_bytes is not None) == memory


def test_a_cell_can_be_profiled(shell, world):
    ranks(shell, "dist.all_reduce(torch.ones(10, 10) @ torch.ones(10, 10))", "--measure m --profile")
    m = shell.user_ns["m"]
    assert [m.profiles[rank].by_name()["aten::mm"][0] for rank in m.ranks] == [1, 1, 1]
    assert all(parts.matmul > 0 for parts in m.budgets.values())


def test_some_ranks_can_be_measured(shell, world):
    ranks(shell, "x = 1", "0,1 --measure m")
    assert shell.user_ns["m"].ranks == (0, 1)


def test_an_error_shows_the_cells_line_as_the_reader_counts_it(shell, world):
    with pytest.raises(mr.RankFailed) as caught:
        ranks(shell, "a = 1\nb = a / 0")
    assert "line 3\n    b = a / 0" in str(caught.value)  # %%ranks is line 1


def test_a_syntax_error_is_raised_before_any_rank_is_asked(shell, world):
    with pytest.raises(SyntaxError) as caught:
        ranks(shell, "a = 1\nb = = 2")
    assert caught.value.lineno == 3


@pytest.mark.parametrize("line", ["zero", "0,,2", "--measure", "--measure 1m", "0 --fast", "--flops", "--measure m --fast"])
def test_bad_options_say_what_is_allowed(shell, world, line):
    with pytest.raises(mr.WorldError, match=r"use %%ranks, or %%ranks 0,2 .*--time; or --measure NAME"):
        ranks(shell, "x = 1", line)


def test_a_rank_that_is_not_there_is_refused(shell, world):
    with pytest.raises(mr.WorldError, match="this world has the ranks 0 to 2"):
        ranks(shell, "x = 1", "3")
    with pytest.raises(ValueError, match="this world has the ranks 0 to 2"):
        world.run_cell("x = 1", "<cell 1>", [3])


def test_cells_run_on_the_newest_open_world(shell, world):
    with mr.World(2, backend="gloo") as newer:
        ranks(shell, "z = world_size")
        assert newer.get("z") == [2, 2]
    ranks(shell, "z = world_size")
    assert world.get("z") == [3, 3, 3]


def test_without_a_world_it_says_how_to_make_one(shell, world):
    world.close()
    with pytest.raises(mr.WorldError, match=r"make one first: world = mr.World\(4\)"):
        ranks(shell, "x = 1")


def test_a_report_replaces_ipythons_traceback(shell, world):
    with pytest.raises(mr.RankFailed) as caught:
        world.run(torch.ones, "two")
    lines = caught.value._render_traceback_()
    assert lines[0].startswith("RankFailed: all 3 ranks raised TypeError")
    assert "world.py" not in "".join(lines)


def test_classes_of_cells_travel_between_ranks(shell, world):
    ranks(shell, "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int")
    ranks(shell, "points = [None] * world_size\ndist.all_gather_object(points, Point(rank))\nxs = [p.x for p in points]")
    assert world.get("xs") == [[0, 1, 2]] * 3


def test_a_loop_over_rank_does_not_change_it_for_the_next_cell(shell, world):
    ranks(shell, "for rank in range(3): pass")
    ranks(shell, "mine = rank")
    assert world.get("mine") == [0, 1, 2]


def test_a_semicolon_hides_the_last_value(shell, world, capsys):
    ranks(shell, "rank;")
    assert capsys.readouterr().out == ""


def test_a_name_that_only_the_notebook_has_comes_with_a_hint(shell, world):
    shell.user_ns["only_here"] = 1
    with pytest.raises(mr.RankFailed, match=r"but the ranks don't: world.set\(only_here=only_here\) sends it"):
        ranks(shell, "print(only_here)")


def test_time_says_how_long_each_rank_took(shell, world, capsys):
    ranks(shell, "x = 1", "--time")
    assert re.fullmatch(
        r"[\d.e+-]+ ms in all; rank 0: [\d.e+-]+ ms, rank 1: [\d.e+-]+ ms, rank 2: [\d.e+-]+ ms\n", capsys.readouterr().out
    )
    ranks(shell, "x = 2", "1 --time")
    assert "; rank 1: " in capsys.readouterr().out


def test_tab_knows_what_only_the_ranks_have(shell, world):
    ranks(shell, "only_here, only_there = torch.ones(2), 4")
    assert sorted(world.names("only_")) == ["only_here", "only_there"]
    assert world.names("only_here.numpy") == ["only_here.numpy"]
    assert world.names("only_here.__cl") != []
    assert world.names("nothing.like.it") == world.names("only_there.x.y") == []
    with pytest.raises(mr.RankFailed):
        ranks(shell, "1 / 0")
    source = """class Odd:
    @property
    def counted(self):
        global asked
        asked += 1
odd, asked = Odd(), 0"""
    ranks(shell, source)
    assert world.names("odd.cou") == ["odd.counted"]
    assert world.names("odd.counted.f") == ["odd.counted.fget", "odd.counted.fset", "odd.counted.fdel"]  # the property's own
    assert world.get("asked") == [0] * world.size
    world.close()
    assert world.names("only_") == []


def test_tab_is_no_run(shell, world, monkeypatch):
    with pytest.raises(mr.RankFailed):
        ranks(shell, "only_here = 1\n1 / 0")
    assert world.names("only_") == ["only_here"]
    monkeypatch.setattr("builtins.input", lambda prompt: "q")
    world.debug()  # what it looks at is there still
    os.kill(world.run(os.getpid)[1], signal.SIGKILL)
    time.sleep(0.3)
    assert world.names("only_") == ["only_here"]
    with pytest.raises(mr.RankDied, match="That was after the last run"):
        ranks(shell, "only_here")
