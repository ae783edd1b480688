"""The library as a wheel: all of it is in there, and it works where nothing else of the course is."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT

WORKS = """
import manyranks as mr
from manyranks import show, theory
assert mr.__file__.startswith({folder!r}), mr.__file__
assert theory.published.rows("accelerators")
show.curves([1, 2], {{"a": [1, 2]}}, "x", "y")
import torch, torch.distributed as dist
def total():
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist(), mr.__file__
with mr.World(2, backend="gloo") as world:
    print(world.run(total))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from copies: other tests use the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "lib", source / "lib", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        target,
        source,
    ]
    subprocess.run(build, check=True, timeout=200, capture_output=True)
    (made,) = target.iterdir()
    return zipfile.ZipFile(made)


def test_it_has_every_file_of_the_library(wheel):
    library = ROOT / "lib"
    there = {str(path.relative_to(library)) for path in (library / "manyranks").rglob("*.*") if path.is_file()}
    there = {name for name in there if not re.search(r"__pycache__|/\.|ruff\.toml$", name)}  # tools leave hidden folders
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == there


def test_it_works_alone(wheel, tmp_path):
    wheel.extractall(folder := str(tmp_path / "installed"))
    own = os.environ | {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORKS.format(folder=folder)], env=own, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 2.0, 2.0]") == 2, done.stdout + done.stderr
    assert done.stdout.count(folder) == 2
