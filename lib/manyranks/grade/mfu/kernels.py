"""Operators that really ran, with the bytes that WorkCounter has for them, one by one and each run of them as one kernel."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyranks.grade.mfu.given import Operator
from manyranks.measure.flops import WorkCounter, as_one_operator

Tensors = dict[str, Tensor]


class Part(NamedTuple):
    """function: of the tensors with these names, returns those that `makes` names; more than one operator where it is fused."""

    function: Callable[..., tuple[Tensor, ...]]
    takes: tuple[str, ...]
    makes: tuple[str, ...]


class Recorded(NamedTuple):
    """operators: in order; runs: of neighbours that are no products, how many, and the bytes of each as one kernel."""

    operators: list[Operator]
    needed: list[str]
    runs: list[tuple[int, int]]


class _Noting(TorchDispatchMode):
    """Notes each operator; names: id -> name of tensors, which are kept, so that no id comes twice."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.operators, self._names, self._kept = [], names, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with WorkCounter() as work:
            result = func(*args, **(kwargs or {}))
        read = [one for one in args if isinstance(one, Tensor)]
        self._kept += [*read, result]
        made = {self._name(result): result.nbytes}
        operator = Operator(func._schema.name.removeprefix("aten::"), work.flops, {self._name(x): x.nbytes for x in read}, made)
        if work.bytes != sum(operator.reads.values()) + sum(made.values()):
            raise RuntimeError(f"{operator}: the counter has {work.bytes} bytes")
        self.operators.append(operator)
        return result

    def _name(self, x: Tensor) -> str:
        return self._names.setdefault(id(x), f"t{len(self._names)}")


def recorded(parts: list[Part], tensors: Tensors, needed: tuple[str, ...]) -> Recorded:
    """Runs the parts twice: operator by operator, and each part as one kernel. needed: what comes out in the end."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    have, noting, runs = dict(tensors), _Noting(names), []
    for part in parts:
        given, before = [have[name] for name in part.takes], len(noting.operators)
        with noting:
            made = part.function(*given)
        have |= dict(zip(part.makes, made, strict=True))
        count = len(noting.operators) - before
        if not noting.operators[-1].flops:
            with WorkCounter() as work:
                as_one_operator(part.function)(*given)
            runs.append((count, work.bytes))
    return Recorded(noting.operators, [names[id(have[name])] for name in needed], runs)


def _drawn(*sizes: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).view(sizes)


def gated() -> Recorded:
    """A gated MLP with a residual; one weight is a thin matrix."""
    x, residual = _drawn(96, 40), _drawn(96, 40)
    weights = {"up": _drawn(40, 120), "gate": _drawn(40, 120), "down": _drawn(120, 40), "thin": _drawn(40, 2)}
    parts = [
        Part(lambda x, w: (x @ w,), ("x", "up"), ("u",)),
        Part(lambda x, w: (x @ w,), ("x", "gate"), ("g",)),
        Part(lambda g, u: (g.sigmoid() * g * u,), ("g", "u"), ("a",)),
        Part(lambda a, w: (a @ w,), ("a", "down"), ("d",)),
        Part(_added, ("d", "residual"), ("sum", "out")),
        Part(lambda x, w: (x @ w,), ("out", "thin"), ("logits",)),
        Part(lambda y: ((y * 0.5).tanh(),), ("logits",), ("half",)),
    ]
    return recorded(parts, {"x": x, "residual": residual, **weights}, ("sum", "half"))


def _added(d: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = d + residual
    return total, total.abs().sqrt() * residual


def attention() -> Recorded:
    """Scores of long rows and their softmax by hand. Two runs read the rows' sums and a scale; the columns' sums are needed."""
    q, k, v, bias = _drawn(64, 8), _drawn(8, 256), _drawn(256, 8), _drawn(64, 256)
    scale = _drawn(1, 1)
    parts = [
        Part(lambda q, k: (q @ k,), ("q", "k"), ("scores",)),
        Part(_weighted, ("scores", "scale", "bias"), ("sums", "columns", "weights")),
        Part(lambda w, v: (w @ v,), ("weights", "v"), ("o",)),
        Part(lambda o, q, scale, sums: ((o * 2.0 + q) * scale + sums,), ("o", "q", "scale", "sums"), ("y",)),
    ]
    return recorded(parts, {"q": q, "k": k, "v": v, "bias": bias, "scale": scale}, ("y", "columns"))


def _weighted(scores: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    powers = (scores * scale + bias).exp()
    sums = powers.sum(-1, keepdim=True)
    return sums, powers.sum(0, keepdim=True), powers / sums
