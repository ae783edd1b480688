"""Exercise 11_kernels is given this: Triton, a tile with bank conflicts, cases, and what watches torch around kernels.

`from manyranks.given.kernels import tl, triton` works without Triton, too: kernels can be defined then, but not started.
"""

import os
import sys
from collections.abc import Callable
from functools import partialmethod
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyranks.given import numbers
from manyranks.lazy import Missing
from manyranks.measure.journal import Stopped
from manyranks.measure.location import place_of

WORD, ROWS = 4, 32  # bytes of a word of shared memory; rows of a tile, one per lane of a warp


class _Absent:
    """Stands for Triton where there is none."""

    def __init__(self, why: str):
        self._why = why

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__) -> "_Absent":
        return self

    def __getitem__(self, _) -> None:
        raise Missing(self._why)


def __getattr__(name: str) -> Any:
    """Triton is imported when somebody asks for it, and not with this module."""
    if name not in ("tl", "triton"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from manyranks.measure import interpreter
    except Missing as error:
        return _Absent(f"{error}")
    return getattr(interpreter, name)


def sick(i: int, j: int, columns: int) -> int:
    """Returns the address of word (i, j) of a tile of 32 rows, one row after another.

    i, j: row and column.
    columns: of the tile.
    Returns bytes from the start of shared memory.
    """
    return WORD * (i * columns + j)


# Cases


class Matrix(NamedTuple):
    """A matrix. even: whether rows and columns fill whole sectors and tiles, so that where tiles begin makes no difference."""

    rows: int
    columns: int
    even: bool = False

    def __str__(self) -> str:
        return f"with {self.rows} × {self.columns} elements"


class Product(NamedTuple):
    """Matrices a, M × K, and b, N × K. budget: bytes that programs may ask for; shared: bytes of a tl.dot's two tiles."""

    m: int
    k: int
    n: int
    budget: int
    shared: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        sizes = f"M = {self.m}, K = {self.k}, N = {self.n} in {kind}"
        return f"{sizes}, a budget of {self.budget:,} bytes and {self.shared:,} of shared memory"

    @property
    def most(self) -> int:
        """The most elements of a tile: of two at once, or of their product, (wide / 32)² at 16 a step."""
        wide = self.shared // self.dtype.itemsize
        return max(wide, (wide // 32) ** 2)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Casts drawn matrices. In float16 the halves of each sum nearly cancel: a sum in float16 is told from a better one."""
        if self.dtype == torch.float16:
            half = self.k // 2
            a[:, half:], b[:, half:] = a[:, :half], 0.01 * b[:, half:] - b[:, :half]
        return a.to(self.dtype), b.to(self.dtype)


def drawn_products(random: Random) -> list[Product]:
    """Returns wide products, tall ones and a square one. One tile keeps the budget, of those that fit into the memory."""
    wide = 32, random.choice((64, 128))
    return [
        _product(random, wide, ((20, 32), (wide[1] + 1, 2 * wide[1])), turned=False),
        _product(random, wide, ((20, 32), (wide[1] + 1, 2 * wide[1])), turned=True),
        _product(random, (16, 256), ((8, 16), (257, 512)), turned=random.random() < 0.5),
        _product(random, (64, 64), ((97, 128), (97, 128)), turned=False, room=2048),  # also 32 × 128 fits
    ]


def _product(random: Random, tile: tuple[int, int], sizes: tuple, turned: bool, room: int = 0) -> Product:
    (m, n), k = (random.randint(*one) for one in sizes), random.randint(20, 50)
    asks = 4 * (k * (m * -(-n // tile[1]) + n * -(-m // tile[0])) + m * n)
    m, n = (n, m) if turned else (m, n)
    return Product(m, k, n, asks + random.randrange(200), 64 * sum(tile) + room + random.randrange(200))


class Tokens(NamedTuple):
    """A case of tokens. strong: what hidden vectors are multiplied by: logits of ±120 have no exponential in float32."""

    tokens: int
    words: int
    hidden: int
    z: float
    strong: float

    def __str__(self) -> str:
        return f"with {self.tokens} tokens, {self.words} words, {self.hidden} elements each, and z = {self.z:g}"


class Heads(NamedTuple):
    """A case of attention. window: keys that a query sees; tile: of both passes; 0 where not asked."""

    heads: int
    rows: int
    head: int
    window: int = 0
    tile: int = 0

    def __str__(self) -> str:
        asked = f"a window of {self.window}" if self.window else f"tiles of {self.tile}"
        return f"with {self.heads} heads of {self.head}, {self.rows} tokens and {asked}"


def drawn_columns(case: Matrix, seed: int) -> Tensor:
    """Draws columns, some far above others. In some, half of the rows, drawn, are far below, or one is far above the rest."""
    x, low = (numbers.normal((case.rows, case.columns), seed, case, i, dtype=torch.float32) for i in range(2))
    columns = torch.arange(case.columns)
    x[:, ::2] -= 1000 * (low[:, ::2] > 0)
    x[low.argmax(0), columns] += 40 * (columns % 4 == 1)
    return 5 * x + 300 * columns.remainder(3) - 300


def drawn_heads(case: Heads, seed: int) -> list[Tensor]:
    """Draws q, k, v and the output's gradient. With few tokens, scores have no exponential; after a tile they're far larger."""
    drawn = [numbers.normal((case.heads, case.rows, case.head), seed, case, i) for i in range(4)]
    if case.rows < 100:
        drawn[0][..., 0], drawn[1][..., 0] = 42 * drawn[0][..., 0].sign(), 42  # a row's scores rise, or fall
        drawn[1][:, case.tile :, 0] += 60
    return drawn


def larger(most: int, q_ASD: Tensor, tile: int) -> str:
    """Says whether more elements were made than a tile of keys for all queries has, or q, k, v and more side by side."""
    return "made" if most > q_ASD.shape[0] * q_ASD.shape[1] * max(tile, 4 * q_ASD.shape[2]) else "not made"


# What torch may do around kernels, and in tiles

OWN = "compute in a kernel of your own; around it, make the result with torch.empty, and take sizes, strides and views"
_MAKES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"}
_MAKES |= {"ones", "ones_like", "new_ones", "full", "full_like", "new_full", "fill_", "zero_", "detach"}


def _leaves(tensor: Tensor, name: str) -> None:
    raise Stopped(f"{name}() of a tensor was called", OWN)


def _of_triton(file: str) -> bool:
    module = sys.modules.get("triton")
    return module is not None and file.startswith(os.path.dirname(str(module.__file__)) + os.sep)


class Launchers(TorchDispatchMode):
    """Inside, torch makes tensors and views. Raises Stopped where it computes, or hands out numbers.

    Triton's interpreter may call what it needs. filled: is told what torch fills, and with what number.
    """

    _WAYS_OUT = ("numpy", "tolist")

    def __init__(self, filled: Callable[[Tensor, float], None]):
        super().__init__()
        self._filled = filled

    def __enter__(self):
        for name in self._WAYS_OUT:
            setattr(Tensor, name, partialmethod(_leaves, name))
        return super().__enter__()

    def __exit__(self, *error):
        for name in self._WAYS_OUT:
            delattr(Tensor, name)  # Tensor has it from the class below
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        schema = operator._schema
        name = schema.name.partition("::")[2]
        marks = [one.alias_info for one in schema.returns]
        view = bool(marks) and all(mark is not None and not mark.is_write for mark in marks)
        if not view and name not in _MAKES:
            place = place_of(sys._getframe(1))
            if place is None or not _of_triton(place.file):
                raise Stopped(f"torch's {name} was called", OWN)
        if name in ("fill_", "zero_"):
            self._filled(args[0], *map(float, args[1:] or (0,)))
        return operator(*args, **(kwargs or {}))


class Made(TorchDispatchMode):
    """Notes the most elements that a tensor has room for. Raises Stopped for attention that is ready."""

    most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "attention" in operator._schema.name:
            raise Stopped("PyTorch's own attention was called", "write both passes in tiles, with products and exponentials")
        result = operator(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.layout == torch.strided:
                self.most = max(self.most, one.untyped_storage().nbytes() // one.element_size())
        return result


def without_triton(trace: TracebackType | None) -> TracebackType | None:
    """Returns it without Triton's own lines: the innermost one is the kernel's then."""
    if trace is None:
        return None
    rest = without_triton(trace.tb_next)
    its = _of_triton(trace.tb_frame.f_code.co_filename)
    return rest if its else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
