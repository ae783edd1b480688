"""Triton kernels as data: what was launched, with its arguments, and the same launches again somewhere else.

A kernel is its source and what it calls. Its arguments are numbers, words, and tensors, each a place in one of a few memories.
So launches can be told in plain data, and be run again where nothing else of the program is: what they compute and move then
is what these kernels do, whatever else the program has done.
"""

import ast
import inspect
import linecache
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from manyranks.measure.audit import audited
from manyranks.measure.interpreter import GridExecutor, InterpretedFunction, tl, triton
from manyranks.measure.journal import Stopped
from manyranks.measure.kernel import Counted, count

_MODULES = {"tl": tl, "triton": triton, "math": math}
_BUILTINS = {"range": range, "min": min, "max": max, "float": float, "int": int, "abs": abs, "print": print, "len": len}
_BUILTINS |= {"bool": bool, "str": str}
_NODES = "Module arguments arg Assign AugAssign AnnAssign For While If Pass Break Continue Return Expr Call keyword"
_NODES += (
    " Name Attribute Subscript Slice Tuple List Constant BinOp UnaryOp Compare BoolOp IfExp JoinedStr FormattedValue Assert"
)
_SIGNS = ast.operator | ast.unaryop | ast.cmpop | ast.boolop | ast.expr_context
# Public names only: another one, str_to_ty, evaluates text.
_OF_TRITON = {name for name in tl.__all__ if f"{getattr(vars(tl)[name], '__module__', '')}".startswith("triton.")}
_OF = {"tl": _OF_TRITON | {"math"}, "triton": {"cdiv", "next_power_of_2"}, "math": {*dir(math)}}  # what leads nowhere else
_CLASSES = [one for one in vars(tl).values() if isinstance(one, type)]
_OF_VALUES = {name for one in _CLASSES for name in dir(one) if not isinstance(getattr(one, name, 0), list)}  # shared
_OF_VALUES |= {*vars(tl.math)} - {"core", "wraps"}
_OF_VALUES |= {"type", "dtype", "shape", "numel", "value", "name", "scalar", "element_ty", "primitive_bitwidth"}
_OWN = "a kernel uses its arguments, tl, numbers that are defined above it, and kernels of its own"
_MOST = 200  # launches
_MAKE_CODE = "<frozen importlib", "/dataclasses.py", "/collections/__init__.py", "/triton/runtime/"  # parts of files' names


class Launches:
    """A record of what is launched.

    inputs: the tensors that the launcher is given, in their order
    """

    def __init__(self, inputs: list[Tensor]):
        self._storages = [one.untyped_storage() for one in inputs]
        self._memories: list[list] = []  # of those that came later: bytes, dtype, and what they were filled with
        self._kernels: dict[FunctionType, int] = {}
        self._sources: list[list] = []  # name, text, and what its global names are
        self._launches: list[list] = []

    def place(self, tensor: Tensor) -> list:
        """A tensor as data: memory, dtype, offset, shape and strides."""
        storage = tensor.untyped_storage()
        known = [i for i, one in enumerate(self._storages) if one.data_ptr() == storage.data_ptr()]
        if not known:
            self._storages.append(storage)
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            first = whole[0].item() if len(whole) else 0
            if not (whole == first).all() and not (first != first and whole.isnan().all()):
                raise Stopped("a kernel is given a tensor that torch has filled with different numbers", _OWN)
            self._memories.append([len(whole), _name_of(tensor.dtype), first])
            known = [len(self._storages) - 1]
        return [known[0], _name_of(tensor.dtype), tensor.storage_offset(), [*tensor.shape], [*tensor.stride()]]

    def fill(self, tensor: Tensor, value: float) -> None:
        """Notes that torch fills a tensor that a kernel may have used."""
        self._launches.append([-1, [], {"tensor": ["tensor", self.place(tensor)], "value": ["value", value]}])

    def launch(self, kernel: InterpretedFunction, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        if len(self._launches) >= _MOST:
            raise Stopped(f"more than {_MOST} kernels were started", "a kernel has many programs: give it a grid")
        told = {
            name: ["tensor", self.place(value)] if isinstance(value, Tensor) else self._told(value, f"the argument {name}")
            for name, value in arguments.items()
        }
        self._launches.append([self._number(kernel), [int(one) for one in grid], told])

    def told(self) -> dict:
        return {"memories": self._memories, "sources": self._sources, "launches": self._launches}

    def _told(self, value: Any, what: str) -> list:
        """Turns a value into data, but neither a tensor nor a module, through which a kernel could do anything."""
        if isinstance(value, tl.constexpr):
            return ["constexpr", self._told(value.value, what)]
        if isinstance(value, tl.dtype):
            return ["dtype", str(value)]
        if isinstance(value, InterpretedFunction):
            return ["kernel", self._number(value)]
        if isinstance(value, torch.dtype):
            return ["torch", _name_of(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return ["value", value]
        raise Stopped(f"{what} is a {type(value).__name__}", _OWN)

    def _number(self, kernel: InterpretedFunction) -> int:
        function = kernel.fn
        if function not in self._kernels:
            self._kernels[function] = len(self._sources)
            self._sources.append(source := [function.__name__, "", {}])
            source[1] = textwrap.dedent(inspect.getsource(function))
            tree = ast.parse(source[1])
            if any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
                return self._kernels[function]  # one that is not written yet says so when it runs
            known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
            names = {id(one): name for name, one in _MODULES.items()}
            modules = {name: names.get(id(one), "") for name, one in known.items() if isinstance(one, ModuleType)}
            for name in _checked(tree, modules) - _BUILTINS.keys():
                what = f"{name}, in {function.__name__},"
                source[2][name] = ["module", modules[name]] if name in modules else self._told(known.get(name), what)
        return self._kernels[function]


@contextmanager
def noted(inputs: list[Tensor]) -> Iterator[Launches]:
    """Inside, each launch is noted, and runs."""
    launches, run = Launches(inputs), InterpretedFunction.run

    def note(kernel, *args, grid, warmup=False, **kwargs):
        own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **own)
        bound.apply_defaults()
        grid = grid(dict(bound.arguments)) if callable(grid) else grid
        launches.launch(kernel, grid, dict(bound.arguments))
        before = sys.getprofile()
        sys.setprofile(None)  # the interpreter calls a thousand functions, and what counts is what the source does elsewhere
        try:
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            sys.setprofile(before)

    with patch.object(InterpretedFunction, "run", note):
        yield launches


def relaunch(told: dict, inputs: list[Tensor], results: list[list]) -> Counted:
    """Runs the launches again, with these inputs. results: places of the tensors that come out.

    Returns these tensors, and what the kernels have moved. Raises ValueError for what is no such data.
    """
    storages = [one.untyped_storage() for one in inputs]
    for length, dtype, first in told["memories"]:
        storages.append(torch.full((length,), first, dtype=_dtype_of(dtype)).untyped_storage())
    kernels: list[InterpretedFunction] = []

    def meant(value: list) -> Any:
        kind, its = value
        own: dict[str, Callable] = {"constexpr": lambda: tl.constexpr(meant(its)), "dtype": lambda: tl.dtype(its)}
        own |= {"kernel": lambda: kernels[its], "torch": lambda: _dtype_of(its), "tensor": lambda: None}  # `at` makes these
        if kind not in own and not (its is None or isinstance(its, bool | int | float | str)):  # programs could share it
            raise Stopped(f"an argument is a {type(its).__name__}", _OWN)
        return own.get(kind, lambda: its)()

    def at(place: list) -> Tensor:
        memory, dtype, offset, shape, stride = place
        return torch.empty(0, dtype=_dtype_of(dtype)).set_(storages[memory], offset, tuple(shape), tuple(stride))

    def launch(kernel: InterpretedFunction, grid: list[int], arguments: dict[str, list]) -> None:
        tensors = {name: at(its) for name, (kind, its) in arguments.items() if kind == "tensor"}
        if found := tensors.keys() & {*GridExecutor(kernel.rewrite(), kernel.arg_names, ()).constexprs}:
            raise Stopped(f"{min(found)} is a tensor, and the kernel has it as a tl.constexpr", _OWN)
        kernel[tuple(grid)](**{name: meant(value) for name, value in arguments.items()} | tensors)

    for i, source in enumerate(told["sources"]):
        kernels.append(_compiled(*source, i))
    for kernel, (_, _, used) in zip(kernels, told["sources"], strict=True):
        kernel.fn.__globals__.update({name: meant(value) for name, value in used.items() if value[0] != "module"})

    def run() -> list[Tensor]:
        for number, grid, arguments in told["launches"][:_MOST]:
            if number < 0:
                at(arguments["tensor"][1]).fill_(float(arguments["value"][1]))
            else:
                launch(kernels[number], grid, arguments)
        return [at(place) for place in results]

    with computes_only():
        return count(run)


@contextmanager
def computes_only() -> Iterator[None]:
    """Inside, Stopped is raised where text becomes code, as in str_to_ty of Triton's language.

    Triton's interpreter may compile kernels, of a source that was checked, and Python may import and make classes.
    """

    def hear(event: str, _: tuple) -> None:
        if event == "exec":
            file = sys._getframe(2).f_code.co_filename  # past the hook that tells
            if not any(part in file for part in _MAKE_CODE):
                raise Stopped("a kernel runs text as code", _OWN)

    with audited(hear):
        yield


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r:.40} is no dtype")
    return found


def _compiled(name: str, text: str, used: dict[str, list], number: int) -> InterpretedFunction:
    """A kernel of this source, which can do nothing but compute."""
    tree, file = ast.parse(text), f"<kernel {number}>"
    if found := [alias for alias in used if alias.startswith("__")]:
        raise Stopped(f"{name} uses {found[0]}", _OWN)
    modules = {alias: its for alias, (kind, its) in used.items() if kind == "module"}
    _checked(tree, modules)  # which takes its decorators away
    text = ast.unparse(tree)  # Python 3.11.2 writes some f-strings as other code: what runs is checked, too
    if found := _checked(ast.parse(text), modules) - used.keys() - _BUILTINS.keys():
        raise Stopped(f"{name} uses {min(found)}", _OWN)
    if sum(line.strip().startswith("def ") for line in text.splitlines()) > 1:  # Triton runs the last one, also of a string
        raise Stopped(f"{name} uses a line of text that begins with def", _OWN)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": "kernel"}
    names |= {alias: _MODULES[its] for alias, its in modules.items()}
    exec(compile(text, file, "exec"), names)
    return InterpretedFunction(names[name])


def _checked(tree: ast.Module, modules: dict[str, str]) -> set[str]:
    """The names that a kernel uses and does not define. Raises Stopped where it does more than compute.

    modules: what is known as a module, and which one it is; it stands in front of a dot and nowhere else.
    """
    if len(tree.body) != 1 or not isinstance(kernel := tree.body[0], ast.FunctionDef):
        raise Stopped("a kernel is no function", _OWN)
    kernel.decorator_list = []
    nodes = [one for one in ast.walk(tree) if one is not kernel]
    names, dots = ([one for one in nodes if isinstance(one, kind)] for kind in (ast.Name, ast.Attribute))
    own = {kernel.name} | {one.arg for one in nodes if isinstance(one, ast.arg)}
    own |= {one.id for one in names if not isinstance(one.ctx, ast.Load)}
    head = {one.id for one in ast.walk(kernel.args) if isinstance(one, ast.Name)}  # outside, where nothing is its own
    allowed = _NODES.split()
    other = [type(one).__name__ for one in nodes if type(one).__name__ not in allowed and not isinstance(one, _SIGNS)]
    plain = (ast.arguments, ast.arg, ast.Constant, ast.Name, ast.Attribute, ast.USub, ast.UnaryOp, ast.Load)
    heads = [*ast.walk(kernel.args), *(ast.walk(kernel.returns) if kernel.returns else ())]  # run where nothing is counted
    other += [f"{ast.unparse(one)} in its head" for one in heads if not isinstance(one, plain)]
    based = {id(one.value) for one in dots}
    alone = [one.id for one in names if one.id in modules and (id(one) not in based or one.id in own)]
    led = [one.id for one in names if one.id.startswith("__")]
    for one in dots:
        module = modules.get(one.value.id) if isinstance(one.value, ast.Name) else None
        known = _OF_VALUES if module is None else _OF.get(module, ())
        if one.attr not in known or one.attr.startswith("_") or not isinstance(one.ctx, ast.Load):
            led.append(ast.unparse(one))
    if found := [*other, *alone, *led]:
        raise Stopped(f"{kernel.name} uses {found[0]}", _OWN)
    return ({one.id for one in names} - own) | head
