"""Points in the forms that Canvas and Gradescope take. What was not judged is no 0 there.

Canvas imports a CSV file whose first columns, up to "Section", say who a student is; the others are assignments, named
"title (number)" if Canvas has them (lib/gradebook_importer.rb in instructure/canvas-lms). Gradescope reads a results.json for
one submission (gradescope-autograders.readthedocs.io, Specs).
"""

import csv
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manyranks.world.strangers.trouble import named

_WHO = ("SIS Login ID", "SIS User ID", "ID")
_TWO = "There are {} notebooks: hand in one, with the exercise's name."


class Row(NamedTuple):
    """A task of a submission.

    points: None where it was not judged
    failed: "" where nothing did
    version: of the notebook, its SHA-256, or "" where it is to be judged anew
    """

    student: str
    exercise: str
    task: str
    points: float | None
    out_of: float
    seconds: float
    failed: str
    version: str


class Canvas:
    """A gradebook as Canvas exports it: who the students are, and which assignments there are.

    Raises ValueError where the file isn't one.
    """

    def __init__(self, exported: Path):
        with exported.open(newline="", encoding="utf-8-sig") as opened:
            first = opened.readline()
            opened.seek(0)
            parted = csv.reader(opened, delimiter=";" if first.count(";") > first.count(",") else ",")
            head, *lines = list(parted) or [[]]
        if head[:2] != ["Student", "ID"] or "Section" not in head:
            raise ValueError(f"{exported} isn't a gradebook of Canvas: give the file that Grades, Export makes there")
        self._name, self._head, self._who = exported.name, head, head.index("Section") + 1
        self._lines = [line for line in lines if len(line) == len(head)]
        self._students: dict[str, list[list[str]]] = {}
        for line in self._lines:
            for value in {named(line[head.index(column)]) for column in _WHO if column in head} - {""}:
                self._students.setdefault(value, []).append(line)

    def write(self, file: Path, rows: Sequence[Row], exercises: Collection[str]) -> list[str]:
        """Writes what Canvas imports: a line for each student who handed something in, a column for each exercise.

        exercises: names of those that were released
        Returns what the teacher has to know: the cells that are empty, and what is missing.
        """
        cells: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row.exercise in exercises:
                cells.setdefault((row.exercise, row.student), []).append(row)
        worth: dict[str, float] = {}
        for (name, _), own in sorted(cells.items()):
            worth[name] = max(worth.get(name, 0.0), sum(row.out_of for row in own))
        places = {name: self._place(name) for name in worth}
        said = [f"{name} has no column: {why}" for name, points in worth.items() if (why := self._unlike(places[name], points))]
        names = [name for name, points in worth.items() if not self._unlike(places[name], points)]
        titles = [name if places[name] is None else self._head[places[name]] for name in names]
        possible = ["    Points Possible", *[""] * (self._who - 1), *(f"{worth[name]:g}" for name in names)]
        table = [[*self._head[: self._who], *titles], possible]
        for student in dict.fromkeys(row.student for row in rows):
            found, handed_in = self._students.get(student, []), [name for name in names if (name, student) in cells]
            if len(found) != 1 or not handed_in:
                why = f"{len(found)} students of {self._name} have this as {' or '.join(_WHO)}"
                said.append(
                    f"{student} has no line: {why if handed_in else 'no notebook is where an exercise with a column belongs'}"
                )
                continue
            line = found[0][: self._who]
            for name in names:
                before = "" if places[name] is None else found[0][places[name]]
                line.append(_sum(cells[name, student]) if name in handed_in else before)
                if name in handed_in and not line[-1]:
                    said.append(f"{student}, {name}: not judged, so the cell is empty")
            table.append(line)
        with file.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows(table)
        return said

    def _place(self, name: str) -> int | None:
        """Finds the column that Canvas has for an exercise."""
        titles = enumerate(self._head)
        return next((place for place, title in titles if re.fullmatch(rf"{re.escape(name)} \(\d+\)", title)), None)

    def _unlike(self, place: int | None, points: float) -> str:
        """Says why an exercise can't have this column, or ""."""
        lines = [line for line in self._lines if "Points Possible" in line[0]]
        there = lines[0][place] if lines and place is not None else ""
        if not there or float(there.replace(",", ".")) == points:
            return ""
        return f"it's worth {points:g} points here and {there} in Canvas. Change that there, and export again"


def gradescope(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Makes results.json from the rows of one submission; None where a part of it was not judged."""
    if any(row.points is None for row in rows):
        return None
    counted = [row for row in rows if row.out_of]
    if (notebooks := len({(row.student, row.exercise) for row in counted})) != 1:
        return {"score": 0.0, "output": _TWO.format(notebooks) if notebooks else rows[0].failed}
    tests = [{"name": row.task, "score": row.points, "max_score": row.out_of, "output": row.failed} for row in counted]
    return {"execution_time": round(sum(row.seconds for row in counted)), "tests": tests}


def _sum(rows: Collection[Row]) -> str:
    if any(row.points is None for row in rows):
        return ""
    return f"{round(sum(row.points or 0.0 for row in rows), 2):g}"
