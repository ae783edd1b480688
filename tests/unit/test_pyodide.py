"""Theory runs in a browser: its own tests pass in Pyodide, where Python has 32-bit addresses, one thread and no torch or numpy.

Node stands in for the browser. `make pyodide` gets Pyodide.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.unit.test_floors import ALSO, MODULES

PYODIDE = Path(sys.prefix, "node_modules", "pyodide")
LIGHT = {*sys.stdlib_module_names, "pytest", "hypothesis"} - {"subprocess"}  # a browser starts no processes
NUMPY = {name for name, needs in ALSO.items() if "numpy" in needs}
THEORY = [name.removesuffix(".__init__") for name in MODULES if name.startswith("manyranks.theory") and name not in NUMPY]
# Hypothesis needs a compiled part that Pyodide's core lacks: what it would draw is skipped there.
CODE = """
import importlib, os, sys
from unittest.mock import MagicMock
os.chdir("/course")
sys.path += ["/course", "/course/lib", "/packages"]
for name in {modules}:
    if not name.endswith("__main__"):
        importlib.import_module(name)
import pytest
hypothesis = MagicMock()
hypothesis.given = lambda *_, **__: pytest.mark.skip(reason="draws with Hypothesis")
hypothesis.settings = hypothesis.example = lambda *_, **__: lambda test: test
sys.modules |= {{"hypothesis": hypothesis, "hypothesis.strategies": hypothesis.strategies}}
alone = ["-c", os.devnull, "--rootdir", "/course", "--noconftest", "-p", "no:cacheprovider", "--tb=short", "-q"]
int(pytest.main([*alone, "-m", "not whole", *{files}]))
"""


def is_light(path: Path) -> bool:
    """Says whether a test's file, with what it takes from others, needs pytest and theory without numpy, and no more."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name for name in found if name.partition(".")[0] not in LIGHT]
    theirs = [ROOT / f"{name.replace('.', '/')}.py" for name in ours if name.startswith("tests.")]
    known = [name for name in ours if name.startswith(("manyranks.theory", "manyranks.timeline"))]
    known = [name for name in known if not NUMPY & {name, name.rpartition(".")[0]}]
    return bool(known) and len(known) + len(theirs) == len(ours) and all(each.exists() and is_light(each) for each in theirs)


@pytest.mark.timeout(900)  # Python in Node takes its time on a busy machine
@pytest.mark.parametrize("least", [pytest.param(200, id="some"), pytest.param(1000, id="all", marks=pytest.mark.whole)])
def test_theory_s_own_tests_pass_in_pyodide(least):
    node = shutil.which("node")
    if not node or not PYODIDE.exists():
        why = f"needs Node on the PATH, and Pyodide in {PYODIDE}: run `make pyodide`"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/unit").glob("test_*.py")) if is_light(path)]
    some = [f"tests/unit/test_{name}.py" for name in ("step", "planner", "sharding_theory", "traffic")]
    assert {*some} <= {*files}
    files = files if least == 1000 else some
    code, packages = CODE.format(modules=THEORY, files=files), Path(pytest.__file__).parents[1]
    command = [node, Path(__file__).with_name("pyodide.mjs"), PYODIDE, code, f"/course={ROOT}", f"/packages={packages}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > least
