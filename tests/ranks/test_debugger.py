"""breakpoint() on a rank, and world.debug after a run that went wrong: the reader's lines come from a list."""

import builtins
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.world.errors import RunInterrupted
from tests.conftest import gone, matrix, wait_until


@pytest.fixture
def typed(monkeypatch):
    """Lines that the reader types, one after another; a function among them is called instead. Keeps the questions."""
    lines, asked = [], []

    def answer(prompt=""):
        asked.append(prompt)
        line = lines.pop(0)
        return line() if callable(line) else line

    monkeypatch.setattr(builtins, "input", answer)
    lines_and_asked = type("Typed", (), {"lines": lines, "asked": asked})
    yield lines_and_asked
    assert lines == []


@pytest.fixture
def world():
    with mr.World(3, timeout=30) as world:
        yield world


def stops(added):
    x = torch.ones(2) * dist.get_rank()
    if dist.get_rank() == 1:
        y = 5
        breakpoint()
        y += added
        x += y
    dist.all_reduce(x)
    return x.tolist()


def fails():
    x, kept = torch.ones(2), "of this moment"
    if dist.get_rank() == 2:
        raise RuntimeError(f"no {kept}")
    dist.all_reduce(x)


def hangs():
    x, kept = torch.ones(2), "of this moment"
    if dist.get_rank():
        dist.all_reduce(x)
    else:
        dist.recv(x, 1)
    return kept


def test_a_breakpoint_stops_a_rank_whose_lines_and_variables_can_be_seen(world, typed, capsys):
    typed.lines[:] = ["p y, added", "n", "p y", "w", "l", "up", "c"]
    assert world.run(stops, 2) == [[10.0, 10.0]] * 3
    assert typed.asked == ["(rank 1) "] * 7
    said = capsys.readouterr().out
    first = stops.__code__.co_firstlineno
    assert f"test_debugger.py({first + 5})stops()\n-> y += added\n" in said
    assert "(5, 2)\n" in said
    assert "\n7\n" in said
    assert f"{first + 4}  \t        breakpoint()" in said
    assert "Oldest frame" in said  # nothing of the library that called it
    assert f"Meanwhile ranks 0 and 2 wait in all_reduce #0 of 8 bytes (test_debugger.py, line {first + 7})" in said
    assert world.run(stops_nowhere) == [1, 1, 1]


def stops_nowhere():
    return 1


def test_who_reads_may_take_longer_than_a_run_and_is_no_deadlock(typed):
    with mr.World(2, timeout=2) as world:
        typed.lines[:] = [lambda: time.sleep(4) or "n", "c"]
        assert world.run(stops, 1) == [[7.0, 7.0]] * 2


def test_q_ends_the_run_and_the_next_one_works(world, typed):
    typed.lines[:] = ["q"]
    with pytest.raises(mr.RankFailed, match="rank 1: you left the debugger with q, which ends the run for all"):
        world.run(stops, 1)
    assert world.run(stops_nowhere) == [1, 1, 1]


def test_an_interrupt_in_the_debugger_ends_the_run(world, typed):
    def interrupt():
        raise KeyboardInterrupt

    typed.lines[:] = ["p y", interrupt]
    with pytest.raises(RunInterrupted):
        world.run(stops, 1)
    assert world.run(stops_nowhere) == [1, 1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_meanwhile_is_reported(world, typed, rank):
    killed = world.run(dist_pid)[rank]

    def kill():
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: gone(killed), 20)
        return "n"

    typed.lines[:] = [kill] if rank == 1 else [kill, "c"]
    with pytest.raises(mr.RankDied) as caught:
        world.run(stops, 1)
    if rank == 0:
        assert caught.value.rank == 0
    typed.lines.clear()
    assert world.run(stops_nowhere) == [1, 1, 1]


def dist_pid():
    return os.getpid()


def test_all_ranks_can_stop_one_after_another(world, typed, capsys):
    def everywhere():
        mine = dist.get_rank()
        breakpoint()
        mine += 1
        return mine

    typed.lines[:] = ["p mine", "c"] * 3
    assert world.run(everywhere) == [1, 2, 3]
    assert typed.asked == [f"(rank {rank}) " for rank in (0, 0, 1, 1, 2, 2)]
    assert "Meanwhile ranks 1 and 2 are in the debugger, too." in capsys.readouterr().out


def test_q_ends_a_run_in_which_all_ranks_have_stopped(world, typed):
    typed.lines[:] = ["q"]
    with pytest.raises(mr.RankFailed, match="rank 0: you left"):
        world.run_cell("breakpoint()\ny = 1", "<cell 1>")
    assert world.run(stops_nowhere) == [1, 1, 1]


def test_a_cell_is_stepped_through_in_one_piece(world, typed, capsys):
    typed.lines[:] = ["b 3", "n", "run", "clear", "y", "c"]
    world.run_cell("breakpoint()\nx = 1\nx + 41", "<cell 1>", [0])
    said = capsys.readouterr().out
    assert "> cell 1(2)<module>()" in said
    assert "> cell 1(3)<module>()" in said
    assert "--Return--" not in said
    assert "don't work here: type statements" in said
    assert "Clear all breaks? " in typed.asked
    assert said.endswith("── rank 0 ──\n42\n")


def test_where_nobody_can_answer_a_rank_goes_on(world, monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", lambda prompt="": (_ for _ in ()).throw(EOFError))
    assert world.run(stops, 1) == [[9.0, 9.0]] * 3
    assert "no one can type here, so the rank goes on" in capsys.readouterr().err


def test_after_a_failure_the_frames_of_that_moment_can_be_seen(world, typed, capsys):
    with pytest.raises(mr.RankFailed):
        world.run(fails)
    typed.lines[:] = ["p kept", "q", "p kept, x.sum().item()", "q"]
    world.debug()
    world.debug(0)  # which waits for the others still
    assert typed.asked == ["(rank 2) "] * 2 + ["(rank 0) "] * 2
    said = capsys.readouterr().out
    assert "-> raise RuntimeError" in said
    assert "-> dist.all_reduce(x)" in said
    assert "'of this moment'\n" in said
    assert "('of this moment', 2.0)\n" in said
    assert world.run(stops_nowhere) == [1, 1, 1]
    with pytest.raises(mr.WorldError, match="there is nothing to debug"):
        world.debug()


def test_after_a_hang_too_and_stacks_say_where_ranks_are(world, typed, capsys):
    with pytest.raises(mr.RankHung):
        world.run(hangs)
    typed.lines[:] = ["p kept", "q"]
    world.debug(1)
    world.stacks()
    said, first = capsys.readouterr().out, hangs.__code__.co_firstlineno
    assert "'of this moment'\n" in said
    assert f"rank 0 waits in recv #0 of 8 bytes from rank 1 (test_debugger.py, line {first + 5})" in said
    assert "    dist.all_reduce(x)" in said
    with pytest.raises(ValueError, match="rank=3: the run that failed had the ranks 0, 1, 2"):
        world.debug(3)
    assert world.run(stops_nowhere) == [1, 1, 1]
    world.stacks()
    assert capsys.readouterr().out == "".join(f"rank {rank} waits for the next run\n" for rank in range(3))


def test_a_rank_that_failed_beside_others_that_are_well_keeps_its_frames_until_the_next_run(world, typed, capsys):
    def all_fail():
        kept = dist.get_rank()
        return 1 // (kept - kept)

    with pytest.raises(mr.RankFailed):
        world.run(all_fail)
    typed.lines[:] = ["p kept", "q"]
    world.debug(2)
    assert "\n2\n" in capsys.readouterr().out
    assert world.run(stops_nowhere) == [1, 1, 1]


def test_nothing_that_computes_is_kept_for_the_debugger():
    def endless():
        while True:
            sum(range(10_000_000))  # in C: an interrupt comes when it is over

    def in_c():
        sum(range(10**12))

    for function in (endless, in_c):
        with mr.World(2, timeout=1.5) as world:
            before = world.run(dist_pid)
            with pytest.raises(mr.RankHung):
                world.run(function)
            assert wait_until(lambda pids=before: all(gone(pid) or idle(pid) for pid in pids), 10)
            assert world.run(stops_nowhere) == [1, 1]


def idle(pid: int) -> bool:
    """Whether the process uses no processor for a moment."""
    import psutil

    try:
        return psutil.Process(pid).cpu_percent(interval=0.3) < 20
    except psutil.Error:
        return True


def test_an_interrupt_at_debug_leaves_it_and_the_world_is_well(world, typed):
    def interrupt():
        raise KeyboardInterrupt

    for function, kind in ((fails, mr.RankFailed), (hangs, mr.RankHung)):
        with pytest.raises(kind):
            world.run(function)
        typed.lines[:] = ["p kept", interrupt, "p kept", "q"]
        world.debug(1)
        world.debug(1)
        assert world.run(stops_nowhere) == [1, 1, 1]


def test_after_a_timeout_it_begins_where_the_reader_s_code_was(typed, capsys):
    def endless():
        kept = "still here"
        while kept:
            time.sleep(0.01)

    with mr.World(2, timeout=1.5) as world:
        with pytest.raises(mr.RankHung):
            world.run(endless)
        typed.lines[:] = ["p kept", "up", "q"]
        world.debug()
        said = capsys.readouterr().out
        assert typed.asked[0] == "(rank 0) "
        assert "'still here'\n" in said
        assert "Oldest frame" in said
        assert world.run(stops_nowhere) == [1, 1]


def test_a_process_or_thread_that_a_rank_starts_cannot_be_stopped(world, typed, capsys):
    def starts():
        if (child := os.fork()) == 0:
            breakpoint()
            os._exit(0)
        os.waitpid(child, 0)
        thread = threading.Thread(target=breakpoint, name="helper")
        thread.start()
        thread.join()
        return 1

    assert world.run(starts) == [1, 1, 1]
    said = capsys.readouterr().err
    assert said.count("breakpoint() in a process that the rank has started is passed over") == 3
    assert said.count("breakpoint() in thread helper is passed over") == 3
    assert world.run(stops_nowhere) == [1, 1, 1]


def test_the_world_can_be_closed_while_a_rank_asks(typed):
    world = mr.World(2)

    def close():
        thread = threading.Thread(target=world.close)
        thread.start()
        time.sleep(0.5)  # it waits for the run to be over
        return "n"

    typed.lines[:] = [close]
    with pytest.raises(mr.WorldError, match="the world was closed while a run was under way"):
        world.run(stops, 1)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_debug_says_that_its_ranks_are_gone(typed, how):
    world = mr.World(2)
    rank = world.run(dist_pid)[0]
    with pytest.raises(mr.RankFailed):
        world.run(lambda: 1 // 0)

    def end():
        if how == "killed":
            os.kill(rank, signal.SIGKILL)
        else:
            threading.Thread(target=world.close).start()
        time.sleep(0.5)
        return "p 1"

    typed.lines[:] = [end]
    with pytest.raises(mr.WorldError, match="the world was closed" if how == "closed" else "rank 0 died"):
        world.debug(0)
    world.close()


def test_stepping_leaves_out_torch_and_the_library(world, typed, capsys):
    def short():
        x = torch.ones(2)
        if dist.get_rank() == 0:
            breakpoint()
            dist.barrier(dist.new_group([0], use_local_synchronization=True))
        return x.sum().item()

    typed.lines[:] = ["s", "s", "interact", "w", "b 331", "n", "n"]
    assert world.run(short) == [2.0, 2.0, 2.0]
    assert typed.lines == ["n"]  # behind the last line the rank goes on
    said = capsys.readouterr().out
    assert "threading.py" not in said
    assert "torch/" not in said
    assert "cloudpickle" not in said
    assert "don't work here: type statements" in said
    typed.lines.clear()
    assert world.run(short_of_breakpoints) == [None, None, None]


def short_of_breakpoints():
    return sys.gettrace()


def test_after_a_failure_nothing_can_be_stepped_and_stacks_say_who_raised(world, typed, capsys):
    with pytest.raises(mr.RankFailed):
        world.run(fails)
    world.stacks()
    typed.lines[:] = ["n", "q"]
    world.debug()
    said = capsys.readouterr().out
    assert "rank 2 has raised\n" in said
    assert "this run is over, so nothing can be stepped" in said


def test_a_rank_that_dies_in_debug_takes_the_others_frames_with_it(world, typed):
    with pytest.raises(mr.RankFailed):
        world.run(fails)
    typed.lines[:] = ["import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(mr.RankDied):
        world.debug(0)
    with pytest.raises(mr.WorldError, match="there is nothing to debug"):
        world.debug(1)
    assert world.run(stops_nowhere) == [1, 1, 1]


FAULTS = {  # what rank 0 does, in a source that the rank compiles, and what the notebook gets
    "raises": ("raise ValueError('odd')", mr.RankFailed),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", mr.RankDied),
    "a segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV)", mr.RankDied),
    "exits": ("os._exit(3)", mr.RankDied),
    "sys.exit": ("sys.exit(1)", mr.RankFailed),
    "a wrong size": ("dist.send(torch.ones(9), 2)", mr.RankDied),
    "a deadlock": ("dist.recv(torch.ones(2), 2)", mr.RankHung),
    "leaves early": ("", mr.RankHung),
    "an endless loop": ("while True: pass", mr.RankHung),
}
FAULTY = """
import os, signal, sys, threading, time
if {streams}:
    def stream():
        while True:
            print("rank", rank, "x" * 200)
            time.sleep(0.001)
    threading.Thread(target=stream, daemon=True).start()
    time.sleep(0.2)
x = torch.ones(2)
if rank == 0:
    {fault}
elif rank == 1 and {debugged}:
    breakpoint()
    dist.barrier()
elif rank == 2 and {received}:
    dist.recv(x, 0)
else:
    dist.barrier()
"""


@pytest.mark.parametrize("while_what", ["output streams", "a debugger is open"])
@pytest.mark.parametrize("fault", matrix(list(FAULTS), ["raises", "killed", "a deadlock"]))
def test_faults_are_the_same(fault, while_what, typed):
    source, kind = FAULTS[fault]
    streams, received = while_what == "output streams", fault == "a wrong size"
    timeout = 4 if fault == "an endless loop" else 30
    with mr.World(3, timeout=timeout) as world:
        cell = FAULTY.format(streams=streams, fault=source or "pass", debugged=not streams, received=received)
        typed.lines[:] = [] if streams else ["p x", lambda: time.sleep(1) or "c"]
        with pytest.raises(kind):
            world.run_cell(cell, "<cell 1>")
        typed.lines.clear()  # the run may be over before the reader has answered
        assert world.run(stops_nowhere) == [1, 1, 1]
