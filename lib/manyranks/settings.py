"""Keeps things for a reader between sessions, in JSON files next to Jupyter's own settings.

With MANYRANKS_SETTINGS=off in the environment nothing is read or kept: tests and stored notebooks start the same everywhere.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

OFF = "off"


def read(name: str) -> dict:
    """Returns what was kept under this name; an empty dict where nothing was, or nothing that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads(_file(name).read_text()) if _on() else {}
        return found if isinstance(found, dict) else {}
    return {}


def write(name: str, values: Mapping) -> None:
    """Keeps these values instead of what was kept; without a word where the disk doesn't allow it."""
    if not _on():
        return
    with suppress(OSError):
        file = _file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(values))
        os.replace(unfinished, file)


def forget(name: str) -> None:
    """Removes what was kept."""
    with suppress(OSError):
        if _on():
            _file(name).unlink()


def _on() -> bool:
    return os.environ.get("MANYRANKS_SETTINGS") != OFF


def _file(name: str) -> Path:
    from jupyter_core.paths import jupyter_config_dir  # not above: it comes with notebooks, and ranks don't need it

    return Path(jupyter_config_dir()) / f"manyranks_{name}.json"
