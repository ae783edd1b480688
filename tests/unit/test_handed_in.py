"""The notebooks of a folder that are read, and whose they are."""

import os
import subprocess

import pytest

from manyranks.world.strangers import handed_in
from manyranks.world.strangers.scratch import contents

NAME = "01_collectives"


def test_a_student_has_one_notebook_an_exercise_where_it_belongs(tmp_path):
    folder = tmp_path / "ada" / NAME
    (folder / "copy").mkdir(parents=True)
    (folder.parent / "00_old").mkdir()
    names = (f"{NAME}.ipynb", f"copy/{NAME}.ipynb", "10_nd_parallel.ipynb", "notes.ipynb", f"{NAME} (1).ipynb")
    for name in (*names, f"../00_old/{NAME}.ipynb", f"../{NAME}.ipynb"):
        (folder / name).write_text("no notebook")
    found = handed_in.submissions(tmp_path, [NAME, "10_nd_parallel"])
    assert [one.path.relative_to(tmp_path).as_posix() for one in found if not one.refused] == [f"ada/{NAME}.ipynb"]
    assert {one.exercise for one in found if one.refused and one.costs} == {"10_nd_parallel", "notes", f"{NAME} (1)"}
    assert {one.refused.partition(":")[0] for one in found if one.refused} == {
        "there is another notebook of this exercise",
        "it is not where a submission is",
        f"it is not called {NAME}.ipynb",
    }


def test_what_cannot_be_looked_at_is_one_row(tmp_path):
    (tmp_path / "ada.ipynb").write_text("no notebook")
    place = os.open(tmp_path, os.O_RDONLY)
    for name in 20 * ["d" * 240]:
        os.mkdir(name, dir_fd=place)
        place, before = os.open(name, os.O_RDONLY, dir_fd=place), place
        os.close(before)
    os.close(os.open("f" * 250, os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    assert "ada" in [one.student for one in handed_in.submissions(tmp_path, []) if not one.refused]


def test_of_a_folder_and_a_notebook_of_one_name_neither_counts_and_depths_are_not_searched(tmp_path):
    place = tmp_path / "ada" / NAME
    place.mkdir(parents=True)
    for path in (tmp_path / "ada.ipynb", tmp_path / "bob.ipynb", place / f"{NAME}.ipynb"):
        path.write_text("no notebook")
    os.symlink("/tmp", tmp_path / "bob")
    before = os.getcwd()
    try:
        os.chdir(tmp_path / "ada")
        for _ in range(1500):
            os.mkdir("a")
            os.chdir("a")
        found = handed_in.submissions(tmp_path, [NAME])
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-rf", tmp_path / "ada" / "a"], check=True)  # pytest cannot
    both = [(NAME, handed_in.BOTH), ("ada", handed_in.BOTH)]
    assert all(one.costs for one in found if one.student == "ada")
    assert [(one.exercise, one.refused) for one in found] == [*both, ("bob", "it is a link"), ("bob", "")]


def test_of_two_names_that_differ_in_how_accents_are_written_neither_counts(tmp_path):
    for name in ("Andre\u0301", "Andr\u00e9", "Ame\u0301lie"):
        (tmp_path / name / NAME).mkdir(parents=True)
        (tmp_path / name / NAME / f"{NAME}.ipynb").write_text("x")
    (tmp_path / "Am\u00e9lie").mkdir()
    (tmp_path / "Am\u00e9lie" / "lost.ipynb").symlink_to("/tmp")  # what she has handed in costs nothing
    with pytest.raises(ValueError, match="is no folder"):
        handed_in.submissions(tmp_path / "none", [NAME])
    found = handed_in.submissions(tmp_path, [NAME])
    both, link = 2 * [("Andr\u00e9", handed_in.BOTH)], ("Am\u00e9lie", "it is a link")
    assert [(one.student, one.refused) for one in found] == [("Am\u00e9lie", ""), link, *both]
    assert [one.costs for one in found] == [True, False, True, False]  # what another has handed in, and one exercise twice


def test_files_that_are_no_submission_are_not_read_and_few_of_them_are_rows(tmp_path, monkeypatch):
    place = tmp_path / "eve" / NAME
    place.mkdir(parents=True)
    for i in range(60):
        (place / f"{i}.ipynb").write_text("x")
    (place / f"{NAME}.ipynb").write_text("x")
    read = []
    monkeypatch.setattr(handed_in, "contents", lambda folder, path: read.append(path.name) or ("", "1", b""))
    found = handed_in.submissions(tmp_path, [NAME])
    assert read == [f"{NAME}.ipynb"]
    assert len(found) == 1 + 20 + 1
    assert found[-1].refused == "40 more files are not where a submission is, or are refused for other reasons"


def test_who_has_handed_in_nothing_that_can_be_read_has_a_row(tmp_path):
    (tmp_path / "ada.ipynb").write_text("x")
    (tmp_path / "bob" / "saved.ipynb").mkdir(parents=True)
    (tmp_path / "eve" / ".ipynb_checkpoints").mkdir(parents=True)
    found = {one.student: one.refused for one in handed_in.submissions(tmp_path, [NAME])}
    assert found == {"ada": "", "bob": handed_in.NOTHING, "eve": handed_in.NOTHING}


def test_neither_a_hard_link_nor_a_folder_that_is_a_link_is_read(tmp_path):
    (other := tmp_path / "other").mkdir()
    (other / "01_collectives.ipynb").write_text("right")
    (folder := tmp_path / "submitted").mkdir()
    (folder / "ada.ipynb").hardlink_to(other / "01_collectives.ipynb")
    (folder / "bob").symlink_to(other)
    assert {one.refused for one in handed_in.submissions(folder, [NAME])} == {"it is a link"}
    assert contents(folder, folder / "bob" / "01_collectives.ipynb")[1:] == ("", b"")
