"""nbgrader's whole round: release, submissions, autograding, feedback, export. No result is no points."""

import json
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import nbformat
import pytest
from jupyter_client import AsyncKernelClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

from manyranks.grade import apart, autograde
from manyranks.report import Report
from tests.conftest import ROOT, matrix
from tests.fences import SLOW_TO_COLOR
from tests.grading.course import Course, answered, graded, small

NAME = "01_collectives"
NO_RESULT = "no points: the cell did not run"
FULL = {"tree_broadcast": 3, "ring_all_gather": 4, "ring_reduce_scatter": 5, "ring_all_reduce": 4, "pairwise_all_to_all": 4}
UPWARDS = """
def ring_all_gather(shard, elements):
    rank, n = dist.get_rank(), dist.get_world_size()
    out_E = torch.empty(elements, dtype=shard.dtype)
    chunks = out_E.tensor_split(n)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], (rank + 1) % n, chunks[(rank - step - 1) % n], (rank - 1) % n)
    return out_E
"""

RIGHT = "def double(x): return 2 * x"
DEAF = "import contextlib, time\ndef double(x):\n while True:\n  with contextlib.suppress(BaseException): time.sleep(60)"

pytestmark = [
    pytest.mark.usefixtures("asked_once"),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's and its database's own
]


def test_the_whole_round_with_two_submissions(tmp_path):
    solution = nbformat.read(ROOT / "solutions" / NAME / f"{NAME}.ipynb", 4)
    course = Course(tmp_path, NAME, solution)
    all_right = course.submit("ada", solution)
    assert all_right == {f"check_{task}": points for task, points in FULL.items()}
    imports = next(cell.source for cell in solution.cells if cell.metadata.nbgrader.grade_id == "imports")
    mine = {"imports": f"{imports}\nsteps = range", "ring_all_gather": UPWARDS.replace("range", "steps")}
    one_in_part = course.submit("bob", answered(course.release, mine))
    assert 2 <= one_in_part.pop("check_ring_all_gather") < 4
    assert set(one_in_part.values()) == {0}
    assert "this ring runs upward" in course.feedback("bob")
    assert "not written yet" in course.feedback("bob")
    assert "<pre>3</pre>" not in course.feedback("ada").replace("\n", ""), "the report says it"
    assert "td, th { padding-right: 1em }" in course.feedback("ada")
    assert course.errors("bob") == []
    assert course.export() == {"ada": 20, "bob": course.export()["bob"]}
    assert 2 <= course.export()["bob"] < 4


def test_a_class_that_sends_too_late_gets_a_part_of_the_points(tmp_path):
    name = "02_data_parallel"
    solution = nbformat.read(ROOT / "solutions" / name / f"{name}.ipynb", 4)
    needed = {"imports", "replicate", "cut", "check_cut", "Overlapped", "check_Overlapped"}  # the others take their time
    solution.cells = [cell for cell in solution.cells if cell.metadata.nbgrader.grade_id in needed]
    course = Course(tmp_path, name, solution)
    mine = {cell.metadata.nbgrader.grade_id: cell.source for cell in solution.cells}
    mine["Overlapped"] = mine["Overlapped"].replace("register_post_accumulate_grad_hook(self.arrived)", "requires_grad")
    assert course.submit("eve", answered(course.release, mine)) == {"check_cut": 2, "check_Overlapped": 4.2}
    assert "start the all-reduce in the hook" in course.feedback("eve")
    assert course.errors("eve") == []


ANSWERS = {  # that leave the kernel alive -> their points, of 2
    "right": ("def double(x): return 2 * x", 2),
    "half": ("def double(x): return x", 1),
    "exits": ("def double(x): raise SystemExit(0)", 0),
    "nothing": ("def double(x):\n    class N:\n        __truediv__ = lambda s, o: None\n    return N()", 0),
    "not_a_number": ("def double(x): return float('nan')", 0),
    "less_than_nothing": ("def double(x): return -4", 0),
    "more_than_all": ("def double(x): return 8", 0),
    "words": ("def double(x):\n    class W:\n        __truediv__ = lambda s, o: 'full marks'\n    return W()", 0),
}


def test_a_senseless_result_is_no_points_which_is_said_of_no_other(tmp_path):
    exercise, kinds = small(), [(kind, cell) for kind in ANSWERS for cell in small().cells[:2]]
    exercise.cells = [cell for _, cell in kinds]  # in one submission, for most of its time is its kernel's start
    for kind, cell in kinds:
        cell.metadata.nbgrader.grade_id += f"_{kind}"
    course = Course(tmp_path, "99_doubles", exercise)
    answers = {f"double_{kind}": answer for kind, (answer, _) in ANSWERS.items()}
    points = course.submit("ada", answered(course.release, answers))
    assert points == {f"check_double_{kind}": right for kind, (_, right) in ANSWERS.items()}
    graded = nbformat.read(course.root / "autograded" / "ada" / course.name / f"{course.name}.ipynb", 4)
    said = [cell for cell in graded.cells if any(output.get("ename") == "NoResult" for output in cell.get("outputs", []))]
    assert {cell.metadata.nbgrader.grade_id for cell in said} == {name for name in points if points[name] == 0}
    assert course.feedback("ada").count(NO_RESULT) == len(said) == 6


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return Course(tmp_path_factory.mktemp("course"), "99_double", small(), seconds=3)


NONE_CAME = {  # answer, the points of the cell that does not depend on it
    "dies": ("import os; os._exit(0)", 0),
    "dies in the check": ("import os\ndef double(x): os._exit(0)", 0),
    "sleeps": ("import time\ndef double(x): time.sleep(60)", 1),
    "cannot be interrupted": (DEAF, 0),
}


@pytest.mark.parametrize("kind", matrix(NONE_CAME, ["dies", "sleeps"]))
def test_a_dead_or_late_result_is_no_points(course, kind):
    answer, rest = NONE_CAME[kind]
    student = kind.replace(" ", "_")
    assert course.submit(student, answered(course.release, {"double": answer})) == {"check_double": 0, "check_rest": rest}
    assert NO_RESULT in course.feedback(student)


def test_outputs_that_came_with_the_submission_count_for_nothing(course):
    forged = answered(course.release, {"double": "import os; os._exit(0)"})
    for cell in forged.cells:
        cell.outputs = [new_output("execute_result", data={"text/plain": "1"}, execution_count=1)]
    assert course.submit("forger", forged) == {"check_double": 0, "check_rest": 0}


def test_feedback_runs_nothing_of_a_learner_s_and_is_soon_written(course):
    told = answered(course.release, {"double": RIGHT})
    told.cells += [new_markdown_cell(f"<script>{'a' * 9}()</script><img src=x onerror=alert(1)>" + " " * 100_000 + "end")]
    course.submit("html", told)
    assert "&lt;script&gt;aaaaaaaaa" in course.feedback("html")
    assert "<script>aaaaaaaaa" not in course.feedback("html")
    graded = nbformat.read(course.root / "autograded" / "html" / course.name / f"{course.name}.ipynb", 4)
    assert len(graded.cells[-1].source) < 20_100


def test_a_learner_does_not_say_how_feedback_colors_code(course):
    told = answered(course.release, {"double": RIGHT})
    told.cells += [new_code_cell(code, metadata={"magics_language": "cddl"}) for code in SLOW_TO_COLOR]
    told.cells += [new_code_cell("1", metadata=graded(grade_id="\x1b]0;x\x07\n[AutogradeApp | INFO]", solution=True))]
    assert course.submit("colors", told)["check_double"] == 2
    kept = nbformat.read(course.root / "autograded" / "colors" / course.name / f"{course.name}.ipynb", 4)
    assert not any("magics_language" in cell.metadata for cell in kept.cells)
    assert "\x1b" not in str([cell.metadata for cell in kept.cells])
    assert '<span class="k">return</span> 2 * x' in course.feedback("colors")


def test_a_kernel_that_ends_before_it_answers_is_started_once_more(course, monkeypatch):
    ways = [AsyncKernelClient.wait_for_ready, AsyncMock(side_effect=RuntimeError("Kernel died before replying"))]
    monkeypatch.setattr(AsyncKernelClient, "wait_for_ready", lambda *args, **more: ways.pop()(*args, **more))
    assert course.submit("port", answered(course.release, {"double": RIGHT})) == {"check_double": 2, "check_rest": 1}
    assert not ways


def without_its_checks(course, answer):
    lacking = answered(course.release, {"double": answer})
    lacking.cells = [cell for cell in lacking.cells if not cell.metadata.nbgrader.grade]
    return lacking


def test_removed_test_cells_come_back(course):
    assert course.submit("right", without_its_checks(course, RIGHT)) == {"check_double": 2, "check_rest": 1}
    assert course.submit("wrong", without_its_checks(course, "def double(x): return 0")) == {"check_double": 0, "check_rest": 1}
    none_any_more = answered(course.release, {"double": RIGHT})
    for cell in none_any_more.cells:
        cell.metadata.nbgrader.grade = False
        cell.metadata.nbgrader.pop("points", None)
    assert course.submit("marked", none_any_more) == {"check_double": 2, "check_rest": 1}


def test_honest_accidents_cost_no_points(course):
    odd = answered(course.release, {"double": RIGHT})
    solution, check = odd.cells[:2]
    for cell in (solution, check):  # turned into a text, and back into nothing that nbgrader knows
        cell.cell_type = "markdown"
        del cell["outputs"], cell["execution_count"]
    check["attachments"] = {"a.png": {"image/png": "AA=="}}
    pasted = new_code_cell("1 / 0", metadata=graded(grade_id="of_another_exercise", solution=True, locked=True))
    odd.cells += [new_raw_cell("a picture" * 40_000), pasted, new_code_cell("2"), new_code_cell("3" + 2_000 * "\n")]
    odd.cells.append(new_code_cell("4  # \ud83d"))  # half of a picture, as some editors leave it
    odd.cells[-1]["outputs"] = [{"output_type": "display_data", "data": {}}]
    del odd.cells[-2]["outputs"], odd.cells[-2]["execution_count"]
    odd.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    (folder := course.root / "submitted" / "odd" / course.name).mkdir(parents=True)
    (folder / f"{course.name}.ipynb").write_text(json.dumps(odd))
    (folder / f"{course.name}.html").write_text("exported")
    assert "checksum" not in course.api.autograde(course.name, "odd")["log"]
    assert course.points("odd") == {"check_double": 2, "check_rest": 1}
    assert "exported" not in course.feedback("odd")


def test_feedback_and_log_have_nothing_of_a_learner_s_that_runs_or_takes_long(course):
    evil = answered(course.release, {"double": RIGHT})
    evil.cells += [new_raw_cell("<a href=x class=btn>y</a>"), *(new_code_cell("#" + "." * 19_000) for _ in range(9))]
    evil.cells[2].metadata.nbgrader["locked"] = "yes\r\x1b[K"
    course._write("submitted/evil", evil)
    for name in ("other.html", "a\r\x1b[Kb.txt\n[INFO] y"):
        (course.root / "submitted" / "evil" / course.name / name).write_text("<script>1</script>")
    log = course.api.autograde(course.name, "evil")["log"]
    assert not {"\r", "\x1b"} & set(log)
    assert log.count("[INFO] y") == log.count("  | [INFO] y") > 0
    assert r"a\r\x1b[Kb.txt" in log
    assert "<a href=x" not in course.feedback("evil")
    assert [path.name for path in (course.root / "feedback" / "evil" / course.name).iterdir()] == [f"{course.name}.html"]
    assert course.feedback("evil").count(".") > 9 * 19_000


def test_a_second_submission_has_its_own_points_only(course):
    for later in (answered(course.release, {"double": "import os; os._exit(0)"}), without_its_checks(course, "double = 0")):
        assert course.submit("twice", answered(course.release, {"double": RIGHT}))["check_double"] == 2
        assert course.submit("twice", later)["check_double"] == 0
    submitted = course.root / "submitted"
    (submitted / "twice" / course.name / f"{course.name}.ipynb").rename(submitted / "answer.txt")
    with pytest.raises(RuntimeError, match="has no notebook that can be graded, and no points"):
        course._do(course.api.autograde(course.name, "twice"))
    later.cells[0].metadata.nbgrader = later.cells[0].metadata.nbgrader | {"grade_id": "check_double"}
    assert course.submit("twice", answered(course.release, {"double": RIGHT}))["check_double"] == 2
    assert course.submit("twice", later)["check_double"] == 0, "a cell that takes a check's name is no check"


def test_a_notebook_of_very_many_cells_is_refused_and_the_log_says_why(course):
    many = answered(course.release, {"double": RIGHT})
    many.cells += [new_code_cell("") for _ in range(1_000)]
    with pytest.raises(RuntimeError, match="it has more than 1,000 cells"):
        course.submit("many", many)


def test_who_may_not_judge_here_is_told_once(course, monkeypatch):
    monkeypatch.setattr(autograde.apart, "lacks", lambda *_: "you are root")
    monkeypatch.setattr(autograde.JudgeApart.fewer_fences, "default_value", False)
    config = course.api.config.JudgeApart
    monkeypatch.setitem(config, "fewer_fences", False)
    for student in ("ada", "bob"):
        course._write(f"submitted/{student}", course.release)
    found = course.api.autograde(course.name, "*")
    assert not found["success"]
    assert found["log"].count("you are root: learners' code could do harm here, and nobody is graded") == 1
    assert "Traceback" not in found["log"]


def test_what_a_learner_says_of_cells_costs_no_submission(course):
    odd = answered(course.release, {"double": RIGHT})
    for cell in odd.cells:
        cell.metadata.nbgrader |= {"solution": True, "grade": True, "task": True, "points": 9}
    assert course.submit("odd_kinds", odd) == {"check_double": 2, "check_rest": 1}
    assert course.feedback("odd_kinds")


def test_a_notebook_of_an_older_format_is_graded(course):
    old = nbformat.convert(answered(course.release, {"double": RIGHT}), 3)
    course.submit("old", course.release)
    (course.root / "submitted" / "old" / course.name / f"{course.name}.ipynb").write_text(nbformat.v3.writes_json(old))
    course._do(course.api.autograde(course.name, "old", force=True))
    assert course.points("old") == {"check_double": 2, "check_rest": 1}


def test_signs_that_turn_what_follows_are_shown_in_letters(course):
    turned = answered(course.release, {"double": f"{RIGHT}  # \u202e0 nruter :\u2066"})
    turned.cells.append(new_markdown_cell("\u202etxet"))
    course.submit("turned", turned)
    feedback = course.feedback("turned")
    assert r"\u202e0 nruter :\u2066" in feedback
    assert r"\u202etxet" in feedback
    assert not {*feedback} & {*"\u202e\u2066"}


def test_what_an_ended_command_did_not_judge_is_judged_the_next_time(course, monkeypatch):
    ended = SimpleNamespace(judged=Mock(side_effect=SystemExit()))
    monkeypatch.setattr(autograde, "_judge", lambda fewer_fences: ended)
    with pytest.raises(RuntimeError, match="Autograding"):
        course.submit("later", answered(course.release, {"double": RIGHT}))
    monkeypatch.undo()
    course._do(course.api.autograde(course.name, "later"))
    assert course.points("later")["check_double"] == 2


def test_what_was_not_judged_has_no_number_anywhere_and_is_judged_the_next_time(tmp_path, monkeypatch):
    exercise = small("grade.collectives.tree_broadcast(double).show()")
    course = Course(tmp_path, "99_double", exercise)
    missed = SimpleNamespace(judged=Mock(side_effect=apart.NotJudged("no room")))
    monkeypatch.setattr(autograde, "_judge", lambda fewer_fences: missed)
    assert course.submit("ada", course.release) == {"check_double": 0, "check_rest": 1}, "nbgrader counts what is open as 0"
    assert "NOT JUDGED, and that is nobody's fault: autograde it again, without --force (no room)" in course.log
    assert course.feedback("ada").count("not judged / 2.0") == 2
    assert "not judged / 3.0" in course.feedback("ada")
    assert "not judged: no room" in course.feedback("ada")
    assert course.export() == {"ada": None}
    report = Report("double", 1.0, 2.0, ())
    found = SimpleNamespace(judged=Mock(return_value=[apart.Judged("check_double", 1, 2.0, report, 0.1)]))
    monkeypatch.setattr(autograde, "_judge", lambda fewer_fences: found)
    course._do(course.api.autograde(course.name, "ada"))
    assert course.points("ada") == {"check_double": 1, "check_rest": 1}
    assert course.export() == {"ada": 2}
