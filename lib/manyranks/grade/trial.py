"""Runs a learner's function on worlds of 2, 3 and 4 ranks, within a time limit, and keeps what happened."""

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from manyranks.grade import journal, probe
from manyranks.grade.trouble import Notes, Trouble, text, trouble
from manyranks.measure.calls import Call
from manyranks.theory.collectives import Round
from manyranks.timeline.program import Recv, Send, Wait
from manyranks.world.errors import WorldError
from manyranks.world.measurement import Measurement
from manyranks.world.world import World

SIZES = (2, 3, 4)
_RUN_SECONDS, _ALL_SECONDS = 8.0, 14.0  # with what it costs to end ranks that hang, a check stays below 20 s
_SHOWN_LINES, _LONG = 12, 600
_LAST_WORDS = ("terminate called after throwing an instance of 'gloo", "  what():  [enforce fail at ")


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer. results: rank -> what it returns if not what is right; hint: what to tell the learner."""

    hint: str
    results: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Missing:
    """A typical wrong answer that is right but for some chunks, whatever stands there. chunks: rank -> the numbers of these."""

    hint: str
    chunks: tuple[set[int], ...]


@dataclass(frozen=True)
class Detour:
    """A typical wrong way. rounds: the messages that travel then; hint: what to tell the learner."""

    hint: str
    rounds: list[Round]


@dataclass(frozen=True)
class Case:
    """One call on every rank of a world. arguments, expected: by rank; rounds: the messages that must travel, in theory.

    note: what distinguishes it beside its size, "root = 3".
    """

    arguments: tuple[tuple, ...]
    expected: tuple[torch.Tensor, ...]
    rounds: list[Round]
    mistakes: tuple[Mistake | Missing, ...] = ()
    detours: tuple[Detour, ...] = ()
    note: str = ""

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.arguments)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.expected[0].itemsize

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return max(message.start + message.count for messages in self.rounds for message in messages)

    def __str__(self) -> str:
        return f"on {self.n} ranks with {self.elements:,} elements"


@dataclass(frozen=True)
class Trial:
    """A case that was run. answers, calls: by rank, empty where it did not end well; trouble: why it did not.

    unwaited: the ranks that never waited for some message, with its kind, "send" or "recv"; notes: the messages with the
    lines that led to them; printed: by the ranks.
    """

    case: Case
    answers: list[probe.Answer] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    unwaited: tuple[tuple[int, str], ...] = ()
    trouble: Trouble | None = None
    notes: Notes = field(default_factory=dict)
    printed: str = ""


def trials(function: Callable, cases: Callable[[int], list[Case]]) -> list[Trial]:
    """One trial a case, on worlds of 2, 3 and 4 fresh ranks, and no more on a world whose ranks raised or died.

    Ends after the first that hangs, and where nothing is written.
    """
    done: list[Trial] = []
    deadline = time.monotonic() + _ALL_SECONDS
    for n in SIZES:
        with World(n, backend="gloo", timeout=_RUN_SECONDS) as world:
            for case in cases(n):
                world.timeout = max(0.1, min(_RUN_SECONDS, deadline - time.monotonic()))
                done.append(_trial(world, function, case))
                if found := done[-1].trouble:
                    if found.hung or found.unwritten:
                        return done
                    break
    return done


def _trial(world: World, function: Callable, case: Case) -> Trial:
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
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
        measured = world.measure(probe.answer, function, case.arguments, folder)
        return {"answers": measured.results, "calls": measured.calls, "unwaited": _unwaited(measured)}
    except WorldError as error:
        found = trouble(error, journal.read(folder, case.n))
    except Exception as error:  # a function that cannot be sent to the ranks, a result that cannot be read
        found = Trouble(f"it could not be run: {type(error).__name__}: {text(error)}", "")
    return {"trouble": found._replace(problem=_short(found.problem), hint=_short(found.hint))}


def _unwaited(measured: Measurement) -> tuple[tuple[int, str], ...]:
    """Rank and kind of the messages that were started and never waited for; none where the ranks' calls do not fit together."""
    try:
        ranks = measured.program.ranks
    except ValueError:
        return ()
    found = []
    for rank, instructions in enumerate(ranks):
        waited = {i.handle for i in instructions if type(i) is Wait}
        started = [i for i in instructions if type(i) in (Send, Recv)]
        found += [(rank, "send" if type(i) is Send else "recv") for i in started if i.handle not in waited]
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
