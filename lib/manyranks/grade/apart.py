"""The score of record: each submission is judged in a process of its own, and what learners wrote runs on confined ranks only.

The process that judges reads a submission, and what its ranks send, as data. It has limits on time, memory and files, so that
whatever ends it ends this submission only. What it compares with, it asks of the process above, which never sees either.
"""

import contextlib
import gc
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from nbformat import NotebookNode

from manyranks import grade
from manyranks.grade import answers, trial
from manyranks.grade import check as checking
from manyranks.grade.absent import Known, known, stand_in
from manyranks.grade.answers import Solved, dumped
from manyranks.grade.check import Line, Record, Report, Task, loaded
from manyranks.grade.submission import Check, checks
from manyranks.measure.machine import slowness
from manyranks.world import cells, confine, local, messages
from manyranks.world import scratch as scratches
from manyranks.world.confine import Confined
from manyranks.world.errors import NotStarted, RankHung, WorldError
from manyranks.world.plain import NotPlain, pack, unpack
from manyranks.world.trouble import late
from manyranks.world.world import World

_READING, _A_CHECK = 30.0, 180.0  # seconds: to read a notebook; of a check, on a machine that is very busy
_MEMORY, _FILE = 3 * 2**30, 64 * 2**20  # bytes more than at the start, and of a file
_LOOK = 0.2  # seconds between two looks at what ranks have written
_SMALL, _WHOLE = 1 << 22, 30.0  # bytes of a message between the processes, and seconds in which it has come whole
_WORDS = 300  # letters of what ranks say of an object
_IN_SPITE = "To judge in spite of it: --fewer-fences, or c.JudgeApart.fewer_fences = True for nbgrader"
SOLUTIONS = Path("solutions")  # beside exercises/, where a course has them


class Judged(msgspec.Struct, tag=True):
    """One check: nbgrader's name of its cell, the cell's place and points, the report, and the seconds that it took."""

    grade_id: str
    index: int
    worth: float
    report: Report
    seconds: float

    @property
    def points(self) -> float:
        """Of those that the cell is worth, the share that the report gives."""
        return round(self.report.points / self.report.out_of * self.worth, 2) if self.report.out_of else 0.0


class _Read(msgspec.Struct, tag=True):
    """The notebook has been read; its cells have not yet run."""


class _Asks(msgspec.Struct, tag=True, frozen=True):
    """For the record of what is right, or with all mistakes."""

    exercise: str
    task: str
    whole: bool


class _Over(msgspec.Struct, tag=True):
    """Nothing follows. why: the submission could not be read; machine: or this machine could not start its ranks."""

    why: str = ""
    machine: bool = False


class Ended(Exception):
    """A submission ended the process that judged it, or could not be read. Its text says how."""


class NotJudged(Exception):
    """This machine could not start the ranks of a submission, which nobody has judged then. Its text says why."""


class Judge:
    """Judges submissions, one after the other. A context manager.

    fewer_fences: also without the important ones, or as root; solutions: folder of the right answers, which is run as it is.

    Raises RuntimeError where the fences that it needs do not stand.
    """

    def __init__(self, fewer_fences: bool = False, solutions: Path = SOLUTIONS):
        if not fewer_fences and (lacking := lacks()):
            raise RuntimeError(f"{lacking}: learners' code could do harm here. {_IN_SPITE}")
        self._solutions, self._solved = solutions, dict[str, Solved | None]()
        self._records: dict[_Asks, bytes] = {}

    def __enter__(self) -> "Judge":
        with _for_strangers():
            local.the_forkserver().wait_until_ready()
        self._seed = 1 + secrets.randbelow(2**60)  # 0 is the library's own
        return self

    def __exit__(self, *_) -> None:
        """The process that forks ranks stays for the next one, and ends with this process."""

    def judged(self, read: Callable[[], NotebookNode]) -> Iterator[Judged]:
        """The checks of a submission, in their order. read: returns its notebook; called in the process that judges.

        Raises Ended, or NotJudged.
        """
        with _for_strangers():
            server = local.the_forkserver(hold=True)  # the worlds of a submission are another process's
            try:
                yield from self._judged(read, server)
            finally:
                server.release()

    def _judged(self, read: Callable[[], NotebookNode], server: local.Forkserver) -> Iterator[Judged]:
        server.wait_until_ready()
        server.renew_network()
        try:
            scratch = tempfile.mkdtemp(prefix="manyranks-judge-")
            mine, theirs = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            raise NotJudged(f"{error}") from error
        if pid == 0:
            mine.close()
            _live(read, scratch, self._seed, theirs)
        theirs.close()
        try:
            yield from self._heard(mine, pid, scratch)
        finally:
            with contextlib.suppress(ChildProcessError):  # it has ended, and _how has seen it
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            mine.close()
            server.kill_all()
            server.settle()
            scratches.remove(scratch)

    def _heard(self, other: socket.socket, pid: int, scratch: str) -> Iterator[Judged]:
        seconds = left = _READING
        while True:
            started = time.monotonic()
            try:
                self._wait(other, left, scratch)
                told = unpack(messages.receive(other, messages.EXACTLY, _SMALL, _WHOLE), _Read | Judged | _Asks | _Over)
            except TimeoutError:
                raise Ended(f"it took longer than {seconds:.0f} s") from None
            except (EOFError, OSError, NotPlain):
                raise Ended(f"it ended the process that judged it: {_how(pid)}") from None
            left -= time.monotonic() - started
            if isinstance(told, _Over):
                if told.why:
                    raise (NotJudged if told.machine else Ended)(told.why)
                return
            if not isinstance(told, _Asks):
                seconds = left = _A_CHECK
                if isinstance(told, Judged):
                    yield told
                continue
            try:
                record = self._record(told)
            except (WorldError, ValueError, OSError) as error:  # the right answer did not run
                raise NotJudged(f"{error}") from error
            with contextlib.suppress(OSError):  # it has ended meanwhile
                messages.send(other, [record])

    def _wait(self, other: socket.socket, seconds: float, scratch: str) -> None:
        """For the next message. Raises TimeoutError; Ended where ranks fill the disk: a limit holds for one file only."""
        until = time.monotonic() + seconds
        while not local.readable(other.fileno(), _LOOK):
            if scratches.too_much(scratch):
                raise Ended(f"its ranks wrote more than {scratches.MOST >> 20} MB, or {scratches.MOST_FILES} files")
            if time.monotonic() > until:
                raise TimeoutError

    def _record(self, asked: _Asks) -> bytes:
        """By what the solution does with numbers that nobody has seen; empty where there is no solution."""
        if asked in self._records:
            return self._records[asked]
        if asked.exercise not in self._solved:
            file = self._solutions / asked.exercise / "mistakes.py"
            self._solved[asked.exercise] = Solved(file) if file.exists() else None
        if (solved := self._solved[asked.exercise]) is None:
            return b""
        task = answers.tasks(asked.exercise)[asked.task]
        local.the_forkserver().renew_network()  # the submission may have left nothing of the one before
        before, trial.seed = trial.seed, self._seed
        try:
            record = solved.whole(task) if asked.whole else solved.right(task)
        finally:
            trial.seed = before
        self._records[asked] = dumped({asked.task: record}).encode()
        return self._records[asked]


@contextmanager
def _for_strangers() -> Iterator[None]:
    """Inside, worlds have the ranks for code of strangers, and torch has one thread, as a process has that was forked."""
    before, threads = local.strangers, torch.get_num_threads()
    local.strangers = True
    torch.set_num_threads(1)  # the threads of a pool are not there after a fork, and it would wait for them
    try:
        yield
    finally:
        local.strangers = before
        torch.set_num_threads(threads)


def lacks() -> str:
    """Why learners' code should not be judged here; empty where it can be."""
    missing = [fence for fence in confine.IMPORTANT if fence not in confine.fences().split(", ")]
    if missing:
        return f"this system does not fence {' and '.join(missing)}"
    return "you are root" if os.getuid() == 0 else ""


def _how(pid: int) -> str:
    for _ in range(20):
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            break
        time.sleep(0.05)
    else:
        return "it sent what is no answer"
    code = os.waitstatus_to_exitcode(ended[1])
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


# In the process that judges one submission


def _live(read: Callable[[], NotebookNode], scratch: str, seed: int, above: socket.socket) -> None:
    """The whole life of that process. Never returns."""
    try:
        gc.freeze()  # what that process has left for its collector stays: an object's end may wait for a thread of its own
        os.setsid()  # an interrupt reaches the process above, which ends this one
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what cells print is no part of the table
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        confine.limit(_FILE, _MEMORY)
        trial.confined = Confined(scratch)
        cells.only_remembered = True
        _Court(above, seed).judge(read)
    finally:
        os._exit(1)


class _Court:
    """above: the process that knows what is right; seed: of numbers that nobody has seen."""

    def __init__(self, above: socket.socket, seed: int):
        self._above, self._seed = above, seed

    def judge(self, read: Callable[[], NotebookNode]) -> None:
        """Tells of one check after the other."""
        try:
            found = checks(read())
        except Exception as error:  # not a notebook: this raises many kinds
            return self._tell(_Over(f"cannot be read: {type(error).__name__}"))
        self._tell(_Read())
        for one in found:
            started = time.monotonic()
            try:
                report = self._report(one)
            except NotStarted as error:
                return self._tell(_Over(f"{error}"[:300], machine=True))
            self._tell(Judged(one.grade_id, one.index, one.points, report, time.monotonic() - started))
        self._tell(_Over())
        os._exit(0)

    def _tell(self, what: _Read | Judged | _Asks | _Over) -> None:
        messages.send(self._above, pack(what))

    def _report(self, check: Check) -> Report:
        """Whatever goes wrong is a line of it, and no points."""
        try:
            return self._checked(check)
        except NotStarted:
            raise
        except Exception as error:  # what came back from the ranks was not what a check notes
            why = f"{type(error).__name__}: {error}"[:300]
            return _no_points(check, "can be judged", why, "leave the check and the library as they are")

    def _checked(self, check: Check) -> Report:
        task, told = _task(check), _asked(check)
        if told.kind == "missing":
            hint = "restart the kernel, run all cells, and look at this one"
            return _no_points(check, f"{check.name} is there", told.error, hint)
        answer = stand_in(check.source, check.name, told) if told.kind in ("class", "function") else told.kind
        if not isinstance(task, Task):
            raise ValueError(f"grade.{'.'.join(check.call)} is no task")
        trial.seed = 0  # the library's own
        if not callable(answer) or (right := self._record(task, whole=False)) is None:
            return task(answer)
        trial.seed = self._seed
        tried = task.tried(answer)
        report = checking.report(task, answer, tried, right)
        if report.passed or (tried[-1].trouble and tried[-1].trouble.unwritten):
            return report
        return checking.report(task, answer, tried, self._record(task, whole=True))

    def _record(self, task: Task, whole: bool) -> Record | None:
        self._tell(_Asks(task.exercise, task.name, whole))
        (answer,) = messages.receive(self._above, messages.EXACTLY)
        return loaded(answer.tobytes().decode())[task.name] if len(answer) else None


def _no_points(check: Check, what: str, found: str, hint: str) -> Report:
    name = getattr(_task(check), "name", check.name)  # two tasks may be about one class
    return Report(name, 0.0, check.points, (Line(False, what, found, hint),))


def _task(check: Check) -> object:
    """What the check's text names in `grade`."""
    found: object = grade
    for part in check.call:
        found = getattr(found, part, None)
    return found


def _asked(check: Check, patience: float = 1.0) -> Known:
    """What a rank says of the learner's object, once the cells have run; where this machine is slow, they get more time."""
    seconds = trial.CELLS * patience
    try:
        with World(1, backend="gloo", timeout=seconds, confined=trial.confined) as world:
            told = world.run(known, check.source, check.name)[0]
        told = msgspec.convert(told, Known)
        return told._replace(kind=told.kind[:_WORDS], error=told.error[:_WORDS])
    except NotStarted:
        raise
    except WorldError as error:
        if not (isinstance(error, RankHung) and late(error)):
            return Known("missing", error=f"{error}".splitlines()[0][:300])
        if patience == 1.0 and (slow := slowness()) >= trial.BUSY:
            return _asked(check, min(slow, trial.MOST_PATIENCE))
        return Known(
            "missing", error=f"the cells above it took more than {seconds:.0f} s together: delete slow ones of your own"
        )
    except msgspec.ValidationError:
        return Known("missing", error="the cells returned what is no answer")
