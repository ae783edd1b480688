"""Runs a learner's function on worlds of 2, 3 and 4 ranks, within a time limit, and keeps what happened."""

import contextlib
import io
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from manyranks.grade import probe
from manyranks.measure.calls import Call
from manyranks.theory.collectives import Round
from manyranks.world.errors import RankFailed, RankHung, WorldError
from manyranks.world.world import World

SIZES = (2, 3, 4)
_RUN_SECONDS, _ALL_SECONDS = 8.0, 14.0  # with what it costs to end ranks that hang, a check stays below 20 s
_SHOWN_LINES, _LONG = 12, 240
_OURS = re.compile(r"^  probe\.py, line \d+, in \w+\n(    .*\n?)?", re.MULTILINE)


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer. results: rank -> what it returns (None: this rank's is right); hint: what to tell the learner."""

    hint: str
    results: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One call on every rank of a world. arguments, expected: by rank; rounds: the messages that must travel, in theory."""

    arguments: tuple[tuple, ...]
    expected: tuple[torch.Tensor, ...]
    rounds: list[Round]
    mistakes: tuple[Mistake, ...] = ()

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.arguments)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.expected[0].itemsize


@dataclass(frozen=True)
class Trial:
    """A case that was run. answers, calls: by rank, empty where it did not end well; problem: why it did not; hung: it hung."""

    case: Case
    answers: list[probe.Answer] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    problem: str = ""
    hint: str = ""
    hung: bool = False
    unwritten: bool = False
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
                if done[-1].hung or done[-1].unwritten:
                    return done
                if done[-1].problem:
                    break
    return done


def _trial(world: World, function: Callable, case: Case) -> Trial:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of messages that nobody received: the count of messages says it
        try:
            measured = world.measure(probe.answer, function, case.arguments)
            outcome = {"answers": measured.results, "calls": measured.calls}
        except WorldError as error:
            outcome = _failed(error)
        except Exception as error:  # a function that cannot be sent to the ranks, a result that cannot be read
            outcome = {"problem": _short(f"it could not be run: {type(error).__name__}: {_text(error)}")}
    return Trial(case, printed=_head(printed.getvalue()), **outcome)


def _failed(error: WorldError) -> dict:
    lines = _OURS.sub("", _text(error)).splitlines()
    if isinstance(error, RankHung):
        said = [line for line in lines[:3] if line]
        return {"problem": _short(said[0].partition("; World(")[0]), "hint": _short("; ".join(said[1:])), "hung": True}
    unwritten = isinstance(error, RankFailed) and isinstance(error.exception, NotImplementedError)
    where = [line.strip() for line in lines[1:5] if line.startswith("  ")]
    return {"problem": _short(lines[0]), "hint": _short("; ".join(where)), "unwritten": unwritten}


def _text(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # its __str__ raises
        return type(error).__name__


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def _head(text: str) -> str:
    """The first lines, without the terminal's control characters."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text[:20_000].splitlines()]
    kept = [_short(line) for line in lines[:_SHOWN_LINES]]
    return "\n".join([*kept, *(["…"] if len(lines) > _SHOWN_LINES else [])])
