"""Submissions that nobody wrote: solutions, untouched releases, and notebooks of mistakes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import nbformat

from manyranks.grade.answers import MISTAKE
from tests.conftest import ROOT
from tests.grading import records
from tests.grading.course import answered

NAME = "01_collectives"


def submissions(number: int) -> Iterator[tuple[str, nbformat.NotebookNode]]:
    """(student, notebook): in turn a solution, the release, and one with a mistake in each task."""
    solution, release = (nbformat.read(ROOT / kind / NAME / f"{NAME}.ipynb", 4) for kind in ("solutions", "exercises"))
    for k in range(number):
        kind = ("right", "empty", "wrong")[k % 3]
        yield f"{k:02}_{kind}", {"right": solution, "empty": release}.get(kind) or _wrong(release, k // 3)


def write(folder: Path, number: int) -> None:
    """As nbgrader collects them."""
    for student, notebook in submissions(number):
        path = folder / student / NAME / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(notebook, path)


def _wrong(release: nbformat.NotebookNode, k: int) -> nbformat.NotebookNode:
    """The k-th mistake of each task."""
    source, answers = _source(ROOT / "solutions" / NAME / "mistakes.py"), {}
    for task in records.tasks(NAME):
        own = [answer for answer in records.answers_of(NAME) if answer.task == task and answer.kind == MISTAKE]
        answers[task] = f"{source}\n{task} = {own[k % len(own)].name}"
    return answered(release, answers)


def _source(file: Path) -> str:
    """The file's definitions as a learner would have written them in a cell: without decorators and what is ours."""
    tree = ast.parse(file.read_text())
    ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "manyranks.grade.answers"]
    kept = [node for node in tree.body if node not in ours]
    for node in kept:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
    return ast.unparse(ast.Module(kept, []))
