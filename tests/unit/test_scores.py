"""A learner's points: the line after a check, what is kept, and the page of all exercises."""

import json

import pytest

import manyranks as mr
from manyranks import scores, settings
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYRANKS_SETTINGS", "")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(scores, "TASKS", {"03_zero": {"shard": 4, "gather": 6}, "12_failures": {"plan": 5}})
    monkeypatch.setattr(scores, "_checked", {})


def test_the_exercises_are_those_of_the_course():
    assert list(scores.EXERCISES) == sorted(path.name for path in (ROOT / "exercises").iterdir() if path.is_dir())


def test_the_total_grows_with_the_checks_and_ends_with_what_comes_next():
    assert scores.after("03_zero", "shard", 2.5, "a view") == "So far 2.5 of 10 points; 0 of 2 tasks are right."
    assert scores.after("03_zero", "shard", 4, "") == "So far 4 of 10 points; 1 of 2 tasks are right."
    assert scores.after("03_zero", "gather", 6, "") == "All done: 10 of 10 points. On to chapter 04."
    assert scores.after("12_failures", "plan", 5, "") == "All done: 5 of 5 points. That was the last exercise."


def test_a_hint_that_an_earlier_task_has_points_back():
    scores.after("03_zero", "shard", 2, "clone() it")
    assert "shard has the same hint" in scores.after("03_zero", "gather", 3, "clone() it")
    assert "hint" not in scores.after("03_zero", "gather", 3, "another")
    assert "hint" not in scores.after("03_zero", "shard", 3, "")
    scores.after("03_zero", "shard", 4, "")
    assert "hint" not in scores.after("03_zero", "gather", 3, "clone() it")


def test_points_are_kept_for_the_page(monkeypatch):
    scores.after("03_zero", "shard", 2, "")
    monkeypatch.setattr(scores, "_checked", {})  # the next day
    scores.after("03_zero", "gather", 6, "")
    assert "03_zero            8 of 10 points in 2 tasks checked" in repr(mr.my_progress())
    assert "01_collectives     not begun" in repr(mr.my_progress())
    assert "width:80%" in mr.my_progress()._repr_html_()


@pytest.mark.parametrize(
    "kept", ["no JSON", "[]", '{"03_zero": 3}', '{"03_zero": {"shard": "x", "gather": [1, "y"], "c": [1]}}']
)
def test_a_file_that_somebody_has_changed_is_no_trouble(kept, tmp_path):
    (tmp_path / "manyranks_progress.json").write_text(kept)
    assert "03_zero            not begun" in repr(mr.my_progress())
    scores.after("03_zero", "shard", 2, "")
    assert "2 of 4 points in 1 task checked" in repr(mr.my_progress())


def test_nothing_is_kept_where_settings_are_off_or_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYRANKS_SETTINGS", settings.OFF)
    scores.after("03_zero", "shard", 2, "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MANYRANKS_SETTINGS", "")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    assert scores.after("03_zero", "shard", 2, "").startswith("So far 2")


def test_a_report_that_no_task_has_made_has_no_total():
    assert scores.after("", "shard", 2, "") == ""


def test_what_is_kept_is_json(tmp_path):
    scores.after("03_zero", "shard", 2, "")
    assert json.loads((tmp_path / "manyranks_progress.json").read_text()) == {"03_zero": {"shard": [2, 4]}}
