"""A learner's notebook as text: its cells, and the checks among them. Nothing of it is run."""

import ast
import re
from typing import NamedTuple

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from manyranks.grade.absent import Source

_MAGIC = re.compile(r"""get_ipython\(\)\.\w+\((?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|, )*\)""")


class Check(NamedTuple):
    """A cell such as grade.zero.shard(shard).show(). grade_id: nbgrader's; points: it is worth; call: ("zero", "shard");
    name: of the learner's object; source: of all cells before it that are no checks; index: of the cell."""

    grade_id: str
    points: float
    call: tuple[str, ...]
    name: str
    source: Source
    index: int


def checks(notebook: NotebookNode) -> list[Check]:
    """The notebook's checks, in their order."""
    found, before = [], []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if is_check(cell):
            call, name = called(cell.source)
            settings = cell.metadata.nbgrader
            source = Source(tuple(before))
            found.append(Check(settings.grade_id, float(settings.points), call, name, source, index))
        else:
            before.append((len(before) + len(found) + 1, _python(cell.source)))
    return found


def is_check(cell: NotebookNode) -> bool:
    """Returns whether the cell is worth points and asks a grader of this library for them."""
    settings = cell.metadata.get("nbgrader", {})
    return bool(settings.get("grade")) and not settings.get("solution") and called(cell.source) is not None


def grade_id(cell: NotebookNode) -> str:
    """nbgrader's name of a cell that a learner may have changed; empty where it has none."""
    settings = cell.metadata.get("nbgrader", {})
    name = settings.get("grade_id") if isinstance(settings, dict) else ""
    return name if isinstance(name, str) else ""


def called(source: str) -> tuple[tuple[str, ...], str] | None:
    """Finds what a check asks for: (("zero", "shard"), "shard") of "grade.zero.shard(shard).show()"; None for other text."""
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of what is nested too deep
        return None
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(function, [ast.Name(name)], []), "show"), [], [])):
            path = ast.unparse(function).split(".")
            return (tuple(path[1:]), name) if path[0] == "grade" and len(path) > 1 else None
    return None


def _python(source: str) -> str:
    """Takes out magics, which no rank has; lines keep their places. A cell whose magic doesn't run it is left empty."""
    first, _, rest = source.lstrip().partition("\n")
    if first.startswith("%%"):
        if first[2:].partition(" ")[0].strip() not in ("time", "timeit", "capture"):
            return ""
        source = f"# {first}\n{rest}"
    try:
        return _MAGIC.sub("None", TransformerManager().transform_cell(source))
    except Exception:  # what is no Python is no magic either
        return source
