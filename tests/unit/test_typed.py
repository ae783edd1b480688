"""A type checker sees the library's names, which are loaded when they are first used, and their arguments."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """\
import manyranks as mr
from manyranks import parallel, theory

world = mr.World(3)
plan = theory.Plan(dp=3)
mr.Wrold(3)
theory.Plan(ddp=3)
parallel.Zero4
"""
CONFIG = """\
[mypy]
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,numpy.*,matplotlib.*,IPython.*,ipywidgets.*]
follow_imports = skip
"""


@pytest.mark.whole
def test_mypy_finds_a_misspelt_name_and_a_misspelt_argument(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--config-file", "mypy.ini", "script.py"]
    path = {"MYPYPATH": str(ROOT / "lib"), "PATH": ""}
    said = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=300).stdout
    assert [line.partition(": error: ")[2].partition("  [")[0] for line in said.splitlines()[:-1]] == [
        'Module has no attribute "Wrold"; maybe "World"?',
        'Unexpected keyword argument "ddp" for "Plan"; did you mean "dp"?',
        'Module has no attribute "Zero4"; maybe "Zero3"?',
    ]
