"""The teacher's command: a folder of submissions becomes a table, and nbgrader's own points are the same."""

import csv
import os
import shutil
from functools import partial

import nbformat
import pytest

from manyranks.grade import apart, classroom
from manyranks.grade.submission import checks
from manyranks.report import Report
from manyranks.world import limits
from tests.conftest import ROOT
from tests.grading import synthetic
from tests.grading.course import Course, small

TASKS = ["tree_broadcast", "ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "pairwise_all_to_all"]

pytestmark = [
    pytest.mark.usefixtures("asked_once", "without_mistakes"),
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
    with apart.Judge(fewer_fences=True) as judge:
        return list(classroom.graded(folder, ROOT / "exercises", judge))


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


@pytest.mark.whole
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
    forged.cells += [nbformat.v4.new_code_cell("later"), *release.cells]
    found = checks(classroom.asked(forged, release))
    assert {(check.grade_id, check.points) for check in found} == {(check.grade_id, check.points) for check in checks(release)}
    assert all("later" in [text.strip() for _, text in check.source.cells] for check in found), "the last of two counts"


RELEASED = ["--released", str(ROOT / "exercises"), "--fewer-fences"]


@pytest.fixture
def broken(tmp_path):
    """Submissions that cannot be read; the last is as long as nobody's."""
    folder = tmp_path / "submitted"
    (folder / "ada").mkdir(parents=True)
    (folder / "zoe.ipynb").write_text("no notebook")
    os.symlink(ROOT / "solutions" / synthetic.NAME / f"{synthetic.NAME}.ipynb", folder / "ada" / f"{synthetic.NAME}.ipynb")
    os.symlink(ROOT / "solutions" / synthetic.NAME, folder / "bob")
    os.symlink("x" * 300, folder / "fay")
    os.symlink("/proc/1/cwd/x", folder / "gus.ipynb")
    os.mkfifo(folder / "carol.ipynb")
    os.symlink("/dev/zero", folder / "dan.ipynb")
    (folder / "eve\n\x1b[2Jada   all  20 of 20.ipynb").write_text("no notebook")
    with (folder / "=cmd.ipynb").open("w") as file:
        file.truncate(30 * 2**20)
    return folder


def test_what_is_no_notebook_is_one_row_and_forges_none(broken, tmp_path, capsys):
    table = tmp_path / "rows.csv"
    classroom.main([str(broken), *RELEASED, "--csv", str(table)])
    printed = capsys.readouterr().out
    rows = {row["student"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert {row["points"] for row in rows.values()} == {"0.0"}
    assert {name: row["failed"] for name, row in rows.items()} == {
        "ada": "not read: it is a link",
        "bob": "not read: it is a link",
        "carol": "not read: it is no file",
        **dict.fromkeys(("dan", "fay", "gus"), "not read: it is a link"),
        "'=cmd": "not read: it has 30 MB; at most 20 are read",
        r"eve\n\x1b[2Jada \x20\x20all \x2020 of 20": "cannot be read: NotJSONError",
        "zoe": "cannot be read: NotJSONError",
    }
    assert "\x1b" not in printed
    assert [line for line in printed.splitlines() if line.startswith("ada")] == [
        line for line in printed.splitlines() if line.startswith("ada ") and "20 of 20" not in line
    ]


def test_what_this_machine_cannot_start_is_not_judged_and_nobody_s_fault(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", int)  # the process that judges is a fork of this one
    (tmp_path / "ada.ipynb").write_text((ROOT / "solutions" / synthetic.NAME / f"{synthetic.NAME}.ipynb").read_text())
    said = classroom.main([str(tmp_path), *RELEASED, "--csv", str(tmp_path / "rows.csv")])
    assert "1 of the submissions could not be judged" in said
    (row,) = classroom.read(tmp_path / "rows.csv")
    assert row.failed.startswith("this machine could not start its ranks: World(1) needs about")
    assert (row.points, row.version) == (None, ""), "the next run judges it"
    shown = [line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("ada")]
    assert shown == [["not", "judged"]] * 2, "and neither 0, nor 0 of 20"


class OneByOne:
    """A judge who takes one submission after the other."""

    def all(self, reads):
        return [self.judged(read) for read in reads]


class RightAnswerLate(OneByOne):
    """A judge who can say something of the first task only."""

    def judged(self, read):
        yield apart.Judged("check_tree_broadcast", 0, 3.0, Report("tree_broadcast", 3.0, 3.0, ()), 0.1)
        why = "the right answer did not run here"
        yield apart.Judged("check_ring_all_gather", 1, 4.0, Report("ring_all_gather", 0.0, 4.0, ()), 0.1, missed=why)
        raise apart.NotJudged("this machine could not start its ranks")


def test_what_was_not_judged_has_no_number_and_no_part_of_a_sum(tmp_path, capsys):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / f"{synthetic.NAME}.ipynb").write_text("{}")
    table = tmp_path / "rows.csv"
    rows = list(classroom.graded(tmp_path, ROOT / "exercises", RightAnswerLate(), keep=partial(classroom.write, table)))
    assert [(row.points, row.out_of) for row in rows] == [(3, 3), (None, 4), (None, 13)]
    assert classroom.shown(rows) == rows
    lines = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("ada")]
    assert lines[1:] == [["ring_all_gather", "not", "judged"], ["–", "not", "judged"], ["all", "not", "judged"]]
    assert [row["points"] for row in csv.DictReader(table.read_text().splitlines())] == ["3.0", "", ""]
    again = list(classroom.graded(tmp_path, ROOT / "exercises", EndedSoon(), classroom.read(table)))
    assert [row.points for row in again] == [3, 0], "all of it is judged the next time"


class EndedSoon(OneByOne):
    """A judge of submissions of exercise 01 that end after their first task."""

    def judged(self, read):
        yield apart.Judged("check_tree_broadcast", 0, 3.0, Report("tree_broadcast", 3.0, 3.0, ()), 0.1)
        raise apart.Ended("it ended the process that judged it")


def test_who_ends_the_judge_loses_the_points_of_all_that_was_not_judged(tmp_path, capsys):
    (tmp_path / "bob    all     20 of 20").mkdir()
    for path in (tmp_path / "ada.ipynb", tmp_path / "bob    all     20 of 20" / f"{synthetic.NAME}.ipynb"):
        path.write_text("{}")
    rows = list(classroom.graded(tmp_path, ROOT / "exercises", EndedSoon()))
    assert [(row.points, row.out_of) for row in rows] == 2 * [(3, 3), (0, 17)]
    classroom.shown(rows)
    assert r"bob \x20\x20\x20all" in capsys.readouterr().out


class Interrupted(OneByOne):
    """A judge who gives each submission one row, and is interrupted at the second."""

    def __init__(self):
        self.judged_so_far = 0

    def judged(self, read):
        if self.judged_so_far == 1:
            raise KeyboardInterrupt
        self.judged_so_far += 1
        yield apart.Judged("check_double", 0, 2.0, Report("double", 2.0, 2.0, ()), 0.1)


def test_an_interrupted_run_goes_on_where_it_stopped_and_a_changed_submission_is_judged_again(tmp_path):
    folder, table, released = tmp_path / "submitted", tmp_path / "rows.csv", ROOT / "exercises"
    folder.mkdir()
    for student in ("ada", "bob"):
        (folder / f"{student}.ipynb").write_text(student)
    with pytest.raises(KeyboardInterrupt):
        list(classroom.graded(folder, released, Interrupted(), keep=partial(classroom.write, table)))
    done = classroom.read(table)
    assert [row.student for row in done] == ["ada"]
    again = Interrupted()
    assert [row.student for row in classroom.graded(folder, released, again, done)] == ["ada", "bob"]
    assert again.judged_so_far == 1, "bob's"
    (folder / "ada.ipynb").write_text("ada, later")
    with pytest.raises(KeyboardInterrupt):
        list(classroom.graded(folder, released, Interrupted(), done))


def test_names_that_differ_are_two_students_and_look_different(tmp_path, capsys):
    names = ("=x", "'=x", "''=x", "bob", "bob\ufe0f", "bob\u034f", " bob", "bob ", "b  ob", "b ob", "a\u200c", "a\\u200c")
    names += ("x" * 50 + "a", "x" * 50 + "b", "b\u1d0fb", "b\u2010b", "12", "1\u0417", "\u1d00", "eve;=1")
    names += tuple(f"Maria-Magdalena-Theresia-von-Hohe{rest}-Langenburg" for rest in ("4dda2e", "nlohe"))  # alike by 24 bits
    for name in names:
        (tmp_path / f"{name}.ipynb").write_text("x")
    assert [one.refused for one in classroom.submissions(tmp_path, ["x"])] == [""] * len(names)
    table = tmp_path / "rows.csv"
    classroom.write(table, classroom.graded(tmp_path, ROOT / "exercises", EndedSoon()))
    done = classroom.read(table)
    shown = {row.student for row in done}
    assert len(shown) == len(names)
    assert all(" ".join(name.split()) == name and name.isascii() for name in shown)
    assert not any(name.startswith(("=", "+", "-", "@")) for name in shown)
    classroom.write(table, classroom.graded(tmp_path, ROOT / "exercises", NotAgain(), done))
    assert classroom.read(table) == done
    assert ";=" not in table.read_text()
    assert all(line.startswith('"') for line in table.read_text().splitlines()), "whatever parts columns"
    classroom.shown(done)
    printed = {line[:40] for line in capsys.readouterr().out.splitlines()}
    assert [sum(line.startswith(name) for line in printed) for name in ("xxx", "Maria-M")] == [2, 2]


class NotAgain(OneByOne):
    def judged(self, read):
        raise AssertionError("what is in the table already is judged again")


def test_a_notebook_that_has_changed_since_it_was_found_is_not_judged(tmp_path):
    released = ROOT / "exercises"
    path = tmp_path / "ada.ipynb"
    path.write_text("a blank one")

    class Swapped(EndedSoon):
        def judged(self, read):
            path.unlink()
            path.symlink_to(released / "01_collectives" / "01_collectives.ipynb")
            with pytest.raises(ValueError, match="the notebook has changed since the command began: it is a link"):
                read()
            path.unlink()
            path.write_text("another one")
            with pytest.raises(ValueError, match=r"the notebook has changed since the command began$"):
                read()
            yield from super().judged(read)

    assert list(classroom.graded(tmp_path, released, Swapped()))


def test_an_interrupted_second_run_loses_no_row_of_the_first(tmp_path):
    folder, table, released = tmp_path / "submitted", tmp_path / "rows.csv", ROOT / "exercises"
    folder.mkdir()
    for student in ("ada", "bob", "zoe"):
        (folder / f"{student}.ipynb").write_text(student)
    classroom.write(table, classroom.graded(folder, released, EndedSoon()))
    before = classroom.read(table)
    rows = classroom.graded(folder, released, NotAgain(), before, keep=partial(classroom.write, table))
    next(rows)
    rows.close()
    assert {row.student for row in classroom.read(table)} == {"ada", "bob", "zoe"}


def test_submissions_that_hold_the_solutions_or_where_the_command_begins_are_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "solutions").mkdir()
    shutil.copytree(ROOT / "exercises" / "01_collectives", tmp_path / "exercises" / "01_collectives")
    with pytest.raises(SystemExit):
        classroom.main([str(tmp_path), "--released", str(tmp_path / "exercises"), "--fewer-fences"])
    assert "whose code is run without fences: keep submissions apart" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "exercises")
    with pytest.raises(SystemExit):
        classroom.main([str(tmp_path / "exercises"), "--fewer-fences"])
    assert "start the command outside of the submissions" in capsys.readouterr().err


def test_the_command_says_what_fences_stand_and_will_not_judge_without(tmp_path, capsys, monkeypatch):
    (tmp_path / "ada.ipynb").write_text("no notebook")
    monkeypatch.setattr(apart, "lacks", lambda *_: "you are root")
    with pytest.raises(SystemExit) as ended:
        classroom.main([str(tmp_path), *RELEASED[:2]])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "limits on learners' code here: time, memory" in said.out
    assert "you are root: learners' code could do harm here" in said.err


def test_an_empty_folder_ends_the_command_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        classroom.main([str(tmp_path), "--fewer-fences"])
    assert ended.value.code == 2
    assert "has no notebooks" in capsys.readouterr().err


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return Course(tmp_path_factory.mktemp("course"), "99_double", small())


def test_a_check_that_is_there_twice_stops_nbgrader_for_nobody(course):
    for student in ("ada", "bob"):
        notebook = course.release
        if student == "ada":
            notebook.cells.append(notebook.cells[1].copy())
            notebook.cells[0].metadata.nbgrader = {}
        assert course.submit(student, notebook)["check_rest"] == 1


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_what_nbgrader_would_wait_for_for_ever_is_not_read(kind, course):
    student = kind.replace(" ", "_")
    course._write(f"submitted/{student}", course.release)
    folder = course.root / "submitted" / student / "99_double"
    if kind == "a pipe":
        os.mkfifo(folder / "timestamp.txt")
    else:
        os.symlink("/dev/zero", folder / "data.csv")
    with pytest.raises(RuntimeError, match="is a link, no file, or larger than 20 MB"):
        course.submit(student, course.release)


HEADING = '{"cell_type": "heading", "level": 4000000000, "source": "x", "metadata": {}}'  # nbformat makes it as long as it says
OLD = '{"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": [%s], "metadata": {}}]}'
MANY = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("#" * 200_001)])
REFUSED = {  # name of a file, what it has, why
    "much memory": ("99_double.ipynb", OLD % HEADING, "MemoryError: "),
    "many letters": ("99_double.ipynb", nbformat.writes(MANY), "more than 200,000 characters"),
    "no time": ("timestamp.txt", "2026-01-01 00:00:00 /../../../../etc/passwd", "has no time"),
    "no end": ("timestamp.txt", " " * 10_000_000 + "x", "has no time"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_nbgrader_would_read_for_minutes_or_look_for_is_not_read(kind, course):
    student, (name, text, why) = kind.replace(" ", "_"), REFUSED[kind]
    course._write(f"submitted/{student}", course.release)
    (course.root / "submitted" / student / "99_double" / name).write_text(text)
    found = course.api.autograde("99_double", student)
    assert not found["success"]
    assert why in found["log"]


def test_names_that_nbgrader_takes_for_something_else_stop_it_for_nobody(tmp_path):
    course = Course(tmp_path, "99_double", small())
    odd = ("e\nf", "[az]da", "*", "eve,,,,20.0,0.0,20.0,20.0", "=1+1", 'q"', "ada\ufe0f", "ada ", "x\udcff")
    for student in ("ada", *odd, "zoe"):
        course._write(f"submitted/{student}", course.release)
    (tmp_path / "submitted" / "bob").symlink_to("ada")
    course.api.autograde("99_double", "*")
    assert {path.name for path in (tmp_path / "autograded").iterdir()} == {"ada", "zoe"}
