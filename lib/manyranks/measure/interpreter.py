"""Triton, interpreted where there is no GPU, and mended: kernels then run on a laptop, one program at a time, in numpy.

TRITON_INTERPRET=1 in the environment asks for the interpreter on a machine with a GPU, too.
"""

import ast
import copyreg
import linecache
import os
import sys
from functools import cache, partialmethod
from types import FunctionType
from typing import Any

import torch

from manyranks.lazy import Missing

if "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
try:
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import (
        ASTTransformer,
        GridExecutor,
        InterpretedFunction,
        InterpreterBuilder,
        TensorHandle,
        _convert_float,
        _get_np_dtype,
    )
    from triton.runtime.jit import JITFunction
except ModuleNotFoundError:
    system = (
        "" if sys.platform == "linux" else f". Triton doesn't exist for {sys.platform}; chapter 11 says what runs without it"
    )
    raise Missing(f"kernels need Triton: pip install triton{system}") from None

INTERPRETED = bool(triton.knobs.runtime.interpret)


def _decorate_again() -> None:
    """Interprets what was decorated before TRITON_INTERPRET was set: Triton's own functions, such as tl.max, and a reader's.

    DDP, FSDP and torch.compile import Triton, and triton.jit decides when it decorates.
    """
    interpreted = cache(triton.jit)  # one for each function, wherever it's named: the interpreter compares them by identity
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is JITFunction:
                setattr(module, name, interpreted(value.fn))
    for name, value in list(vars(tl.tensor).items()):
        if type(value) is JITFunction:
            setattr(tl.tensor, name, partialmethod(interpreted(value.fn)))  # x.sum()


if INTERPRETED and type(tl.max) is JITFunction:
    _decorate_again()


def _widened(operand: TensorHandle) -> TensorHandle:
    """A tile of bfloat16 as float32."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle(_convert_float(operand.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def _mend(multiply):
    """The interpreter keeps bfloat16 in numpy's uint16, and tl.dot would multiply the bit patterns: wrong, and silently."""

    def create_dot(self, a, b, *rest):
        return multiply(self, _widened(a), _widened(b), *rest)

    return create_dot


InterpreterBuilder.create_dot = _mend(InterpreterBuilder.create_dot)


def _undefined(load):
    """Gives masked lanes NaN where a load has no `other`: what they get is undefined, and the interpreter's 0 would hide it."""

    def create_masked_load(self, pointers, mask, other, *rest):
        dtype = pointers.get_element_ty()
        if other is None and dtype.is_floating() and dtype.primitive_bitwidth > 8:
            nan = 0x7FC0 if dtype == tl.bfloat16 else np.nan  # bfloat16 is kept as its bits
            other = TensorHandle(np.full(pointers.data.shape, nan, _get_np_dtype(dtype)), dtype)
        return load(self, pointers, mask, other, *rest)

    return create_masked_load


def _aside(shift):
    """Shifts a copy: the interpreter changes the argument itself, which the next program gets."""

    def create_ashr(self, number, by):
        return shift(self, TensorHandle(number.data.copy(), number.dtype), by)

    return create_ashr


InterpreterBuilder.create_ashr = _aside(InterpreterBuilder.create_ashr)
InterpreterBuilder.create_masked_load = _undefined(InterpreterBuilder.create_masked_load)
GridExecutor.__call__ = np.errstate(all="ignore")(GridExecutor.__call__)  # a GPU doesn't warn of NaN either


def _one_by_one(self, function: ast.FunctionDef) -> ast.FunctionDef:
    """Refuses a < b < c, as the compiler does before Triton 3.9. The interpreter made it b < c: a tile counts as true."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise ValueError(f"{ast.unparse(node)}: Triton {triton.__version__} needs two comparisons, (a < b) & (b < c)")
    return self.generic_visit(function)


if not hasattr(ASTTransformer, "visit_Compare"):
    ASTTransformer.visit_FunctionDef = _one_by_one


def _annotated(rewrite):
    """The rewritten function has its annotations as text, and only "tl.constexpr" is known as that."""

    def rewritten(self):
        function = rewrite(self)
        function.__annotations__ = self.fn.__annotations__
        return function

    return rewritten


InterpretedFunction.rewrite = _annotated(InterpretedFunction.rewrite)


def _travels(kernel: InterpretedFunction) -> tuple:
    """A kernel goes to a rank with the text of its file. The interpreter reads it to rewrite assignments, and from
    Triton 3.9 on comparisons such as a < b < c. Without it the kernel would run as it stands, and compute something else.
    """
    file = kernel.fn.__code__.co_filename
    return _arrived, (kernel.fn, kernel.kwargs, file, "".join(linecache.getlines(file)))


def _arrived(function: FunctionType, options: dict[str, Any], file: str, text: str) -> InterpretedFunction:
    if text:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return InterpretedFunction(function, **options)


copyreg.pickle(InterpretedFunction, _travels)
