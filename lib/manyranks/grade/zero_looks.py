"""How the checks of exercise 03_zero look at what a learner has made: its parts, what it holds, and what happens when.

Where later tasks call the learner's own shard and gather, these are looked at, too: what is wrong there is said there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.given.zero import padded, pieces
from manyranks.grade.judges import Right
from manyranks.grade.learner import Ready, refuse_class
from manyranks.grade.trial import Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Event, Watch

UNIT = ("start", "wait", "free", "reduce")
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

NONE = "a parameter that a rank's examples do not use has a gradient of None there: zeros take its place, and are sent"
_ABSENT = (
    "a row was used whose memory is freed: call storage.resize_(nbytes), gather into this very storage, which autograd has "
    "saved, and wait(); only then may the layer compute"
)
_ROOM = (
    "dist.all_gather_single(output, input): the input is this rank's shard, of S elements, and the output is flat and has room "
    "for N·S, padding included"
)
ADVICE = (
    (r"for \+=?: 'NoneType'|object has no attribute 'add_?'", "a shard's .grad may be None: then the mean takes its place"),
    (r"IndexError.*\n.*chunk", "few elements make fewer chunks than N: pad with zeros to a multiple of N first"),
    (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b", NONE),
    (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
    (r"allgather: invalid tensor size|output size must be", _ROOM),
    (
        r"invalid tensor type|different dtypes",
        "a tensor arrives in the dtype of its sender: receive it into that dtype",
    ),
    (r"outputShape.*worldSize|input tensor must be", "pad with zeros first: N·S elements go in, and S come out"),
    (r"Padding length should be", "flatten the tensor before you pad it: pad counts along the last dimension"),
    (r"shape '.*' is invalid for input of size", "the padding is still there: keep the first shape.numel() elements"),
    (r"out of bounds for storage of size [1-9]", BYTES),
    (r"signal 11|SIGSEGV|exited with code -11|Segmentation|storage of size 0|no storage", _ABSENT),
    (r"a leaf Variable that requires grad", "change parameters under torch.no_grad(), or give parameter.detach() away"),
    (r"in wait: (assert|raise)\b", "wait() must do nothing if nothing is on its way, even if the unit is free"),
    (r"in start: (assert|raise)\b", "start() does nothing where the unit is whole or on its way"),
    (r"in reduce: (assert|raise)\b", "reduce() works whether the unit is whole or free: a gradient needs no parameter"),
)  # on what Python and torch say of wrong answers


def made(kind, ready: Ready, call: str, methods: Iterable[str], *args, **kwargs):
    """What the learner's class makes of the arguments. Raises Stopped where it was ready, or lacks a method."""
    refuse_class(kind if isinstance(kind, type) else type(kind), ready)
    answer = kind(*args, **kwargs)
    refuse_class(type(answer), ready)
    for name in methods:
        if not callable(getattr(answer, name, None)):
            raise Stopped(f"{call} gave a {type(answer).__name__}, which has no {name}()", f"write {name} in the class")
    return answer


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
    """Of all units. Raises Stopped where a layer's are not one Parameter a parameter, as `shard` gives it."""
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


@contextmanager
def checked(kind) -> Iterator[None]:
    """Inside, Stopped is raised where the learner's class calls a shard or a gather of the learner's that is wrong."""
    functions = [kind, *(value for base in getattr(kind, "__mro__", ()) for value in vars(base).values())]
    theirs = [f for f in functions if isinstance(f, FunctionType) and not f.__module__.startswith(("torch", "manyranks"))]
    spaces = {id(f.__globals__): f.__globals__ for f in theirs}.values()
    before = [(names, name, names.get(name)) for names in spaces for name in ("shard", "gather")]
    before = [one for one in before if isinstance(one[2], FunctionType)]
    for names, name, function in before:
        names[name] = with_check(name, function)
    try:
        yield
    finally:
        for names, name, function in before:
            names[name] = function


def with_check(name: str, function: Callable) -> Callable:
    @wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        asked = len(args) == 1 if name == "shard" else len(args) == 2 and isinstance(args[1], tuple | list)
        if asked and not kwargs and not _fits(name, result, args[0], torch.Size(*args[1:])):
            what = f"the {name} that is called here does not return what it must"
            raise Stopped(what, f"your {name} does not pass its own check: mend it first; call a helper by another name")
        return result

    return call


def _fits(name: str, result, given: Tensor, shape: torch.Size) -> bool:
    """Whether it is given's piece, or a whole of which `given` is the piece, as far as this rank knows."""
    if not isinstance(result, Tensor) or result.dtype != given.dtype:
        return False
    if name == "shard":
        return torch.equal(result, pieces(given)[dist.get_rank()])
    there = min(len(given), max(0, shape.numel() - dist.get_rank() * len(given)))  # without padding
    mine, given = (one[:there].nan_to_num() for one in (pieces(result)[dist.get_rank()], given))
    return result.shape == shape and torch.equal(mine, given)


# What happens when: by the order of events, not by any clock


def forget(watch: Watch) -> None:
    """Drops the events that are worked out by now, all but the calls: records would be large with them."""
    watch.events[:] = [event for event in watch.events if event.kind == "call"]


_HOOK = "reduce it in a hook, register_post_accumulate_grad_hook. A lambda in a loop sees its last value: use functools.partial"
_REST = "finish() sends what has not left, with zeros for None"
TURN = "gradients leave in the reverse order of `params`, on all ranks: one that's there early waits for those before it"


def leaving(events: list[Event], model: nn.Module) -> tuple[str, str]:
    """Where a gradient first leaves too early, too late or in another's place, and a hint; empty where none does."""
    turns = [(name, padded(p)) for name, p in model.named_parameters() if p.requires_grad][::-1]
    place, backward, there, left = "", 0, set(), len(turns)
    for kind, what, count in events:
        name, right = turns[left] if left < len(turns) else ("", 0)
        if place == "backward" and kind in ("gradient", "mark") and name in there:
            until = f"that of {what} was made" if kind == "gradient" else "backward was over"
            return f"in backward #{backward}, the gradient of {name} was there, but had not left when {until}", _HOOK
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
                return f"in backward #{backward}, {count:,} bytes left where it was the turn of {name}, {why}", TURN
            left += 1
    return "", ""


def out_of_turn(trial: Trial, right: Right) -> str:
    """Says TURN where the first gradients of a run that broke off left in another order, and not where one was left out."""
    passes = sum(map(len, trial.case.batches))
    for rank, should in enumerate(right):
        must = [call.bytes for call in should.calls if call.op == "reduce_scatter"]
        got = [entry.bytes for entry in trial.notes.get(rank, []) if entry.op == "reduce_scatter"]
        first = len(must) // passes
        rest = iter(must[:first])
        if not all(count in rest for count in got[:first]):
            return TURN
    return ""


def misplaced(events: list[Event]) -> list[str]:
    """What gathers and reduces in the wrong method, and whether start() waits."""
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
    """What is there when a layer computes; how many units at once, at least where there is a next one, and at most."""
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
