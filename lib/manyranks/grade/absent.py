"""A learner's function or class that is not here: its source travels to the ranks and becomes one there.

The process that judges never runs it. It knows only what a confined rank tells: its kind and its methods' names.
"""

import gc
import re
import sys
import warnings
from codeop import Compile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from manyranks.world import cells

_ran: set[tuple] = set()  # on a rank: the cells that have run among its variables
# of torch.distributed, what it knows of groups by name
_KEPT = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg", "_pg_to_tag")


@dataclass(frozen=True)
class Source:
    """The cells of a notebook up to a check, with the numbers that they have in it."""

    cells: tuple[tuple[int, str], ...]


class Known(NamedTuple):
    """The judge's knowledge of the learner's object.

    kind: "class", "function", "missing", or the name of another type; methods: the names of a class; error: of its cells
    """

    kind: str
    methods: tuple[str, ...] = ()
    error: str = ""


class _Kind(type):
    """The type of a class that stands for the learner's: as messages pack it, it becomes theirs."""

    def __travels__(self):
        return load, (self.__source__, self.__name__)


class _Function:
    def __init__(self, source: Source, name: str):
        self.__source__, self.__name__ = source, name

    def __travels__(self):
        return load, (self.__source__, self.__name__)

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} runs on ranks only: this process judges it")


def stand_in(source: Source, name: str, known: Known) -> Any:
    """Makes what a check takes in the place of the learner's object."""
    if known.kind == "class":
        named = (name for name in known.methods if name == "__init__" or not name.startswith("__"))
        return _Kind(name, (), {**dict.fromkeys(named), "__source__": source})
    return _Function(source, name)


def load(source: Source, name: str) -> Any:
    """Returns, on a rank, the learner's object. The cells run once, as in a notebook: one that raises does not stop the next.

    Raises NameError where no cell defines it.
    """
    variables = vars(sys.modules["__main__"])
    for known, value in {"display": _display, "In": [""], "Out": {}, "_": ""}.items():
        variables.setdefault(known, value)
    errors = {} if source.cells in _ran else _run(source, variables)
    _ran.add(source.cells)
    if name not in variables:
        its = re.compile(rf"^(async +)?(def|class) +{name}\b|^{name} *[:=]", re.MULTILINE)
        why = [errors[number] for number, text in source.cells if number in errors and its.search(text)] or [*errors.values()]
        raise NameError(f"name {name!r} is not defined" + (f": {why[0]}" if why else ""))
    return variables[name]


def known(source: Source, name: str) -> Known:
    """Returns, on a rank, what the judge is told of the learner's object."""
    try:
        found = load(source, name)
    except NameError as error:
        return Known("missing", error=f"{error}"[:300])
    methods = tuple(str(key) for key in vars(found))[:100] if isclass(found) else ()
    kind = "class" if isclass(found) else "function" if callable(found) else type(found).__name__
    return Known(str(kind)[:60], methods)


def _display(*objects, **_) -> None:
    """Prints what Jupyter's function would show, where there are only words."""
    print(*objects, sep="\n")


@contextmanager
def _modes_of_their_own() -> Iterator[None]:
    """Inside, cells may set torch's modes; an answer finds them as they were, for in a notebook a kernel's reach no rank."""
    dtype, threads, recursion = torch.get_default_dtype(), torch.get_num_threads(), sys.getrecursionlimit()
    with torch.enable_grad(), warnings.catch_warnings():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_default_device(None)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
            torch.set_num_threads(threads)
            sys.setrecursionlimit(recursion)
            gc.enable()


@contextmanager
def without_a_group() -> Iterator[None]:
    """Hides the rank's process group while cells run that were written for a notebook, which has none.

    Groups that are made meanwhile are destroyed, as the end of a notebook does it.
    """
    kept, world = {name: getattr(c10d, name) for name in _KEPT}, vars(c10d._world).copy()
    _put_back({name: type(value)() for name, value in kept.items()}, vars(c10d._World()))
    try:
        yield
    finally:
        with suppress(Exception):  # there may be none
            dist.destroy_process_group()
        _put_back(kept, world)


def _put_back(kept: dict, world: dict) -> None:
    c10d._unregister_all_process_groups()
    vars(c10d).update(kept)
    vars(c10d._world).update(world)
    c10d._update_default_pg(c10d._world.default_pg)
    for group, name in c10d._pg_names.items():
        c10d._register_process_group(name, group)


@without_a_group()
@_modes_of_their_own()
def _run(source: Source, variables: dict) -> dict[int, str]:
    errors, compiled = {}, Compile()  # with what earlier cells have imported from __future__, as in a notebook
    compiled.flags = 0  # codeop's own, for which half a cell is no error but one to wait for
    for number, text in source.cells:
        name = f"<cell {number}>"
        cells.remember(name, text)
        try:
            exec(compiled(text, name, "exec"), variables)
        except BaseException as error:  # also sys.exit(), or an interrupt: a notebook goes on
            errors[number] = f"cell {number} raised {type(error).__name__}: {error}"
    return errors
