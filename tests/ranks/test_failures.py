"""Failures of any kind on a rank: one clear error, no process left, and the next run works."""

import os
import signal
import stat
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.world import collect
from manyranks.world import world as world_module
from manyranks.world.errors import HUNG_UP
from manyranks.world.processes import local
from tests.conftest import gone, pids, wait_until

# Seconds until the next run has worked, after any failure: 0.5 on an idle machine, and a tenth of the timeout on a busy one.
RESTART = 3.0


def all_ranks(world) -> list[int]:
    def count():
        x = torch.ones(1)
        dist.all_reduce(x)
        return int(x)

    return world.run(count)


def assert_recovers(world, before: list[int], restarted: bool = True) -> None:
    """The next run works within RESTART, and the ranks of before are gone then, or still serve, if not restarted."""
    for _ in range(3):  # a busy machine may be slow once
        started = time.monotonic()
        assert all_ranks(world) == [world.size] * world.size
        if (seconds := time.monotonic() - started) < RESTART:
            break
        failing(world, mr.RankDied, os._exit, 1)
    assert seconds < RESTART
    if not restarted:
        assert pids(world) == before
        return
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)


def failing(world, kind, function, *args):
    with pytest.raises(kind) as caught:
        world.run(function, *args)
    return caught.value


def test_a_run_whose_last_rank_replies_in_the_moment_it_is_late_is_no_hang():
    with mr.World(1, backend="gloo", timeout=1e-6) as world:
        assert [world.run(int) for _ in range(5)] == [[0]] * 5


def test_a_rank_that_raises_stops_the_others_at_once(world):
    def broken():
        if dist.get_rank() == 1:
            raise KeyError("no such layer")
        dist.all_reduce(torch.ones(4))

    before, started = pids(world), time.monotonic()
    error = failing(world, mr.RankFailed, broken)
    assert time.monotonic() - started < 15  # its timeout is 30
    assert error.rank == 1
    assert isinstance(error.exception, KeyError)
    assert "rank 1 raised KeyError: 'no such layer'" in str(error)
    assert 'raise KeyError("no such layer")' in str(error)
    assert 'raise KeyError("no such layer")' in error.traceback
    assert "ranks 0 and 2 waited in all_reduce #0 of 16 bytes" in str(error)
    assert_recovers(world, before)


def test_an_error_on_every_rank_keeps_the_ranks_and_their_variables(world):
    world.set(kept=7)
    before = pids(world)
    error = failing(world, mr.RankFailed, lambda: undefined_name)  # noqa: F821
    assert "all 3 ranks raised NameError" in str(error)
    assert "are gone" not in str(error)
    assert world.get("kept") == [7, 7, 7]
    assert_recovers(world, before, restarted=False)


def test_ranks_that_raise_a_little_later_than_the_first_are_named_too(world):
    def broken():
        time.sleep(0.3 * dist.get_rank())  # on a busy machine, a rank may be late by as much
        raise ValueError("no")

    assert "all 3 ranks raised ValueError" in str(failing(world, mr.RankFailed, broken))


def test_an_exception_that_cannot_be_pickled_is_still_reported(world):
    def broken():
        error = ValueError("held")
        error.lock = threading.Lock()
        raise error

    error = failing(world, mr.RankFailed, broken)
    assert error.exception is None
    assert "ValueError: held" in str(error)


def test_a_rank_that_exits_is_named_with_its_code(world):
    def leave():
        if dist.get_rank() == 2:
            os._exit(3)
        dist.barrier()

    before = pids(world)
    error = failing(world, mr.RankDied, leave)
    assert (error.rank, error.exit_code) == (2, 3)
    assert "rank 2 died: its process exited with code 3" in str(error)
    assert_recovers(world, before)


def test_a_rank_is_named_with_its_code_also_where_the_machine_is_too_busy_to_say_it_soon(world):
    """The process that knows how ranks ended gets no processor for a while."""
    forkserver = local.the_forkserver().pid
    before = pids(world)

    def leave():
        if dist.get_rank() == 2:
            os.kill(forkserver, signal.SIGSTOP)
            os._exit(3)
        dist.barrier()

    waking = threading.Timer(3.0, os.kill, (forkserver, signal.SIGCONT))
    waking.start()
    try:
        error = failing(world, mr.RankDied, leave)
    finally:
        waking.join()
    assert (error.rank, error.exit_code) == (2, 3)
    assert_recovers(world, before)


def test_a_rank_that_hangs_up_and_lives_on_is_told_from_one_that_has_ended(world, monkeypatch):
    def hang_up():
        if dist.get_rank() == 2:
            for fd in (fd for fd in range(3, 256) if os.path.exists(f"/dev/fd/{fd}")):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.close(fd)
            time.sleep(60)
        dist.barrier()

    monkeypatch.setattr(collect, "_BUSY", 0.5)
    error = failing(world, mr.RankDied, hang_up)
    assert (error.rank, error.exit_code) == (2, HUNG_UP)
    assert "rank 2 died: it closed its connection to the notebook, and its process had not ended" in f"{error}"


def test_a_segfault_is_named_with_its_line(world):
    def crash():
        import ctypes

        if dist.get_rank() == 1:
            ctypes.string_at(0)
        dist.barrier()

    before = pids(world)
    error = failing(world, mr.RankDied, crash)
    assert (error.rank, error.exit_code) == (1, -signal.SIGSEGV)
    line = crash.__code__.co_firstlineno + 4
    assert f"rank 1 died at test_failures.py, line {line}: its process was ended by SIGSEGV, a segmentation" in str(error)
    assert_recovers(world, before)


@pytest.mark.parametrize("busy", [True, False], ids=["in a collective", "between runs"])
def test_a_rank_that_is_killed_is_reported(world, busy):
    before = pids(world)

    def wait():
        if dist.get_rank() == 0:
            time.sleep(20)
        dist.barrier()

    if not busy:
        os.kill(before[1], signal.SIGKILL)
        assert wait_until(lambda: gone(before[1]), 20)
        error = failing(world, mr.RankDied, dist.get_rank)
        assert (error.rank, error.exit_code) == (1, -signal.SIGKILL)
        assert "rank 1 died: its process was ended by SIGKILL" in str(error)
        return assert_recovers(world, before)
    threading.Timer(1, os.kill, (before[1], signal.SIGKILL)).start()
    error = failing(world, mr.RankDied, wait)
    assert (error.rank, error.exit_code) == (1, -signal.SIGKILL)
    assert "ended by SIGKILL, as the system does when memory runs out" in str(error)
    assert_recovers(world, before)


def test_sizes_that_differ_are_reported_although_gloo_aborts(world):
    def mismatch():
        dist.all_reduce(torch.ones(1000 if dist.get_rank() == 0 else 2000))

    before = pids(world)
    error = failing(world, mr.RankDied, mismatch)
    line = mismatch.__code__.co_firstlineno + 1
    assert f"died at test_failures.py, line {line}: its process was ended by SIGABRT" in str(error)
    assert f"then raised RuntimeError, in all_reduce #0 of 8,000 bytes (test_failures.py, line {line})" in str(error)
    assert_recovers(world, before)


def test_a_deadlock_names_who_waits_for_whom_long_before_the_timeout(world):
    def cross():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(2), src=1)
        else:
            dist.all_reduce(torch.ones(2))

    before, started = pids(world), time.monotonic()
    error = failing(world, mr.RankHung, cross)
    assert time.monotonic() - started < 15  # its timeout is 30; on an idle machine it takes less than 3
    line = cross.__code__.co_firstlineno
    assert (
        f"rank 0 waits in recv #0 of 8 bytes from rank 1 (test_failures.py, line {line + 2}), "
        f"which waits in all_reduce #0 of 8 bytes (test_failures.py, line {line + 4}) for rank 0"
    ) in str(error)
    assert error.states[1].startswith("waited in all_reduce #0")
    assert "the calls diverge: rank 1 issued all_reduce #0" in str(error)
    assert_recovers(world, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how threads get on")
def test_a_look_sees_how_the_main_thread_gets_on(world):
    def look():
        from manyranks.world.rank.watch import processor

        return processor()

    assert all(seen.delayed >= 0 and seen.state in "RS" for seen in world.run(look))


def test_a_rank_that_leaves_early_is_named(world):
    def early():
        if dist.get_rank() != 2:
            dist.barrier()

    before = pids(world)
    error = failing(world, mr.RankHung, early)
    assert "rank 0 waits in barrier #0 (test_failures.py" in str(error)
    assert "for rank 2, which has returned" in str(error)
    assert_recovers(world, before)


def test_a_deadlock_in_the_backward_of_ddp_is_found(world):
    def train():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if dist.get_rank() == 0:
            dist.barrier()
        loss.backward()

    error = failing(world, mr.RankHung, train)
    assert "barrier" in str(error)
    assert "all_reduce" in str(error)


def test_a_group_that_only_one_rank_makes_is_found(world):
    def alone():
        if dist.get_rank() == 0:
            dist.new_group([0, 1])

    error = failing(world, mr.RankHung, alone)
    assert "torch.distributed's new_group" in str(error)


def test_an_endless_loop_is_reported_with_its_line():
    def endless():
        while True:
            pass

    with mr.World(2, backend="gloo", timeout=2.5) as world:
        before = pids(world)
        error = failing(world, mr.RankHung, endless)
        line = endless.__code__.co_firstlineno
        assert "not over after 2.5 s" in str(error)
        assert f"test_failures.py, line {line + 1}" in str(error) or f"test_failures.py, line {line + 2}" in str(error)
        assert_recovers(world, before)


def test_ranks_that_compute_while_others_wait_are_no_deadlock(world):
    def uneven():
        if dist.get_rank() == 0:
            time.sleep(2.5)
        dist.barrier()
        return dist.get_rank()

    assert world.run(uneven) == [0, 1, 2]


@pytest.mark.parametrize("where", ["before its call", "after its wait"])
def test_a_rank_that_a_busy_machine_holds_up_is_no_deadlock(world, where):
    def held():
        from manyranks.measure import calls, completions

        issue, wait = calls.issue, completions.wait

        def issue_late(*args):
            time.sleep(2.5)
            return issue(*args)

        def return_late(*args, **kwargs):
            done = wait(*args, **kwargs)
            time.sleep(2.5)
            return done

        try:
            if where == "after its wait":
                completions.wait = return_late
            elif dist.get_rank() == 0:
                calls.issue = issue_late
            dist.all_reduce(x := torch.ones(1))
        finally:
            calls.issue, completions.wait = issue, wait
        return int(x)

    assert world.run(held) == [3, 3, 3]


@pytest.mark.parametrize("where", ["loop", "collective"])
def test_an_interrupt_is_a_keyboard_interrupt_long_before_the_timeout(world, where, capfd, monkeypatch):
    if where == "loop":
        monkeypatch.setattr(world_module, "_AFTER_INTERRUPT", 8.0)  # they come at once, but on a busy machine

    def wait():
        if where == "collective" and dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        while True:
            time.sleep(0.01)

    world.set(kept=1)
    before, pressed = pids(world), []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.4, press).start()
    with pytest.raises(KeyboardInterrupt, match="the run was stopped; the next one works") as stopped:
        world.run(wait)
    assert stopped.value._render_traceback_() == [f"KeyboardInterrupt: {stopped.value}"]  # what a notebook shows
    assert ("fresh ranks" in str(stopped.value)) == (where == "collective")
    assert time.monotonic() - pressed[0] < 10  # its timeout is 30; on an idle machine it takes less than 1
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert ("are gone" in printed.err) == (where == "collective")
    assert_recovers(world, before, restarted=where == "collective")


def test_a_result_that_cannot_be_pickled_names_the_type(world):
    error = failing(world, mr.RankFailed, threading.Lock)
    assert "the result, a lock, cannot be sent to the notebook" in str(error)


def test_an_argument_that_cannot_be_pickled_is_refused_before_it_is_sent(world):
    with pytest.raises(ValueError, match=r"cannot be sent to the ranks: .*lock"):
        world.run(print, threading.Lock())
    with pytest.raises(ValueError, match="cannot be sent to the ranks: a World cannot be sent to its own ranks"):
        world.run(lambda: world.size)


def test_what_is_not_a_function_is_refused(world):
    with pytest.raises(ValueError, match="the first argument must be a function"):
        world.run(42)


def test_a_rank_that_prints_50_megabytes_is_cut_short(world, capsys):
    def chatter():
        for _ in range(50):
            print("x" * 1_000_000)
        return "done"

    assert world.run(chatter) == ["done"] * 3
    out = capsys.readouterr().out
    assert len(out) < 1_000_000
    assert "[rank 0 printed 50,000,050 bytes; the first 200,000 are shown]" in out


def test_two_worlds_at_once_do_not_disturb_each_other(world):
    with mr.World(2, backend="gloo") as other:
        assert all_ranks(other) == [2, 2]
        assert all_ranks(world) == [3, 3, 3]
        failing(world, mr.RankFailed, lambda: 1 / 0)
        assert all_ranks(other) == [2, 2]


def test_a_world_inside_a_world_is_refused(world):
    def inner():
        import manyranks

        manyranks.World(2)

    error = failing(world, mr.RankFailed, inner)
    assert "a rank cannot start another world" in str(error)


def test_a_closed_world_says_so(world):
    before = pids(world)
    world.close()
    world.close()
    assert all(gone(pid) for pid in before)
    with pytest.raises(mr.WorldError, match="this world is closed; make a new one"):
        world.run(os.getpid)


def test_a_message_nobody_received_does_not_reach_the_next_run(world):
    def leave_one():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), dst=1)

    with pytest.warns(RuntimeWarning, match="a message was sent that nobody received"):
        world.run(leave_one)
    assert all_ranks(world) == [3, 3, 3]


def test_a_destroyed_group_is_there_again_for_the_next_run(world):
    with pytest.warns(RuntimeWarning):
        world.run(dist.destroy_process_group)
    assert all_ranks(world) == [3, 3, 3]


class NeedsTwo(Exception):
    """Cannot be unpickled: it keeps one argument and asks for two."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_be_read_here_is_still_reported(world):
    def broken():
        if dist.get_rank() == 1:
            raise NeedsTwo(1, 2)
        dist.barrier()

    before = pids(world)
    error = failing(world, mr.RankFailed, broken)
    assert error.exception is None
    assert "NeedsTwo: 1 and 2" in str(error)
    assert_recovers(world, before)


def test_an_exception_whose_text_raises_is_reported_by_its_name(world):
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    def broken():
        raise Mute

    assert "Mute" in str(failing(world, mr.RankFailed, broken))


def test_causes_and_the_members_of_groups_are_shown(world):
    def chained():
        try:
            {}["layer"]
        except KeyError as error:
            raise RuntimeError("no plan") from error

    def several():
        raise ExceptionGroup("two", [ValueError("first"), TypeError("second")])

    report = str(failing(world, mr.RankFailed, chained))
    assert report.index("RuntimeError: no plan") < report.index("caused by KeyError: 'layer'")
    assert '{}["layer"]' in report
    report = str(failing(world, mr.RankFailed, several))
    assert "ValueError: first" in report
    assert "TypeError: second" in report


def test_a_deep_recursion_is_shown_by_its_ends(world):
    def deeper():
        return deeper()

    report = str(failing(world, mr.RankFailed, deeper))
    assert "RecursionError" in report
    assert len(report.splitlines()) < 60


def test_an_endless_loop_in_c_is_reported_with_its_line():
    def endless():
        return sum(range(10**12))

    with mr.World(2, backend="gloo", timeout=3) as world:
        before = pids(world)
        error = failing(world, mr.RankHung, endless)
        line = endless.__code__.co_firstlineno + 1
        assert f"was in code that holds the interpreter, at test_failures.py, line {line}" in error.states[0]
        assert_recovers(world, before)


def test_an_interrupt_while_a_result_travels_leaves_a_world_that_works(world):
    def big():
        return torch.ones(100_000_000)

    for delay in (0.2, 0.3, 0.4, 0.5):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        timer.start()
        try:
            world.run(big)
            timer.join()
            time.sleep(0.1)
        except KeyboardInterrupt:
            assert time.monotonic() - started < delay + 15
        assert all_ranks(world) == [3, 3, 3]


def test_a_fork_of_a_rank_does_not_answer_in_its_place(world):
    assert world.run(lambda: os.fork() == 0) == [False] * 3
    assert world.run(lambda: "fresh") == ["fresh"] * 3


def test_what_a_rank_had_started_ends_when_it_dies(world):
    def leave(path):
        import subprocess

        if dist.get_rank() == 1:
            path.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
            os._exit(3)
        dist.barrier()

    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "pid"
        failing(world, mr.RankDied, leave, path)
        assert wait_until(lambda: gone(int(path.read_text())), 20)


def test_a_rank_that_takes_no_arguments_runs_into_the_timeout():
    with mr.World(2, backend="gloo", timeout=3) as world:
        os.kill(pids(world)[0], signal.SIGSTOP)
        error = failing(world, mr.RankHung, len, torch.ones(30_000_000))
        assert error.states[0] == "did not answer: its process is stopped"
        assert world.run(abs, -1) == [1, 1]


def test_a_slow_disk_is_no_deadlock(world, tmp_path):
    def save(folder):
        import torch.distributed.checkpoint as checkpoint

        fsync = os.fsync
        os.fsync = lambda fd: (time.sleep(2.5), fsync(fd))
        try:
            checkpoint.save({"x": torch.ones(3)}, checkpoint_id=folder)
        finally:
            os.fsync = fsync

    world.run(save, str(tmp_path / "saved"))


def test_a_result_that_cannot_be_read_names_its_rank(world):
    class Bad:
        def __reduce__(self):
            return eval, ("1/0",)

    with pytest.raises(mr.WorldError, match="rank 0's result cannot be read in the notebook: ZeroDivisionError"):
        world.run(lambda: Bad())


def test_closing_a_world_during_its_run_says_so(world):
    threading.Timer(0.3, world.close).start()
    with pytest.raises(mr.WorldError, match="closed while a run was under way"):
        world.run(time.sleep, 20)


def test_an_interrupt_after_some_ranks_have_ended_keeps_the_variables(world, monkeypatch):
    monkeypatch.setattr(world_module, "_AFTER_INTERRUPT", 8.0)
    world.set(kept=1)
    before = pids(world)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        world.run(lambda: dist.get_rank() == 0 or time.sleep(20))
    assert world.get("kept") == [1, 1, 1]
    assert pids(world) == before


def test_a_warning_points_at_the_line_of_the_reader(world):
    def leave_one():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), dst=1)

    for call in (world.run, world.measure):
        with pytest.warns(RuntimeWarning) as caught:
            call(leave_one)
        assert caught[0].filename == __file__
