"""Fixtures that the tests of checks share."""

from contextlib import nullcontext
from functools import cache

import pytest

from manyranks.grade import answers, trial
from manyranks.world.processes.forkserver import into_large_pages
from manyranks.world.world import World

_SHARED = (1, 2, 3, 4)  # ranks; larger worlds are for new groups, which some answers leave in a state of their own


@pytest.fixture(scope="session", autouse=True)
def large_pages():
    """Each submission is judged in a fork of this process, of which another fork looks at the disk."""
    into_large_pages()


@pytest.fixture(scope="module")
def worlds():
    """n -> a world that several checks share: a check spends most of its time on starting ranks."""
    made: dict[int, World] = {}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture
def shared_ranks(worlds, monkeypatch):
    """Checks run on worlds that are there already, and have as much time for the last case as for the first."""

    def world(n: int, **fences):
        if n not in _SHARED or fences.get("confined"):
            return World(n, **fences)
        if n not in worlds:
            worlds[n] = World(n, backend="gloo")
        return nullcontext(worlds[n])

    monkeypatch.setattr(trial, "_LEAST_SECONDS", trial._RUN_SECONDS)
    monkeypatch.setattr(trial, "World", world)


@pytest.fixture(scope="module")
def without_mistakes():
    """Lets the judge run no known mistakes: they give hints, not points. test_round.py has them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers.Solved, "whole", answers.Solved.right)
        yield


@pytest.fixture(scope="module")
def asked_once():
    """nbgrader asks alembic for each new gradebook, in a process that takes seconds; the answer is the same each time."""
    from nbgrader import api  # also takes a second, which the others do without

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get_alembic_version", cache(api.get_alembic_version))
        yield
