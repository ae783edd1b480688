"""The library as a wheel: all of it is in there, and it works where nothing else of the course is."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT

COURSE = (
    "matplotlib",
    "ipywidgets",
    "IPython",
    "ipykernel",
    "jupyterlab",
    "nbformat",
    "nbgrader",
    "nbclient",
    "playwright",
    "ray",
)
CORE = """
import sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.partition(".")[0] in {course} else super().find_spec(name, *rest)
sys.meta_path = [Finder if one is PathFinder else one for one in sys.meta_path]
import manyranks as mr
from manyranks import parallel, theory
from manyranks.parallel import ContextParallel, ExpertParallel, Mesh, Pipeline, Zero3, checkpoint_modules, parallelize
theory.planner.search(theory.models["llama3-8b"], theory.clusters["h100-dgx"], gpus=8)
import torch, torch.distributed as dist
def total():
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist()
with mr.World(2, backend="gloo") as world:
    print(world.run(total), world.measure(total).payload_bytes)
try:
    mr.show
except ImportError as error:
    print(error)
"""
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


def test_it_works_without_what_the_course_needs():
    own = os.environ | {"PYTHONPATH": str(ROOT / "lib")}
    command = [sys.executable, "-c", CORE.format(course=COURSE)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [
        "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]] {0: 12, 1: 12}",
        f"manyranks needs matplotlib and ipywidgets: {sys.executable} -m pip install matplotlib ipywidgets",
    ], done.stderr
