"""A type checker sees the library's names, which are loaded when they are first used, and their arguments."""

import re
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


@pytest.mark.whole
def test_mypy_finds_a_misspelt_name_and_a_misspelt_argument_and_nothing_in_the_readme(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "readme.py").write_text("".join(readme), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--config-file",
        str(ROOT / "pyproject.toml"),
    ]
    command += ["script.py", "readme.py"]
    said = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=300).stdout
    assert [line.partition(": error: ")[2].partition("  [")[0] for line in said.splitlines()[:-1]] == [
        'Module has no attribute "Wrold"; maybe "World"?',
        'Unexpected keyword argument "ddp" for "Plan"; did you mean "dp"?',
        'Module has no attribute "Zero4"; maybe "Zero3"?',
    ]
