"""Runs a function on a rank and counts what was asked for."""

import contextlib
import time
from dataclasses import dataclass, field

from manyranks.measure import flops, memory, wire
from manyranks.measure.calls import Call, Event, Recorder
from manyranks.measure.profile import Profile, profiled


@dataclass
class Recording:
    """The counts of one rank during one run; times in seconds of the notebook's clock, by which all ranks set theirs."""

    started: float
    finished: float = 0.0
    calls: list[Call] = field(default_factory=list)
    journal: list[Event] = field(default_factory=list)
    work: tuple[int, int] = (0, 0)  # flops and bytes of the whole run
    sent_bytes: int | None = None
    no_bytes: str | None = None  # why sent_bytes is None
    flops: int | None = None
    peak_bytes: int | None = None
    profile: Profile | None = None


def checked_counts(flops: bool = False, memory: bool = False, profile: bool = False) -> frozenset[str]:
    """The names of what is to be counted. Raises ValueError for a profile together with what would show in it."""
    if profile and (flops or memory):
        raise ValueError("profile=True with flops or memory: counting takes time, which would show; measure twice")
    return frozenset(name for name, on in (("flops", flops), ("memory", memory), ("profile", profile)) if on)


def record(recorder: Recorder, counts: frozenset, function, args: tuple, kwargs: dict):
    """Calls the function. Returns its result, and its Recording.

    counts: what checked_counts() returns
    """
    with contextlib.ExitStack() as modes:
        peak = modes.enter_context(memory.PeakBytes()) if "memory" in counts else None
        counter = modes.enter_context(flops.WorkCounter()) if "flops" in counts else None
        recorder.start(everything=True, work=counter and (lambda: (counter.flops, counter.bytes)))
        before = wire.counters()
        recording = Recording(started=time.perf_counter())
        if "profile" in counts:
            result, profile = profiled(function, *args, **kwargs)
            recording.profile, recording.started, recording.finished = profile, profile.started, profile.finished
        else:
            result = function(*args, **kwargs)
            recording.finished = time.perf_counter()
    recorder.settle()
    recording.calls, recording.journal = list(recorder.calls), recorder.journal
    recording.no_bytes = wire.unavailable()
    if recording.no_bytes is None:
        recording.sent_bytes = wire.moved(before, wire.counters())[0]
    if counter:
        recording.flops, recording.work = counter.flops, (counter.flops, counter.bytes)
    recording.peak_bytes = peak.peak_bytes if peak else None
    return result, recording
