"""Submissions that nobody wrote: solutions, untouched releases, and notebooks of wrong answers from the zoo."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat

from tests.conftest import ROOT
from tests.grading.course import answered
from tests.grading.zoo import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, wrong

NAME = "01_collectives"
ZOOS = (broadcast, all_gather, reduce_scatter, all_reduce, all_to_all)


def submissions(number: int) -> Iterator[tuple[str, nbformat.NotebookNode]]:
    """(student, notebook): in turn a solution, the release, and one with a wrong answer to each task."""
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
    """The k-th mistake of each zoo."""
    answers = {}
    for zoo in ZOOS:
        one = zoo.ZOO[k % len(zoo.ZOO)]
        answers[one.task] = f"{_source(wrong)}\n{_source(zoo)}\n{one.task} = {one.function.__name__}"
    return answered(release, answers)


def _source(module: ModuleType) -> str:
    """What the module defines, as a learner would have written it in a cell: without its decorators and what is ours."""
    tree = ast.parse(inspect.getsource(module))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)]
    kept = [node for node in kept if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"))]
    for node in kept:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
    return ast.unparse(ast.Module(kept, []))
