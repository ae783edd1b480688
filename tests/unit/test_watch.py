"""A rank's second thread looks at the first one and leaves no trace."""

import threading
import weakref

import pytest

from manyranks.measure.calls import Recorder
from manyranks.world.rank import watch


class Thing:
    pass


def test_who_looks_at_a_rank_keeps_none_of_its_locals_alive(monkeypatch):
    looking, seen = threading.Event(), threading.Event()

    def slowly() -> tuple[int, int]:
        looking.set()
        seen.wait(10)
        return 0, 0

    def hold() -> weakref.ref:
        thing = Thing()
        looker.start()
        assert looking.wait(10)
        return weakref.ref(thing)

    monkeypatch.setattr(watch, "_moved", slowly)
    of = Recorder(), threading.Event(), threading.get_ident(), False
    looker = threading.Thread(target=watch._look, args=of)
    try:
        assert hold()() is None
    finally:
        seen.set()
        looker.join()


def test_a_look_that_fails_is_repeated_and_the_last_one_says_why(monkeypatch):
    looks, look, of = [], watch._look, (Recorder(), threading.Event(), threading.get_ident(), False)

    def fails_first(*args):
        looks.append(args)
        if len(looks) < fails:
            raise RuntimeError("changed meanwhile")
        return look(*args)

    monkeypatch.setattr(watch, "_look", fails_first)
    fails = 3
    assert not watch._seen(*of).running
    assert len(looks) == 3
    looks.clear()
    fails = 4
    with pytest.raises(RuntimeError, match="changed meanwhile"):
        watch._seen(*of)
