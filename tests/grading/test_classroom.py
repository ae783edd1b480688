"""The teacher's command: a folder of submissions becomes a table, and nbgrader's own points are the same."""

import csv

import nbformat
import pytest

from manyranks.grade import classroom
from manyranks.grade.submission import checks
from tests.conftest import ROOT
from tests.grading import synthetic
from tests.grading.course import Course

TASKS = ["tree_broadcast", "ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "pairwise_all_to_all"]

pytestmark = [
    pytest.mark.usefixtures("asked_once"),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's and its database's own
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submitted")
    synthetic.write(folder, 3)
    (folder / "zoe.ipynb").write_text("no notebook")
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return list(classroom.graded(folder, ROOT / "exercises"))


def of(rows, student):
    return [row for row in rows if row.student == student]


def test_the_solution_has_all_points_the_release_none_and_mistakes_less_than_half(rows):
    assert [row.task for row in of(rows, "00_right")] == TASKS
    assert [(row.points, row.failed) for row in of(rows, "00_right")] == [(points, "") for points in (3, 4, 5, 4, 4)]
    assert all(row.points == 0 and row.failed.startswith("not written yet") for row in of(rows, "01_empty"))
    assert all(row.failed for row in of(rows, "02_wrong"))
    assert sum(row.points for row in of(rows, "02_wrong")) < 10


def test_what_cannot_be_read_is_a_row_too(rows):
    (row,) = of(rows, "zoe")
    assert (row.points, row.failed) == (0, "cannot be read: NotJSONError")


def test_nbgrader_gives_the_same_points(rows, tmp_path):
    course = Course(tmp_path, synthetic.NAME, nbformat.read(ROOT / "solutions" / synthetic.NAME / f"{synthetic.NAME}.ipynb", 4))
    for student, notebook in synthetic.submissions(3):
        points = course.submit(student, notebook)
        assert points == {f"check_{row.task}": row.points for row in of(rows, student)}


def test_the_release_says_what_is_asked_and_for_how_many_points():
    release = nbformat.read(ROOT / "exercises" / synthetic.NAME / f"{synthetic.NAME}.ipynb", 4)
    forged = nbformat.from_dict(release)
    forged.cells = [
        cell for cell in forged.cells if cell.metadata.get("nbgrader", {}).get("grade_id") != "check_ring_all_gather"
    ]
    for cell in forged.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.source, cell.metadata.nbgrader.points = "100", 100
    found = checks(classroom.asked(forged, release))
    assert {(check.grade_id, check.points) for check in found} == {(check.grade_id, check.points) for check in checks(release)}


def test_the_command_prints_a_table_and_writes_it(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(classroom.apart, "judge", lambda notebook: [])
    classroom.main([str(folder), "--released", str(ROOT / "exercises"), "--csv", str(tmp_path / "rows.csv")])
    printed = capsys.readouterr().out
    assert "zoe              all" in printed
    assert next(csv.reader((tmp_path / "rows.csv").read_text().splitlines())) == list(classroom.Row._fields)


def test_an_empty_folder_ends_the_command_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        classroom.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "has no notebooks" in capsys.readouterr().err
