"""Calls of a learner's function that fail while others do not: each costs what it would have shown, and no more."""

import json
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from manyranks.grade import trouble
from manyranks.grade.journal import Stopped
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict
from manyranks.measure.place import machinery

_FAILED = "failed: "  # a mark
_SECONDS = 2.0  # of processor time: a busy machine does not count
_FINITE = "a table is finite: count down what is left to do, and end when nothing is"


class TooLong(Stopped):
    """A call computes for too long."""


@contextmanager
def named(call: str) -> Iterator[None]:
    """Inside, what a line of the learner's raises becomes Stopped, with the call's name; not that nothing is written yet."""
    try:
        yield
    except Exception as error:
        if not _is_their_own(error):
            raise
        raise Stopped(_raised(call, error), "this line raised").with_traceback(error.__traceback__) from None


@contextmanager
def noted(watch, key: str, call: str, first: bool, patient: bool = False) -> Iterator[None]:
    """Inside, the function is called once; what it raises is noted under this key.

    first: nothing has worked yet: it ends the run, as in `named`. patient: whether a call that takes too long is noted as well.
    Otherwise it raises TooLong.
    """
    try:
        with _limited(call), named(call) if first else nullcontext():
            yield
    except Exception as error:
        if first or (isinstance(error, TooLong) and not patient):
            raise
        found, hint = (error.what, error.hint) if isinstance(error, Stopped) else (_raised(call, error), "")
        watch.mark(_FAILED + json.dumps([key, found, hint, _frames(error)]))


def _raised(call: str, error: Exception) -> str:
    name, said = type(error).__name__, trouble.text(error)
    return f"{call} raised {name}" + (f": {said}" if said != name else "")


def _is_their_own(error: Exception) -> bool:
    """Whether a line of the learner's raised it, and not to say that there is no answer yet."""
    return not isinstance(error, NotImplementedError | Stopped) and bool(_frames(error))


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """The learner's lines that lead to it, innermost first."""
    steps = [(step.filename, step.lineno, step.name) for step in traceback.extract_tb(error.__traceback__)]
    return [step for step in reversed(steps) if not machinery(step[0])]


@contextmanager
def _limited(call: str) -> Iterator[None]:
    """Inside, a call that computes for too long raises Stopped."""

    def stop(*_):
        raise TooLong(f"{call} was not over after {_SECONDS:g} s", _FINITE)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def failures(trial: Trial) -> dict[str, Verdict]:
    """By key, what to say of a call that failed; the first of each."""
    found: dict[str, Verdict] = {}
    for event in trial.answers[0].events:
        if event.what.startswith(_FAILED):
            key, what, hint, frames = json.loads(event.what.removeprefix(_FAILED))
            where = trouble.place([tuple(frame) for frame in frames])
            found.setdefault(key, Verdict(False, what, "; ".join(filter(None, (hint, where)))))
    return found
