"""What a rank did in the course of a script, in order: gradients, calls, waits, and the bytes that are alive."""

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.journal import Journal, Stopped, frames
from manyranks.measure.memory import PeakBytes

_MOMENT, _LOOKS = 0.02, 4  # seconds, and how often to look in the meantime


class Event(NamedTuple):
    """kind: "gradient", "call", "wait" or "mark"; what: the parameter, the operation or the mark; bytes: of a call."""

    kind: str
    what: str
    bytes: int = 0


class Watch(Journal):
    """A journal that also keeps events in memory, in order.

    held: the live bytes each time that `weigh` was called; peak_bytes: the most that tensors took inside `peak`; scattered:
    whether an all-to-all was given one output that is not contiguous, where gloo writes numbers to wrong places, silently.
    """

    def __init__(self, folder: str, rank: int):
        super().__init__(folder, rank)
        self.events: list[Event] = []
        self.held: list[int] = []
        self.peak_bytes = 0
        self.scattered = False
        self._memory = PeakBytes(counts=False)
        self._place, self._forbidden = "", ("", "", "", "")
        self._ready: tuple[tuple[str, ...], str] = ((), "")
        self._sent: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything is noted."""
        wait, events = dist.Work.wait, self.events

        def noted(work, *args, **kwargs):
            self._stop_forbidden()
            events.append(Event("wait", ""))
            return wait(work, *args, **kwargs)

        dist.Work.wait = noted
        try:
            with self, self._memory:
                yield
        finally:
            dist.Work.wait = wait

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

    def refuse(self, modules: tuple[str, ...], hint: str) -> None:
        """From now on, Stopped is raised where a function of these modules makes a call: it is an answer that was ready."""
        self._ready = modules, hint

    def changed(self) -> bool:
        """Whether a tensor that was sent, and still is there, has been changed since."""
        return any((tensor := ref()) is not None and tensor._version != version for ref, version in self._sent)

    def weigh(self) -> None:
        """Counts the bytes that are alive; the least of a moment, for a call's thread may let go of a tensor a little late."""
        counts = [self._memory.live_bytes()]
        for _ in range(_LOOKS if self._count else 0):
            time.sleep(_MOMENT / _LOOKS)
            counts.append(self._memory.live_bytes())
        self.held.append(min(counts))

    @contextmanager
    def peak(self) -> Iterator[None]:
        """Inside, the most that is alive at one time is what peak_bytes says."""
        self._memory.peak_bytes, self._memory.counts = 0, True
        yield
        self.peak_bytes, self._memory.counts = self._memory.peak_bytes, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_c10d_functional"):  # they reach no operator of c10d
            self._stop_ready()
            raise Stopped("functional collectives do not count here", "call dist's own: dist.all_reduce and the like")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _gradient(self, name: str) -> None:
        self.events.append(Event("gradient", name))

    def _stop_forbidden(self) -> None:
        function, place, what, hint = self._forbidden
        if place and place == self._place and function in (name for _, _, name in frames()):
            raise Stopped(what, hint)

    def _stop_ready(self) -> None:
        modules, hint = self._ready
        frame = sys._getframe(1) if modules else None
        while frame is not None:
            if (name := frame.f_globals.get("__name__", "")).startswith(modules):
                raise Stopped(f"{name} is not allowed", hint)
            frame = frame.f_back

    def _note(self, op: str, named: dict) -> None:
        self._stop_forbidden()
        self._stop_ready()
        super()._note(op, named)
        self.events.append(Event("call", op, self.last.bytes))
        self.scattered |= op == "all_to_all" and "output" in named and not named["output"].is_contiguous()
        if op == "send":
            self._sent += [(weakref.ref(tensor), tensor._version) for tensor in named["tensors"]]


class Blind:
    """Takes a watch's place where a script is run for its results only."""

    def __init__(self):
        self.events, self.held = [], [0]

    def weigh(self) -> None:
        """Counts nothing."""

    def mark(self, what: str) -> None:
        """Notes nothing."""

    def peak(self):
        """Counts nothing."""
        return nullcontext()
