"""Points in the forms of Canvas and Gradescope: who gets which, and that nobody gets a 0 for what was not judged."""

import csv
import json

import pytest

from manyranks.grade import apart, classroom
from manyranks.grade.classroom import Row
from manyranks.grade.gradebooks import Canvas, gradescope
from manyranks.report import Report
from tests.conftest import ROOT

NAMES = {"01_collectives", "03_zero"}
HEAD = "Student,ID,SIS User ID,SIS Login ID,Section,03_zero (4711),Essay (12),Current Score"
POSSIBLE = "    Points Possible,,,,,7,10,(read only)"
STUDENTS = ('"Lovelace, Ada",101,s-1,ada,"A, B",5,9,1', '"Ray, Bob",102,s-2,bob@school,A,6,8,2', '"Test, Student",103,,,A,,,')
NOBODY = "have this as SIS Login ID or SIS User ID or ID"


def row(student, points, out_of=4.0, exercise="03_zero", task="a", failed=""):
    return Row(student, exercise, task, points, out_of, 1.0, failed, "")


def lines(file):
    return list(csv.reader(file.read_text().splitlines()))


@pytest.fixture
def export(tmp_path):
    file = tmp_path / "grades.csv"
    file.write_text("\n".join([HEAD, POSSIBLE, *STUDENTS]), encoding="utf-8-sig")
    return file


@pytest.fixture
def written(export, tmp_path):
    def write(*rows):
        said = Canvas(export).write(tmp_path / "import.csv", rows, NAMES)
        return lines(tmp_path / "import.csv"), said

    return write


def test_canvas_gets_the_sum_beside_what_it_says_of_a_student(written):
    table, said = written(
        row("ada", 2.675),
        row("ada", 3, 3, task="b"),
        row("ada", 0, 0, "notes"),
        row("s-2", 0, 7),
        row("s-2", 1, 5, "01_collectives"),
    )
    assert said == []
    assert table == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "01_collectives", "03_zero (4711)"],
        ["    Points Possible", "", "", "", "", "5", "7"],
        ["Lovelace, Ada", "101", "s-1", "ada", "A, B", "", "5.67"],
        ["Ray, Bob", "102", "s-2", "bob@school", "A", "1", "0"],
    ]


def test_what_was_not_judged_is_empty_in_canvas_and_what_was_not_handed_in_stays(written):
    table, said = written(row("ada", 3, 7), row("bob@school", 4), row("bob@school", None, 3, task="b"))
    assert [line[-1] for line in table[2:]] == ["3", ""]
    assert said == ["bob@school, 03_zero: not judged, so the cell is empty"]
    table, said = written(row("ada", 1, 5, "01_collectives"), row("102", 0, 7))
    assert [line[-2:] for line in table[2:]] == [["1", "5"], ["", "0"]]
    assert said == []


def test_who_has_no_line_in_canvas_is_named(written, export):
    table, said = written(row("ada", 3, 7), row("zoe", 3, 7), row("'=1", 3, 7), row("102", 0, 0, "notes"))
    assert [line[0] for line in table[2:]] == ["Lovelace, Ada"]
    assert said == [
        f"zoe has no line: 0 students of grades.csv {NOBODY}",
        f"'=1 has no line: 0 students of grades.csv {NOBODY}",
        "102 has no line: no notebook is where an exercise with a column belongs",
    ]
    export.write_text("\n".join([HEAD, POSSIBLE, *STUDENTS, '"Lovelace, Adam",ada,s-9,lov,A,,,']))
    assert written(row("ada", 3, 7))[1] == [f"ada has no line: 2 students of grades.csv {NOBODY}"]


def test_a_column_with_other_points_is_left_out(written, export):
    (name, no_line) = written(row("ada", 3, 8))[1]
    assert name == "03_zero has no column: it's worth 8 points here and 7 in Canvas. Change that there, and export again"
    assert no_line.startswith("ada has no line: no notebook")
    export.write_text("\n".join([HEAD, *STUDENTS]).replace(",", ";"))  # a line without points, and Canvas's other separator
    assert written(row("s-1", 3, 8))[0][2][-1] == "3"


@pytest.mark.parametrize("text", ["", "student,points\nada,3", "Student,ID,SIS Login ID\nx,1,ada"])
def test_another_file_than_canvas_s_is_refused(text, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="isn't a gradebook of Canvas"):
        Canvas(tmp_path / "x.csv")


def test_gradescope_gets_each_task_with_what_failed():
    rows = [row("x", 4), row("x", 0, 3, task="b", failed="rank 0 has 1"), row("__MACOSX", 0, 0, "", "–", "it has no notebook")]
    assert gradescope(rows) == {
        "execution_time": 2,
        "tests": [
            {"name": "a", "score": 4, "max_score": 4, "output": ""},
            {"name": "b", "score": 0, "max_score": 3, "output": "rank 0 has 1"},
        ],
    }


def test_gradescope_says_why_a_file_gets_nothing():
    both = gradescope([row("x", 4), row("y", 4)])
    assert both == {"score": 0.0, "output": "There are 2 notebooks: hand in one, with the exercise's name."}
    assert gradescope([row("x", 0, 0, "x", "–", "cannot be read")]) == {"score": 0.0, "output": "cannot be read"}


class Judge:
    """Judges one task of each submission, or none: as `points` says."""

    points: float | None

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def all(self, reads):
        return [self.judged() for _ in reads]

    def judged(self):
        yield apart.Judged("check_shift", 0, 3.0, Report("shift", 3.0, 3.0, ()), 0.1, "no ranks" if self.points is None else "")


@pytest.mark.parametrize(("points", "cell"), [(3.0, "3"), (None, "")])
def test_the_command_writes_both_and_what_is_not_judged_nowhere(points, cell, export, tmp_path, monkeypatch, capsys):
    results, table = tmp_path / "results.json", tmp_path / "import.csv"
    results.write_text("of an earlier time")
    (folder := tmp_path / "submitted" / "ada" / "00_start_here").mkdir(parents=True)
    (folder / "00_start_here.ipynb").write_text("{}")
    monkeypatch.setattr(apart, "Judge", Judge)
    monkeypatch.setattr(Judge, "points", points, raising=False)
    options = ["--released", str(ROOT / "exercises"), "--fewer-fences", "--gradescope", str(results)]
    said = classroom.main([str(tmp_path / "submitted"), *options, "--canvas", str(export), str(table)])
    assert lines(table)[2] == ["Lovelace, Ada", "101", "s-1", "ada", "A, B", cell]
    if points is None:
        assert not results.exists()
        assert said.splitlines()[1:] == [
            "ada, 00_start_here: not judged, so the cell is empty",
            f"{results} isn't written, so that nobody gets 0 points for what was not judged",
        ]
    else:
        assert said is None
        tests = [{"name": "shift", "score": 3.0, "max_score": 3.0, "output": ""}]
        assert json.loads(results.read_text()) == {"execution_time": 0, "tests": tests}
