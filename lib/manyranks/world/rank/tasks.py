"""The notebook's own work on ranks, besides the reader's functions: %%ranks cells, and get and set of their variables."""

import ast
import inspect
import sys
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from manyranks.world.rank import shown

_LAST = "__value_of_the_last_line__"


def run_cell(source: str, name: str) -> None:
    """Runs a cell among this rank's variables; the value of a last expression is shown unless it is None.

    name: the file name that tracebacks give to the cell's lines.
    """
    variables = _variables()
    tree = ast.parse(source, name)
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):  # one piece, so that a debugger steps through it
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name(_LAST, ast.Store())], last.value), last)
    try:
        exec(compile(ast.fix_missing_locations(tree), name, "exec"), variables)
    finally:
        value = variables.pop(_LAST, None)
    if value is not None and not source.rstrip().endswith(";"):
        shown.last_value(value)


def time_cell(source: str, name: str) -> float:
    started = time.perf_counter()
    run_cell(source, name)
    return time.perf_counter() - started


def names(begun: str) -> list[str]:
    """The names that begin so: variables of this rank's cells, or what one has after a dot. None of their code is run."""
    above, dot, own = begun.rpartition(".")
    known, (first, *others) = vars(sys.modules["__main__"]), above.split(".")
    if dot:
        found = known.get(first)
        for name in others:
            found = inspect.getattr_static(found, name, None)
        classes = type.mro(found if isinstance(found, type) else type(found))
        known = dict.fromkeys(name for one in (found, *classes) for name in _own(one))
    hidden = () if own.startswith("__") else "__" if own.startswith("_") or not dot else "_"
    return [above + dot + name for name in known if name.startswith(own) and not name.startswith(hidden)]


def _own(value) -> Mapping[str, object]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def get_variable(name: str):
    """Raises NameError where the rank has no such variable."""
    variables = _variables()
    if name not in variables:
        raise NameError(f"no %%ranks cell has set {name!r}")
    return variables[name]


def set_variables(values: dict) -> None:
    _variables().update(values)


def _variables() -> dict:
    """The rank's __main__, with what every cell finds: its rank, the number of ranks, torch and torch.distributed.

    rank and world_size are set anew each time, for a loop of an earlier cell may have used the name.
    """
    variables = vars(sys.modules["__main__"])
    variables.update(rank=dist.get_rank(), world_size=dist.get_world_size())
    variables.setdefault("torch", torch)
    variables.setdefault("dist", dist)
    variables.setdefault("display", shown.display)
    return variables
