"""Checks the code that a reader writes in a lesson, and says in a sentence what it found."""

import re
import traceback
from collections.abc import Callable
from typing import Any

from manyranks.measure.location import machinery
from manyranks.world import cells
from manyranks.world.errors import RankFailed, RankHung, WorldError

_NOT_WRITTEN = "Not written yet. Fill in the cell above and run it again; until then the answer below steps in."
_FRAME = re.compile(r"^  (.+, line \d+)(?:, in .+)?(?:\n    (.+))?$", re.M)


def attempt(run: Callable[[], Any], *checks: tuple[Callable[[Any], Any], str | Callable[[Any], str]]) -> bool:
    """Runs the reader's code and prints "Right.", or says what is wrong with the result.

    run: calls the reader's code and returns what to check, for instance lambda: world.measure(train)
    checks: pairs of a condition on that result and the sentence to print if it doesn't hold; the sentence may be a function
        of the result
    Returns True if every condition holds. Errors of the code are printed, never raised.
    """
    try:
        result = run()
    except Exception as error:
        print(_NOT_WRITTEN if _unwritten(error) else f"Not yet: {_told(error)}")
        return False
    for check in checks:
        if complaint := _complaint(result, *check):
            print(f"Not yet: {complaint}")
            return False
    print("Right.")
    return True


def _complaint(result, condition: Callable, sentence: str | Callable) -> str:
    """Returns the sentence if the condition doesn't hold; NaN doesn't, and neither does a condition that raises."""
    try:
        holds = condition(result)
        if holds and holds == holds:
            return ""
        return sentence(result) if callable(sentence) else sentence
    except Exception as error:
        return f"the check can't use what your code returned ({_first_line(error)})."


def _unwritten(error: Exception) -> bool:
    """Returns whether a stub, here or on a rank, still raises its NotImplementedError. PyTorch's own come with a text."""
    raised = error.exception if isinstance(error, RankFailed) else error
    return type(raised) is NotImplementedError and not raised.args


def _told(error: Exception) -> str:
    """Returns what was raised and, on a second line, where in the reader's cells."""
    if isinstance(error, RankHung):
        waits = f"{error}".partition("\n\n")[0].splitlines()[1:] or [f"rank {r} {state}" for r, state in error.states.items()]
        return f"{_first_line(error)}\n  {waits[0]}"
    if isinstance(error, RankFailed):
        return _first_line(error) + _where(_FRAME.findall(error.traceback))
    if isinstance(error, WorldError):
        return _first_line(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not machinery(f.filename)]
    return _first_line(error) + _where([(cells.label((f.filename, f.lineno)), f.line) for f in frames])


def _where(frames: list[tuple[str, str]]) -> str:
    """Returns the innermost line of a cell, or of any file if no cell is among the frames (label, source)."""
    own = [frame for frame in frames if frame[0].startswith("cell ")] or frames
    return f"\n  {own[-1][0]}: {own[-1][1]}" if own else ""


def _first_line(error: Exception) -> str:
    text = f"{error}" if isinstance(error, WorldError) else "".join(traceback.format_exception_only(error))
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)
