"""What the zoos share."""

from contextlib import nullcontext
from functools import cache

import pytest

from manyranks.grade import trial
from manyranks.world.world import World


@pytest.fixture(scope="module")
def worlds():
    """n -> a world that several checks share: most of a check's time is that of starting its ranks."""
    made = {n: World(n, backend="gloo") for n in (1, 2, 3, 4)}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture
def shared_ranks(worlds, monkeypatch):
    """Checks run on worlds that are there already, and have as much time for the last case as for the first."""
    monkeypatch.setattr(trial, "_LEAST_SECONDS", trial._RUN_SECONDS)
    monkeypatch.setattr(trial, "World", lambda n, **_: nullcontext(worlds[n]))


@pytest.fixture(scope="module")
def asked_once():
    """nbgrader asks alembic for each new gradebook, in a process that takes seconds; the answer is the same each time."""
    from nbgrader import api  # also takes a second, which the zoos do without

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get_alembic_version", cache(api.get_alembic_version))
        yield
