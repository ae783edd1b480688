"""Every c10d call of this process, also those that DistributedDataParallel and fully_shard make in C++.

A kernel of ours stands before each c10d operator at the dispatch key BackendSelect, which the dispatcher always visits:
in every thread, under no_grad and inference_mode, below autograd, on the CPU and on GPUs. Other operators never pass it,
so that a rank can keep the recorder on at all times. (A TorchDispatchMode sees the same calls, but slows every operator.)
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from manyranks.measure import completions, operators
from manyranks.measure.location import Place, called_from, distributed_function, here, in_backward

RECENT = 64  # calls remembered when not everything is kept: enough for a report of a hang

_KEY = torch._C.DispatchKey.BackendSelect
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_engine = torch.autograd.Variable._execution_engine


@dataclass(eq=False)
class Call:
    """A communication call of one rank.

    op: "all_reduce", "send", …
    bytes: of the tensors that this rank puts in (for a recv: takes out)
    group: "default" or the group's name
    ranks: the group's, global
    peer: global rank of the other side or the root, else None
    sequence: from 0; counts the group's collectives, or the messages to (or from) this peer with this tag
    dtype: of these tensors
    is_async: whether the caller goes on before it is done
    started, finished: seconds of time.perf_counter; finished is None while it is under way
    where: (file, line) in the reader's program, made readable in the kernel
    tag: of a message
    parts: bytes of an all_to_all for each of `ranks`, this one too
    received: bytes that an all_to_all brings, with this rank's own
    number: its place among the rank's calls, from 0
    """

    op: str
    bytes: int
    group: str
    ranks: tuple[int, ...]
    peer: int | None
    sequence: int
    dtype: str
    is_async: bool
    started: float
    finished: float | None = None
    where: Place | str | None = None
    tag: int = 0
    parts: tuple[int, ...] = ()
    received: int = 0
    number: int = 0

    def finish(self) -> None:
        """Notes that it is over now, unless that was noted before."""
        if self.finished is None:
            self.finished = time.perf_counter()


class Event(NamedTuple):
    """The main thread issues a call, or waits. number: the call's; None for a wait in C++ that does not say for which.

    started, finished: as Call's; flops, bytes: what the operators had done before it, 0 where that is not counted.
    """

    waits: bool
    number: int | None
    started: float
    finished: float
    flops: int
    bytes: int


def issue(operator, keyset, args: tuple, kwargs: dict):
    """Makes a call that has been noted. (Tests put another transport in this place.)"""
    return operator.redispatch(keyset, *args, **kwargs)


class Recorder:
    """Notes the calls of this process from `install` on. One a process."""

    def __init__(self):
        self._followers = completions.Followers()
        self._numbering = threading.RLock()  # other threads make calls, too: a call's number is its place in the list
        self.start(everything=False)

    def install(self) -> "Recorder":
        """Puts the recorder before every c10d operator and Work.wait; the returned object must be kept alive."""
        self._library = torch.library.Library("c10d", "IMPL")
        for name in operators.NAMES:
            self._library.impl(name, self._kernel(name), _KEY.name, with_keyset=True)
        recorder = self
        dist.Work.wait = lambda work, *args, **kwargs: recorder._waited(work, args, kwargs)
        dist.Work.get_future = lambda work: recorder._future_of(work)
        torch._C.Future.wait = lambda future: recorder._waited_for(future)
        torch._C.Future.then = lambda future, function: recorder._after(future, function)
        self._functional = torch.library.Library("_c10d_functional", "IMPL")
        self._functional.impl("wait_tensor", self._wait_tensor, _KEY.name, with_keyset=True)
        return self

    def start(self, everything: bool, work: Callable[[], tuple[int, int]] | None = None) -> None:
        """Forgets what was noted. `everything`: keep all calls and the real end of each, not only the recent ones.

        work: gives the flops and bytes of the operators so far.
        """
        with self._numbering:
            self.everything = everything
            self._work = work or (lambda: (0, 0))
            self.calls: deque[Call] = deque(maxlen=None if everything else RECENT)
            self.journal: list[Event] = []
            self.issued = 0
        self.counts: Counter = Counter()  # collectives by group; messages by (group, op, peer, tag)
        self.members: dict[str, tuple[int, ...]] = {}
        self.broken = False
        self.late: set[int] = set()  # ids of Works whose wait had a timeout that passed
        self._in_backward = False
        self.waiting: Call | None = None
        self._endless = False  # whether that wait has no timeout
        self.issuing: Call | None = None
        self._messages: dict[int, tuple[dist.Work, Call]] = {}
        self._collectives: dict[int, tuple[dist.Work, Call]] = {}
        self._completed: dict[int, Call] = {}  # by the id of a Work that may still be waited for
        self._futures: WeakKeyDictionary[torch._C.Future, dist.Work] = WeakKeyDictionary()
        self._groups: dict[dist.ProcessGroup, tuple[str, tuple[int, ...]]] = {}

    def blocked_in(self, frame) -> Call | str | None:
        """Finds the communication that the thread with this innermost frame waits in: a call, or the name of a function."""
        if call := self.waiting or self.issuing:
            return call
        function = distributed_function(frame)
        if in_backward(frame) or function:
            return self.oldest_incomplete() or function
        return None

    def waits_for_peers(self, call: Call | str) -> bool:
        """Returns whether the main thread waits for the end of this call, and nothing but the call's end ends that."""
        return call is self.waiting and self._endless and not self.broken

    def settle(self) -> None:
        """Waits a moment for the ends of calls: other threads note them, a little after the caller could go on."""
        deadline = time.perf_counter() + 0.1
        while any(call.finished is None for call in self.calls) and time.perf_counter() < deadline:
            time.sleep(0.0005)

    def oldest_incomplete(self) -> Call | None:
        return next((call for work, call in list(self._collectives.values()) if not work.is_completed()), None)

    def _kernel(self, name: str):
        operator = getattr(torch.ops.c10d, name).default

        def kernel(keyset, *args, **kwargs):
            call = self._note(name, operators.arguments(operator, args, kwargs))
            main = threading.current_thread() is threading.main_thread()
            self.issuing = call if main else self.issuing
            try:
                result = issue(operator, keyset & _BELOW, args, kwargs)
            except BaseException:
                self.counts[_number_of(call)] -= 1  # refused: its peers will not meet it
                raise
            finally:
                self.issuing = None if main else self.issuing
            return self._track(call, result)

        return kernel

    def _wait_tensor(self, keyset, tensor: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        try:
            return torch.ops._c10d_functional.wait_tensor.default.redispatch(keyset & _BELOW, tensor)
        finally:
            self._note_event(True, None, started)

    def _note(self, name: str, named: dict) -> Call:
        op = operators.NAMES[name]
        group, ranks = self._group(operators.group_of(named))
        peer, tag = operators.peer_of(named, ranks), named.get("tag", 0)
        size, dtype = operators.payload(op, named)
        if op in operators.POINT_TO_POINT:
            is_async = not called_from(op, sys._getframe(2))
        else:
            is_async = bool(named.get("async_op", False))
        call = Call(op, size, group, ranks, peer, 0, dtype, is_async, 0.0, where=here(), tag=tag)
        key = _number_of(call)
        if op == "all_to_all":
            call.parts, call.received = operators.parts(named), operators.received(named)
        with self._numbering:
            call.sequence, call.number = self.counts[key], self.issued
            self.counts[key] += 1
            self.issued += 1
            self.calls.append(call)
        self._note_end_of_backward(sys._getframe(2))
        call.started = time.perf_counter()
        self._note_event(False, call.number, call.started)
        return call

    def _note_end_of_backward(self, frame) -> None:
        """Notes the wait in C++ at the end of a backward of DistributedDataParallel that issued collectives.

        The engine runs callbacks in the order they were queued in: ours comes before DDP's, which waits for the
        buckets; from there we queue another, which comes after it.
        """
        if not self.everything or self._in_backward or not in_backward(frame):
            return
        if threading.current_thread() is threading.main_thread():
            self._in_backward = True
            _engine.queue_callback(lambda: _engine.queue_callback(self._backward_ended(time.perf_counter())))

    def _backward_ended(self, started: float) -> Callable[[], None]:
        def ended():
            self._in_backward = False
            self._note_event(True, None, started)

        return ended

    def _group(self, group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
        if group not in self._groups:
            name = "default" if group == dist.group.WORLD else group.group_name
            self._groups[group] = name, tuple(dist.get_process_group_ranks(group))
            ranks = self._groups[group][1]
            self.members[name] = ranks if self.members.get(name, ranks) == ranks else ()  # two groups of one name
        return self._groups[group]

    def _track(self, call: Call, result):
        work = operators.work_of(result)
        if work is None:
            call.finished = time.perf_counter()
            self._note_event(True, call.number, call.started)  # a monitored_barrier waits inside
            return result
        from_anyone = call.op == "recv" and call.peer is None  # only its own Work can say whom it was from
        # The end of a call that is not asynchronous is that of the wait which comes next: it needs no thread.
        if self.everything and not from_anyone and not completions.notify(work, call.finish) and call.is_async:
            work = self._followers.follow(work, call.finish)
            result = (*result[:-1], work.boxed()) if isinstance(result, tuple) else work.boxed()
        self._completed.pop(id(work), None)  # the id of one that is gone
        if call.op in operators.POINT_TO_POINT:
            self._messages[id(work)] = work, call
        else:
            self._forget_completed()
            self._collectives[id(work)] = work, call
        return result

    def _forget_completed(self) -> None:
        # Keeping a Work keeps its tensors: hold it no longer than it is under way.
        for key, (work, call) in list(self._collectives.items()):
            if not work.is_completed():
                break
            del self._collectives[key]
            if self.everything:
                self._completed[key] = call

    def _future_of(self, work: dist.Work) -> torch._C.Future:
        future = completions.get_future(work)
        self._futures[future] = work  # as long as somebody has the future
        return future

    def _after(self, future: torch._C.Future, function: Callable) -> torch._C.Future:
        following = completions.then(future, function)
        if (work := self._futures.get(future)) is not None:
            self._futures[following] = work  # to wait for one is to wait for both
        return following

    def _waited_for(self, future: torch._C.Future):
        if (work := self._futures.pop(future, None)) is not None:
            work.wait()
        return completions.wait_for(future)

    def _waited(self, work: dist.Work, args: tuple, kwargs: dict) -> bool:
        done = None, self._completed.pop(id(work), None)
        _, call = self._messages.get(id(work)) or self._collectives.get(id(work)) or done
        main = threading.current_thread() is threading.main_thread()
        started = time.perf_counter()
        timed, again = bool(args or kwargs), id(work) in self.late
        if main:  # whoever waits once more for the same Work waits without an end
            self.waiting, self._endless = call, again or not timed
        self.late.discard(id(work))
        try:
            return self._followers.wait(work, *args, **kwargs)
        except RuntimeError:
            if timed and not work.is_completed():
                self.late.add(id(work))
            else:
                self.broken = True
            raise
        finally:
            self._after_wait(id(work), call, started, main)

    def _after_wait(self, key: int, call: Call | None, started: float, main: bool) -> None:
        if main:
            self.waiting = None
        if key in self.late:
            return
        finished = time.perf_counter()
        self._messages.pop(key, None)
        self._collectives.pop(key, None)
        if call is not None and call.finished is None:
            call.finished = finished
        if main:
            self._note_event(True, None if call is None else call.number, started)

    def _note_event(self, waits: bool, number: int | None, started: float) -> None:
        if self.everything and threading.current_thread() is threading.main_thread():
            finished = time.perf_counter() if waits else started
            self.journal.append(Event(waits, number, started, finished, *self._work()))


def _number_of(call: Call) -> str | tuple[str, str, int | None, int]:
    """Returns what a call is counted among: its group's collectives, or the messages to or from this peer with this tag."""
    return (call.group, call.op, call.peer, call.tag) if call.op in operators.POINT_TO_POINT else call.group
