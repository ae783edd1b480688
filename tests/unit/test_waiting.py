"""A wait for processes that start gives up only when they stand still; on times and efforts made by hand."""

import os
import sys

import pytest

from manyranks.world.processes import waiting

PID = 7


@pytest.fixture
def given_up(monkeypatch):
    """From what a process's effort is at each second to the second at which it had stood still for too long, or None."""

    def until_over(effort, seconds: float = 60.0, end: int = 300) -> int | None:
        now = [0.0]
        monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(waiting, "_efforts", lambda pid: effort(now[0]))
        waits = waiting.Standstill(PID, seconds, "importing torch")
        for second in range(1, end):
            now[0] = float(second)
            if waits.over():
                return second
        return None

    return until_over


def test_a_process_that_gets_on_is_waited_for(given_up, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert given_up(lambda now: {PID: 0.5 * now}) is None
    said = capsys.readouterr().err
    assert said == "importing torch has taken 61 s so far: this machine is busy, and we keep waiting\n"


def test_a_child_that_gets_on_is_waited_for(given_up):
    assert given_up(lambda now: {PID: 3.0, 8: 0.5 * now}) is None


def test_a_process_that_stands_still_is_given_up(given_up, capsys):
    assert given_up(lambda now: {PID: min(now, 30.0)}) == 91  # it got on for 30 s
    assert capsys.readouterr().err == ""


def test_who_only_waits_for_others_stands_still(given_up):
    assert given_up(lambda now: {PID: 0.03 * now}) == 61


def test_what_cannot_be_seen_has_its_time(given_up):
    assert given_up(lambda now: {}) == 61


def test_the_effort_of_this_process_grows():
    before = waiting._efforts(os.getpid())[os.getpid()]
    while waiting._efforts(os.getpid())[os.getpid()] <= before:
        sum(range(100_000))


def test_a_process_that_is_gone_has_none():
    assert waiting._efforts(None) == waiting._efforts(2**22 + 1) == {}


PASSED = 10.0
SPENT = {  # of ranks on two processors, in ten seconds: each has run, and has waited for a processor, so long -> what counts
    "one computes alone": ([(10, 0)], 10),
    "four compute, and nobody else": ([(5, 5)] * 4, 10),
    "all sleep": ([(0.01, 0.05)] * 4, 9.8),
    "all sleep while others compute": ([(0.01, 0.5)] * 4, 8),
    "one computes with a tenth of a processor": ([(1, 9)], 1.7),
    "four compute with half of the processors": ([(2.5, 7.5)] * 4, 5),
    "in turn, with a fifth of one": ([(0.5, 2)] * 4, 2),
}


@pytest.mark.parametrize("kind", SPENT)
def test_seconds_count_in_which_nobody_else_had_the_processors(kind, monkeypatch):
    turns, counts = SPENT[kind]
    now = {"passed": 0.0}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now["passed"])
    monkeypatch.setattr(waiting, "cores", lambda: 2)
    monkeypatch.setattr(waiting, "_turn", lambda pid: turns[pid] if now["passed"] else (0.0, 0.0))
    monkeypatch.setattr(waiting, "computed", lambda pid: turns[pid][0] if now["passed"] else 0.0)
    clock, exact = waiting.Clock(range(len(turns)), slack=6.0), waiting.Clock(range(len(turns)))
    now["passed"] = PASSED
    assert clock.seconds() == pytest.approx(counts, abs=0.1)
    assert exact.seconds() == PASSED
    assert clock.over(counts - 0.2)
    assert not clock.over(counts + 0.2)


def test_who_waits_for_threads_of_his_own_waits_for_nobody_else(monkeypatch):
    now = {"passed": 0.0}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now["passed"])
    monkeypatch.setattr(waiting, "cores", lambda: 2)
    monkeypatch.setattr(waiting, "_turn", lambda pid: (0.1 * now["passed"], 0.9 * now["passed"]))
    monkeypatch.setattr(waiting, "computed", lambda pid: 2.0 * now["passed"])
    clock = waiting.Clock([PID], slack=6.0)
    now["passed"] = PASSED
    assert clock.seconds() == PASSED


def test_where_nobody_says_who_waits_a_slow_machine_tells_how_busy_it_was(monkeypatch):
    monkeypatch.setattr(waiting, "_turn", lambda pid: None)
    monkeypatch.setattr("manyranks.measure.machine.slowness", lambda: 2.0)
    clock = waiting.Clock([1], slack=6.0)
    clock.forget(-4.0)
    assert clock.seconds() == pytest.approx(2.0, abs=0.5)
