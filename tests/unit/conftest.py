"""Fixtures that the tests of this folder share."""

import numpy as np
import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Explorers compute and write, and draw nothing, which takes four fifths of their time: for tests that see no picture."""
    from manyranks.show import Explorer

    monkeypatch.setattr(Explorer, "_drawn", lambda explorer: np.zeros((1, 1, 4), np.uint8))
