"""The project's files agree with each other, and none of them knows the machine it was written on."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(text) for text in (*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra))]
REQUIREMENTS = [requirement for requirement in REQUIREMENTS if requirement.name != PROJECT["name"]]  # other extras of its own

FILES = (
    *("README.md", "LICENSE", "CHANGELOG.md", "CLASSROOM.md", "CLUSTERS.md", "CONTRIBUTING.md", "Makefile"),
    *("pyproject.toml", "environment.yml", "nbgrader_config.py", ".ci/run", "CITATION.cff", "Dockerfile"),
    *("SECURITY.md", "CODE_OF_CONDUCT.md"),
)
FOLDERS = (
    *("notebooks", "solutions", "exercises", "lib/manyranks", "benchmarks"),
    *("tests/unit", "tests/ranks", "tests/notebooks", "tests/grading", "tests/browser", "tests/cluster", "docs"),
)
# In pieces, so that this file is not found by its own test. A path begins after something that is no part of a name.
PATHS = [rf"(?<![\w.-])/{folder}" for folder in ("work" + "/", "root" + "/", "tmp/" + "ipykernel")]
HOSTS = [r"\.".join(parts) for parts in (("pypi", "org"), ("files", "pythonhosted", "org"), ("download", "pytorch", "org"))]


@pytest.fixture(scope="module")
def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


@pytest.fixture(scope="module")
def pinned() -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    assert len({canonicalize_name(r.name) for r in requirements}) == len(requirements), "a package is pinned twice"
    return {canonicalize_name(r.name): r for r in requirements}


@pytest.fixture(scope="module")
def tracked() -> dict[str, str]:
    """Path -> content of the files that git tracks; bytes that are no text stay out of the way."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    paths = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    return {name: (ROOT / name).read_bytes().decode("latin-1") for name in paths}


def test_the_environment_has_the_project_s_name(environment):
    assert environment["name"] == PROJECT["name"]


def test_conda_s_packages_are_the_project_s_and_pip_brings_the_rest(environment, pinned):
    *conda, sections = environment["dependencies"]
    named = {requirement.name: requirement.specifier for requirement in map(Requirement, conda)}
    assert {"python", "pip", "jupyterlab", "matplotlib", "ipywidgets", "nbval"} <= named.keys()
    assert all(
        version in SpecifierSet(PROJECT["requires-python"]) for version in named["python"].filter(["3.11", "3.12", "3.13"])
    )
    asked = {requirement.name: requirement.specifier for requirement in REQUIREMENTS}
    assert {name: spec for name, spec in named.items() if name not in ("python", "pip") and asked[name] != spec} == {}
    assert sections == {"pip": [str(pinned["torch"]), "--editable .[test]"]}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_dependency_is_pinned_to_a_version_that_the_project_allows(requirement, pinned):
    name = canonicalize_name(requirement.name)
    assert name in pinned
    assert requirement.specifier.contains(exact_version(pinned[name]))


def test_every_constraint_is_one_exact_version(pinned):
    assert [str(r) for r in pinned.values() if exact_version(r) is None] == []


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name):
    path = ROOT / name
    assert path.is_file()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_holds_files(name):
    found = (p for p in (ROOT / name).rglob("*") if not any(part.startswith((".", "__pycache__")) for part in p.parts[-2:]))
    assert any(path.is_file() and path.stat().st_size > 0 for path in found)


def test_continuous_integration_runs_make_test():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert re.findall(r"^(?:make|python3) .*$", run.read_text(), re.MULTILINE) == [
        "python3 .ci/bare_install.py",
        "make pyodide",
        "make types",
        "make test",
        "make labs",
        "make site-test",
    ]


def test_the_test_extra_has_what_the_configuration_of_pytest_needs():
    names = {canonicalize_name(Requirement(text).name) for text in EXTRAS["test"]}
    assert {"pytest", "pytest-timeout", "nbval", "hypothesis", "ruff"} <= names


@pytest.mark.parametrize("pattern", PATHS, ids=["work", "root", "kernel"])
def test_no_tracked_file_contains_a_path_of_the_machine_it_was_written_on(tracked, pattern):
    assert [name for name, content in tracked.items() if re.search(pattern, content)] == []


@pytest.mark.parametrize("pattern", HOSTS)
def test_no_tracked_file_names_the_host_of_a_package_registry(tracked, pattern):
    assert [name for name, content in tracked.items() if re.search(pattern, content, re.IGNORECASE)] == []


def exact_version(requirement: Requirement) -> Version | None:
    (*others, only) = requirement.specifier
    return Version(only.version) if not others and only.operator == "==" and "*" not in only.version else None


def test_the_workflow_runs_what_the_readme_says_on_each_python_and_system():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    pythons = job["strategy"]["matrix"]["python"]
    assert [version in SpecifierSet(PROJECT["requires-python"]) for version in pythons] == [True] * len(pythons)
    assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / "README.md").read_text()
    assert {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos"}
    assert job["steps"][-1]["run"].startswith("make test ")


def test_the_workflow_runs_every_notebook():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    steps = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = re.findall(r"\bmake ([a-z-]+)", steps)
    said = subprocess.run(
        ["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    ran = {word for line in said.splitlines() if "pytest" in line for word in line.split()}
    there = {
        str(path.relative_to(ROOT)) for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    }
    assert there - ran == {"notebooks/glossary.ipynb"}  # it has no code
    assert "conda env create --file environment.yml" in steps


PAGES = sorted(ROOT.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_links_to_nothing_that_is_not_there(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_gallery_has_every_explorer():
    from tests.browser.lab import EXPLORERS

    shown = re.findall(r'src="docs/gallery/(\w+).png"', (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(EXPLORERS)


def test_a_checkout_is_not_large(tracked):
    """A clone is this and what git has of the past: 29 MB in all when this was written, with 15 of them here."""
    assert sum(map(len, tracked.values())) < 20e6


def test_the_citation_names_this_version(tracked):
    citation = yaml.safe_load(tracked["CITATION.cff"])
    assert citation["version"] == re.search(r'__version__ = "(.+)"', tracked["lib/manyranks/__init__.py"])[1]
    assert (citation["license"], citation["type"]) == (PROJECT["license"], "software")


def test_the_container_installs_what_make_lab_does_and_starts_it(tracked):
    steps = tracked["Dockerfile"]
    assert 'RUN UV_NO_CACHE=1 make "${VENV}/.installed"\nCMD ["make", "lab", "LAB=' in steps
    assert "lab: $(VENV)/.installed " in tracked["Makefile"]
    assert json.loads(tracked[".devcontainer/devcontainer.json"])["build"] == {"dockerfile": "../Dockerfile", "context": ".."}


def test_the_lab_serves_the_whole_course(tracked):
    """Chapters link to exercises, and JupyterLab shows nothing outside its server's folder."""
    assert '"$(CURDIR)/docs/jupyter" $(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir="$(CURDIR)" ' in tracked["Makefile"]
    assert 'JUPYTER_CONFIG_PATH=docs/jupyter jupyter lab --ServerApp.root_dir="$PWD" ' in tracked["README.md"]
