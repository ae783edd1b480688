"""The work of a process, operator by operator: torch.profiler's events as intervals that do not overlap."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from manyranks.measure.kinds import Span, innermost, kind_of, one_after_another

_WHOLE = "manyranks: all of it"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_TAKEN = "a process has one torch.profiler at a time"


class Profile(NamedTuple):
    """Holds one run; seconds of time.perf_counter.

    spans: of the main thread's operators, or of an accelerator's kernels where there were any; none overlap. An operator that
        calls others has what these leave. What only calls others, or moves nothing, isn't work: it lies between the spans
    operators: how many the main thread ran, counting all
    """

    started: float
    finished: float
    spans: tuple[Span, ...]
    operators: int
    on_device: bool = False

    @property
    def seconds(self) -> float:
        return self.finished - self.started

    def by_name(self) -> dict[str, tuple[int, float]]:
        """Says how often each operator was called (how many kernels ran for it) and how many seconds it worked."""
        found: dict[str, tuple[int, float]] = {}
        for span in self.spans:
            count, seconds = found.get(span.name, (0, 0.0))
            found[span.name] = count if span.goes_on else count + 1, seconds + span.finished - span.started
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def profiled(function: Callable, *args, **kwargs) -> tuple[Any, Profile]:
    """Calls the function once under torch.profiler, and returns its result and the Profile.

    Raises RuntimeError where a torch.profiler is on already, or the function starts one.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError(f"a torch.profiler is on: {_TAKEN}; measure outside of its `with` block")
    with record_function(_WHOLE):
        pass  # the first one of a process takes milliseconds, which would count as the function's
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with _silent(), torch_profile(activities=activities, acc_events=True) as profiler:
        with record_function(_WHOLE):
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        ended = time.perf_counter()
    return result, _read(profiler.profiler.kineto_results.events(), begun, ended)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler prints two lines per run unless this variable forbids it when a process first has a profiler."""
    given = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = given or "99"
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_LOG_LEVEL, None)


def _read(events: list, begun: float, ended: float) -> Profile:
    """Reads the profiler's events.

    begun, ended: moments, by time.perf_counter, right after the event of the whole run began and right after it ended
    """
    whole = next((event for event in events if event.name() == _WHOLE and event.activity_type() == "user_annotation"), None)
    if whole is None:
        raise RuntimeError(f"the function runs its own torch.profiler: {_TAKEN}; take that one, or this one, out")
    first, last = whole.start_ns(), whole.end_ns()
    # Each moment is a little late, the first by 0.1 ms, the last by 0.01 ms, and either by more where another process came
    # between: the one that is less late says what the profiler's clock shows by perf_counter.
    finished = min(begun + (last - first) / 1e9, ended)
    # Neither what another thread does for it meanwhile, nor CUDA's own functions, whose numbers aren't the operators'.
    calls = [event for event in events if event.activity_type() == "cpu_op" and not event.is_async()]
    called = [(e.start_ns(), e.end_ns(), e.name()) for e in calls if e.start_thread_id() == whole.start_thread_id()]
    names = {event.correlation_id(): event.name() for event in calls}
    ran = [event for event in events if event.activity_type() in _KERNELS]
    # A kernel's name is its operator's; its own if it communicates, or if nobody knows who launched it.
    known = [None if "nccl" in event.name() else names.get(event.linked_correlation_id()) for event in ran]
    kernels = [(e.start_ns(), e.end_ns(), name or e.name()) for e, name in zip(ran, known, strict=True)]

    def at(nanoseconds: int) -> float:
        return finished - (last - nanoseconds) / 1e9

    spans = []
    for name, start, end, goes_on in one_after_another(kernels) if kernels else innermost(called):
        start, end = max(start, first), min(end, last)  # what was under way before, and clocks that differ
        if end > start:
            spans.append(Span(name, kind_of(name), at(start), at(end), goes_on))
    operators = sum(name.startswith("aten::") for _, _, name in called)
    return Profile(at(first), finished, tuple(spans), operators, bool(kernels))
