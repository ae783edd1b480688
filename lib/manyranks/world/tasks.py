"""What the kernel runs on ranks besides the reader's functions: %%ranks cells, and get and set of their variables."""

import ast
import builtins

import torch
import torch.distributed as dist

_variables: dict = {"__name__": "__main__", "__builtins__": builtins}


def run_cell(source: str, name: str) -> None:
    """Runs a cell among this rank's variables; the value of a last expression is printed unless it is None.

    name: the file name that tracebacks give to the cell's lines.
    """
    _offer()
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), _variables)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), _variables)
        if value is not None:
            print(repr(value))


def get_variable(name: str):
    """Raises NameError where the rank has no such variable."""
    _offer()
    if name not in _variables:
        raise NameError(f"no %%ranks cell has set {name!r}")
    return _variables[name]


def set_variables(values: dict) -> None:
    _offer()
    _variables.update(values)


def _offer() -> None:
    """What every cell finds: its rank, the number of ranks, torch and torch.distributed."""
    _variables.update(rank=dist.get_rank(), world_size=dist.get_world_size())  # anew, for a loop may have used the name
    _variables.setdefault("torch", torch)
    _variables.setdefault("dist", dist)
