"""python -P -m manyranks.grade.classroom submitted/: checks every submission in a folder, and prints who got what.

submitted/ada/03_zero/03_zero.ipynb, as nbgrader collects them, or submitted/ada.ipynb. The released exercise says what
is asked, and for how many points, not the submission. Learners' code runs on confined ranks; nbgrader's gradebook is
not touched.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from manyranks.grade import apart
from manyranks.grade.gradebooks import Canvas, Row, gradescope
from manyranks.grade.submission import called, checks, grade_id, is_check
from manyranks.report import NOT_JUDGED, Report
from manyranks.world.fences import confine
from manyranks.world.strangers.handed_in import Submission, submissions
from manyranks.world.strangers.scratch import contents
from manyranks.world.strangers.trouble import FORMULA, named, no_column, printable

_LONG, _SHOWN, _WIDE = 300, 100, 40  # letters of what failed, in a row and in a line; of a name
_EVERY = 1.0  # seconds between two times that the table is written


def graded(
    folder: Path, released: Path, judge: apart.Judge, done: Iterable[Row] = (), keep: Callable[[list[Row]], None] = len
) -> Iterator[Row]:
    """The rows of all submissions, students in their order.

    done: rows of an earlier time, which are not made again; keep: is called with all rows so far, now and then and at the end.
    """
    known = {path.stem: nbformat.read(path, 4) for path in sorted(released.glob("*/*.ipynb"))}
    if not known:
        raise ValueError(f"{released} has no exercises: give the folder of those that were released, with --released")
    before: dict[tuple, list[Row]] = {}
    for row in done:
        before.setdefault((row.student, row.exercise, row.version), []).append(row)
    rows, found, last = [], submissions(folder, known), time.monotonic()
    keys = {one: (named(one.student), named(one.exercise), one.version) for one in found}
    before = {key: own for key, own in before.items() if key in keys.values() and key[2]}
    new = [one for one in found if keys[one] not in before and not one.refused]
    judged = dict(zip(new, judge.all([partial(_notebook, one, folder, known) for one in new]), strict=True))
    try:
        for one in found:
            key, own = keys[one], []
            for row in before.get(key) or _rows(one, known, judged.get(one, ())):
                own.append(row)
                yield row
            again = any(row.points is None for row in own)
            rows += [row._replace(version="") for row in own] if again else own
            before.pop(key, None)
            if time.monotonic() > last + _EVERY:
                keep([*rows, *chain(*before.values())])
                last = time.monotonic()
    finally:
        keep([*rows, *chain(*before.values())])  # also what an interrupted command has not come to


def asked(submission: NotebookNode, release: NotebookNode) -> NotebookNode:
    """The submission with the release's checks in place of its own (the last, if it has several); others come last."""
    theirs = {cell.metadata.nbgrader.grade_id: cell for cell in release.cells if is_check(cell)}
    cells = []
    for cell in reversed(submission.cells):
        if grade_id(cell) in theirs:
            cell = theirs.pop(grade_id(cell))
        elif cell.get("cell_type") != "code" or not isinstance(cell.get("source"), str) or called(cell.source):
            continue  # also a check that nobody has asked for
        else:
            cell = nbformat.v4.new_code_cell(cell.source)
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=[*reversed(cells), *theirs.values()])


def _notebook(one: Submission, folder: Path, releases: dict[str, NotebookNode]) -> NotebookNode:
    """Returns the notebook that is judged. Raises ValueError where the file has changed."""
    refused, version, text = contents(folder, one.path)
    if refused or version != one.version:
        raise ValueError(f"the notebook has changed since the command began{refused and ': '}{refused}")
    submission = nbformat.reads(text.decode("utf-8-sig"), 4)
    return asked(submission, releases.get(one.exercise) or _closest(submission, releases.values()))


def _rows(one: Submission, releases: dict[str, NotebookNode], found_of_it: Iterable[apart.Judged]) -> Iterator[Row]:
    """Yields a submission's rows. If something ends it, a row says so, with the points that are lost or not given."""
    release, judged = releases.get(one.exercise), set()
    if one.refused:
        yield _none(one, release if one.costs else None, f"not read: {one.refused}")
        return
    try:
        for found in found_of_it:
            judged.add(found.grade_id)
            task, points = found.report.task, None if found.missed else found.points
            yield _row(one, task, points, found.worth, found.seconds, _failed(found.report))
    except (apart.Ended, apart.NotJudged) as error:
        theirs = (each for each in releases.values() if judged & {check.grade_id for check in checks(each)})
        row = _none(one, release or next(theirs, None), f"{error}", judged)
        yield row._replace(points=None) if isinstance(error, apart.NotJudged) else row


def _none(one: Submission, release: NotebookNode | None, why: str, but: Collection[str] = ()) -> Row:
    """Gives no points for all checks of the release, but for these; the sum shows what they are worth."""
    lost = sum(check.points for check in checks(release) if check.grade_id not in but) if release else 0.0
    return _row(one, "–", 0.0, lost, 0.0, _cut(why, _LONG))


def _row(one: Submission, task: str, points: float | None, out_of: float, seconds: float, failed: str) -> Row:
    failed = printable(no_column(f"'{failed}" if failed.startswith(FORMULA) else failed))
    return Row(named(one.student), named(one.exercise), printable(task), points, out_of, seconds, failed, one.version)


def _closest(submission: NotebookNode, releases: Iterable[NotebookNode]) -> NotebookNode:
    """The release that most of its checks are from, for a notebook that is not called like its exercise."""
    ids = {grade_id(cell) for cell in submission.cells}
    return max(releases, key=lambda release: len(ids & {check.grade_id for check in checks(release)}))


def _failed(report: Report) -> str:
    wrong = sorted((line for line in report.lines if not line.ok), key=lambda line: line.ok is None)
    if not wrong:
        return ""
    first = wrong[0]
    said = ": ".join(part for part in (first.what, first.found or first.hint) if part)
    return _cut(said, _LONG)


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 2]} …"


def shown(rows: Iterable[Row]) -> list[Row]:
    """Prints each row as soon as it is there, and the sum after a student's last one. Returns all rows."""
    found = []
    print(_line("student", "task", "points", "seconds", "what failed"))
    for student, own in groupby(rows, key=lambda row: row.student):
        kept = []
        for row in own:
            kept.append(row)
            print(_line(student, row.task, _points([row]), f"{row.seconds:.1f}", _cut(row.failed, _SHOWN)), flush=True)
        print(_line(student, "all", _points(kept), f"{sum(row.seconds for row in kept):.1f}", ""))
        found += kept
    return found


def _points(rows: list[Row]) -> str:
    """The sum; no number where a part of it is not known yet."""
    if any(row.points is None for row in rows):
        return NOT_JUDGED
    return f"{sum(row.points or 0.0 for row in rows):g} of {sum(row.out_of for row in rows):g}"


def _line(student: str, task: str, points: str, seconds: str, failed: str) -> str:
    student, failed = (" ".join(printable(words).split()) for words in (student, failed))  # no columns of a learner's making
    if len(student) > _WIDE:
        student = f"{student[: _WIDE - 17]}…{hashlib.sha256(student.encode()).hexdigest()[:16]}"  # none is found to fit
    return printable(f"{student:16} {task:22} {points:>12} {seconds:>8}  {failed}".rstrip())


def write(file: Path, rows: Iterable[Row]) -> None:
    """The rows as CSV, all of them at once: who interrupts the command finds a whole file."""
    unfinished = file.with_name(f"{file.name}.part")
    with unfinished.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, quoting=csv.QUOTE_ALL)  # for spreadsheets that part columns at other signs
        writer.writerow(Row._fields)
        writer.writerows(rows)
    os.replace(unfinished, file)


def read(file: Path) -> list[Row]:
    """The rows that an earlier time has written. Raises ValueError where the file is no such table."""
    with file.open(newline="", encoding="utf-8") as opened:
        head, *rows = csv.reader(opened) or [[]]
    if tuple(head) != Row._fields:
        raise ValueError(f"{file} isn't a table made by this command: give another name, or remove it")
    return [Row(*row[:3], float(row[3]) if row[3] else None, *map(float, row[4:6]), *row[6:]) for row in rows]


def main(arguments: list[str] | None = None) -> str | None:
    """Runs the command. It ends with status 2 where there is nothing to check, or no fences to check it behind.

    Returns what to say where this machine could not judge all submissions, or not all points found their place: then it ends
    with status 1.
    """
    parser = argparse.ArgumentParser("python -P -m manyranks.grade.classroom", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with the submissions")
    parser.add_argument("--released", type=Path, default=Path("exercises"), help="folder of the exercises (exercises)")
    parser.add_argument("--csv", type=Path, help="also write the rows there; what is there already is not judged again")
    parser.add_argument("--canvas", nargs=2, type=Path, metavar=("EXPORTED", "FILE"), help="make a file that Canvas imports")
    parser.add_argument("--gradescope", type=Path, metavar="FILE", help="results.json of one submission")
    parser.add_argument("--fewer-fences", action="store_true", help="judge as root, or where the system has no fences")
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a letter
    print(f"limits on learners' code here: {', '.join(apart.fences())}")
    solutions = chosen.released.resolve().parent / "solutions"
    if chosen.fewer_fences and (lacking := apart.lacks(solutions)):
        print(f"WITHOUT A FENCE: {lacking}, and learners' code could do harm here", file=sys.stderr)
    try:
        done = read(chosen.csv) if chosen.csv and chosen.csv.exists() else []
        if chosen.folder.resolve() in (here := Path.cwd(), *here.parents):
            raise ValueError(f"you are in {here}: start the command outside of the submissions, where no file is a student's")
        if chosen.folder.resolve() in (solutions, *solutions.parents):
            raise ValueError(f"{chosen.folder} holds {solutions}, whose code is run without fences: keep submissions apart")
        if place := confine.opened(chosen.folder):
            raise ValueError(f"ranks may read all of {place}, where Python is, and {chosen.folder} lies in it; move it")
        canvas = Canvas(chosen.canvas[0]) if chosen.canvas else None
        if chosen.gradescope:
            chosen.gradescope.unlink(missing_ok=True)
        print(f"right answers: {'made anew from' if solutions.is_dir() else 'from the library, for there is no'} {solutions}")
        with apart.Judge(chosen.fewer_fences, solutions) as judge:
            keep = partial(write, chosen.csv) if chosen.csv else len
            rows = shown(graded(chosen.folder, chosen.released, judge, done, keep))
        missed = len({(row.student, row.exercise) for row in rows if row.points is None})
        said = [f"{missed} of the submissions could not be judged: see why above, and run the command again"] if missed else []
        if canvas:
            said += canvas.write(chosen.canvas[1], rows, {path.stem for path in chosen.released.glob("*/*.ipynb")})
        if chosen.gradescope and (results := gradescope(rows)):
            chosen.gradescope.write_text(json.dumps(results), encoding="utf-8")
        elif chosen.gradescope:
            said.append(f"{chosen.gradescope} isn't written, so that nobody gets 0 points for what was not judged")
    except (ValueError, RuntimeError, OSError) as error:
        parser.exit(2, f"{error}\n")
    return "\n".join(said) or None


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # then, too, the folder of a submission is cleared away
        signal.signal(number, lambda *_: sys.exit(1))
    sys.exit(main())
