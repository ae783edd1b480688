"""Triton, interpreted where there is no GPU, and mended: kernels then run on a laptop, one program at a time, in numpy.

Import this before whatever else imports Triton: its own functions, such as tl.max, are interpreted or compiled
for good once it's imported. TRITON_INTERPRET=1 in the environment asks for the interpreter on a machine with a GPU, too.
"""

import copyreg
import linecache
import os
import sys
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
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle, _convert_float
except ModuleNotFoundError:
    system = (
        "" if sys.platform == "linux" else f". Triton doesn't exist for {sys.platform}; chapter 11 says what runs without it"
    )
    raise Missing(f"kernels need Triton: pip install triton{system}") from None

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED and not isinstance(tl.max, InterpretedFunction):
    raise ImportError(
        "Triton was imported before TRITON_INTERPRET was set: restart Python, and set TRITON_INTERPRET=1 or import "
        "manyranks.kernels before Triton; torch.compile, DDP and FSDP import it, too"
    )


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
GridExecutor.__call__ = np.errstate(all="ignore")(GridExecutor.__call__)  # a GPU doesn't warn of NaN either


def _travels(kernel: InterpretedFunction) -> tuple:
    """A kernel goes to a rank with the text of its file. The interpreter reads it to rewrite comparisons such as a < b < c;
    without it the kernel would run as it stands, and compute something else, silently.
    """
    file = kernel.fn.__code__.co_filename
    return _arrived, (kernel.fn, kernel.kwargs, file, "".join(linecache.getlines(file)))


def _arrived(function: FunctionType, options: dict[str, Any], file: str, text: str) -> InterpretedFunction:
    if text:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return InterpretedFunction(function, **options)


copyreg.pickle(InterpretedFunction, _travels)
