"""Runs a learner's function on worlds of several sizes, within a time limit, and keeps what happened."""

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from manyranks.measure import journal
from manyranks.measure.calls import Call
from manyranks.timeline.program import Collective, Recv, Send, Wait
from manyranks.world.confine import Confined
from manyranks.world.errors import RankHung, WorldError
from manyranks.world.measurement import Measurement
from manyranks.world.trouble import RETURNED, Notes, Trouble, late, text, trouble
from manyranks.world.world import World

_RUN_SECONDS, _ALL_SECONDS = 8.0, 14.0  # with what it costs to end ranks that hang, a check stays below 20 s on a quiet machine
_BUSY, _MOST_PATIENCE = 1.5, 6.0  # slowness from which a late run gets more time, and how much
_PROBE = 0.3  # seconds to find out
_LEAST_SECONDS = 4.0  # what a case gets in any case: on a busy machine those before it have used the time up
_SHOWN_LINES, _LONG = 12, 600
_NAMES = {Send: "send", Recv: "recv"}
_LAST_WORDS = ("terminate called after throwing an instance of 'gloo", "  what():  [enforce fail at ")


confined: Confined | None = None  # grade.apart sets it


def _fences() -> dict[str, Confined]:
    return {"confined": confined} if confined else {}


class Case(Protocol):
    """What every rank of a world of n does once with the learner's function. Its str() is "on 3 ranks with 7 elements"."""

    @property
    def n(self) -> int:
        """The number of ranks."""

    @property
    def job(self) -> tuple:
        """What a rank runs: a function, and its arguments between the learner's function and the journal's folder."""


@dataclass(frozen=True)
class Trial:
    """A case that was run. answers: what the ranks' jobs returned; calls: by rank; both empty where it did not end well.

    unwaited: the ranks that never waited for some call, with its operation; trouble: why it did not end well; notes: the
    calls with the lines that led to them; printed: by the ranks.
    """

    case: Case
    answers: list[Any] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    unwaited: tuple[tuple[int, str], ...] = ()
    trouble: Trouble | None = None
    notes: Notes = field(default_factory=dict)
    printed: str = ""


def trials(function: Callable, cases: Callable[[int], list[Case]], sizes: tuple[int, ...], part: bool = False) -> list[Trial]:
    """One trial a case, on fresh worlds of these sizes, and no more on a world whose ranks raised or died.

    Ends after the first that hangs, and where nothing is written. part: each case counts, so that a deadlock, which is found
    soon, ends its world only.
    """
    done: list[Trial] = []
    deadline = time.monotonic() + _ALL_SECONDS
    for n in sizes:
        with World(n, backend="gloo", timeout=_RUN_SECONDS, **_fences()) as world:
            for case in cases(n):
                world.timeout = round(min(_RUN_SECONDS, max(_LEAST_SECONDS, deadline - time.monotonic())), 1)
                done.append(_trial(world, function, case))
                if found := done[-1].trouble:
                    if found.unwritten or (found.hung and not (part and found.deadlock)):
                        return done
                    break
    return done


def _trial(world: World, function: Callable, case: Case) -> Trial:
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory(dir=confined.scratch if confined else None) as folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of messages that nobody received: the count of messages says it
        outcome = _outcome(world, function, case, folder)
        notes = journal.read(folder, case.n)
    return Trial(case, notes=notes, printed=_head(printed.getvalue()), **outcome)


def _outcome(world: World, function: Callable, case: Case, folder: str) -> dict:
    try:
        measured = _measured(world, function, case, folder)
        return {"answers": measured.results, "calls": measured.calls, "unwaited": _unwaited(measured)}
    except WorldError as error:
        found = trouble(error, journal.read(folder, case.n))
    except Exception as error:  # a function that cannot be sent to the ranks, a result that cannot be read
        found = Trouble(f"it could not be run: {type(error).__name__}: {text(error)}", "")
    return {"trouble": found._replace(problem=_short(found.problem), hint=_short(found.hint))}


def _measured(world: World, function: Callable, case: Case, folder: str) -> Measurement:
    """Once more where it was late because the machine has other things to do, with as much more time."""
    work, *arguments = case.job
    try:
        return world.measure(work, function, *arguments, folder)
    except RankHung as error:
        returned = set(error.states.values()) == {RETURNED}
        slow = slowness() if late(error) else 1.0
        if slow < _BUSY and not returned:
            raise
    for file in Path(folder).iterdir():
        file.unlink()
    world.timeout = round(_RUN_SECONDS * min(max(slow, 1.0), _MOST_PATIENCE), 1)
    return world.measure(work, function, *arguments, folder)


def slowness() -> float:
    """The seconds that a second of computing takes: 1 on a machine that does nothing else."""
    started, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _PROBE:
        pass
    return (time.monotonic() - started) / _PROBE


def _unwaited(measured: Measurement) -> tuple[tuple[int, str], ...]:
    """Rank and operation of the calls that were never waited for; none where the ranks' calls do not fit together."""
    try:
        ranks = measured.program.ranks
    except ValueError:
        return ()
    found = []
    for rank, instructions in enumerate(ranks):
        waited = {i.handle for i in instructions if type(i) is Wait}
        started = [i for i in instructions if type(i) in _NAMES or type(i) is Collective]
        found += [(rank, _NAMES.get(type(i)) or i.op) for i in started if i.handle not in waited]
    return tuple(found)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def _head(text: str) -> str:
    """The first lines, without the terminal's control characters and C++'s last words, which the report translates."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text[:20_000].splitlines()]
    lines = [line for line in lines if not line.startswith(_LAST_WORDS)]
    said = [line for line, following in zip_longest(lines, lines[1:]) if not (_headed(line) and _headed(following))]
    return "\n".join([*map(_short, said[:_SHOWN_LINES]), *(["…"] if len(said) > _SHOWN_LINES else [])])


def _headed(line: str | None) -> bool:
    """Whether it is a rank's heading, or the end."""
    return line is None or line.startswith("── rank ")
