"""`pytest --nbval a_notebook.ipynb`, typed in any folder, on a slow machine, by somebody who has used the course before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.conftest import ROOT

# A bar that is shown at once stands for a start that takes long. The number of the cell is another one than what is stored.
SLOW = """from manyranks import progress_bar, settings

progress_bar.DELAY = progress_bar.EVERY = 0
with progress_bar.bar("importing torch for the ranks") as bar:
    bar.step()
print(settings.read("scenario"), "cell 1, line 7")"""
SAID = "{} cell 9, line 7\n"


@pytest.fixture
def course(tmp_path) -> Path:
    """A course with one notebook, at its root and among the labs."""
    course = tmp_path / "the course"
    course.mkdir()
    for name in ("conftest.py", "pyproject.toml", "tests"):
        (course / name).symlink_to(ROOT / name)
    cell = new_code_cell(SLOW, execution_count=1, outputs=[new_output("stream", text=SAID)])
    for folder in (course, course / "notebooks" / "lab"):
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=[cell]), folder / "slow.ipynb")
    return course


@pytest.mark.parametrize(
    "typed", [("the course", "slow.ipynb"), (".", "the course/notebooks/lab/slow.ipynb")], ids=["in", "above"]
)
def test_a_notebook_gives_what_is_stored_whoever_runs_it_wherever(typed, course, tmp_path):
    folder, notebook = typed
    kept = tmp_path / "jupyter" / "manyranks_scenario.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"dp": 8}))
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MANYRANKS_"))}
    ran = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "--nbval", notebook],
        cwd=tmp_path / folder,
        env=mine | {"JUPYTER_CONFIG_DIR": str(kept.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
