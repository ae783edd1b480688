"""The library's floors: which package imports which, what importing one brings in, and how long files and functions are."""

import ast
import re
import statistics
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import manyranks as mr

LIB, TESTS = Path(__file__).parents[2] / "lib", Path(__file__).parents[1]
FLOOR = {
    "lazy": -1,
    "settings": -1,
    "progress_bar": -1,
    "older_pytorch": -1,
    "scores": 0,
    "timeline": 0,
    "report": 1,
    "theory": 1,
    "measure": 1,
    "world": 2,
    "lesson": 3,
    "calibrate": 3,
    "parallel": 3,
    "kernels": 3,
    "training": 4,
    "given": 4,
    "show": 5,
    "few_ranks": 5,
    "grade": 5,
}
MAY_IMPORT = {
    "lazy": (),
    "settings": (),
    "progress_bar": (),
    "older_pytorch": (),
    "scores": ("settings",),
    "report": ("scores",),
    "timeline": (),
    "theory": ("lazy", "progress_bar", "timeline"),
    "measure": ("lazy", "timeline"),
    "world": ("lazy", "progress_bar", "timeline", "theory", "measure"),
    "lesson": ("measure", "world"),
    "calibrate": ("measure", "theory", "world"),
    "parallel": ("lazy", "older_pytorch", "timeline"),
    "kernels": ("lazy", "measure"),
    "training": ("lazy", "parallel", "measure", "theory", "world"),
    "given": ("lazy", "timeline", "theory", "measure", "world", "parallel"),
    "show": ("lazy", "settings", "timeline", "theory", "measure", "parallel.pipeline"),
    "few_ranks": ("lazy", "timeline", "theory", "measure", "world", "parallel", "kernels", "training"),
    "grade": (
        "lazy",
        "progress_bar",
        "scores",
        "report",
        "timeline",
        "theory",
        "measure",
        "world",
        "parallel",
        "kernels",
        "training",
        "given",
    ),
}
# What a package may take from outside the standard library, where that is limited.
OUTSIDE = {"lazy": set(), "timeline": set(), "theory": set(), "measure": {"torch"}, "parallel": {"torch"}}
OUTSIDE["kernels"] = {"torch", "triton"}
ALSO = {  # modules that take more than their package: those of the theory compute with arrays
    "manyranks.theory.optimal_checkpoints": {"numpy"},
    "manyranks.theory.equal_checkpoints": {"numpy"},
    "manyranks.measure.kernel": {"numpy"},
    "manyranks.measure.interpreter": {"numpy", "triton", "manyranks.lazy.Missing"}
    | {f"triton.runtime.interpreter.{name}" for name in ("GridExecutor", "InterpretedFunction", "InterpreterBuilder")}
    | {f"triton.runtime.interpreter.{name}" for name in ("ASTTransformer", "TensorHandle", "_convert_float", "_get_np_dtype")}
    | {"triton.language", "triton.runtime.jit.JITFunction"},
}
MODULES = {".".join(p.relative_to(LIB).with_suffix("").parts): p for p in sorted((LIB / "manyranks").rglob("*.py"))}
LAZY = ("theory", "measure", "world", "parallel", "training", "given", "show", "few_ranks", "grade")
ROOMS = (
    "errors",
    "limits",
    "cells",
    "fences",
    "rank",
    "processes",
    "counted",
    "faults",
    "strangers",
    "notebook",
    "collect",
    "world",
    "magic",
)
LONGEST_FILE, LONGEST_MEDIAN = 500, 15
# Underscored names that are nevertheless public: IPython's, namedtuples', and os._exit.
PROTOCOLS = {"_repr_html_", "_repr_png_", "_repr_mimebundle_", "_ipython_display_", "_replace", "_asdict", "_fields", "_exit"}


def test_a_package_may_import_only_from_the_floors_below_it():
    for package, allowed in MAY_IMPORT.items():
        assert all(FLOOR[name.partition(".")[0]] < FLOOR[package] for name in allowed), package


def test_contributing_draws_this_house():
    picture = (LIB.parent / "CONTRIBUTING.md").read_text().partition("```text\n")[2].partition("```")[0]
    drawn, package = {}, ""
    for line in picture.splitlines()[1:-1]:  # below the heading; the last line has those that import nothing
        package = line[7:18].strip() or package
        drawn[package] = drawn.get(package, "") + line[58:].partition(";")[0] + ","
    known = {package: {*drawn[package].replace(" ", "").split(",")} - {"", "nothing"} for package in drawn}
    assert known == {package: {*allowed} - {"lazy"} for package, allowed in MAY_IMPORT.items() if package in known}
    assert MAY_IMPORT.keys() - known.keys() == {*picture.splitlines()[-1][7:58].replace(",", "").split()}


def test_every_module_belongs_to_a_package_that_has_a_floor():
    packages = {module.split(".")[1] for module in MODULES if module != "manyranks.__init__"}
    assert packages <= FLOOR.keys()


@pytest.mark.parametrize("module", [name for name in MODULES if name != "manyranks.__init__"])
def test_module_keeps_to_its_floor(module):
    found = set(forbidden_imports(module, MODULES[module].read_text()))
    assert found <= ALSO.get(module, set())


def test_a_room_of_world_takes_from_those_before_it_only():
    modules = {
        name.removesuffix(".__init__"): (name, path) for name, path in MODULES.items() if name.startswith("manyranks.world")
    }
    places = {name: ROOMS.index(name.split(".")[2]) for name in modules if name != "manyranks.world"}
    for name, place in places.items():
        taken = neighbors(modules[name][0], modules[name][1].read_text(), modules) - {"manyranks.world"}
        assert all(places[other] <= place for other in taken), name


def test_the_map_of_world_shows_its_rooms_from_the_top():
    page = ast.get_docstring(ast.parse(MODULES["manyranks.world.__init__"].read_text()))
    assert re.findall(r"^    (\w+)  ", page, re.MULTILINE) == [*reversed(ROOMS)]


def test_no_import_leads_back_to_where_it_began():
    modules = {name.removesuffix(".__init__"): (name, path) for name, path in MODULES.items()}
    taken = {module: neighbors(name, path.read_text(), modules) for module, (name, path) in modules.items()}
    assert circle(taken) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d", "a"}, "d": set()}) == ["a", "b", "c", "a"]
    inside = neighbors("manyranks.theory.step", "def f():\n    from manyranks.theory.published import rows, steps", modules)
    assert inside == {"manyranks.theory.published", "manyranks.theory.published.steps"}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("manyranks.timeline.spans", "import numpy as np", ["numpy"]),
        ("manyranks.timeline.spans", "def f():\n    from torch import Tensor", ["torch.Tensor"]),
        ("manyranks.theory.step", "if TYPE_CHECKING:\n    import numpy", ["numpy"]),
        ("manyranks.theory.step", "from manyranks.measure.calls import Call", ["manyranks.measure.calls.Call"]),
        ("manyranks.theory.step", "from manyranks import measure", ["manyranks.measure"]),
        ("manyranks.theory.step", "from ..world import errors", ["manyranks.world.errors"]),
        ("manyranks.theory.__init__", "from .. import world", ["manyranks.world"]),
        ("manyranks.theory.step", "import_module('manyranks.world.errors')", ["manyranks.world.errors"]),
        ("manyranks.theory.step", "importlib.import_module(f'manyranks.world.{name}')", ["manyranks.world"]),
        ("manyranks.parallel.zero", "import manyranks as mr", ["manyranks"]),
        ("manyranks.parallel.zero", "import ipywidgets, torch", ["ipywidgets"]),
        ("manyranks.show.plots", "from manyranks.parallel import mesh", ["manyranks.parallel.mesh"]),
        ("manyranks.show.plots", "from manyranks.parallel.pipeline import schedules", []),
        ("manyranks.theory.step", "import json\nfrom manyranks.timeline import Span\nfrom . import collectives", []),
        ("manyranks.grade.zero", "from manyranks import show, training", ["manyranks.show"]),
    ],
)
def test_the_check_sees_imports_in_every_form(module, source, found):
    assert forbidden_imports(module, source) == found


def test_theory_and_timeline_bring_in_no_heavy_package():
    loaded = modules_after(
        "import manyranks.theory, manyranks.timeline\n"
        "assert manyranks.theory.collectives.sent_bytes('all_reduce', 8, 4, 4) == [48] * 4"
    )
    assert loaded.isdisjoint({"torch", "numpy", "matplotlib"})
    assert "manyranks.theory.collectives" in loaded


def test_a_public_name_of_the_theory_stays_what_it_is_once_modules_are_loaded():
    from manyranks import theory

    first = {name: getattr(theory, name) for name in theory.__all__}
    assert {name: getattr(theory, name) for name in theory.__all__} == first
    assert theory.models["llama3-405b"].layers == 126
    assert theory.clusters["h100-dgx"].node == 8


def test_importing_manyranks_brings_in_none_of_its_packages():
    loaded = modules_after("import manyranks")
    assert sorted(name for name in loaded if name.startswith("manyranks.")) == ["manyranks.lazy"]
    assert loaded.isdisjoint({"torch", "numpy", "matplotlib"})


@pytest.mark.parametrize("name", [*LAZY, "timeline"])
def test_public_package_resolves(name):
    package = getattr(mr, name)
    assert package is import_module(f"manyranks.{name}")
    assert package.__file__, "a folder without __init__.py"


@pytest.mark.parametrize("name", ["World", "WorldError", "RankFailed", "RankDied", "RankHung"])
def test_public_class_resolves(name):
    assert getattr(mr, name).__name__ == name
    assert name in dir(mr)


def test_every_failure_of_a_rank_is_a_world_error():
    assert all(issubclass(error, mr.WorldError) for error in (mr.RankFailed, mr.RankDied, mr.RankHung))


PACKAGES = ["manyranks", *(f"manyranks.{name}" for name in LAZY)]
# Each package in a process of its own that has imported nothing of ours; what others wrote, and takes long, is imported once.
EACH_FRESH = """
import os, sys, traceback, warnings
from importlib import import_module
warnings.simplefilter("ignore")
import ipywidgets, matplotlib.figure, torch
for package in sys.argv[1:]:
    if child := os.fork():
        print(package, os.waitpid(child, 0)[1])
        continue
    try:
        module = import_module(package)
        first, again = ([getattr(module, name) for name in module.__all__] for _ in range(2))
        assert first and all(a is b for a, b in zip(first, again, strict=True)), "another object the second time"
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def exit_codes():
    done = subprocess.run(
        [sys.executable, "-c", EACH_FRESH, *PACKAGES], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return {package: (code, done.stderr) for package, code in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves_in_a_fresh_interpreter_and_again(package, exit_codes):
    assert exit_codes[package][0] == "0", exit_codes[package][1]


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Wrold'"):
        _ = import_module(package).Wrold


def test_every_file_is_short():
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: count for module, count in lines.items() if count > LONGEST_FILE} == {}


def test_no_test_of_show_looks_behind_its_public_names():
    paths = [path for path in sorted(TESTS.rglob("*.py")) if "grading" not in path.relative_to(TESTS).parts]
    found = {str(path.relative_to(TESTS)): behind(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
    assert behind("from manyranks.show.zero import _lanes, Stages\nStages()._held\nsetattr(Stages, '_sent', 1)") == [
        "_held",
        "_lanes",
        "_sent",
    ]


def test_the_median_function_is_short():
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert statistics.median(f.end_lineno - f.lineno + 1 for f in functions) < LONGEST_MEDIAN


def forbidden_imports(module: str, source: str) -> list[str]:
    """Lists what the module imports against the table, wherever in the file the import stands."""
    package = module.split(".")[1]
    return [name for name in imported(module, source) if not allowed(package, name)]


def behind(source: str) -> list[str]:
    """The private names that a test takes from others, if it is one of manyranks.show."""
    names = imported("tests", source) if "show" in source else []
    if not any(f"{name}.".startswith("manyranks.show.") for name in names):
        return []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Call) and called(node) in ("getattr", "setattr", "delattr"):
            names += map(leading_text, node.args)
    last = {name.rpartition(".")[2] for name in names} - PROTOCOLS
    return sorted(name for name in last if name.startswith("_") and not name.startswith("__"))


def allowed(package: str, name: str) -> bool:
    first, _, rest = name.partition(".")
    if first == "manyranks":
        return rest == "__version__" or any(f"{rest}.".startswith(f"{a}.") for a in (package, *MAY_IMPORT[package]))
    return first in sys.stdlib_module_names or package not in OUTSIDE or first in OUTSIDE[package]


def imported(module: str, source: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = [*above, node.module] if node.module else above
            names += [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and called(node) in ("import_module", "__import__"):
            names += [text] if (text := leading_text(node.args[0])) else []
    return names


def neighbors(module: str, source: str, modules: dict[str, tuple]) -> set[str]:
    """The library's modules that this one imports, wherever in the file: a name that is none is its package's."""
    names = (name if name in modules else name.rpartition(".")[0] for name in imported(module, source))
    return {name for name in names if name in modules} - {module.removesuffix(".__init__")}


def circle(taken: dict[str, set[str]]) -> list[str]:
    """The first way along imports that comes back to a module on it; empty where there is none."""
    done: set[str] = set()

    def follow(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        found = [] if module in done else next(filter(None, (follow(n, [*way, module]) for n in sorted(taken[module]))), [])
        done.add(module)
        return found

    return next(filter(None, (follow(module, []) for module in sorted(taken))), [])


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def leading_text(node: ast.expr) -> str:
    """The constant that a string, or an f-string, begins with."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return f"{first.value}".rstrip(".") if isinstance(first, ast.Constant) else ""


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that has run the code."""
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["torch", "numpy", "cloudpickle"])
def test_a_package_that_is_missing_is_one_clear_line(package, tmp_path):
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec; "
        f"importlib.util.find_spec = lambda name, *a: None if name == {package!r} else found(name, *a); "
        "import runpy; runpy.run_module('manyranks.grade.classroom', run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr == f"manyranks needs {package}: {sys.executable} -m pip install {package}\n"
