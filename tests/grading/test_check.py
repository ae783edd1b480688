"""Whatever a learner writes, a check ends in time with a report, and gives no points for it."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from manyranks import grade
from manyranks.grade import trial

DEADLINE = 20  # seconds, whatever the learner wrote


class Unreadable:
    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __repr__


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no str")


class Disguised:
    @property
    def __class__(self):
        return torch.Tensor


def raises(x):
    raise KeyError("no such chunk")


def raises_what_cannot_be_printed(x):
    raise Unspeakable


def interrupts(x):
    raise KeyboardInterrupt


def exits(x):
    sys.exit(0)


def dies(x):
    os._exit(0)


def is_stopped(x):
    os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_dies(x):
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.recv(x, 1)


def loops(x):
    while True:
        pass


def loops_and_ignores_interrupts(x):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def sleeps(x):
    time.sleep(60)


def sleeps_almost_too_long(x):
    time.sleep(5)
    return x


def receives_for_ever(x):
    dist.recv(x, (dist.get_rank() + 1) % dist.get_world_size())


def recurses(x):
    return recurses(x)


def prints_a_lot(x):
    for _ in range(500):
        print("\x1b[31m" + "x" * 100_000)
    return x


def prints_to_stderr(x):
    print("careful", file=sys.stderr)
    return x


def forks(x):
    os.fork()
    return x


def starts_a_thread_that_stays(x):
    threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
    return x


def takes_no_argument():
    return 1


def destroys_the_group(x):
    dist.destroy_process_group()
    return x


def sends_what_nobody_receives(x):
    dist.isend(x, (dist.get_rank() + 1) % dist.get_world_size())
    return x


async def is_a_coroutine(x):
    return x


def returns_nothing(x):
    pass


def returns_a_huge_tensor(x):
    return torch.zeros(300_000_000, dtype=torch.int8)


def returns_a_list(x):
    return [x]


def returns_what_has_no_repr(x):
    return Unreadable()


def returns_a_false_tensor(x):
    return Disguised()


def returns_a_sparse_tensor(x):
    return x.to_sparse()


def returns_nan(x):
    return x * float("nan")


def returns_what_requires_grad(x):
    return (x * 1.0).requires_grad_()


def returns_a_lock(x):
    return threading.Lock()


def changes_the_grader_in_its_rank(x):
    from manyranks.grade import check, judge, probe, report

    probe._plain = lambda value, room: (torch.zeros_like(x), "a tensor")
    judge.Judged.holds = lambda *_: True
    check.check = lambda *_: report.Report("", 4, 4, ())
    return x


LOCK = threading.Lock()
CASES = [
    *((raises, "raised KeyError: 'no such chunk'"), (raises_what_cannot_be_printed, "Unspeakable")),
    *((interrupts, "raised KeyboardInterrupt"), (exits, "raised SystemExit"), (dies, "exited with code 0")),
    *((is_stopped, "not over after 1.5 s"), (one_rank_dies, "exited with code 3"), (loops, "not over after 1.5 s")),
    *(
        (loops_and_ignores_interrupts, "not over after 1.5 s"),
        (sleeps, "not over after 1.5 s"),
    ),
    *(
        (receives_for_ever, "waits in recv #0"),
        (recurses, "RecursionError"),
        (prints_a_lot, "xxx"),
        (prints_to_stderr, "careful"),
    ),
    *((forks, "nothing was sent"), (starts_a_thread_that_stays, "nothing was sent"), (takes_no_argument, "TypeError")),
    *((destroys_the_group, "nothing was sent"), (sends_what_nobody_receives, "✗ sends")),
    *((is_a_coroutine, "returned a coroutine"), (returns_nothing, "returned None"), (returns_a_list, "returned a list")),
    *((returns_a_huge_tensor, "a tensor of 300,000,000 elements"), (returns_what_has_no_repr, "returned a Unreadable")),
    *((returns_a_false_tensor, "cannot be read"), (returns_a_sparse_tensor, "✗ returns"), (returns_nan, "elements are wrong")),
    *((returns_what_requires_grad, "nothing was sent"), (returns_a_lock, "returned a lock")),
    *((lambda x: LOCK, "could not be run: "), (None, "is not a function"), (7, "is not a function")),
    *((Unreadable(), "is not a function"), (changes_the_grader_in_its_rank, "nothing was sent")),
]


@pytest.fixture
def impatient(monkeypatch):
    """Hangs end sooner, to save the tests' time."""
    monkeypatch.setattr(trial, "_RUN_SECONDS", 1.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("function", "says"), CASES, ids=[getattr(f, "__name__", type(f).__name__) for f, _ in CASES])
def test_it_ends_in_time_with_a_report(function, says, capfd):
    started = time.monotonic()
    report = grade.collectives.ring_all_reduce(function)
    assert time.monotonic() - started < DEADLINE
    assert says in repr(report), report
    assert report.points <= 0.5 * report.out_of
    assert not report.passed
    assert len(repr(report)) < 10_000
    assert report._repr_html_()
    assert capfd.readouterr() == ("", "")


def test_many_runs_that_are_almost_late_end_in_time_too():
    started = time.monotonic()
    report = grade.collectives.ring_all_reduce(sleeps_almost_too_long)
    assert time.monotonic() - started < DEADLINE
    assert "not over after" in repr(report)


def test_no_process_is_left():
    grade.collectives.ring_all_reduce(returns_nothing)
    assert multiprocessing.active_children() == []


def test_points_are_what_show_returns(capsys):
    report = grade.Report("a task", 1.25, 4, (grade.Line(False, "is <right>", "found", "a hint"),))
    assert report.show() == 1.25
    assert capsys.readouterr().out == repr(report) + "\n"
    assert "is &lt;right&gt;" in report._repr_html_()
