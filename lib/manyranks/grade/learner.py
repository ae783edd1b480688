"""A learner's code on a rank: what it may not call, what its calls raise, and what it hands back."""

import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import islice
from numbers import Integral, Real
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple

import torch

from manyranks.measure.audit import audited
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.location import machinery
from manyranks.measure.watch import Watch
from manyranks.world.strangers import trouble

FAILED = "failed: "  # a mark of a call that failed where others did not
LEAVE, LEAVE_GIVEN = "leave the check as it is", "leave what you are given as it is"  # to who has changed what isn't theirs

# Ready-made is no answer: where a learner's line calls a function, this asks which module the function comes from.

_LIBRARY, _PYTORCH = "manyranks", "torch"
_CALLED_BY_TORCH = ("<module>", "__torch_dispatch__", "__torch_function__")  # and an import by Python, on a learner's line
_AROUND = ("torch._compile", "torch._dynamo", "torch.autograd.function", "torch.utils._contextlib", "contextlib")
_AROUND += ("torch.distributed.c10d_logger",)  # these stand between a line and what it calls
# Where in PyTorch whole answers lie ready: DDP, FSDP, DTensor, meshes, checkpoint; what there a line may call; and not of that.
_ANSWERS = ("torch.distributed", "torch.nn.parallel", "torch.profiler")
_ANSWERS += ("torch.utils.benchmark", "torch.utils.checkpoint", "torch.utils.flop_counter")
_CALLS = tuple(f"torch.distributed.{name}" for name in ("distributed_c10d", "c10d_logger", "is_available"))
_TOGETHER = tuple(f"torch.distributed.distributed_c10d.{name}" for name in ("all_reduce_coalesced", "_coalescing_manager"))
_C10D = "torch._C._distributed_c10d"
_OF_C10D = "done exception get_future is_completed is_success name rank result size synchronize then value wait"
_LOOKS = ("gc.get_objects", "gc.get_referents", "gc.get_referrers")  # these find what closures and frames hide
# What watches the answer, and is called in the middle of it.
_WATCHES = (
    *("manyranks.grade.learner", "manyranks.grade.absent._display", "manyranks.lazy"),  # an import is no call
    *(
        f"manyranks.measure.{name}"
        for name in ("audit", "calls", "completions", "journal", "location", "memory", "operators", "watch")
    ),
    "manyranks.world",
)
YOURSELF = "write it yourself: the text above says all that it needs"


class Allowed(NamedTuple):
    """The ready-made things that an answer may call.

    given: what the task hands out of this library's modules, classes and functions
    hint: what to do instead of another call
    only: the operations it is built from, where others give no points at all
    """

    given: tuple[str, ...] = ()
    hint: str = YOURSELF
    only: tuple[str, ...] = ()


NOTHING_GIVEN = Allowed()


@contextmanager
def refused(allowed: Allowed) -> Iterator[Callable[[str], str]]:
    """Raises Stopped at its end where a learner's line has called what is forbidden; calls between modules are their affair.

    Not at once: their own except would catch it, and a profile function that raises is taken away. Yields a function that has
    a line call something forbidden of this name, and returns what was noted: `watched` where the watcher is still there.
    """
    codes: dict[int, tuple[CodeType, bool]] = {}  # asked of each call: whether the function's code is forbidden
    called: list[Stopped] = []

    def is_forbidden(frame: FrameType) -> bool:
        code, module = frame.f_code, frame.f_globals.get("__name__") or ""
        looked_at = module.startswith((_LIBRARY, _PYTORCH)) and code.co_name not in _CALLED_BY_TORCH
        forbidden = looked_at and _is_forbidden(f"{module}.{code.co_qualname}", allowed)
        codes[id(code)] = code, forbidden  # kept, so that no other code gets its id
        return forbidden

    def note(frame: FrameType, event: str, argument) -> None:
        if called:  # one is enough, and what it calls in turn may be much
            return
        name, caller, hint = "", frame, allowed.hint
        if event == "call":
            known = codes.get(id(frame.f_code))
            if not (known[1] if known else is_forbidden(frame)):
                return
            caller = _past(frame.f_back)
            name = _as_called(frame, allowed) if _is_theirs(caller) else ""
        elif event == "c_call" and argument is sys.setprofile:
            name, hint = "sys.setprofile", LEAVE
        elif event == "c_call" and str(getattr(argument, "__module__", None)) == _C10D:
            name = f"{_C10D}.{argument.__name__}" if argument.__name__ not in _OF_C10D.split() else ""
        if name and _is_theirs(caller):
            refuse(name, hint, caller)

    def refuse(name: str, hint: str, caller: FrameType) -> None:
        line = TracebackType(None, caller, caller.f_lasti, caller.f_lineno)
        called.append(Stopped(f"{name} is not allowed", hint).with_traceback(line))

    def hear(event: str, _: tuple) -> None:
        if event in _LOOKS and not called and _is_theirs(caller := sys._getframe(2)):  # past the hook that tells
            refuse(event, "an answer may not look through all objects, not even to debug: take that line out", caller)

    def still_watched(word: str) -> str:
        if called:
            return ""
        # Both watchers have to notice: `note` a call of what seems to be a function of the library's, `hear` a look at what is
        # hidden. exec and compile give the function that module, and the lines that call a learner's cell.
        library = {"__name__": f"{_LIBRARY}.{word}"}
        exec("def ready(): pass", library)
        found = []
        for call, names in (("ready()", library), ("audit(looks)", {"audit": sys.audit, "looks": _LOOKS[0]})):
            eval(compile(call, "<cell 0>", "eval"), {**names, "__name__": "__main__"})
            found.append(called.pop().what if called else "")
        return found[0] if all(found) else ""

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with audited(hear):
            yield still_watched
        if sys.getprofile() is not note:  # a recursion without end takes it away, and a signal can; their own except hides it
            hint = "don't recurse without end, handle signals or set a profiler"
            called.append(Stopped("the check's call watcher was removed", hint))
    finally:
        sys.setprofile(before)
        if called:
            raise called[0]


def watched(word: str) -> str:
    """Returns what a watcher notes of the forbidden call of this name."""
    return f"{_LIBRARY}.{word}.ready is not allowed"


def refuse_class(kind: type, allowed: Allowed) -> None:
    """Raises Stopped for a ready-made class, or one that is derived from it."""
    for base in kind.__mro__:
        if _is_forbidden(f"{base.__module__}.{base.__qualname__}", allowed):
            raise Stopped(f"{base.__name__} is not allowed", allowed.hint)


def refuse_itself(answer, allowed: Allowed) -> None:
    """Raises Stopped for a ready-made answer, or a partial of one."""
    while isinstance(answer, partial):
        answer = answer.func
    name = f"{getattr(answer, '__module__', '')}.{getattr(answer, '__qualname__', type(answer).__qualname__)}"
    if _is_forbidden(name, allowed):
        raise Stopped(f"{name} is not allowed", allowed.hint)


def made(kind, allowed: Allowed, call: str, methods: Iterable[str], *args, **kwargs):
    """Makes an object of the learner's class. Raises Stopped where it is ready-made, or lacks a method."""
    refuse_class(kind if isinstance(kind, type) else type(kind), allowed)
    answer = kind(*args, **kwargs)
    refuse_class(type(answer), allowed)
    for name in methods:
        if not callable(getattr(answer, name, None)):
            raise Stopped(f"{call} gave a {type(answer).__name__}, which has no {name}()", f"write {name} in the class")
    return answer


@contextmanager
def checked(kind, fits: dict[str, Callable[..., bool]]) -> Iterator[None]:
    """Inside, Stopped is raised where the learner's class calls an answer to an earlier task that is wrong.

    fits: its name -> whether a result fits, of the result and the arguments; a helper of this name has others, and fits
    """
    functions = [kind, *(value for base in getattr(kind, "__mro__", ()) for value in vars(base).values())]
    theirs = [f for f in functions if isinstance(f, FunctionType) and not f.__module__.startswith((_PYTORCH, _LIBRARY))]
    spaces = {id(f.__globals__): f.__globals__ for f in theirs}.values()
    before = [(names, name, names[name]) for names in spaces for name in fits if isinstance(names.get(name), FunctionType)]
    for names, name, function in before:
        names[name] = _with_check(name, function, fits[name])
    try:
        yield
    finally:
        for names, name, function in before:
            names[name] = function


def _with_check(name: str, function: Callable, fits: Callable[..., bool]) -> Callable:
    @wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if not kwargs and not fits(result, *args):
            what = f"the {name} called here doesn't return what it should"
            raise Stopped(what, f"your {name} does not pass its own check: mend it first; call a helper by another name")
        return result

    return call


def _is_forbidden(name: str, allowed: Allowed) -> bool:
    known = _within(name, (_LIBRARY, *_ANSWERS)) and not _within(name, (*allowed.given, *_WATCHES, *_CALLS))
    return known or _within(name, _TOGETHER)


def _within(name: str, names: tuple[str, ...]) -> bool:
    """Returns whether it is one of these, or something in a module or a class of them."""
    return name in names or name.startswith(tuple(f"{each}." for each in names))


def _past(caller: FrameType | None) -> FrameType | None:
    """Finds who has called it, past what PyTorch and Python have put around it."""
    while caller and not _is_theirs(caller) and (caller.f_globals.get("__name__") or "").startswith(_AROUND):
        caller = caller.f_back
    return caller


def _is_theirs(caller: FrameType | None) -> bool:
    """Returns whether the line is the learner's, not the library's, PyTorch's or Python's, which call for themselves."""
    if caller is None or machinery(caller.f_code.co_filename):
        return False
    name = caller.f_globals.get("__name__") or ""  # which anybody can take: the names must be the module's own
    module = sys.modules.get(name) if name.startswith((f"{_LIBRARY}.", _PYTORCH)) else None
    return module is None or vars(module) is not caller.f_globals


def _as_called(frame: FrameType, allowed: Allowed) -> str:
    """The name of the function, or of the class whose object is made, in the outermost package that has it."""
    code, module = frame.f_code, frame.f_globals.get("__name__") or ""
    name = code.co_qualname
    if code.co_name == "__init__":
        kinds = type(frame.f_locals[code.co_varnames[0]]).__mro__  # the learner's own may be derived from it
        kind = next((kind for kind in kinds if _is_forbidden(f"{kind.__module__}.{kind.__qualname__}", allowed)), kinds[0])
        module, name = kind.__module__, kind.__qualname__
    parts = module.split(".")
    packages = [package for k in range(1, len(parts)) if (package := ".".join(parts[:k])) in sys.modules]
    here = (one for one in packages if getattr(getattr(sys.modules[one], name, None), "__module__", "") == module)
    return f"{next(here, module)}.{name}"


# Calls of a learner's function, in the learner's terms

_SECONDS = 2.0  # of processor time: a busy machine does not count
_FINITE = "it is finite: count down what is left to do, and end when nothing is"

Advice = tuple[tuple[str, str], ...]  # pattern of what was found, or of its hint, and what to say then, with its groups


def arguments(names: str) -> str:
    """A pattern of what Python says where one of these methods takes other arguments than the check gives; a group."""
    return rf"\b({names})\(\) (?:takes|missing|got an unexpected)"


_ROOM = "the input is this rank's shard, of S elements, and the output is flat and has room for N·S, padding included"
GENERAL = (  # on what Python and torch say of answers to whatever task
    (
        r"'builtin_function_or_method' object has no attribute '(?:all_|get_rank|get_world|i?send|i?recv)",
        "dist is something else here: an `import *` has replaced it (math has a dist, too)",
    ),
    (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
    (r"allgather: invalid tensor size|output size must be", f"dist.all_gather_single(output, input): {_ROOM}"),
    (r"outputShape.*worldSize|input tensor must be", "pad with zeros first: N·S elements go in, and S come out"),
    (r"invalid tensor type|different dtypes", "a tensor arrives in the dtype of its sender: receive it into that dtype"),
    (r"a leaf Variable that requires grad", "change parameters under torch.no_grad(), or give parameter.detach() away"),
    (r"incorrect number of gradients", "backward returns one for each argument of apply, None for what has none"),
    (r"(must|has to) be contiguous", "what is sent has to be contiguous: x.contiguous()"),
    (r"cannot be interpreted as an integer", "whole numbers: // in place of /"),
)


# on answers to tasks of some exercises
NO_RANK = ("is not in this group", "a rank is a number from 0 to N − 1: what does % N do to the others?")
TABLE = (r"AttributeError: '\w+' object has no attribute", "the table above has the names of what you are given")


def on_ctx(call: str, gradient: str = "") -> Advice:
    """Returns advice on a torch.autograd.Function without ctx. call: the check's; gradient: the argument of backward."""
    forward = (r"forward\(\) (takes|missing)", f"the check calls {call}: forward gets ctx first")
    return (forward, (r"backward\(\) (takes|missing)", f"backward gets ctx and {gradient}")) if gradient else (forward,)


def dict_of(names: Iterable[str]) -> str:
    """Says what is asked for where a function returns something else than a dict with these names."""
    return "it returns a dict: {" + ", ".join(f'"{name}": …' for name in names) + "}"


def advised(found: trouble.Trouble, known: Advice) -> str:
    """Returns advice on it, from what is known of this task and of all; "" where there is none."""
    matches = ((re.search(pattern, f"{found.problem}\n{found.hint}"), said) for pattern, said in (*known, *GENERAL))
    return next((match.expand(said) for match, said in matches if match), "")


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
        late.append(TooLong(f"{call} was not over after {_SECONDS:g} s", hint))
        raise late[0]

    late: list[TooLong] = []
    watching = sys.getprofile()
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if late:
            sys.setprofile(watching)  # where it came in the midst of that, it has taken it away
            raise late[0]


def error_of(function, *args) -> str:
    """Names what a call raises: "ValueError" for that or a kind of it; empty for nothing. NotImplementedError goes on."""
    try:
        function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return ""


def items(value: Iterable, what: str, form: str, most: int) -> list:
    """Lists so many items at most; they may be made now. Raises Stopped for what has none, or more; form: what it should be."""
    if isinstance(value, str | bytes | dict):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    if not hasattr(value, "__iter__"):
        raise Stopped(f"{what} is {value!r:.60}", form)
    found = list(islice(value, most + 1))
    if len(found) > most:
        raise Stopped(f"{what} has more than {most} items", form)
    return found


def number(value: Any, what: str, form: str) -> float:
    """Returns the learner's number. Raises Stopped for what is none; form: what is asked for."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return float(value)


def whole(value: Any, what: str, form: str) -> int:
    """Returns the learner's whole number. Raises Stopped for any other, 3.0 too; form: what is asked for."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex():
        value = value.item()
    if isinstance(value, float):
        raise Stopped(f"{what} is {value!r:.40}", "a whole number is asked for: // in place of /")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return int(value)


def pair(value: Any, call: str, form: str) -> tuple[Any, Any]:
    """Returns the learner's pair, also of a tensor or an array. Raises Stopped where it is none."""
    value = value.tolist() if getattr(value, "ndim", 0) == 1 else value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    return value[0], value[1]


def tensor(value: Any, what: str, hint: str = "it returns a tensor") -> torch.Tensor:
    """Returns the learner's tensor. Raises Stopped where it is none."""
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
