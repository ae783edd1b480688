"""The learner's own checkpoint, where a later task calls it: what is wrong there is said there."""

from collections.abc import Callable
from types import CodeType, FunctionType

import torch

from manyranks.grade.checkpointing import oracle
from manyranks.grade.checkpointing.layers import Function, Layer, gradient, gradients, inputs
from manyranks.grade.compare import same
from manyranks.grade.journal import Stopped
from manyranks.grade.watch import Blind
from manyranks.measure.memory import PeakBytes

_NAME, _SEED, _TOLERANCE = "checkpoint", 42, 1e-9
_MEND = "your checkpoint does not pass its own check: mend it first"


def check_own(function: Callable) -> None:
    """Raises Stopped where the function calls a global `checkpoint` of the learner's that does not what it must."""
    own = getattr(function, "__globals__", {}).get(_NAME)
    if not isinstance(own, FunctionType) or _NAME not in _names(function.__code__):
        return
    with torch.random.fork_rng([]):
        got, bytes_kept = _tried(own)
        right, least = _tried(oracle.right)
    if bytes_kept > least or not all(same(got[name], right[name], _TOLERANCE) for name in right):
        raise Stopped("the checkpoint that is called here does not do what it must", _MEND)


def _names(code: CodeType) -> set[str]:
    """The global names in the code, and in functions within."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def _tried(checkpoint: Callable) -> tuple[dict[str, torch.Tensor], int]:
    """What comes of one layer, and bytes that forward has left, to a few tens of kilobytes."""
    torch.manual_seed(_SEED)
    layer, x = Layer(), inputs(9).requires_grad_()
    with PeakBytes(counts=False) as memory:
        upstream = x.detach() * 0.5
        before = memory.live_bytes()
        y = checkpoint(Function("function", layer, Blind()), x)
        loss = (y * upstream).sum()
        drawn = torch.rand(2)
        kept = memory.live_bytes() - before - y.nbytes
    loss.backward()
    found = {"y": y.detach().clone(), "x": gradient(x), "drawn": drawn, "random": torch.rand(2), **gradients(layer)}
    return found, kept // (2 * x.nbytes)
