"""What an explorer's "Measure it" runs: a small group of real ranks counts what theory says, and is gone afterwards."""

import multiprocessing
import threading
import time

import pytest

from manyranks import show, small
from manyranks.small import ranks

# chapter -> values of its explorer, beside the defaults
CHAPTERS = {"data_parallel": [{"dp": 1}, {"dp": 1024, "overlap": False}]}


@pytest.mark.parametrize(("chapter", "change"), [(name, change) for name, each in CHAPTERS.items() for change in each])
def test_ranks_count_what_theory_says(chapter, change):
    explorer = getattr(show, chapter).explorer(measure=getattr(small, chapter))
    heard = []
    counted = getattr(small, chapter)(explorer.set(**change).values, lambda share, words: heard.append(share))
    for row in counted.rows:
        assert row.measured == pytest.approx(row.theory, rel=0.02 if row.unit == "bytes" else 0.25), row
    assert heard == sorted(heard)
    assert all(0 < share < 1 for share in heard)
    assert not multiprocessing.active_children()


def test_it_can_be_stopped_while_ranks_run():
    def waits(values, world, say):
        world(2).run(time.sleep, 60)

    runs, raised = ranks.OnRanks(waits), []

    def run():
        try:
            runs({})
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1)
    runs.stop()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert "closed" in str(raised[0])


def test_stopped_before_ranks_are_there_it_starts_none():
    def stops(values, world, say):
        runs.stop()
        world(2).run(print, "never")

    runs = ranks.OnRanks(stops)
    with pytest.raises(RuntimeError, match="stopped"):
        runs({})
