"""The code of an exercise, as learners get it and as it is solved."""

from collections.abc import Collection
from pathlib import Path

import nbformat

from manyranks import grade
from manyranks.world import cells
from tests.conftest import ROOT


class Exercise:
    """exercises/<name>/<name>.ipynb and solutions/<name>/<name>.ipynb.

    classes: the tasks that ask for a class. An answer to another may be a class too: one that is called like a function.
    module: of the checks, where it is not called like the exercise.
    """

    def __init__(self, name: str, classes: Collection[str] = (), module: str = ""):
        self._path, self._classes = Path(name) / f"{name}.ipynb", classes
        self._module = module or name[len("00_") :]

    def definitions(self, folder: str, only: set[str] | None = None) -> dict:
        """What its cells define, without the checks. only: the tasks whose cells are the folder's, the others are unwritten."""
        names = {"__name__": "__main__"}
        for cell in self._cells(folder):
            marks = cell.metadata.nbgrader
            unwritten = only is not None and marks.solution and marks.grade_id not in only
            source = self.source("exercises", marks.grade_id) if unwritten else cell.source
            file = f"<{folder}/{self._path.stem}/{marks.grade_id}>"
            cells.remember(file, source)  # as a notebook does: Triton's interpreter reads a kernel's source
            exec(compile(source, file, "exec"), names)
        return names

    def check(self, task: str, answer) -> grade.Report:
        """What the notebook's check of this task says of an answer."""
        called = isinstance(answer, type) and task not in self._classes
        checks = getattr(grade, self._module)
        return getattr(checks, task.lower())(answer() if called else answer)

    def source(self, folder: str, grade_id: str) -> str:
        """That of one cell."""
        return next(cell.source for cell in self._cells(folder) if cell.metadata.nbgrader.grade_id == grade_id)

    def _cells(self, folder: str) -> list:
        if not (file := ROOT / folder / self._path).exists():
            made = "; `python -m tests.grading.release` makes it" if folder == "exercises" else ""
            raise ValueError(f"{file} is missing{made}")
        notebook = nbformat.read(file, 4)
        return [cell for cell in notebook.cells if cell.cell_type == "code" and not cell.metadata.nbgrader.grade]
