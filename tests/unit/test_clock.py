"""A rank on another machine has another clock: it is set by the notebook's."""

import time

from manyranks.world.rank import process as rank


def test_a_clock_that_is_set_shows_the_notebooks_time_and_goes_on(monkeypatch):
    own = iter([7.0, 7.5, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(own))
    rank._set_clock(100.0)
    assert [time.perf_counter(), time.perf_counter()] == [100.5, 102.0]
