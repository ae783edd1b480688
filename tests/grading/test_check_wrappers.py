"""Whatever class a learner hands in, a check ends in time with a report, and gives no full marks for what is wrong."""

import time

import pytest

from manyranks import grade
from manyranks.grade.old import trial
from manyranks.grade.old.data_parallel.task import GradientTask
from tests.grading.zoo import alike
from tests.grading.zoo import hostile_wrappers as hostile

DEADLINE = 40  # seconds, whatever the learner wrote; half of it on an idle machine
HANGS = [
    (hostile.LoopsInFinish, "no rank waits for a message: a loop does not end (hostile_wrappers.py, line "),
    (hostile.ForksAndGoesOn, "✗ "),
]
SAME = [
    hostile.IsNoModule,
    hostile.HasOtherNames,
    hostile.RebindsGradients,
    hostile.LooksForNone,
    hostile.HasRowsForGood,
    hostile.MakesSparseGradients,
]
CASES = [
    (hostile.gives_nothing, "gave a NoneType, which cannot be called"),
    (hostile.gives_itself, "which has no finish()"),
    (hostile.ForgetsSuper, "cannot assign module before Module.__init__() call; hint: hostile_wrappers.py, line "),
    (hostile.TakesMemory, "holds 1.2 GB beside the model"),
    (hostile.Prints, "xxx"),
    (hostile.Forks, "the ranks started from different weights"),
    (hostile.Exits, "raised SystemExit"),
    (hostile.WaitsForItsOwn, "all ranks must make the same calls in the same order"),
    (hostile.LeavesBackward, "hostile_wrappers.py, line "),
    (hostile.RemovesALayer, "has no detour.bias any more"),
    (hostile.SaysThatWeightsAreRight, "nothing was sent"),
    (hostile.SaysThatItHasSent, "did not return what the check notes"),
    (hostile.AsksTheCheck, "manyranks.grade.old.data_parallel.wrapper.overlap_cases is not allowed"),
    (hostile.SendsAWord, "rank 0 did not return what the check notes"),
    (hostile.SendsPartsOfAnotherKind, "rank 0 did not return what the check notes"),
    (hostile.SkipsTheJournal, "what the check noted is not what was sent"),
    (None, "is not a function"),
    (7, "is not a function"),
]


def report_of(wrapper, says: str, monkeypatch, capfd) -> grade.Report:
    monkeypatch.setattr(GradientTask, "sizes", (2,))
    started = time.monotonic()
    report = grade.data_parallel.overlapped(wrapper)
    assert time.monotonic() - started < DEADLINE
    assert says in repr(report).replace("\n    hint:", "; hint:"), report
    assert len(repr(report)) < 10_000
    assert capfd.readouterr() == ("", "")
    return report


@pytest.mark.parametrize(("wrapper", "says"), CASES, ids=[getattr(w, "__name__", str(w)) for w, _ in CASES])
def test_it_ends_in_time_with_a_report(wrapper, says, monkeypatch, capfd):
    report = report_of(wrapper, says, monkeypatch, capfd)
    assert not report.passed
    most = {hostile.TakesMemory: 0.9, hostile.SendsAWord: 0, hostile.SendsPartsOfAnotherKind: 0}.get(wrapper, 0.5)
    assert report.points <= most * report.out_of


@pytest.mark.parametrize(("wrapper", "says"), HANGS, ids=[w.__name__ for w, _ in HANGS])
def test_so_does_what_hangs(wrapper, says, monkeypatch, capfd):
    monkeypatch.setattr(trial, "_RUN_SECONDS", 2.0)
    assert report_of(wrapper, says, monkeypatch, capfd).points <= 3


@pytest.mark.parametrize("wrapper", SAME, ids=[wrapper.__name__ for wrapper in SAME])
def test_what_does_the_same_in_another_form_is_right(wrapper, monkeypatch, capfd):
    assert report_of(wrapper, "✓ Overlapped: 6 of 6", monkeypatch, capfd).passed


@pytest.mark.parametrize(("task", "answer"), alike.ANSWERS, ids=[f"{task}-{f.__name__}" for task, f in alike.ANSWERS])
def test_other_right_answers_get_full_marks(task, answer, shared_ranks, monkeypatch):
    monkeypatch.setattr(GradientTask, "sizes", (3,))
    report = getattr(grade.data_parallel, task)(answer)
    assert (report.passed, report.points) == (True, report.out_of), report
