"""A model of seven layers, a driver and units, which exercise 03_zero gives or its checks train."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from manyranks.given.numbers import EXACT, drawn, normal, seed_of, whole
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Event, Watch

_SHAPES = {"matrix": (5, 7), "cube": (2, 3, 4), "vector": (11,), "square": (2, 2), "five": (5,), "one": (1,), "number": ()}
_HIDDEN, _VOCAB, _LENGTH = 47, 48, 3  # the first and the last weight need no padding on 2, 3 and 4 ranks, all others do


class Layer(nn.Module):
    """A layer: h + tanh(…).

    shift: made before the weight, whose gradient comes after its own, and used by some examples
    twice: the weight is used once more, with a bias
    """

    def __init__(self, shift: bool = False, twice: bool = False):
        super().__init__()
        self.shift, self.uses_shift = nn.Parameter(torch.ones(1, **EXACT)) if shift else None, False
        self.linear = nn.Linear(_HIDDEN, _HIDDEN, bias=False, **EXACT)
        self.again = nn.Linear(_HIDDEN, _HIDDEN, **EXACT) if twice else None
        if twice:
            self.again.weight = self.linear.weight

    def forward(self, h: Tensor) -> Tensor:
        out = self.linear(h)
        h = h + torch.tanh(out + self.shift if self.uses_shift else out)
        return h if self.again is None else h + torch.tanh(self.again(h))


class Head(nn.Linear):
    """The gradient of the weight comes before the scale's, which is made last."""

    def __init__(self):
        super().__init__(_HIDDEN, _VOCAB, bias=False, **EXACT)
        self.scale = nn.Parameter(torch.ones(1, **EXACT))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h * self.scale)


class Batch(NamedTuple):
    """A rank's batch. uses_shift: whether layer 1 adds `shift`."""

    tokens: Tensor
    uses_shift: bool

    def loss(self, layers: nn.ModuleList, run: Callable | None = None) -> Tensor:
        """The mean over its examples."""
        layers[1].uses_shift = self.uses_shift
        logits = (run or nn.Sequential(*layers))(self.tokens)
        return nn.functional.cross_entropy(logits[0, :-1], self.tokens[0, 1:])


class Training(NamedTuple):
    """A training. batches: for each step, one per backward pass; finishes: whether finish() follows each pass."""

    optimizer: str
    settings: dict
    batches: tuple[tuple[int, ...], ...]
    finishes: bool = False

    def drawn(self, seed: int) -> "Training":
        """The training with other settings, for the judge."""
        random = drawn(seed, self.optimizer)
        other = {
            name: tuple(b * random.uniform(0.8, 1) for b in value) if name == "betas" else value * random.uniform(0.7, 1)
            for name, value in self.settings.items()
        }
        return self._replace(settings=other) if seed else self

    def __str__(self) -> str:
        passes = ", each of two backward passes" if self.finishes else ""
        return f"in {len(self.batches)} steps of {self.optimizer}{passes}"


def trained(rank: int, seed: int, batches: int, more: bool = False) -> tuple[nn.ModuleList, list[Batch]]:
    """Layers to be run one after the other, the same on all ranks, with number 2 frozen; and a rank's batches.

    Batch 0 uses `shift` on no rank, 1 on one, 2 on all but one. For the judge a bias is frozen, too; more: and draws layers.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(seed))
        blocks = [Layer(shift=True), Layer().requires_grad_(False), Layer(), Layer(twice=True), Layer()]
        if seed:
            blocks[3].again.bias.requires_grad_(False)
            blocks += [Layer() for _ in range(drawn(seed).randint(1, 2) * more)]
        layers = nn.ModuleList([nn.Embedding(_VOCAB, _HIDDEN, **EXACT), *blocks, Head()])
    shifts = [(i == 1 and rank == 1) or (i % 3 == 2 and rank != 0) for i in range(batches)]
    return layers, [Batch(whole(_VOCAB, (1, _LENGTH), seed, i, rank), shift) for i, shift in enumerate(shifts)]


def pieces(whole: Tensor, n: int = 0) -> list[Tensor]:
    """Cuts a tensor into each rank's piece, padding included. n: ranks; 0 for all of the world."""
    flat, n = whole.detach().flatten(), n or dist.get_world_size()
    return [piece.clone() for piece in torch.cat([flat, flat.new_zeros(-flat.numel() % n)]).chunk(n)]


def padded(parameter: Tensor) -> int:
    """Counts a parameter's bytes, padding included."""
    n = dist.get_world_size()
    return -(-parameter.numel() // n) * n * parameter.element_size()


def _is_shard(result, *given) -> bool:
    """Returns whether it is this rank's piece, where that was asked for."""
    if len(given) != 1:
        return True
    return _alike(result, given[0]) and torch.equal(result, pieces(given[0])[dist.get_rank()])


def _is_whole(result, *given) -> bool:
    """Returns whether what is given is its piece, as far as this rank knows, where that was asked for."""
    if len(given) != 2 or not isinstance(given[1], tuple | list):
        return True
    piece, shape = given[0], torch.Size(given[1])
    if not _alike(result, piece):
        return False
    there = min(len(piece), max(0, shape.numel() - dist.get_rank() * len(piece)))  # without padding
    mine, piece = (one[:there].nan_to_num() for one in (pieces(result)[dist.get_rank()], piece))
    return result.shape == shape and torch.equal(mine, piece)


def _alike(result, given: Tensor) -> bool:
    return isinstance(result, Tensor) and result.dtype == given.dtype


FITS = {"shard": _is_shard, "gather": _is_whole}  # answers that later ones call -> whether a result fits what it is made of


def tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random numbers in several shapes, with their names; a matrix's columns are its rows in memory."""
    for name, shape in _SHAPES.items():
        kind = torch.float32 if seed and name in ("cube", "five") else torch.float64  # all float64 for learners
        one = normal(shape[::-1], seed, name, dtype=kind)
        yield name, one.T if one.dim() == 2 else one.view(shape)


# What is held


@contextmanager
def state_bytes() -> Iterator[list[int]]:
    """Inside, each optimizer that steps adds the bytes of its states, counters apart."""
    counts = []
    stepped = register_optimizer_step_post_hook(lambda optimizer, *_: counts.append(_states(optimizer)))
    try:
        yield counts
    finally:
        stepped.remove()


def _states(optimizer: Optimizer) -> int:
    named = [item for state in optimizer.state.values() for item in state.items()]
    return sum(value.nbytes for name, value in named if isinstance(value, Tensor) and name != "step")


def in_backward(model: nn.Module, peak: int, room: int) -> int:
    """Bytes apart from model, shards, their states and gradients; no less than `room` below what nearly all gradients take."""
    whole = sum(padded(p) for p in model.parameters() if p.requires_grad)
    others = peak - sum(p.nbytes for p in model.parameters()) - 4 * whole // dist.get_world_size()
    return max(others, 15 * whole // 16 - room)


def enough(layers: nn.ModuleList, batch: Batch, watch: Watch) -> int:
    """Bytes of shards, states, gradients and activations, and of six units."""
    watch.weigh()
    loss = batch.loss(layers)
    watch.weigh()
    activations = watch.held[-1] - watch.held[-2] - loss.nbytes
    shards = sum(padded(p) * (4 if p.requires_grad else 1) for p in layers.parameters()) // dist.get_world_size()
    return shards + activations + 6 * max(sum(map(padded, layer.parameters())) for layer in layers)


# What is seen of a learner's optimizer, units and schedule

UNIT = "start", "wait", "free", "reduce"
BYTES = "storage.resize_ takes bytes, not elements: t.nbytes is what t needs"
_MARKED = "wait() does nothing where nothing is on its way: a free unit stays free, and the next start() gathers it"
_SHAPE = (
    "parameter.data = torch.empty(0) loses the shape, and frees nothing that autograd has saved: leave the parameter as it is, "
    "and resize the storage below it"
)
_OTHERS = (
    "the module keeps the Parameter objects that it has: put nothing new into it, give parameter.data what it needs; "
    "others hold these objects, too"
)
_SHARDS = (
    "a shard is what shard(parameter) returns, and learns where its parameter does: "
    "torch.nn.Parameter(shard(parameter.detach()), requires_grad=parameter.requires_grad)"
)
_HOOK = "reduce it in a hook, register_post_accumulate_grad_hook. A lambda in a loop sees its last value: use functools.partial"
_REST = "finish() sends what has not left, with zeros for None"
TURN = "gradients leave in the reverse order of `params`, on all ranks: one that's there early waits for those before it"


def leaving(events: list[Event], model: nn.Module) -> tuple[str, str]:
    """Finds where a gradient first leaves too early, too late or in another's place, and a hint; empty where none does."""
    turns = [(name, padded(p)) for name, p in model.named_parameters() if p.requires_grad][::-1]
    place, backward, there, left = "", 0, set(), len(turns)
    for kind, what, count in events:
        name, right = turns[left] if left < len(turns) else ("", 0)
        anew = f"{TURN}; does finish() forget what the backward before has counted?" if backward > 1 else ""
        if place == "backward" and kind in ("gradient", "mark") and name in there:
            until = f"that of {what} was made" if kind == "gradient" else "backward was over"
            return f"in backward #{backward}, the gradient of {name} was there, but had not left when {until}", anew or _HOOK
        if kind == "gradient":
            there.add(what)
        elif kind == "mark":
            if what == "finished" and name:
                return f"{name} did not leave after backward #{backward}", _REST
            if what == "backward":
                backward, there, left = backward + 1, set(), 0
            place = what
        elif what == "reduce_scatter":
            if place == "step":
                return "something leaves in step()", "what has left is with the shards already: step() reduces nothing"
            if not name:
                return f"in backward #{backward}, more left than there are gradients", "each gradient leaves once a backward"
            if count != right or (place == "backward" and name not in there):
                why = f"with {right:,}" if count != right else "which was not there"
                return f"in backward #{backward}, {count:,} bytes left where it was the turn of {name}, {why}", anew or TURN
            left += 1
    return "", ""


class Noted:
    """A learner's unit; the watch hears when its methods begin and end. Raises Stopped where too little memory is there."""

    def __init__(self, unit, layer: nn.Module, watch: Watch):
        self._unit, self._layer, self._watch = unit, layer, watch
        self.start, self.wait, self.free, self.reduce = (partial(self._call, name) for name in UNIT)

    def _call(self, method: str) -> None:
        self._watch.mark(method)
        getattr(self._unit, method)()
        self._watch.mark("over")
        for p in self._layer.parameters():
            if p.is_contiguous() and 0 < (there := p.untyped_storage().nbytes()) < p.nbytes:
                raise Stopped(f"after {method}(), a parameter of {p.nbytes:,} bytes has a storage of {there:,}", BYTES)

    def is_there(self) -> None:
        """Raises Stopped where a parameter has no memory, which nobody could read and live."""
        if any(p.untyped_storage().nbytes() < p.nbytes for p in self._layer.parameters()):
            raise Stopped("after wait() on a free unit, start() and wait(), the parameters are not there", _MARKED)


Before = list[tuple[str, nn.Parameter, torch.Size]]  # the layers' parameters: name, object, shape


def unchanged(layers: nn.ModuleList, before: Before) -> None:
    """Raises Stopped where the layers have other parameters than before, or of other shapes."""
    if [id(p) for p in layers.parameters()] != [id(p) for _, p, _ in before]:
        raise Stopped("the modules' parameters are not still the same Parameter objects", _OTHERS)
    for name, p, shape in before:
        if p.shape != shape:
            raise Stopped(f"{name} of shape {list(shape)} has the shape {list(p.shape)} now", _SHAPE)


def shards_of(units: list, layers: nn.ModuleList) -> list[nn.Parameter]:
    """Returns all units' shards. Raises Stopped where a layer's are not one Parameter a parameter, as `shard` gives it."""
    found = []
    for k, (unit, layer) in enumerate(zip(units, layers, strict=True)):
        shards, parameters = list(getattr(unit, "shards", ())), list(layer.parameters())
        if len(shards) != len(parameters):
            what = f"the unit of layer {k} has {len(shards)} shards; its module has {len(parameters)} parameters"
            raise Stopped(what, "unit.shards is a list: one Parameter for each of module.parameters(), in their order")
        for shard, p in zip(shards, parameters, strict=True):
            right = f"a Parameter of {[-(-p.numel() // dist.get_world_size())]} with requires_grad={p.requires_grad}"
            is_one = isinstance(shard, nn.Parameter)
            there = f"a Parameter of {list(shard.shape)} with requires_grad={shard.requires_grad}" if is_one else kind_of(shard)
            if there != right:
                raise Stopped(f"unit.shards of layer {k} has {there}; right is {right}", _SHARDS)
        found += shards
    return found


def misplaced(events: list[Event]) -> list[str]:
    """Lists what gathers and reduces in the wrong method, and whether start() waits."""
    place, found = "", set()
    for kind, what, _ in events:
        place = what if kind == "mark" else place
        if (what, place) in (("all_gather", "start"), ("reduce_scatter", "reduce")):
            continue
        if what in ("all_gather", "reduce_scatter") or (kind == "wait" and place == "start"):
            found.add(f"{what or kind} in {place}()")
    return sorted(found)


_OLD = "there from before"


def scheduled(events: list[Event], n: int) -> dict:
    """Says what is there when a layer computes; how many units at once, at least where there is a next one, and at most."""
    found, there, step, most, fewest = {}, {}, 1, 0, n
    marks = (event.what.partition(" ") for event in events if event.kind == "mark")
    for what, k in ((what, int(number)) for what, _, number in marks if number.isdigit()):
        if what == "start":
            there.setdefault(k, "on its way")
            most = max(most, len(there))
        elif what == "wait" and there.get(k) == "on its way":
            there[k] = "there"
        elif what == "free":
            there.pop(k, None)
        elif what == "step":
            found[f"units at once in step {k}"] = f"{fewest} to {most}"
            found[f"units still there at the end of step {k}"] = sorted(there)
            there, step, most, fewest = dict.fromkeys(there, _OLD), k + 1, 0, n
        elif what in ("forward", "backward"):
            following = k + 1 if what == "forward" else k - 1
            for unit in sorted({k, following} & set(range(n))):
                state = there.get(unit, "not there")
                found[f"while layer {k} computes in {what} {step}, unit {unit}"] = (
                    "there" if (unit, state) == (k, _OLD) else state
                )
            fewest = min(fewest, len(there)) if 0 <= following < n else fewest
    return found


# What the exercise gives; the notebook shows both classes as they stand here.


class Sharded(torch.nn.Module):
    """Layers, one after the other. A schedule gathers, frees and reduces their units."""

    def __init__(self, layers, schedule):
        super().__init__()
        self.layers, self.schedule = layers, schedule

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            self.schedule.before_forward(k)
            x = layer(x)
            self.schedule.after_forward(k)
            x.register_hook(partial(self.arrived, k))
        return x

    def arrived(self, k, grad):
        """The gradient of layer k's output is there: layer k + 1 is done, k is next."""
        if k + 1 < len(self.layers):
            self.schedule.after_backward(k + 1)
        self.schedule.before_backward(k)

    def finish(self):
        self.schedule.after_backward(0)


class OneAtATime:
    """Each unit is gathered when it is needed, and freed when it has computed."""

    def __init__(self, units):
        self.units = units

    def before_forward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_forward(self, k):
        self.units[k].free()

    def before_backward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_backward(self, k):
        self.units[k].reduce()
        self.units[k].free()


class FreesOneFirst(OneAtATime):
    """Unit 1 is freed before it is reduced, too: a gradient needs no parameter."""

    def after_backward(self, k):
        if k == 1:
            self.units[k].free()
        super().after_backward(k)


class Marked(Sharded):
    """The watch hears when a layer computes: "forward 3"."""

    def __init__(self, layers: nn.ModuleList, schedule, watch: Watch):
        super().__init__(layers, schedule)
        self._mark = watch.mark
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, k=k: watch.mark(f"forward {k}"))

    def arrived(self, k, grad):
        super().arrived(k, grad)
        self._mark(f"backward {k}")


class Unit:
    """A layer's unit, which marks what a schedule does with it. While it is not whole, its parameters are NaN."""

    def __init__(self, k: int, layer: nn.Module, watch: Watch):
        self._k, self._parameters, self._mark = k, list(layer.parameters()), watch.mark
        self.shards = [nn.Parameter(pieces(p)[dist.get_rank()], p.requires_grad) for p in self._parameters]
        self._coming: list[tuple[Tensor, Tensor, dist.Work]] = []
        self._empty()

    def _empty(self) -> None:
        self._there = False
        for p in self._parameters:
            p.data.fill_(nan)

    def start(self) -> None:
        self._mark(f"start {self._k}")
        for p, shard in zip(self._parameters, self.shards, strict=True) if not self._there else ():
            row = shard.new_empty(len(shard) * dist.get_world_size())
            self._coming.append((p, row, dist.all_gather_single(row, shard.detach(), async_op=True)))
        self._there = True

    def wait(self) -> None:
        self._mark(f"wait {self._k}")
        for p, row, work in self._coming:
            work.wait()
            p.data.copy_(row[: p.numel()].view(p.shape))
        self._coming.clear()

    def free(self) -> None:
        self._mark(f"free {self._k}")
        for _, _, work in self._coming:
            work.wait()
        self._coming.clear()
        self._empty()

    def reduce(self) -> None:
        self._mark(f"reduce {self._k}")
        for p, shard in zip(self._parameters, self.shards, strict=True):
            if p.requires_grad:
                row = torch.cat(pieces(torch.zeros_like(p) if p.grad is None else p.grad)) / dist.get_world_size()
                dist.reduce_scatter_single(mean := torch.empty_like(shard), row)
                shard.grad = mean
                p.grad = None
