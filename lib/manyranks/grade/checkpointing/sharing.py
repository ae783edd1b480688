"""The task shared_checkpoint: all ranks of a group have the same x, and each keeps its share of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade.checkpointing import gathers, judges, oracle
from manyranks.grade.checkpointing.gathers import group_size
from manyranks.grade.checkpointing.judges import Hold, Must
from manyranks.grade.checkpointing.layers import (
    EXACT,
    Function,
    Layer,
    checked,
    gradient,
    gradients,
    inputs,
    refuse_calls,
    weigh,
)
from manyranks.grade.checkpointing.own import check_own
from manyranks.grade.checkpointing.task import CheckpointTask, values
from manyranks.grade.scripts import NOTHING, Scene, Tensors, Wrong
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Blind, Watch

_SEED, _HIDDEN, _ROWS = 43, 23, 397
_OFF = "after no_grad"  # a mark
_RANDOM = "x is not what it was, or the random numbers are not: is all as in task 1, but for what is kept of x?"
_OWN = "that is this rank's own share, t times: gather the others'"
_ALONE = "only this rank's own share is there: gather the others'"
_ORDER = "the shares come back in another order: rank r of the group keeps share r, from the front"
_FRONT = "the padding comes at the end: cut it off there, the first elements are x's"
_KEEP = (
    "a share has 1/t of x. Is x still in a closure or on ctx? Is the share a view? A slice keeps the memory of all of x: "
    "clone() it"
)


_LET_GO = (
    "when backward is over, neither x nor a share is needed any more: is a gathered x, or a share, in a list, in a closure or "
    "on ctx?"
)
_NONE = "group may be None, for all ranks: dist.get_world_size(group) and dist.get_rank(group) know what that means"
_UNEQUAL = "shares have the same size on all ranks: pad with zeros to a multiple of t, then cut"
_PAD = "t need not divide the elements: pad with zeros to a multiple of t first, then cut"
_CUT = [_ROWS * _HIDDEN // t * t for t in (2, 3)]  # elements of floors of shares
_STATES = [-(-gathers.STATE // t) * t for t in (2, 3)]  # of shares of a random state
_NO_GRAD = "nobody will go backward here: under torch.no_grad() just call the function"


def _two(function: Callable, watch, rank: int | None = None, n: int = 0) -> Tensors:
    """Two checkpoints, one after the other, with an x that t does not divide, and whose rows are columns in memory."""
    group, place = _group(rank, n)
    torch.manual_seed(_SEED + place)
    layers = torch.nn.ModuleList([Layer(hidden=_HIDDEN), Layer(hidden=_HIDDEN)])
    first, second = (Function(name, layer, watch) for name, layer in zip(("first", "second"), layers, strict=True))
    leaf = inputs(10 + place, _HIDDEN, _ROWS).requires_grad_()
    x, upstream = (leaf * 2).t(), inputs(20, _ROWS, _HIDDEN)
    weigh(watch, "before")
    watch.mark("forward")
    h = checked(first, function(first, x, group), x)
    y = checked(second, function(second, h, group), h)
    watch.mark("forward over")
    loss = (y * upstream).sum()
    del x, h, y
    weigh(watch, "after forward")
    watch.mark("backward")
    loss.backward()
    watch.mark("backward over")
    weigh(watch, judges.AFTER_BACKWARD)
    drawn = torch.rand(3, **EXACT)
    return {"the gradient of x": gradient(leaf), **gradients(layers), "the random numbers drawn after backward": drawn}


def _few(function: Callable, watch, rank: int | None = None, n: int = 0) -> Tensors:
    """So few elements that the last of 3 ranks has nothing but padding; first without gradients."""
    group, place = _group(rank, n)
    weight = torch.linspace(0.5, 1, _elements(n or dist.get_world_size()), **EXACT).requires_grad_()
    function_of = Function("function", lambda x: torch.tanh(x * weight), watch)
    x = (torch.arange(1.0, 1 + len(weight), **EXACT) / (3 + place)).requires_grad_()
    watch.mark("forward")
    with torch.no_grad():
        without = checked(function_of, function(function_of, x, group), x)
    y = checked(function_of, function(function_of, x, group), x)
    watch.mark("forward over")
    watch.mark("backward")
    y.sum().backward()
    watch.mark("backward over")
    found = {"the result": y.detach().clone(), "the result under no_grad": without.detach().clone()}
    return found | {"the gradient of x": gradient(x), "the gradient of the weight": gradient(weight)}


def _still(function: Callable, watch, rank: int | None = None, n: int = 0) -> Tensors:
    """Under no_grad; then a frozen layer and one that learns, where x needs no gradient."""
    group, place = _group(rank, n)
    torch.manual_seed(_SEED + place)
    layers = torch.nn.ModuleList([Layer(hidden=_HIDDEN).requires_grad_(False), Layer(hidden=_HIDDEN)])
    frozen, learning = (Function(name, layer, watch) for name, layer in zip(("frozen", "learning"), layers, strict=True))
    x = inputs(30 + place, _ROWS, _HIDDEN)
    weigh(watch, "before")
    watch.mark("forward")
    with torch.no_grad():
        y = checked(frozen, function(frozen, x, group), x)
    without = y.clone()
    weigh(watch, _OFF)
    h = checked(frozen, function(frozen, x, group), x, learns=False)
    y = checked(learning, function(learning, h.detach(), group), h.detach())
    watch.mark("forward over")
    loss = (y * y).sum() + (h * h).sum()
    watch.mark("backward")
    loss.backward()
    watch.mark("backward over")
    return {"the result under no_grad": without.detach(), **gradients(layers), "the result": y.detach().clone()}


def _elements(n: int) -> int:
    return group_size(n) + 1


def _group(rank: int | None, n: int) -> tuple[dist.ProcessGroup | None, int]:
    """This rank's group, and its number. rank, n: where no process is one."""
    if rank is not None:
        return None, rank // group_size(n)
    rank, n = dist.get_rank(), dist.get_world_size()
    if n != 4:
        return None, 0
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], rank // 2


def _alone(function: Callable, watch: Watch, script: Callable) -> Tensors:
    """The script on a rank: what was ready is refused, and the learner's own checkpoint comes first."""
    refuse_calls(watch)
    check_own(function)
    return script(function, watch)


def _results(script: Callable, n: int, way: Callable) -> list[Tensors]:
    """On n ranks, where way(rank, t) is a checkpoint."""
    found = []
    for rank in range(n):
        checkpoint = way(rank % group_size(n), group_size(n))
        with torch.random.fork_rng([]):
            found.append(script(lambda function, x, group, checkpoint=checkpoint: checkpoint(function, x), Blind(), rank, n))
    return found


@cache
def cases(n: int) -> list[Scene]:
    """Two checkpoints of an odd size; a few elements; without gradients, and with few of them."""
    share, whole = share_bytes(_ROWS * _HIDDEN, group_size(n)), 8 * _ROWS * _HIDDEN
    kept = "{there} were kept after forward; shares of x and of the second input have {here}"
    left = "{there} were held after backward; the gradients have {here}"
    grads = whole + 2 * sum(p.nbytes for p in Layer(hidden=_HIDDEN).parameters() if p.requires_grad)
    holds = (
        Hold("after forward", 2 * share, kept, _KEEP, gone=whole),
        Hold(judges.AFTER_BACKWARD, grads, left, _LET_GO, gone=whole),
    )
    off = Hold(_OFF, 2 * whole, "{there} were held under no_grad; the result, twice, has {here}", _NO_GRAD)
    pairs = "in two pairs" if n == 4 else ""
    two = Must(("first", "second"), ("second", "first"), holds, gathers=(share, share))
    still = Must(("frozen", "frozen", "learning"), None, (off,), gathers=None)
    few = Must(("function", "function"), ("function",), gathers=(share_bytes(_elements(n), group_size(n)),))
    return [
        _scene(n, _two, two, ", ".join(filter(None, (pairs, "two checkpoints")))),
        _scene(n, _few, few, ", ".join(filter(None, (pairs, f"with {_elements(n)} elements")))),
        _scene(n, _still, still, ", ".join(filter(None, (pairs, "an x that needs no gradient")))),
    ]


def share_bytes(elements: int, t: int) -> int:
    """Of a share of so many float64, padded."""
    return 8 * -(-elements // t)


def _scene(n: int, script: Callable, must: Must, note: str) -> Scene:
    right = _results(script, n, lambda rank, t: oracle.plain)
    return Scene(n, partial(_alone, script=script), right, lambda: _wrong(script, n), must, note)


def _wrong(script: Callable, n: int) -> Iterator[Wrong]:
    def when(hint: str, kept: Callable) -> Wrong:
        def way(rank: int, t: int) -> oracle.Checkpoint:
            return oracle.Checkpoint(kept=lambda x: kept(list(_shares(x, t)), rank, x))

        return Wrong(hint, _results(script, n, way))

    def joined(shares: list, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(shares)[: x.numel()].view(x.shape)

    if script is _still:  # the others have shown it
        return
    yield when(_OWN, lambda shares, rank, x: joined([shares[rank]] * len(shares), x))
    yield when(_ALONE, lambda shares, rank, x: joined([s * (k == rank) for k, s in enumerate(shares)], x))
    yield when(_ORDER, lambda shares, rank, x: joined(shares[::-1], x))
    yield when(_ORDER, lambda shares, rank, x: joined(shares[1:] + shares[:1], x))
    yield when(_ORDER, lambda shares, rank, x: joined(shares[-1:] + shares[:-1], x))
    yield when(_ORDER, lambda shares, rank, x: joined([torch.cat(shares).view(-1, len(shares)).t().flatten()], x))
    yield when(_FRONT, lambda shares, rank, x: torch.cat(shares)[-x.numel() :].view(x.shape))
    yield when(
        _FRONT, lambda shares, rank, x: torch.cat([torch.cat(shares)[x.numel() :], x.flatten()])[: x.numel()].view(x.shape)
    )
    yield when(gathers.REST, lambda shares, rank, x: _without_rest(x, len(shares)))


def _shares(x: torch.Tensor, t: int) -> tuple[torch.Tensor, ...]:
    return torch.nn.functional.pad(x.detach().flatten(), (0, -x.numel() % t)).chunk(t)


def _without_rest(x: torch.Tensor, t: int) -> torch.Tensor:
    """With zeros for the elements that elements // t leaves out."""
    flat = x.detach().flatten().clone()
    flat[x.numel() // t * t :] = 0
    return flat.view(x.shape)


def _values(task: "Shared", trial: Trial) -> Verdict:
    """As usual; that nothing was sent is no matter of values here."""
    verdict = values(task, trial)
    if not verdict.ok and verdict.hint == NOTHING:
        return Verdict(True)
    if verdict.ok or verdict.hint:
        return verdict
    hint = gathers.traffic(task, trial).hint or judges.why_values(trial.answers[0]) or _RANDOM
    return verdict._replace(hint=hint)


@dataclass(frozen=True)
class Shared(CheckpointTask):
    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        *CheckpointTask.advice,
        (r"in two pairs.*(IndexError|Invalid rank|group|invalid)", gathers.GROUP),
        (r"'NoneType' object has no attribute '(size|rank)'", _NONE),
        (r"IndexError", "few elements make fewer chunks than t: pad with zeros to a multiple of t first"),
        (r", rank \d raised.*invalid tensor size", _UNEQUAL),
        (r"tensor size must be equal|invalid tensor size", "an all-gather's output has t times as many elements as its input"),
        (rf"CPUGeneratorImplState|invalid for input of size ({_STATES[0]}|{_STATES[1]})\b", gathers.ONLY_X),
        (r"view size is not compatible", "x need not be contiguous: flatten() or reshape(-1) in place of view(-1)"),
        (rf"'\[\d, -1\]' is invalid|is invalid for input of size ({_CUT[0]}|{_CUT[1]})\b", _PAD),
        (r"is invalid for input of size", "cut the padding off before view: the first x.numel() elements are x's"),
        (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
    )
    guesses: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"(waits in|to its|called|gave).* all_gather", f"shares have the same size on all ranks; {gathers.GROUP}"),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("computes and trains as without a checkpoint", 0.2, _values, each_world=True),
        Aspect("keeps shares only", 0.3, judges.held),
        Aspect("lets them go when backward is over", 0.1, judges.given_back),
        Aspect("makes one all-gather of a share for each checkpoint, in backward", 0.3, gathers.traffic),
        Aspect("gathers and runs a function when backward comes to it", 0.1, gathers.order),
    )
