"""Names that a reader knows for the places of a program: "cell 12, line 4" or "collectives.py, line 33"."""

import linecache
import os
import sys

from manyranks.measure.location import Place

_only_remembered = False  # whether no file is opened for its lines: see open_no_files()
_remembered: dict[str, list[str]] = {}


def label(place: Place | tuple[str, int] | None) -> str:
    """The readable form of a place; "" for None."""
    return f"{file_label(place[0])}, line {place[1]}" if place else ""


def file_label(file: str) -> str:
    """ "cell 12" for a cell's file name, the last part of the path for any other."""
    if number := _cell_numbers().get(file):
        return f"cell {number}"
    return file.strip("<>") if file.startswith("<cell ") else os.path.basename(file)


def source_line(file: str, line: int) -> str:
    """The line of source, "" where there is none."""
    if not _only_remembered:
        return linecache.getline(file, line).strip()
    lines = _remembered.get(file, [])
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def open_no_files() -> None:
    """Shows lines of remembered source alone from now on: where strangers' code runs, it chooses the names of files."""
    global _only_remembered
    _only_remembered = True


def remember(name: str, source: str) -> None:
    """Lets tracebacks show the lines of source that has no file."""
    lines = _remembered[name] = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)


def current_number() -> int:
    """The number of the cell that runs now."""
    return max(_cell_numbers().values(), default=0)


def notebook_has(name: str) -> bool:
    """Returns whether the notebook has a variable of this name."""
    return name in getattr(_shell(), "user_ns", {})


def labels() -> dict[str, str]:
    """The file name of each of the notebook's cells -> "cell 12"."""
    return {file: f"cell {number}" for file, number in _cell_numbers().items()}


def _cell_numbers() -> dict[str, int]:
    """File name -> execution count, as IPython keeps it to name cells in its own tracebacks."""
    return getattr(getattr(_shell(), "compile", None), "_filename_map", {})


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
