"""A course in a folder, graded by nbgrader with the project's own nbgrader_config.py."""

import copy
import csv
import os
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from traitlets.config import PyFileConfigLoader
from traitlets.utils.importstring import import_item

from tests.conftest import ROOT


class Course:
    """solutions/<name>/<name>.ipynb below `root`, released; then submissions, one a student."""

    def __init__(self, root: Path, name: str, solution, seconds: int | None = None):
        os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]  # for alembic
        self.root, self.name = root, name
        config = PyFileConfigLoader("nbgrader_config.py", str(ROOT)).load_config()
        config.CourseDirectory.root = str(root)
        config.CourseDirectory.db_url = f"sqlite:///{root / 'gradebook.db'}"
        config.JudgeApart.fewer_fences = True  # the tests may run as root
        config.ExecutePreprocessor.timeout = seconds or config.ExecutePreprocessor.timeout
        self.config, self.api = config, NbGraderAPI(config=config)
        self._told: set[str] = set()  # students who have the feedback on what they submitted last
        self._write("solutions", solution)
        self._do(self.api.generate_assignment(name, force=True, create=True))

    @property
    def release(self) -> nbformat.NotebookNode:
        """A copy of what learners get."""
        return nbformat.read(self._path("exercises"), 4)

    def submit(self, student: str, notebook) -> dict[str, float]:
        """Submits and autogrades; returns the points by test cell."""
        self._write(f"submitted/{student}", notebook)
        self._told.discard(student)
        result = self.api.autograde(self.name, student)
        self.log = result.get("log")
        self._do(result)
        return self.points(student)

    def points(self, student: str) -> dict[str, float]:
        """By test cell, as the gradebook has them."""
        with Gradebook(self.config.CourseDirectory.db_url, "manyranks") as book:
            notebook = book.find_submission_notebook(self.name, self.name, student)
            return {grade.cell.name: grade.score for grade in notebook.grades}

    def feedback(self, student: str) -> str:
        """The HTML that the student gets; it takes nbgrader a second, so it's made for who reads it."""
        if student not in self._told:
            self._do(self.api.generate_feedback(self.name, student))
            self._told.add(student)
        return (self.root / "feedback" / student / self.name / f"{self.name}.html").read_text()

    def errors(self, student: str) -> list[str]:
        """The names of the errors in the student's notebook, as it was executed."""
        cells = nbformat.read(self._path(f"autograded/{student}"), 4).cells
        return [output.ename for cell in cells for output in cell.get("outputs", []) if output.output_type == "error"]

    def export(self) -> dict[str, float | None]:
        """Student -> score, from nbgrader's CSV; None where it has none."""
        to = self.root / "grades.csv"
        with Gradebook(self.config.CourseDirectory.db_url, "manyranks") as book:
            import_item(self.config.ExportApp.plugin_class)(to=str(to)).export(book)
        rows = csv.DictReader(to.read_text().splitlines())
        return {row["student_id"]: float(row["score"]) if row["score"] else None for row in rows}

    def _path(self, folder: str) -> Path:
        return self.root / folder / self.name / f"{self.name}.ipynb"

    def _write(self, folder: str, notebook) -> None:
        self._path(folder).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, self._path(folder))

    def _do(self, result: dict) -> None:
        if not result["success"]:
            raise RuntimeError(result.get("log") or result.get("error"))


def graded(**kind) -> dict:
    """The metadata of a cell that nbgrader knows. kind: grade_id, solution, grade, points, locked."""
    settings = {"schema_version": 3, "grade": False, "solution": False, "locked": False, "task": False}
    return {"nbgrader": settings | kind}


def answered(release, answers: dict[str, str]) -> nbformat.NotebookNode:
    """The release with other sources in the cells of these grade_ids."""
    notebook = copy.deepcopy(release)
    for cell in notebook.cells:
        cell.source = answers.get(cell.metadata.nbgrader.grade_id, cell.source)
    return notebook


def small(test: str = "double(2) / 2") -> nbformat.NotebookNode:
    """An exercise without ranks: one task of 2 points, then another of 1 point whose test always gives its point."""
    task = "def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION"
    cells = [
        new_code_cell(task, metadata=graded(grade_id="double", solution=True)),
        new_code_cell(test, metadata=graded(grade_id="check_double", grade=True, locked=True, points=2)),
        new_markdown_cell("## The rest", metadata=graded(grade_id="text_rest", locked=True)),
        new_code_cell("1.0", metadata=graded(grade_id="check_rest", grade=True, locked=True, points=1)),
    ]
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
