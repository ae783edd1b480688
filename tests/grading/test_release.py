"""exercises/ is what nbgrader makes of solutions/, and nothing else."""

import filecmp

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.conftest import ROOT
from tests.grading.course import graded
from tests.grading.release import assignments, release

pytestmark = pytest.mark.usefixtures("asked_once")
COLUMNS = 92
TASK = "def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION"


def test_a_release_has_the_stub_in_place_of_the_answer(tmp_path):
    notebook = new_notebook(
        cells=[
            new_code_cell(TASK, metadata=graded(grade_id="double", solution=True)),
            new_code_cell("assert double(2) == 4", metadata=graded(grade_id="test_double", grade=True, locked=True, points=1)),
        ]
    )
    folder = tmp_path / "solutions" / "99_double"
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "99_double.ipynb")
    assert release(tmp_path, tmp_path / "exercises") == ["99_double"]
    released = nbformat.read(tmp_path / "exercises" / "99_double" / "99_double.ipynb", 4)
    assert "return 2 * x" not in released.cells[0].source
    assert "raise NotImplementedError  # your code here" in released.cells[0].source
    assert released.cells[1].source == "assert double(2) == 4"


def test_exercises_are_those_of_solutions():
    released = sorted(path.parent.name for path in (ROOT / "exercises").glob("*/*.ipynb"))
    assert released == assignments(ROOT)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """All exercises, released once."""
    target = tmp_path_factory.mktemp("released")
    release(ROOT, target)
    return target


@pytest.mark.parametrize("name", assignments(ROOT))
def test_the_exercise_is_what_its_solution_releases(name, released):
    file = f"{name}/{name}.ipynb"
    assert filecmp.cmp(released / file, ROOT / "exercises" / file, shallow=False)


@pytest.mark.parametrize("name", assignments(ROOT))
def test_no_line_of_code_is_wider_than_a_notebook_shows(name):
    cells = nbformat.read(ROOT / "solutions" / name / f"{name}.ipynb", 4).cells
    lines = [line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_learners_get_the_notebooks_and_no_answers(released):
    for folder in (released, ROOT / "exercises"):
        assert list(folder.rglob("*.py")) == []


@pytest.mark.parametrize("name", assignments(ROOT))
def test_a_solution_has_short_cells_and_a_check_after_each_task(name):
    cells = nbformat.read(ROOT / "solutions" / name / f"{name}.ipynb", 4).cells
    assert max(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code") <= 70  # the answer to a whole class
    kinds = [cell.metadata.nbgrader for cell in cells]
    for task, following, cell in zip(kinds, kinds[1:], cells[1:], strict=False):
        if task.solution:
            assert (following.grade, following.grade_id) == (True, f"check_{task.grade_id}")
            assert cell.source.endswith(f"{task.grade_id.lower()}({task.grade_id}).show()")


@pytest.mark.parametrize("name", assignments(ROOT))
def test_an_exercise_has_cells_that_fit_a_screen(name):
    cells = nbformat.read(ROOT / "exercises" / name / f"{name}.ipynb", 4).cells
    assert max(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code") <= 25


@pytest.mark.parametrize("name", assignments(ROOT))
def test_a_solution_is_stored_without_outputs_and_machine(name):
    notebook = nbformat.read(ROOT / "solutions" / name / f"{name}.ipynb", 4)
    assert notebook.metadata == nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", 4).metadata
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
