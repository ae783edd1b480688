"""On a rank, beside a learner's code: what happens when, what is alive, what may not be called, what a call raises."""

import json
import re
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from numbers import Integral
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from manyranks.measure.elsewhere import Elsewhere
from manyranks.measure.journal import Journal, Stopped, frames
from manyranks.measure.memory import PeakBytes
from manyranks.measure.place import machinery
from manyranks.world import trouble

FAILED = "failed: "  # a mark of a call that failed where others did not
OVERWROTE = "a tensor was changed while it was being sent"  # a mark
_MOMENT, _LOOKS = 0.02, 4  # seconds, and how often to look in the meantime
_BLOCK = 4096  # bytes: torch and Python keep smaller ones for themselves, as they meet operators and modules
_OWN_BOOKS = re.compile("^<frozen importlib|linecache.py$")  # files in which Python notes modules, and lines for tracebacks


class Event(NamedTuple):
    """kind: "gradient", "call", "wait" or "mark"; what: the parameter, the operation or the mark; bytes: of a call."""

    kind: str
    what: str
    bytes: int = 0


class _Memory(PeakBytes):
    """What happens inside operators is not asked whether it was ready, for no learner's lines run there: that saves time."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            sys.setprofile(before)


class Watch(Journal):
    """A journal that also keeps events in memory, in order.

    seed: of the script's random numbers; held: the live bytes each time that `weigh` was called; peak_bytes: the most that
    tensors took inside `peak`; scattered: whether an all-to-all had an output that is not contiguous: gloo misplaces numbers.
    """

    def __init__(self, folder: str, rank: int, seed: int = 0):
        super().__init__(folder, rank)
        self.seed = seed
        self.events: list[Event] = []
        self.held: list[int] = []
        self.peak_bytes, self.scattered = 0, False
        self._memory = _Memory(counts=False)
        self._place, self._forbidden = "", ("", "", "", "")
        self._works: list[dist.Work] = []
        self._open: dict[int, set[StorageWeakRef]] = {}  # of a send that nobody has waited for: the storages that it reads
        self._places: dict[int, set[tuple[StorageWeakRef, int]]] = {}  # of the same sends: where in them
        self._coming: dict[int, dist.Work] = {}  # of a receive that nobody has waited for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything is noted."""
        wait, send, receive, events = dist.Work.wait, dist.ProcessGroup.send, dist.ProcessGroup.recv, self.events

        def noted(work, *args, **kwargs):
            self._stop_forbidden()
            events.append(Event("wait", ""))
            for under_way in (self._open, self._places, self._coming):
                under_way.pop(id(work), None)
            return wait(work, *args, **kwargs)

        def opened(group, tensors, *args):
            work = send(group, tensors, *args)
            self._open[id(work)] = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
            self._places[id(work)] = _places(tensors)
            self._works.append(work)  # so that no other one has its id
            return work

        def coming(group, tensors, *args):
            if _places(tensors) & set().union(*self._places.values()):
                self.mark(OVERWROTE)
            work = receive(group, tensors, *args)
            self._coming[id(work)] = work
            return work

        dist.Work.wait, dist.ProcessGroup.send, dist.ProcessGroup.recv = noted, opened, coming
        try:
            with self, self._memory:
                yield
        finally:
            dist.Work.wait, dist.ProcessGroup.send, dist.ProcessGroup.recv = wait, send, receive

    def follow(self, model: nn.Module) -> None:
        """Notes each gradient of the model, from now on, as it is made."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._gradient(name))

    def mark(self, what: str) -> None:
        """Notes that the script has come to this place."""
        self._place = what
        self.events.append(Event("mark", what))

    def forbid(self, function: str, place: str, what: str, hint: str) -> None:
        """From now on, Stopped is raised where a function of this name calls or waits past the mark `place`."""
        self._forbidden = (function, place, what, hint)

    def under_way(self) -> tuple[int, int]:
        """How many messages are being sent, and how many received: begun, and nobody has waited for them."""
        return len(self._open), len(self._coming)

    def weigh(self, *owners) -> None:
        """Counts the bytes that are alive; the least of a moment, for a call's thread may let go of a tensor a little late.

        owners: what the learner has made; what they lead to counts in any form, also as arrays, bytes and lists of numbers.
        """
        others = self._others(owners)
        counts = [self._memory.live_bytes()]
        for _ in range(_LOOKS if self._count else 0):
            time.sleep(_MOMENT / _LOOKS)
            counts.append(self._memory.live_bytes())
        self.held.append(min(counts) + others)

    def _others(self, owners: tuple) -> int:
        found = Elsewhere(owners, but=(self, self.events))
        self._memory.meet(found.tensors, found.storages)
        return found.bytes

    def weigh_all(self, first: bool = False) -> int:
        """Bytes that are alive, also of lists, bytes and numpy's arrays that were made since the first time."""
        self.weigh()
        if first and tracemalloc.is_tracing():  # it never stops: stopping can crash other threads (CPython 128679)
            tracemalloc.clear_traces()
        elif first:
            tracemalloc.start()
        blocks = [] if first else [(one.traceback[0].filename, one.size) for one in tracemalloc.take_snapshot().traces]
        theirs = [n for file, n in blocks if not _OWN_BOOKS.search(file) and (n >= _BLOCK or not machinery(file))]
        return self.held[-1] + sum(theirs)

    @contextmanager
    def peak(self) -> Iterator[None]:
        """Inside, the most that is alive at one time is what peak_bytes says."""
        self._memory.peak_bytes, self._memory.counts = 0, True
        yield
        self.peak_bytes, self._memory.counts = self._memory.peak_bytes, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_c10d_functional"):  # they reach no operator of c10d
            raise Stopped("functional collectives do not count here", "call dist's own: dist.all_reduce and the like")
        if self._open and self._overwrites(func, args, kwargs or {}):
            self.mark(OVERWROTE)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _overwrites(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether the operator writes where an open send reads."""
        read = set().union(*self._open.values())
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor) and StorageWeakRef(value.untyped_storage()) in read:
                    return True
        return False

    def _gradient(self, name: str) -> None:
        self.events.append(Event("gradient", name))

    def _stop_forbidden(self) -> None:
        function, place, what, hint = self._forbidden
        if place and place == self._place and function in (name for _, _, name in frames()):
            raise Stopped(what, hint)

    def _note(self, op: str, named: dict) -> None:
        self._stop_forbidden()
        super()._note(op, named)
        self.events.append(Event("call", op, self.last.bytes))
        self.scattered |= op == "all_to_all" and "output" in named and not named["output"].is_contiguous()


def _places(tensors: list[torch.Tensor]) -> set[tuple[StorageWeakRef, int]]:
    """Where in memory they begin."""
    return {(StorageWeakRef(one.untyped_storage()), one.data_ptr()) for one in tensors}


# What is ready is no answer: where a learner's line calls a function, this asks which module the function comes from.

_LIBRARY, _PYTORCH = "manyranks", "torch"
_CALLED_BY_TORCH = ("<module>", "__torch_dispatch__", "__torch_function__")  # and an import by Python, on a learner's line
_DECORATORS = ("torch._compile", "torch._dynamo", "torch.utils._contextlib")
# What watches the answer, and is called in the middle of it.
_WATCHES = (
    "manyranks.grade.watch",
    *(f"manyranks.measure.{name}" for name in ("calls", "ends", "journal", "memory", "operators", "place")),
    "manyranks.world",
)
YOURSELF = "write it yourself: the text above says all that it needs"


class Ready(NamedTuple):
    """given: modules of this library that the exercise hands out, or functions in them: all others are refused.

    theirs: how the names of PyTorch's modules and functions begin that would be the answer; hint: what to do instead.
    """

    given: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    hint: str = YOURSELF


NOTHING_GIVEN = Ready()


@contextmanager
def refused(ready: Ready) -> Iterator[None]:
    """Inside, a call of a function that was ready raises Stopped: one of this library's, but for what the exercise hands out.

    Calls between modules of the library, or of PyTorch, are their own affair: the caller must be a learner's line.
    """
    watched = (_LIBRARY, _PYTORCH) if ready.theirs else (_LIBRARY,)
    roots = tuple({name.partition(".")[0] for name in ready.theirs})
    codes: dict[int, tuple[CodeType, bool]] = {}  # asked of each call: whether the function's code was ready

    def is_ready(frame: FrameType) -> bool:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        called = module.startswith(watched) and code.co_name not in _CALLED_BY_TORCH
        codes[id(code)] = code, called and _is_ready(f"{module}.{code.co_qualname}", ready)
        return codes[id(code)][1]

    def refuse(frame: FrameType, event: str, argument) -> None:
        if event == "call":
            known = codes.get(id(frame.f_code))
            if not (known[1] if known else is_ready(frame)):
                return
            caller = _past_decorators(frame.f_back)
        elif event == "c_call" and str(getattr(argument, "__module__", None)).startswith(roots):
            name, caller = f"{argument.__module__}.{getattr(argument, '__name__', '')}", frame
            if not name.startswith(ready.theirs):
                return
        else:
            return
        if _is_theirs(caller):
            raise Stopped(f"{name if event == 'c_call' else _as_called(frame, ready)} is not allowed", ready.hint)

    before = sys.getprofile()
    sys.setprofile(refuse)
    try:
        yield
    finally:
        sys.setprofile(before)


def refuse_class(kind: type, ready: Ready) -> None:
    """Raises Stopped for a class that was ready, or one that is derived from it."""
    for base in kind.__mro__:
        if _is_ready(f"{base.__module__}.{base.__qualname__}", ready):
            raise Stopped(f"{base.__name__} is not allowed", ready.hint)


def refuse_itself(answer, ready: Ready) -> None:
    """Raises Stopped for an answer that was ready, or a partial of one."""
    while isinstance(answer, partial):
        answer = answer.func
    name = f"{getattr(answer, '__module__', '')}.{getattr(answer, '__qualname__', type(answer).__qualname__)}"
    if _is_ready(name, ready):
        raise Stopped(f"{name} is not allowed", ready.hint)


def _is_ready(name: str, ready: Ready) -> bool:
    ours = name.startswith(_LIBRARY) and not name.startswith((*ready.given, *_WATCHES))
    return ours or bool(ready.theirs and name.startswith(ready.theirs))


def _past_decorators(caller: FrameType | None) -> FrameType | None:
    """Who has called it, past those that PyTorch has put around it."""
    while caller and (caller.f_globals.get("__name__") or "").startswith(_DECORATORS):
        caller = caller.f_back
    return caller


def _is_theirs(caller: FrameType | None) -> bool:
    """Whether the line is the learner's, not the library's, PyTorch's or Python's, which call for themselves."""
    name = (caller.f_globals.get("__name__") or "") if caller else ""
    return bool(name) and not name.startswith((f"{_LIBRARY}.", _PYTORCH)) and not machinery(caller.f_code.co_filename)


def _as_called(frame: FrameType, ready: Ready) -> str:
    """The function's name, or that of the class whose object is made, in the outermost package that has it."""
    code, module = frame.f_code, frame.f_globals.get("__name__") or ""
    name = code.co_qualname
    if code.co_name == "__init__":
        kinds = type(frame.f_locals[code.co_varnames[0]]).__mro__  # the learner's own may be derived from it
        kind = next((kind for kind in kinds if _is_ready(f"{kind.__module__}.{kind.__qualname__}", ready)), kinds[0])
        module, name = kind.__module__, kind.__qualname__
    parts = module.split(".")
    packages = [".".join(parts[:k]) for k in range(1, len(parts))]
    here = (package for package in packages if getattr(_found(package, name), "__module__", "") == module)
    return f"{next(here, module)}.{name}"


def _found(package: str, name: str):
    return vars(sys.modules[package]).get(name) if package in sys.modules else None


# Groups that ranks make

ALL_MAKE_ALL = (
    "dist.new_group is called by all ranks, for every group, in one order, also by ranks outside the group: a loop over all "
    "groups, and each rank keeps the one that it is in"
)


@contextmanager
def groups_compared() -> Iterator[list[list[int]]]:
    """Inside, the ranks of each new group are noted, and compared with what the other ranks make at once. All ranks come in.

    Where they make different groups, torch waits for ranks that never come, or mixes groups up: which of them is chance.
    """
    store, before, made = distributed_c10d._get_default_store(), dist.new_group, []
    place = f"groups compared/{(store.add('groups compared', 1) - 1) // dist.get_world_size()}"

    def new_group(ranks=None, *args, use_local_synchronization=False, **kwargs):
        if use_local_synchronization:
            hint = "plain dist.new_group(ranks) is asked for: with use_local_synchronization only a group's own ranks call it"
            raise Stopped("new_group was called with use_local_synchronization", hint)
        ranks = None if ranks is None else list(ranks)
        mine = sorted(range(dist.get_world_size()) if ranks is None else map(int, ranks))
        first = store.compare_set(f"{place}/{len(made)}", "", f"{mine}").decode()
        if first != f"{mine}":
            found = f"rank {dist.get_rank()} made a group of ranks {mine} where another rank made one of {first}"
            raise Stopped(found, ALL_MAKE_ALL)
        made.append(mine)
        return before(ranks, *args, **kwargs)

    dist.new_group = distributed_c10d.new_group = new_group
    try:
        yield made
    finally:
        dist.new_group = distributed_c10d.new_group = before


# Calls of a learner's function, in the learner's terms

_SECONDS = 2.0  # of processor time: a busy machine does not count
_FINITE = "it is finite: count down what is left to do, and end when nothing is"


class TooLong(Stopped):
    """A call computes for too long."""


@contextmanager
def named(call: str) -> Iterator[None]:
    """Inside, what a line of the learner's raises becomes Stopped, with the call's name; not that nothing is written yet."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotImplementedError | Stopped) or not _frames(error):
            raise
        raise Stopped(_raised(call, error), "this line raised").with_traceback(error.__traceback__) from None


@contextmanager
def noted(watch: Watch, key: str, call: str, first: bool, patient: bool = False) -> Iterator[None]:
    """Inside, the function is called once; a failure costs the results whose names begin with this key, and no others.

    first: nothing has worked yet: it ends the run, as in `named`. patient: whether a call that takes too long costs no more
    than that, either. Otherwise it raises TooLong.
    """
    try:
        with limited(call), named(call) if first else nullcontext():
            yield
    except Exception as error:
        if first or (isinstance(error, TooLong) and not patient):
            raise
        found, hint = (error.what, error.hint) if isinstance(error, Stopped) else (_raised(call, error), "")
        watch.mark(FAILED + json.dumps([key, found, hint, _frames(error)]))


def _raised(call: str, error: Exception) -> str:
    name, said = type(error).__name__, trouble.text(error)
    return f"{call} raised {name}" + (f": {said}" if said != name else "")


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """The learner's lines that lead to it, innermost first."""
    steps = [(step.filename, step.lineno, step.name) for step in traceback.extract_tb(error.__traceback__)]
    return [step for step in reversed(steps) if not machinery(step[0])]


@contextmanager
def limited(call: str, hint: str = _FINITE) -> Iterator[None]:
    """Inside, a call that computes for too long raises TooLong."""

    def stop(*_):
        raise TooLong(f"{call} was not over after {_SECONDS:g} s", hint)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def error_of(function, *args) -> str:
    """The name of what a call raises, "ValueError"; empty where it raises nothing. What is not written yet goes on its way."""
    try:
        function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return ""


def items(value: Iterable, what: str, form: str, most: int) -> list:
    """So many at most; they may be made now. Raises Stopped for what has none, or more; form: what it should be."""
    if isinstance(value, str | bytes | dict):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    if not hasattr(value, "__iter__"):
        raise Stopped(f"{what} is {value!r:.60}", form)
    found = list(islice(value, most + 1))
    if len(found) > most:
        raise Stopped(f"{what} has more than {most} items", form)
    return found


def whole(value: Any, what: str, form: str) -> int:
    """The learner's number. Raises Stopped for what is none; form: what is asked for."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex():
        value = value.item()
    if isinstance(value, float):
        raise Stopped(f"{what} is {value!r:.40}", "a whole number is asked for: // in place of /")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return int(value)


def tensor(value: Any, what: str, hint: str = "it returns a tensor") -> torch.Tensor:
    """The learner's. Raises Stopped where it is none."""
    if not isinstance(value, torch.Tensor):
        raise Stopped(f"{what} is {kind_of(value)}", hint)
    return value


def plain(value: Any) -> torch.Tensor | str:
    """A learner's tensor, dense and without a graph; of anything else what it is, in words."""
    try:
        if not isinstance(value, torch.Tensor):
            return kind_of(value)
        return value.detach().as_subclass(torch.Tensor).to_dense().cpu()
    except Exception:  # an object that pretends to be a tensor
        return "something that cannot be read"


def kind_of(value: Any) -> str:
    """ "nothing", "a tuple of 3"."""
    if value is None:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.numel()} elements"
    many = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"a {type(value).__name__}{many}"
