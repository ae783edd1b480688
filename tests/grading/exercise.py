"""The code of an exercise, as learners get it and as it is solved."""

from pathlib import Path

import nbformat

from manyranks.world import cells
from tests.conftest import ROOT


class Exercise:
    """exercises/<name>/<name>.ipynb and solutions/<name>/<name>.ipynb."""

    def __init__(self, name: str):
        self._path = Path(name) / f"{name}.ipynb"

    def definitions(self, folder: str) -> dict:
        """All that its cells define, without the checks."""
        names = {"__name__": "__main__"}
        for cell in self._cells(folder):
            file = f"<{folder}/{self._path.stem}/{cell.metadata.nbgrader.grade_id}>"
            cells.remember(file, cell.source)  # as a notebook does: Triton's interpreter reads a kernel's source
            exec(compile(cell.source, file, "exec"), names)
        return names

    def source(self, folder: str, grade_id: str) -> str:
        """That of one cell."""
        return next(cell.source for cell in self._cells(folder) if cell.metadata.nbgrader.grade_id == grade_id)

    def _cells(self, folder: str) -> list:
        if not (file := ROOT / folder / self._path).exists():
            made = "; `python -m tests.grading.release` makes it" if folder == "exercises" else ""
            raise ValueError(f"{file} is missing{made}")
        notebook = nbformat.read(file, 4)
        return [cell for cell in notebook.cells if cell.cell_type == "code" and not cell.metadata.nbgrader.grade]
