"""Python's debugger on a rank, whose reader sits in the notebook: `breakpoint()`, and after a run that went wrong.

The rank asks for each line of input with a message, and waits. The rest is pdb's own.
"""

import linecache
import os
import pdb
import sys
import threading
import traceback
from bdb import BdbQuit, Breakpoint
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from manyranks.measure.location import OURS, machinery, readers_first

_ask: Callable[["Asked"], str | dict[str, str]] | None = None
_process = 0  # the rank's own, which may fork others
_STEPS = ("n", "next", "s", "step", "r", "return", "unt", "until", "j", "jump")
_last: TracebackType | None = None  # of what ended the last run
_stepped = False  # whether breakpoint() has opened a debugger in this run
asking = False  # whether this rank waits for a line now


@dataclass
class Asked:
    """What the debugger says before it waits for a line; or, with `files`, names of files whose source the rank lacks."""

    text: str = ""
    files: list[str] = field(default_factory=list)


class Left(Exception):
    """The reader has left the debugger, which ends the run."""

    __module__ = "builtins"  # a report says its name alone


def start(ask: Callable[[Asked], str | dict[str, str]]) -> None:
    """Lets breakpoint() and pdb.set_trace() open the debugger in the notebook, through `ask`."""
    global _ask, _process
    _ask, _process = ask, os.getpid()
    sys.breakpointhook = pdb.set_trace = _stop_here
    pdb.input = lambda question: ask(Asked(question)).rstrip("\n")  # `clear` asks whether you are sure
    pdb.post_mortem = lambda trace=None: Debugger(over=True).interaction(None, trace or sys.exc_info()[2])


def keep(trace: TracebackType | None) -> None:
    """Keeps what `after` looks at: the frames of an exception, until the next run."""
    global _last
    _last = trace


def rest() -> None:
    """A run is over: nothing is traced in the next one, and there are no breakpoints."""
    global _stepped
    if _stepped and os.getpid() == _process:
        sys.settrace(None)
        Breakpoint.clearBreakpoints()
        _stepped = False


def named(error: BaseException) -> BaseException:
    """An exception for a report: what leaves the debugger has words."""
    words = "you left the debugger with q, which ends the run for all ranks"
    return Left(words).with_traceback(error.__traceback__) if isinstance(error, BdbQuit) else error


def after() -> None:
    """Opens the debugger where the last run of this rank raised."""
    if _last is None:
        print("this rank raised nothing: it was another rank that failed or hung")
        return
    _fetch(traceback.walk_tb(_last))
    Debugger(over=True).interaction(None, _last)


def look_at(frame: FrameType) -> None:
    """Opens the debugger on another thread's frame, which goes on waiting: its variables can be seen, not its next line."""
    _fetch(traceback.walk_stack(frame))
    Debugger(over=True).interaction(frame, None)


class Debugger(pdb.Pdb):
    """pdb, from the notebook. Frames of this library that called the reader's code are left out.

    over: nothing runs any more; it begins at the reader's innermost line, and `down` leads into what that called.
    """

    def __init__(self, over: bool = False):
        super().__init__(stdin=self, stdout=self, nosigint=True, readrc=False)
        self.use_rawinput, self._said, self._over = False, [], over
        self.reset()
        self.prompt = f"(rank {os.environ['MANYRANKS_RANK']}) "

    def write(self, text: str) -> None:
        self._said.append(text)

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        """The reader's next line; "" where no one can type."""
        global asking
        said, self._said = "".join(self._said), []
        asking = True
        try:
            return _ask(Asked(said))
        finally:
            asking = False

    def get_stack(self, frame, trace):
        stack, at = super().get_stack(frame, trace)
        files = [each.f_code.co_filename for each, _ in stack]
        if self._over:
            at = max((k for k, file in enumerate(files) if not _unseen(file)), default=at)
        kept = [k for k in range(readers_first(files), len(stack)) if k == at or not files[k].startswith(OURS)]
        return [stack[k] for k in kept], sum(k < at for k in kept)

    def stop_here(self, frame) -> bool:
        """Steps through the reader's lines alone, over what they call of PyTorch."""
        return not _unseen(frame.f_code.co_filename) and super().stop_here(frame)

    def user_return(self, frame, value) -> None:
        super().user_return(frame, value)
        if frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(OURS) and not self.quitting:
            self.set_continue()  # that was the last of the reader's lines

    def onecmd(self, line: str) -> bool:
        if not self._over or self.parseline(line)[0] not in _STEPS:
            return super().onecmd(line)
        self.message("this run is over, so nothing can be stepped: p, w, up and down look at it, and q leaves")
        return False

    def do_interact(self, _: str) -> None:
        self.message("`interact` and `run` don't work here: type statements at the prompt, and run the cell again")

    do_run = do_restart = do_interact

    def _cmdloop(self) -> None:
        self.cmdloop()  # an interrupt ends the run, too

    def set_stepinstr(self) -> None:
        self.set_step()  # stops at the next line, where Python 3.13 and later would stop in the call of breakpoint() itself


def _unseen(file: str) -> bool:
    """Whether it isn't the reader's, or is no file."""
    return machinery(file) or file.startswith(("<string>", "<frozen"))


def _stop_here(*_, header: str = "", **__) -> None:
    frame, thread = sys._getframe(1), threading.current_thread()
    if os.getpid() != _process or thread is not threading.main_thread():
        where = f"thread {thread.name}" if os.getpid() == _process else "a process that the rank has started"
        print(f"breakpoint() in {where} is passed over: only a rank's main thread can be stopped", file=sys.stderr)
        return
    global _stepped
    _stepped = True
    _fetch(traceback.walk_stack(frame))
    debugger = Debugger()
    if header:
        debugger.message(header)
    debugger.set_trace(frame)


def _fetch(lines: Iterable[tuple[FrameType, int]]) -> None:
    """Gets the source of a notebook's cells, which is in no file."""
    files = {frame.f_code.co_filename for frame, _ in lines}
    lacking = sorted(file for file in files if not _unseen(file) and not linecache.getlines(file))
    for file, source in (_ask(Asked(files=lacking)) if lacking else {}).items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
