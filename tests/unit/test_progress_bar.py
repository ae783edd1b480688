"""A bar for what takes long: in a notebook's main thread only, one at a time, and gone at the end."""

import sys
import threading
import types

import IPython.display  # noqa: F401  what a notebook has
import pytest

from manyranks import progress_bar


class Shown:
    """The texts that a notebook has shown under one display id."""

    def __init__(self):
        self.seen = []

    def update(self, data, raw):
        assert raw
        self.seen.append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch):
    """A kernel around us; all bars that were shown."""
    shown = []

    def display(data, **_):
        shown.append(Shown())
        shown[-1].update(data, True)
        return shown[-1]

    shell = types.SimpleNamespace(kernel=True)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress_bar, "DELAY", 0.0)
    monkeypatch.setattr(progress_bar, "EVERY", 0.0)
    monkeypatch.setenv("MANYRANKS_SETTINGS", "")
    return shown


def test_each_step_moves_the_bar_and_the_end_takes_it_away(notebook):
    assert list(progress_bar.each(range(4), "counting")) == [0, 1, 2, 3]
    (bar,) = notebook
    assert bar.seen == ["counting: 25%, 0 s", "counting: 50%, 0 s", "counting: 75%, 0 s", "counting: 100%, 0 s", ""]


def test_where_nobody_knows_the_end_only_seconds_are_shown(notebook):
    with progress_bar.bar("4 ranks run") as bar:
        bar.step(0)
    assert notebook[0].seen == ["4 ranks run: 0 s", ""]


def test_what_is_inside_something_long_has_no_bar_of_its_own(notebook):
    for _ in progress_bar.each("ab", "outer"):
        list(progress_bar.each("cd", "inner"))
    assert [bar.seen[0] for bar in notebook] == ["outer: 50%, 0 s"]
    list(progress_bar.each("cd", "next"))
    assert notebook[-1].seen[0] == "next: 50%, 0 s"


def test_an_interrupt_takes_it_away_too(notebook):
    def interrupted():
        with progress_bar.bar("run") as bar:
            bar.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert notebook[0].seen[-1] == ""


def test_what_is_soon_done_shows_nothing(notebook, monkeypatch):
    monkeypatch.setattr(progress_bar, "DELAY", 5.0)
    assert list(progress_bar.each(range(3), "counting")) == [0, 1, 2]
    assert notebook == []


def test_in_a_thread_outside_of_notebooks_and_where_settings_are_off_nothing_is_shown(notebook, monkeypatch):
    thread = threading.Thread(target=lambda: list(progress_bar.each("ab", "counting")))
    thread.start()
    thread.join()
    monkeypatch.setenv("MANYRANKS_SETTINGS", "off")
    list(progress_bar.each("ab", "counting"))
    monkeypatch.setenv("MANYRANKS_SETTINGS", "")
    monkeypatch.delitem(sys.modules, "ipykernel")
    list(progress_bar.each("ab", "counting"))
    assert notebook == []
