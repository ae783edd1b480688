"""python -m manyranks.grade.classroom submitted/: checks every submission in a folder, and prints who got what.

submitted/ada/03_zero/03_zero.ipynb, as nbgrader collects them, or submitted/ada.ipynb. What is asked, and for how many points,
the released exercise says, not the submission. Learners' code runs on confined ranks; nbgrader's gradebook is not touched.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from manyranks.grade import apart
from manyranks.grade.check import Report
from manyranks.grade.submission import checks, is_check
from manyranks.world.confine import fences

_LONG = 100


class Row(NamedTuple):
    """One task of one submission. failed: "" where nothing did."""

    student: str
    exercise: str
    task: str
    points: float
    out_of: float
    seconds: float
    failed: str


def graded(folder: Path, released: Path) -> Iterator[Row]:
    """The rows of all notebooks below the folder, students in their order. Raises ValueError where there are none."""
    found = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not found:
        raise ValueError(f"{folder} has no notebooks: give the folder that has the submissions")
    releases = [nbformat.read(path, 4) for path in sorted(released.glob("*/*.ipynb"))]
    known = {tuple(check.grade_id for check in checks(release)): release for release in releases}
    for path in found:
        yield from _rows(path, path.relative_to(folder), known)


def asked(submission: NotebookNode, release: NotebookNode) -> NotebookNode:
    """The submission with the release's checks in the places of its own; what it has removed comes last."""
    theirs = {cell.metadata.nbgrader.grade_id: cell for cell in release.cells if is_check(cell)}
    cells = []
    for cell in submission.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") in theirs:
            cell = theirs.pop(cell.metadata.nbgrader.grade_id)
        elif is_check(cell):
            continue  # a check that nobody has asked for
        cells.append(cell)
    return nbformat.from_dict({**submission, "cells": [*cells, *theirs.values()]})


def _rows(path: Path, name: Path, releases: dict[tuple[str, ...], NotebookNode]) -> Iterator[Row]:
    student, exercise = name.parts[0].removesuffix(".ipynb"), name.stem
    try:
        submission = nbformat.read(path, 4)
    except Exception as error:  # not a notebook: nbformat raises many kinds
        yield Row(student, exercise, "–", 0.0, 0.0, 0.0, f"cannot be read: {type(error).__name__}"[:_LONG])
        return
    ids = {cell.metadata.get("nbgrader", {}).get("grade_id") for cell in submission.cells}
    _, release = max(releases.items(), key=lambda item: len(ids & set(item[0])))
    for one in apart.judge(asked(submission, release)):
        task, failed = one.report.task, _failed(one.report)
        yield Row(student, exercise, task, one.points, one.check.points, one.seconds, failed)


def _failed(report: Report) -> str:
    wrong = [line for line in report.lines if line.ok is False]
    if not wrong:
        return ""
    first = wrong[0]
    said = ": ".join(part for part in (first.what, first.found or first.hint) if part)
    return said if len(said) <= _LONG else f"{said[: _LONG - 2]} …"


def shown(rows: Iterable[Row]) -> list[Row]:
    """Prints each row as soon as it is there, and the sum after a student's last one."""
    print(_line("student", "task", "points", "seconds", "what failed"))
    kept = []
    for student, own in groupby(rows, key=lambda row: row.student):
        first = len(kept)
        for row in own:
            kept.append(row)
            print(_line(student, row.task, f"{row.points:g} of {row.out_of:g}", f"{row.seconds:.1f}", row.failed), flush=True)
        points, out_of, seconds = (sum(getattr(row, name) for row in kept[first:]) for name in ("points", "out_of", "seconds"))
        print(_line(student, "all", f"{points:g} of {out_of:g}", f"{seconds:.1f}", ""))
    return kept


def _line(student: str, task: str, points: str, seconds: str, failed: str) -> str:
    return f"{student:16} {task:22} {points:>12} {seconds:>8}  {failed}".rstrip()


def main(arguments: list[str] | None = None) -> None:
    """The command. It ends with status 2 where there is nothing to check."""
    parser = argparse.ArgumentParser("python -m manyranks.grade.classroom", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with the submissions")
    parser.add_argument("--released", type=Path, default=Path("exercises"), help="folder of the exercises (exercises)")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    chosen = parser.parse_args(arguments)
    print(f"limits on learners' code here: {fences()}")
    try:
        rows = shown(graded(chosen.folder, chosen.released))
    except ValueError as error:
        parser.error(str(error))
    if chosen.csv:
        with chosen.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    sys.exit(main())
