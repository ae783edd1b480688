"""python -m tests.grading.counts: how large the graders are, and how many files one opens to follow a check."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

GRADE, GIVEN = (ROOT / "lib" / "manyranks" / name for name in ("grade", "given"))


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


@cache
def modules() -> dict[str, Path]:
    """Name in the package -> file."""
    return {".".join(file.relative_to(GRADE).with_suffix("").parts): file for file in sorted(GRADE.rglob("*.py"))}


def exercises() -> dict[str, Path]:
    """The modules whose tasks belong to an exercise."""
    return {name: file for name, file in modules().items() if re.search(r"^\w+ = (Task|_\w+)\(", file.read_text(), re.M)}


@cache
def imported(file: Path) -> set[str]:
    """The package's modules that a file imports, wherever it does, also for types only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyranks.grade"):
            inside = node.module.removeprefix("manyranks.grade").removeprefix(".")
            for alias in node.names:
                name = f"{inside}.{alias.name}".strip(".")
                found.add(name if name in modules() else inside)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("manyranks.grade.") for alias in node.names if "manyranks.grade." in alias.name}
    return found - {""}


@cache
def closure(name: str) -> set[str]:
    """The modules that this one leads to."""
    found, rest = set(), [name]
    while rest:
        if (module := rest.pop()) not in found and module in modules():
            found.add(module)
            rest += imported(modules()[module])
    return found


def opened(name: str) -> set[str]:
    """The files one opens to follow a check of this module, beside what its exercise hands out (`given`)."""
    return closure(name) - (set(exercises()) - {name})


def circles() -> list[str]:
    """Modules that import themselves by way of others."""
    reach = {name: set().union(*(closure(other) for other in imported(file))) for name, file in modules().items()}
    return [name for name, others in reach.items() if name in others]


def figures() -> dict[str, int]:
    """The figures that the plan for the graders limits. Sizes are per exercise, so that there is room for more."""
    number = len({_exercise(file) for file in exercises().values()})
    tests = [*(ROOT / "tests" / "grading").rglob("*.py"), *(ROOT / "solutions").glob("*/mistakes.py")]
    return {
        "lines in grade/ and given/, per exercise": lines([*modules().values(), *GIVEN.glob("*.py")]) // number,
        "lines of the longest exercise": max(lines([file]) for file in exercises().values()),
        "lines in tests/grading/ and solutions/*/mistakes.py, per exercise": lines(tests) // number,
        "files to follow a check": max(len(opened(name)) for name in exercises()),
        "circles": len(circles()),
        "imports for types only": sum("TYPE_CHECKING" in file.read_text() for file in modules().values()),
    }


def main() -> None:
    for what, number in figures().items():
        print(f"{number:8,} {what}")
    for name, file in exercises().items():
        mistakes = next((ROOT / "solutions").glob(f"{_exercise(file)}/mistakes.py"), None)
        print(f"{lines([file]):8,} {name}, {len(opened(name))} files, mistakes {lines([mistakes]) if mistakes else 0:,}")


def _exercise(file: Path) -> str:
    found = re.search(r'"(\d\d_\w+)"', file.read_text())
    return found[1] if found else "none"


if __name__ == "__main__":
    main()
