"""A check ends in time with a report, whatever a learner writes, and gives no points for it."""

import multiprocessing
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from manyranks import grade
from manyranks.given import pipeline
from manyranks.grade import answers, check, trial
from manyranks.measure.watch import Watch
from manyranks.report import Line, Report
from manyranks.world.processes import waiting
from tests.grading import hostile, records
from tests.grading.exercise import Exercise

DEADLINE = 40  # seconds, whatever the learner wrote; half of it on an idle machine
LOCK = threading.Lock()
HANGS = [
    (hostile.is_stopped, "rank 0 did not answer: its process is stopped"),
    (hostile.loops, "no rank waits for a message: a loop does not end (hostile.py, line "),
    (hostile.loops_and_ignores_interrupts, "no rank waits for a message: a loop does not end (hostile.py, line "),
    (hostile.sleeps, "no rank waits for a message: a loop does not end (hostile.py, line "),
    (hostile.one_rank_loops, "does a loop not end?; rank 1 waits in recv #0 of 56 bytes from rank 0 (hostile.py, line "),
]
CASES = [
    (hostile.raises, "raised KeyError: 'no such chunk'"),
    (hostile.raises_what_torch_has_not, "raised NotImplementedError: not for 'Long'"),
    (hostile.raises_what_cannot_be_printed, "Unspeakable"),
    (hostile.interrupts, "raised KeyboardInterrupt"),
    (hostile.exits, "raised SystemExit"),
    (hostile.dies, "exited with code 0"),
    (hostile.one_rank_dies, "exited with code 3"),
    (hostile.receives_for_ever, "waits in recv #0"),
    (hostile.recurses, "RecursionError"),
    (hostile.prints_a_lot, "xxx"),
    (hostile.prints_to_stderr, "careful"),
    (hostile.forks, "nothing was added to it"),
    (hostile.starts_a_thread_that_stays, "nothing was added to it"),
    (hostile.takes_no_argument, "TypeError"),
    (hostile.destroys_the_group, "nothing was added to it"),
    (hostile.sends_what_nobody_receives, "✗ sends"),
    (hostile.is_a_coroutine, "the result is a coroutine"),
    (hostile.returns_nothing, "the result is nothing"),
    (hostile.returns_a_list, "the result is a list of 1"),
    (hostile.returns_a_huge_tensor, "a tensor of 300,000 elements"),
    (hostile.returns_what_has_no_repr, "the result is a Unreadable"),
    (hostile.returns_a_false_tensor, "cannot be read"),
    (hostile.returns_a_sparse_tensor, "✗ returns"),
    (hostile.returns_nan, "elements are wrong"),
    (hostile.returns_what_requires_grad, "nothing was added to it"),
    (hostile.returns_a_lock, "the result is a lock"),
    (lambda x: LOCK, "could not be run: "),
    (None, "is not a function"),
    (7, "is not a function"),
    (hostile.Unreadable(), "is not a function"),
    (hostile.changes_the_grader_in_its_rank, "nothing was sent"),
]


@pytest.fixture
def quiet(monkeypatch):
    """As if the machine had nothing else to do."""
    monkeypatch.setattr(trial, "SLACK", 1.0)


def assert_ends_in_time(function, says: str, capfd) -> grade.Report:
    started = time.monotonic()
    report = grade.collectives.ring_all_reduce(function)
    assert time.monotonic() - started < DEADLINE
    assert says in repr(report), report
    assert report.points <= 0.5 * report.out_of
    assert not report.passed
    assert len(repr(report)) < 10_000
    assert report._repr_html_()
    assert capfd.readouterr() == ("", "")
    return report


@pytest.mark.parametrize(("function", "says"), CASES, ids=[getattr(f, "__name__", type(f).__name__) for f, _ in CASES])
@pytest.mark.few(14)
def test_it_ends_in_time_with_a_report(function, says, capfd):
    assert_ends_in_time(function, says, capfd)


@pytest.mark.parametrize(("function", "says"), HANGS, ids=[f.__name__ for f, _ in HANGS])
def test_so_does_what_hangs(function, says, capfd, monkeypatch, quiet):
    monkeypatch.setattr(trial, "_RUN_SECONDS", 1.0)  # the real ones are those of the test below
    report = assert_ends_in_time(function, "not over after 1 s", capfd)
    assert says in repr(report), report


@pytest.mark.whole
def test_many_runs_that_are_almost_late_end_in_time_too(quiet):
    started = time.monotonic()
    report = grade.collectives.ring_all_reduce(hostile.sleeps_almost_too_long)
    assert time.monotonic() - started < DEADLINE
    assert "not over after" in repr(report)


@pytest.mark.parametrize(("others", "passes"), [(0.0, False), (10.0, True)])
def test_a_right_answer_that_is_late_passes_where_other_programs_had_the_processors(others, passes, monkeypatch):
    monkeypatch.setattr(waiting.Clock, "seconds", lambda clock: max(0.0, time.monotonic() - clock._began - others))
    monkeypatch.setattr(trial, "_RUN_SECONDS", 1.0)
    right = Exercise("01_collectives").definitions("solutions")["ring_all_reduce"]

    def late_on_four(x):
        if torch.distributed.get_world_size() == 4:
            time.sleep(1.5)
        return right(x)

    assert grade.collectives.ring_all_reduce(late_on_four).passed == passes


def test_what_waits_for_ever_is_found_on_any_machine(monkeypatch):
    monkeypatch.setattr(waiting.Clock, "over", lambda clock, seconds: False)
    assert "waits in recv" in repr(grade.collectives.ring_all_reduce(hostile.receives_for_ever))


def test_prints_are_those_of_the_run_that_the_first_wrong_line_is_about():
    report = grade.collectives.ring_all_reduce(hostile.prints_its_world)
    wrong = next(line for line in report.lines if not line.ok)
    assert (report.run, wrong.found[: len(report.run)]) == ("on 4 ranks, with 7 elements",) * 2
    assert "what the ranks printed on 4 ranks, with 7 elements:\n── rank 0 ──\nI am 0 of 4, with 7\n" in repr(report)
    assert "of 2" not in report.printed


def test_what_cpp_printed_when_it_gave_up_is_translated_not_shown():
    report = grade.collectives.ring_all_reduce(hostile.prints_and_sends_more_than_there_is_room)
    assert "rank 0 sent 7 elements (56 bytes), rank 1 made room for 6 (48 bytes)" in repr(report)
    assert "in message 1 to rank 1, rank 0 sends 7 elements; right is 3: cut it with torch.tensor_split" in repr(report)
    assert "one chunk at a time; hostile.py, line " in repr(report)
    assert "in prints_and_sends_more_than_there_is_room: exchange(" in repr(report)
    assert "enforce fail" not in repr(report)


def test_no_process_is_left():
    grade.collectives.ring_all_reduce(hostile.returns_nothing)
    assert multiprocessing.active_children() == []


def test_points_are_what_show_returns(capsys):
    report = grade.Report("a task", 1.25, 4, (grade.Line(False, "is <right>", "found", "a hint"),))
    assert report.show() == 1.25
    assert capsys.readouterr().out == repr(report) + "\n"
    assert "is &lt;right&gt;" in report._repr_html_()


def test_facts_that_a_rank_sends_in_place_of_tables_count_for_nothing():
    forged = {pipeline.WHY: "", pipeline.WAITS: 0.0, "what rank 0 holds": 1}
    for task, case in (
        (grade.pipeline.one_f_one_b, pipeline.Case(4, 8)),
        (grade.pipeline.under_a_cap, pipeline.Case(4, 8, cap=4)),
    ):
        assert task.then(case, None, forged) == {}
        assert task.then(case, None, forged | {"tables": [[("F", 0)]]}) == {}
        nothing = trial.Trial(1, case, "1/0", seen=[trial.Seen({})])
        assert not task.judges[0].verdict(nothing, [trial.Seen(forged)]).ok


def test_what_a_rank_says_of_its_own_choice_counts_for_nothing():
    task = grade.checkpointing.choose
    case = next(case for case in task.cases if not case.nothing_fits)
    right = {"the choice": "within the budget", "what need not be chosen": "nothing", "the FLOPs that run again": 0}
    with pytest.raises(KeyError):
        task.then(case, None, right)
    none = task.then(case, None, right | {"did": "returns []", "chosen": []})
    assert none["the choice"].endswith("bytes above the budget")
    assert none["the FLOPs that run again"] is None


def test_what_a_rank_says_of_its_plan_and_its_orders_counts_for_nothing():
    assert grade.nd.plan(hostile.forges_a_plan).points == 0
    (case,) = grade.nd.misplaced.cases_on(1)
    exam = grade.nd.misplaced.make(case, 0, 1, 0)
    orders = {name: list(run.sizes) for name, (run,) in exam.questions.items()}
    assert all(type(sent) is float for sent in grade.nd.misplaced.then(case, exam, orders).values())


TASKS = [(exercise, *item) for exercise in records.exercises() for item in answers.tasks(exercise).items()]
DRAWN = [(exercise, task) for exercise, task, own in TASKS if own.more and own.worlds == (1,)]


@pytest.mark.parametrize(("exercise", "task"), DRAWN, ids=[task for _, task in DRAWN])
def test_who_ends_python_where_a_table_of_what_all_are_asked_has_no_answer_has_no_points(exercise, task, tmp_path):
    own, known, line = answers.tasks(exercise)[task], set(), hostile.shapes if task in ("product", "attend") else repr
    (right,) = (one for one in records.answers_of(exercise) if (one.task, one.kind) == (task, answers.RIGHT))
    function = answers.given(own, right.code)
    for case in own.cases_on(1):
        given = own.make(case, 0, 1, 0)
        own.run(given, lambda *asked: known.add(line(asked)) or function(*asked), Watch(str(tmp_path), 0))
    own = replace(own, seed=777)
    record = answers.record_of(own, [(right, own.tried(function))])
    table = partial(hostile.ends_where_a_table_ends, known, line, function)
    assert check.report(own, table, own.tried(table), record).points == 0


def test_a_report_is_in_color_and_tells_what_is_not_written_from_what_is_wrong():
    right, wrong = Line(True, "returns the sum"), Line(False, "sends it once", "twice", "call `send` once")
    said = Report("ring", 1.0, 2.0, (right, wrong))
    assert repr(said).splitlines()[0] == "✗ ring: 1 of 2 points"
    page = said._repr_html_()
    assert "color:#009E73'>✓" in page
    assert "color:#D55E00'>✗" in page
    assert "<code>send</code>" in page
    assert "`" not in page
    unwritten = Report("ring", 0.0, 2.0, (Line(False, "not written yet", hint="replace it"),))
    assert repr(unwritten).splitlines()[:2] == ["○ ring: not written yet", "○ not written yet"]
    assert "✗" not in unwritten._repr_html_()
    points = said.show()
    assert (float(points), repr(points), points._repr_html_()) == (1.0, "1.0", "")  # nbgrader reads it, a page shows nothing
