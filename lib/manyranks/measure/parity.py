"""Finds where a parallel run first departs from one process: compares in lockstep all that the modules give.

    with record(alone) as reference:
        loss(alone(x), y).backward()
    traces = world.run(train)                      # on each rank: with record(model) as trace: …; return trace
    print(compare(reference, gathered(traces)))    # layers.2.mlp (gradient): 4.1e+12 ulps …: bug

Two right programs that add in another order differ in the last places. A wrong one differs in the first ones, and all
that comes after it does, too. So what counts is the first tensor that departs, in the reference's order. Compare in
float64: there a rounding is 2e-16 of a number, and a bug is seldom below 1e-6.

Where ranks have parts of tensors, say which: each rank is compared with its part of the one process's, copies and all.

    print(compare_ranks(reference, traces, [Part(rows=…, tokens=…, cut=(0, 2)), …]))
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

REASSOCIATION, BUG = "reassociation", "bug"
GRADIENT = " (gradient)"


@dataclass
class Trace:
    """A record of what the modules of a run gave.

    calls[name]: what a module gave, each time it was called; name + " (gradient)": the gradient of that.
    A module that its parent calls several times has "#2" after its name for the second time, and so on.
    trace[name]: all calls as one tensor, the micro-batches' rows one after another. Last come the parameters' gradients,
    by name. It is plain data: ranks can return it.
    """

    calls: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in self.calls[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __repr__(self) -> str:
        return f"Trace of {len(self.calls)} names"


@dataclass(frozen=True)
class Departure:
    """A tensor that differs from the reference's.

    ulps: the largest difference, in units in the last place (see compare); index: where; reference, other: what is there.
    verdict: "reassociation", as other orders of the same sums explain it, or "bug". rank: whose tensor it is, where it was
    asked of ranks; index is then a place in this rank's part.
    """

    name: str
    ulps: float
    verdict: str
    index: tuple[int, ...] = ()
    reference: float = math.nan
    other: float = math.nan
    note: str = ""
    rank: int | None = None

    def __repr__(self) -> str:
        where = self.note or f"at {list(self.index)}, {self.other:.17g} instead of {self.reference:.17g}"
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name}{rank}: {self.ulps:.3g} ulps {where}: {self.verdict}"


class Part(NamedTuple):
    """A rank's parts of one process's tensors, in a composed run.

    rows: places in the batch; None for all
    tokens: places in the sequence; None for all
    cut: (place, t): it has the part at this place of the t into which a dim is cut: features, heads, or tokens between layers
    averaged: the number of ranks over which the parameters' gradients are averaged; what comes back to a rank's own activations
        is so many times as large as in one process
    """

    rows: Sequence[int] | Tensor | None = None
    tokens: Sequence[int] | Tensor | None = None
    cut: tuple[int, int] = (0, 1)
    averaged: int = 1

    def of(self, reference: Trace, own: Trace) -> Trace:
        """Returns what the rank should have, named as in its trace, whose shapes say what is cut.

        A tensor of a module has its rows in dim 0 and its tokens in the last but one. Left out is what the reference has not,
        and what has another shape than such a part: what experts give, gradients in ZeRO's shards, filled-up vocabularies.
        """
        parts = {name: self._of(name, reference, own[name].shape) for name in own if name in reference.calls}
        return Trace({name: [parts[name]] for name in reference if parts.get(name) is not None})

    def _of(self, name: str, reference: Trace, shape: torch.Size) -> Tensor | None:
        tensor = reference[name]
        if name.removesuffix(GRADIENT) in reference.calls:  # a module's: parameters have no rows
            tensor = _picked(_picked(tensor, 0, self.rows if tensor.dim() > 2 else None), -2, self.tokens)
            tensor = tensor * self.averaged if name.endswith(GRADIENT) else tensor
        place, t = self.cut
        for dim, size in enumerate(shape[: tensor.dim()]):
            if t > 1 and tensor.shape[dim] == size * t:
                tensor = tensor.chunk(t, dim)[place]
        return tensor if tensor.shape == shape else None


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Notes what each module of the model gives, and the gradients that come back to it, until the end of the block.

    A rank may run only some modules of the model, as a stage of a pipeline: names are the whole model's.
    At the end it notes the parameters' gradients. It copies everything: for small models.
    """
    trace, under_way = Trace(), []
    hooks = []
    for name, part in model.named_modules():
        hooks.append(part.register_forward_pre_hook(partial(_begin, under_way)))
        hooks.append(part.register_forward_hook(partial(_note, trace, under_way, name or "model")))
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            _put(trace, name + GRADIENT, parameter.grad)


def gathered(traces: Iterable[Trace]) -> Trace:
    """The ranks' traces as one. A tensor that several ranks have is taken for parts of a batch, in the ranks' order.

    For a pipeline's ranks, or replicas' outputs. Where ranks have the same tensors, compare one of them, or each.
    """
    calls: dict[str, list[Tensor]] = {}
    for trace in traces:
        for name, tensors in trace.calls.items():
            calls[name] = calls.get(name, []) + tensors
    return Trace(calls)


def compare(reference: Trace, other: Trace, limit: float | None = None) -> Departure | None:
    """The first tensor, in the reference's order, that departs from it as no rounding does; else the first that differs.

    The reference may have run the batch at once and the other in micro-batches, or the other way round. Names that only one
    of them has are not compared. limit: how many units in the last place are still "reassociation"; None for 1024, or 5 %
    where that is less, as in bfloat16. They are units of the largest of: the two numbers, the root mean square of the
    reference's tensor, and a thousandth of the largest such one among the gradients, or among what is no gradient. For a sum
    that came out small was rounded as its terms are (a key's bias has a gradient of 0, and is never quite that).
    Returns None where all is equal to the bit. Raises ValueError where they have no name in common.
    """
    common = [name for name in reference if name in other.calls]
    if not common:
        raise ValueError(
            f"no name in common: the reference has {_some(reference)}, the other {_some(other)}; record the whole model "
            "in both, also where a rank runs some of its modules"
        )
    first, pairs = None, {name: _aligned(name, reference, other) for name in common}
    sizes = [(name.endswith(GRADIENT), _mean_square(a) ** 0.5) for name, (a, _) in pairs.items()]
    floors = {kind: max((size for k, size in sizes if k == kind), default=0.0) / 1000 for kind in (False, True)}
    for name, tensors in pairs.items():
        departure = _departure(name, *tensors, floors[name.endswith(GRADIENT)], limit)
        if departure is not None and departure.verdict == BUG:
            return departure
        first = first or departure
    return first


def compare_ranks(reference: Trace, traces: Sequence[Trace], parts: Sequence[Part]) -> Departure | None:
    """Does as compare, for ranks that have parts: finds the first tensor, in the reference's order, that departs on any.

    Ranks that should have the same are each compared with the reference, so that it also finds copies that differ.
    Raises ValueError where a rank has nothing to compare, and unless there is one part for each trace.
    """
    if len(traces) != len(parts):
        raise ValueError(f"{len(traces)} traces and {len(parts)} parts: give one of each for every rank")
    found = []
    for rank, (own, part) in enumerate(zip(traces, parts, strict=True)):
        if departure := compare(part.of(reference, own), own):
            found.append(replace(departure, rank=rank))
    order = {name: place for place, name in enumerate(reference)}
    return min(found, key=lambda each: (each.verdict != BUG, order[each.name], each.rank), default=None)


def ulps(reference: Tensor, other: Tensor, least: float = 0.0) -> Tensor:
    """Counts how many units in the last place each element is off, as compare does; infinite where one is not finite.

    least: the smallest number whose unit counts.
    """
    a, b = reference.double(), other.double()
    scale = torch.maximum(a.abs(), b.abs()).clamp(min=max(least, _mean_square(reference) ** 0.5))
    exponent = torch.frexp(scale).exponent - 1
    unit = torch.ldexp(torch.full_like(a, _epsilon(reference, other)), exponent)
    off = (a - b).abs() / unit
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, off.nan_to_num(math.inf, math.inf))


def _aligned(name: str, reference: Trace, other: Trace) -> tuple[Tensor, Tensor]:
    """The two tensors to compare. One without a row for each example, as of positions, is the same in every micro-batch.

    Its gradients add up.
    """
    a, b = reference[name], other[name]
    each = [*reference.calls[name], *other.calls[name]]
    if a.shape == b.shape or any(tensor.shape != each[0].shape for tensor in each):
        return a, b
    if name.endswith(GRADIENT):
        return sum(reference.calls[name]), sum(other.calls[name])
    return reference.calls[name][0], other.calls[name][0]


def _picked(tensor: Tensor, dim: int, places: Sequence[int] | Tensor | None) -> Tensor:
    """Picks these places of the dim; all of them for None, and where there is no such dim."""
    return tensor if places is None or tensor.dim() < 2 else tensor.index_select(dim, torch.as_tensor(places))


def _departure(name: str, reference: Tensor, other: Tensor, least: float, limit: float | None) -> Departure | None:
    if reference.shape != other.shape:
        return Departure(name, math.inf, BUG, note=f"of shape {list(other.shape)} instead of {list(reference.shape)}")
    if not reference.numel() or not (off := ulps(reference, other, least)).any():
        return None
    most = off.max().item()
    index = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    if limit is None:
        limit = min(1024, 0.05 / _epsilon(reference, other))
    values = reference[index].item(), other[index].item()
    return Departure(name, most, REASSOCIATION if most <= limit else BUG, index, *values)


def _mean_square(tensor: Tensor) -> float:
    """Returns the mean square of the finite numbers."""
    squares = tensor.double().square()
    return squares[squares.isfinite()].mean().nan_to_num().item()


def _epsilon(*tensors: Tensor) -> float:
    """The unit in the last place of 1, in the coarser of their types; of integers, nothing is a rounding."""
    floats = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]
    return max(floats, default=2.0**-52)


def _begin(under_way: list[Counter], module: nn.Module, inputs: tuple) -> None:
    """A module is called. Begins to count which modules it calls in turn, and how often."""
    under_way.append(Counter())


def _note(trace: Trace, under_way: list[Counter], name: str, module: nn.Module, inputs: tuple, output: object) -> None:
    """A module was called. If a checkpoint computes it again, in backward, it was noted before."""
    under_way.pop()
    caller = under_way[-1] if under_way else Counter()
    caller[name] += 1
    if torch._C._current_graph_task_id() != -1:
        return
    again = f"#{caller[name]}" if caller[name] > 1 else ""
    several = isinstance(output, (tuple, list))
    for place, tensor in enumerate(output if several else [output]):
        if isinstance(tensor, Tensor):
            full = name + (f"[{place}]" if several else "") + again
            _put(trace, full, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_put, trace, full + GRADIENT))


def _put(trace: Trace, name: str, tensor: Tensor) -> None:
    trace.calls.setdefault(name, []).append(tensor.detach().cpu().clone())


def _some(trace: Trace) -> str:
    names = list(trace)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "none"
