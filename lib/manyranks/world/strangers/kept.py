"""Functions that stay with who judges: a rank calls them through pipes, and holds nothing of what answers.

A call is one byte, the function's number; its result is one float.
"""

import errno
import math
import os
import secrets
import select
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from typing import Any, NamedTuple

from manyranks.measure.journal import Stopped
from manyranks.world.errors import NotStarted

_RESULT = struct.Struct("d")
_MANY = 256  # calls that are read at once
_TRIES = 20  # to make a pipe that nobody takes away
_LOOK = 50  # milliseconds after which the thread sees that a run is over


class Kept(NamedTuple):
    """Functions that stay with who judges.

    given: what a rank gets
    functions: that it may call, NaN where they answer no more
    by: what answers, for who judges
    """

    given: Any
    functions: tuple[Callable[[], float], ...]
    by: Any


class Asks(NamedTuple):
    """A rank's end.

    given: what it gets
    pipes: of its calls, and of their results
    functions: how many it may call
    """

    given: Any
    pipes: tuple[str, str]
    functions: int

    @contextmanager
    def calls(self, refused: Stopped) -> Iterator[list[Callable[[], float]]]:
        """Inside, these functions ask who judges.

        refused: what they raise where he answers no more
        """
        with open(self.pipes[0], "wb", 0) as calls, open(self.pipes[1], "rb", 0) as results:

            def function(number: int) -> Callable[[], float]:
                def ask() -> float:
                    calls.write(bytes([number]))
                    (result,) = _RESULT.unpack(results.read(_RESULT.size))
                    if math.isnan(result):
                        raise refused
                    return result

                return ask

            yield [function(number) for number in range(self.functions)]


@contextmanager
def answering(given: Sequence[Any], folder: str, there: str) -> Iterator[list[Any]]:
    """Inside, a thread answers the ranks' calls. Yields what each rank gets.

    folder: of the pipes, which ranks find `there`
    """
    gets, ends, over = list(given), [], threading.Event()
    with ExitStack() as stack:
        for rank, one in enumerate(given):
            if isinstance(one, Kept):
                pipes = [stack.enter_context(_pipe(folder)) for _ in ("calls", "results")]
                ends.append((*pipes, one.functions))
                paths = tuple(os.path.join(there, os.path.basename(pipe.name)) for pipe in pipes)
                gets[rank] = Asks(one.given, paths, len(one.functions))
        if ends:
            thread = threading.Thread(target=_answer, args=(ends, over), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        yield gets


def _pipe(folder: str) -> FileIO:
    """Makes a pipe with a name that nobody knows before. Raises ValueError where others take it away again and again.

    Others who may write in the folder can't put another file there that is opened here.
    """
    never_waits = os.O_NONBLOCK | os.O_NOFOLLOW
    for _ in range(_TRIES):
        path = os.path.join(folder, secrets.token_hex(8))
        try:
            os.mkfifo(path, 0o600)
            opened = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | never_waits))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EEXIST):  # taken away, or a link in its place
                continue
            raise NotStarted(f"there is no room for a pipe: {error}") from error
        if stat.S_ISFIFO(os.fstat(opened.fileno()).st_mode):
            return opened
        opened.close()
    raise ValueError("files of the check's were taken away: leave the check as it is")


def _answer(ends: list[tuple[FileIO, FileIO, tuple[Callable[[], float], ...]]], over: threading.Event) -> None:
    """A thread that answers until the run is over.

    ends: of each rank, where its calls come and results go, and functions
    """
    poll, of = select.poll(), {calls.fileno(): (calls, *rest) for calls, *rest in ends}
    for number in of:
        poll.register(number, select.POLLIN)
    while not over.is_set():
        for number, _ in poll.poll(_LOOK):
            calls, results, functions = of[number]
            for called in calls.read(_MANY) or ():
                if called < len(functions):
                    results.write(_RESULT.pack(functions[called]()))  # or not, where nobody reads them
