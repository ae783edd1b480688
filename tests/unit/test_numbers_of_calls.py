"""Calls of several threads of a rank: each has its place as its number."""

import threading
from collections import Counter

import pytest
import torch

from manyranks.measure import calls
from manyranks.measure.calls import Recorder


class Between(Counter):
    """Counts, and lets another thread make a call while one is being counted."""

    def __init__(self, other: threading.Thread):
        super().__init__()
        self._other = other

    def __setitem__(self, key, count):
        if not self._other.ident:
            self._other.start()
            self._other.join(timeout=0.2)
        super().__setitem__(key, count)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(calls.operators, "group_of", lambda named: None)
    monkeypatch.setattr(calls.operators, "peer_of", lambda named, ranks: None)
    monkeypatch.setattr(made, "_group", lambda group: ("default", (0, 1)))
    return made


def test_calls_of_two_threads_have_the_numbers_of_their_places(recorder):
    def call():
        recorder._note("allreduce_", {"tensors": [torch.ones(2)]})

    recorder.start(everything=True)
    other = threading.Thread(target=call)
    recorder.counts = Between(other)
    for _ in range(3):
        call()
    other.join()
    assert [one.number for one in recorder.calls] == [one.sequence for one in recorder.calls] == [0, 1, 2, 3]
    assert all(recorder.calls[event.number].number == event.number for event in recorder.journal)
