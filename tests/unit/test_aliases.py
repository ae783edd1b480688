"""Functions that stand in for a module's, and what is heard of Python's events."""

import os
import threading

import pytest

from manyranks.measure.aliases import replaced
from manyranks.measure.audit import audited


def learner(cell: str):
    """The function that a cell defines as `answer`."""
    exec(cell, names := {})
    return names["answer"]


@pytest.mark.parametrize("cell", ["import os\ndef answer(): return os.getpid()", "from os import getpid as answer"])
def test_a_stand_in_is_called_by_the_modules_name_and_by_one_of_the_learners(cell):
    function = learner(f"{cell}\ninner = answer\ndef answer(): return inner()")
    with replaced({(os, "getpid"): lambda: "stand-in"}, function):
        assert function() == "stand-in"
    assert function() == os.getpid()


def test_an_event_is_heard_inside_in_any_thread_and_a_listener_may_raise(tmp_path):
    heard, kept = [], open
    (tmp_path / "file").write_text("")

    def hear(event: str, args: tuple) -> None:
        if event == "open" and args[0] == f"{tmp_path / 'file'}":
            heard.append(threading.current_thread().name)
            if len(heard) > 1:
                raise PermissionError

    with audited(hear):
        thread = threading.Thread(target=lambda: kept(f"{tmp_path / 'file'}").close(), name="another")
        thread.start()
        thread.join()
        with pytest.raises(PermissionError):
            kept(f"{tmp_path / 'file'}")
    kept(f"{tmp_path / 'file'}").close()
    assert heard == ["another", threading.current_thread().name]
