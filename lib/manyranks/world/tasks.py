"""What the kernel runs on ranks besides the reader's functions: %%ranks cells, and get and set of their variables."""

import ast
import sys
import time

import torch
import torch.distributed as dist

from manyranks.world import shown


def run_cell(source: str, name: str) -> None:
    """Runs a cell among this rank's variables; the value of a last expression is shown unless it is None.

    name: the file name that tracebacks give to the cell's lines.
    """
    variables = _variables()
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), variables)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
        if value is not None and not source.rstrip().endswith(";"):
            shown.last_value(value)


def time_cell(source: str, name: str) -> float:
    """As run_cell; returns the seconds that it took."""
    started = time.perf_counter()
    run_cell(source, name)
    return time.perf_counter() - started


def names(begun: str) -> list[str]:
    """The names that begin so: variables of this rank's cells, or after a dot what such a variable has."""
    above, dot, own = begun.rpartition(".")
    if not dot:
        return [name for name in _variables() if name.startswith(own) and not name.startswith("__")]
    found = _variables().get(above.split(".")[0])
    for part in above.split(".")[1:]:
        found = getattr(found, part, None)
    hidden = () if own.startswith("_") else ("_",)
    return [f"{above}.{name}" for name in dir(found) if name.startswith(own) and not name.startswith(hidden)]


def get_variable(name: str):
    """Raises NameError where the rank has no such variable."""
    variables = _variables()
    if name not in variables:
        raise NameError(f"no %%ranks cell has set {name!r}")
    return variables[name]


def set_variables(values: dict) -> None:
    """Sets variables of this rank's cells."""
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
