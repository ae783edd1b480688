"""Reads the tables that theory's numbers come from, of papers and public repositories; every row names its source."""

import csv
from importlib.resources import files


def rows(name: str) -> list[dict[str, str]]:
    """Returns the rows of a table, numbers as they are printed in the source. Raises ValueError for an unknown name."""
    path = files(__name__) / f"{name}.csv"
    if not path.is_file():
        known = sorted(entry.name.removesuffix(".csv") for entry in files(__name__).iterdir() if entry.name.endswith(".csv"))
        raise ValueError(f"published table {name!r}: choose from {', '.join(known)}")
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def value(text: str) -> int | bool | str:
    """Reads a cell: a whole number, "True" or "False", or a word."""
    return int(text) if text.isdecimal() else {"True": True, "False": False}.get(text, text)


def pairs(text: str) -> dict[str, str]:
    """Reads a cell that names several things: "tp=8 seq=2048"."""
    return dict(each.split("=") for each in text.split())
