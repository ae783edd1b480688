"""A rank's reply to the notebook, and an exception in a form that always travels."""

import os
import time
import traceback
from dataclasses import dataclass

import cloudpickle

from manyranks.measure.calls import Call
from manyranks.measure.location import machinery
from manyranks.world.rank.recording import Recording

REPLY, SHOWN, ASKED = b"r", b"s", b"a"  # kinds of messages to the notebook: a reply, something to show, a question
_CAUSES, _DEEP, _LONG = 3, 20, 20_000  # how much of an exception is shown
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


@dataclass
class Failure:
    """An exception, in a form that always travels."""

    kind: str
    rendered: str
    frames: list[tuple[str, int, str]]  # file, line, function; outermost first
    said: tuple[str, ...]  # the exception's arguments, as words
    pickled: bytes | None
    when: float
    cause: "Failure | None" = None


@dataclass
class Reply:
    """A rank's reply: how a run ended there. Where it ended well, the frames of its result follow in the message.

    It has no tensor and no array, for it must pack into one frame.
    """

    failure: Failure | None = None
    recording: Recording | None = None
    counts: dict[str | tuple[str, str, int | None, int], int] | None = None  # as Recorder's: do the ranks agree?
    members: dict[str, tuple[int, ...]] | None = None
    recent: list[Call] | None = None
    broken: bool = False


def failure_of(error: BaseException, whole: bool, depth: int = 0) -> Failure:
    """Describes an exception.

    whole: whether the exception itself travels, too
    """
    trace, cause = error.__traceback__, error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    try:
        pickled = cloudpickle.dumps(error.with_traceback(None)) if whole and depth == 0 else None
    except Exception:
        pickled = None
    return Failure(
        type(error).__name__,
        _rendered(error),
        _readers([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(trace)]),
        _said(error),
        pickled,
        time.perf_counter(),
        failure_of(cause, whole, depth + 1) if cause is not None and depth < _CAUSES else None,
    )


def _rendered(error: BaseException) -> str:
    """The exception's last lines, as Python prints them; of a group, its members too."""
    try:
        lines = "".join(traceback.format_exception_only(error)).strip()
        members = [f"  | {_rendered(member)}" for member in getattr(error, "exceptions", ())]
    except Exception:  # its __str__ raises
        return type(error).__name__
    text = "\n".join([lines, *members])
    return text if len(text) < _LONG else f"{text[: _LONG // 2]} … {text[-_LONG // 2 :]}"


def _said(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(argument)[:_LONG] for argument in error.args[:_CAUSES])
    except Exception:  # their __str__ raises
        return ("",)


def _readers(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The frames of the reader's code, and the line of a library that raised; the middle of a deep recursion left out."""
    readers = [frame for frame in frames if not machinery(frame[0])]
    if frames and machinery(frames[-1][0]) and not frames[-1][0].startswith(_OURS):
        readers.append(frames[-1])
    return readers if len(readers) <= _DEEP else [*readers[: _DEEP // 2], *readers[-_DEEP // 2 :]]
