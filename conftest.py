"""Lets pytest run a notebook as typed, from any folder: `pytest --nbval notebooks/01_collectives.ipynb`.

For a notebook alone pytest reads no other file of ours; tests/conftest.py has what else the tests need.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent

# As if it were not installed: what reads notebooks spends a second on its grammar, which nothing here needs.
sys.modules["rfc3987_syntax"] = None
pytest_plugins = ["nbval.plugin", "tests.cpu"]  # importable here: pytest has put this folder on the path

os.environ["MANYRANKS_SETTINGS"] = "off"  # no bars, and explorers open at their defaults, whatever the user has set before


def pytest_configure(config):
    """Finds what hides differences of machines, wherever pytest was started.

    A notebook's kernel that does not answer is started once more: another process may have taken the ports chosen for it.
    """
    config.option.nbval_sanitize_with = str(ROOT / "tests" / "notebooks" / "sanitize.cfg")
    from nbval import kernel  # not above: a rank that imports this file has no need of it

    kernel.start_new_kernel = twice(kernel.start_new_kernel)


def twice(start):
    """`start`, tried again on new ports when its first kernel dies or keeps silent for 40 s."""

    def start_new_kernel(startup_timeout=40, **kwargs):
        try:
            return start(startup_timeout=40, **kwargs)
        except RuntimeError:
            return start(startup_timeout=startup_timeout, **kwargs)

    return start_new_kernel


def pytest_collection_modifyitems(items):
    """Skips cells with the tag "triton" where there is no Triton."""
    if find_spec("triton") is None:
        for item in items:
            if "triton" in getattr(item, "cell", {}).get("metadata", {}).get("tags", ()):
                item.add_marker(pytest.mark.skip(reason="Triton exists for Linux only"))
