"""The score of record: each submission is judged in its own process, and learners' code runs on confined ranks only.

The process that judges reads a submission, and what its ranks send, as data. It has limits on time, memory and files,
so that whatever ends it ends this submission only. It asks the process above for what it compares with; that one never
sees either.
"""

import contextlib
import gc
import math
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path

import msgspec
import torch
from nbformat import NotebookNode

from manyranks import grade
from manyranks.grade import answers, trial
from manyranks.grade import check as checking
from manyranks.grade.absent import Known, known, stand_in
from manyranks.grade.answers import Solved, dumped
from manyranks.grade.check import Record, Task, loaded
from manyranks.grade.submission import Check, checks
from manyranks.grade.trial import Terms
from manyranks.report import NOT_JUDGED, Line, Report
from manyranks.world import cells, limits
from manyranks.world.errors import NotStarted, RankHung, WorldError
from manyranks.world.fences import confine, sandbox
from manyranks.world.fences.confine import Confined
from manyranks.world.processes import handle, local
from manyranks.world.processes.waiting import computed
from manyranks.world.rank import messages
from manyranks.world.rank.plain import NotPlain, pack, unpack
from manyranks.world.rank.process import die_with_the_parent
from manyranks.world.strangers import scratch as scratches
from manyranks.world.strangers.trouble import late
from manyranks.world.world import World

_READING, _JUDGING = 30.0, 60.0  # seconds of a processor: to read a notebook; to judge what its ranks send
_SUBMISSION, _A_CHECK = 45.0, 300.0  # seconds that its code may take in all, where a right one takes 2 to 7; of a check at most
_MOST_AT_ONCE, _ROOM = 8, 2 * 2**30  # submissions; bytes for each
_MEMORY, _FILE = 3 * 2**30, 64 * 2**20  # bytes more than at the start, and of a file
_LOOK, _FULL = 0.2, signal.SIGUSR2  # seconds between two looks at what ranks have written; what ends all where that is too much
_SMALL, _WHOLE = 1 << 22, 30.0  # bytes of a message between the processes, and seconds for it to come whole
_MOMENT = 1.0  # seconds between two times that submissions are asked whether they're late
_WORDS = 300  # letters of what ranks say of an object, and of why something is not judged
IN_SPITE = "To judge anyway: --fewer-fences, or c.JudgeApart.fewer_fences = True for nbgrader"
# What no rank should have to import: the exercises' scripts, and what Triton imports when the first kernel is launched.
_ONCE = (*(f"manyranks.grade.{name}" for name in grade.__all__ if name.islower()), "triton.experimental.gluon")
SOLUTIONS = Path("solutions")  # beside exercises/, where a course has them


class Judged(msgspec.Struct, tag=True):
    """A judged check: nbgrader's name of its cell, the cell's place and points, the report, and the seconds that it took.

    missed: why nobody could judge it, which is not the answer's fault; the report says it, too.
    """

    grade_id: str
    index: int
    worth: float
    report: Report
    seconds: float
    missed: str = ""

    @property
    def points(self) -> float:
        """Returns the share that the report gives of the points that the cell is worth."""
        return round(self.report.points / self.report.out_of * self.worth, 2) if self.report.out_of else 0.0


class _Asks(msgspec.Struct, tag=True, frozen=True):
    """A request for the record of what is right, or of that and all mistakes."""

    exercise: str
    task: str
    whole: bool


class _Over(msgspec.Struct, tag=True):
    """The end of a submission. why: it could not be read; machine: or this machine could not judge what is left of it."""

    why: str = ""
    machine: bool = False


class Ended(Exception):
    """A submission ended the process that judged it, or could not be read. Its text says how."""


class NotJudged(Exception):
    """The rest of a submission, or a check, was not judged, and that is not its fault. Its text says why."""


_NOT_STARTED, _IT_ENDED = "this machine could not start its ranks", "it ended the process that judged it"
_idle: dict[bool, list[local.Forkserver]] = {True: [], False: []}  # that no submission needs now, by whether sandboxed


@dataclass
class _Case:
    """A submission that is being judged. number: its place; pid: of the process that judges it, and other: the way there;
    until: when the next message has to be there; scratch: the folder of its ranks, which server forks; before: the seconds of
    processors that this one had used."""

    number: int
    pid: int
    other: socket.socket
    server: local.Forkserver
    scratch: str
    until: float
    before: float


class Judge:
    """Judges submissions. A context manager.

    fewer_fences: also without the important ones, or as root; solutions: folder of the right answers, which is run as it is;
    at_once: how many submissions, else what this machine has processors and memory for; sandboxed: whether each
    submission's ranks get their own sandbox, by default where there is one.

    Raises RuntimeError where the fences that it needs do not stand.
    """

    def __init__(
        self, fewer_fences: bool = False, solutions: Path = SOLUTIONS, at_once: int | None = None, sandboxed: bool | None = None
    ):
        if not fewer_fences and (lacking := lacks(solutions)):
            raise RuntimeError(f"{lacking}: learners' code could do harm here. {IN_SPITE}")
        self._at_once = at_once or max(1, min(limits.cores(), limits.available_bytes() // _ROOM, _MOST_AT_ONCE))
        self._sandboxed = sandbox.works() if sandboxed is None else sandboxed
        self._solutions, self._solved = solutions, dict[str, Solved | None]()
        self._records: dict[_Asks, bytes] = {}
        self._cases: list[_Case] = []

    def __enter__(self) -> "Judge":
        self._seed = 1 + secrets.randbelow(2**60)  # 0 is the library's own
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the threads of a pool are not there after a fork, and it would wait for them
        self._warm_up()
        return self

    def __exit__(self, *_) -> None:
        for case in list(self._cases):
            self._end(case)
        torch.set_num_threads(self._threads)

    def judged(self, read: Callable[[], NotebookNode]) -> Iterator[Judged]:
        """The checks of a submission, in their order. read: returns its notebook; called in the process that judges.

        Raises Ended, or NotJudged.
        """
        return self.all([read])[0]

    def all(self, reads: Iterable[Callable[[], NotebookNode]]) -> list[Iterator[Judged]]:
        """Judges several, as `judged` does, some of them at once: whoever waits for one lets others go on."""
        reads, waiting = list(reads), defaultdict(deque)
        told = self._told(reads)

        def of(number: int) -> Iterator[Judged]:
            while True:
                while not waiting[number]:
                    other, one = next(told)
                    waiting[other].append(one)
                one = waiting[number].popleft()
                if isinstance(one, Exception):
                    raise one
                if isinstance(one, _Over):
                    return
                yield one

        return [of(number) for number in range(len(reads))]

    def _told(self, reads: list[Callable[[], NotebookNode]]) -> Iterator[tuple[int, Judged | _Over | Exception]]:
        """Yields the number of a submission and what is told of it; of each, last comes _Over, or what it raises."""
        coming, cases = enumerate(reads), list[_Case]()
        try:
            while True:
                while len(cases) < self._at_once and (one := next(coming, None)):
                    try:
                        cases.append(self._begun(*one))
                    except NotJudged as error:
                        yield one[0], error
                if not cases:
                    return
                connection.wait([case.other for case in cases], _MOMENT)
                for case in list(cases):
                    try:
                        told: Judged | _Over | Exception | None = self._heard(case)
                    except (Ended, NotJudged) as error:
                        told = error
                    if isinstance(told, _Over | Exception):
                        cases.remove(case)
                        self._end(case)
                    if told:
                        yield case.number, told
        finally:
            for case in cases:
                self._end(case)

    def _begun(self, number: int, read: Callable[[], NotebookNode]) -> _Case:
        server = None
        try:
            server = self._server()
            server.wait_until_ready()
            there = sandbox.SCRATCH if self._sandboxed else tempfile.mkdtemp(prefix="manyranks-judge-")
            scratch = f"/proc/self/fd/{server.scratch}/." if self._sandboxed else there
            mine, theirs = socket.socketpair()
            pid = os.fork()
        except (OSError, NotStarted) as error:
            if server:
                server.close()
            raise NotJudged(f"{_NOT_STARTED}: {error}") from error
        if pid == 0:
            for other in [mine, *(case.other for case in self._cases)]:
                other.close()
            _live(read, Confined(there, scratch), self._seed, theirs, server)
        theirs.close()
        before = computed(server.pid, children=True)
        self._cases.append(case := _Case(number, pid, mine, server, scratch, time.monotonic() + _A_CHECK, before))
        return case

    def _server(self) -> local.Forkserver:
        idle = _idle[self._sandboxed]
        while idle:
            if (server := idle.pop()).alive():
                break
        else:
            server = local.Forkserver(strangers=True, sandboxed=self._sandboxed, once=_ONCE)
        server.hold()
        if self._sandboxed:
            self._warm_up()
        return server

    def _warm_up(self) -> None:
        """The next one imports torch meanwhile."""
        if not _idle[self._sandboxed]:
            _idle[self._sandboxed].append(local.Forkserver(strangers=True, sandboxed=self._sandboxed, once=_ONCE))

    def _end(self, case: _Case) -> None:
        if case not in self._cases:  # it has ended before
            return
        self._cases.remove(case)
        with contextlib.suppress(ChildProcessError):  # it has ended, and _how has seen it
            if os.waitpid(case.pid, os.WNOHANG)[0] == 0:
                os.kill(case.pid, signal.SIGKILL)
                os.waitpid(case.pid, 0)
        case.other.close()
        if self._sandboxed:
            case.server.close()  # and nothing is left
            return
        case.server.kill_all()
        case.server.settle()
        case.server.release()
        scratches.remove(case.scratch)
        _idle[False].append(case.server)

    def _heard(self, case: _Case) -> Judged | _Over | None:
        """Returns what has come of it, if anything has. Raises Ended and NotJudged."""
        if not handle.readable(case.other.fileno()):
            if time.monotonic() > case.until:
                if computed(case.server.pid, children=True) - case.before > _SUBMISSION:
                    raise Ended(f"its ranks have used more than {_SUBMISSION:.0f} s of the processors")
                raise NotJudged(f"this machine took more than {_A_CHECK:.0f} s for one check")
            return None
        try:
            told = unpack(messages.receive(case.other, messages.EXACTLY, _SMALL, _WHOLE), Judged | _Asks | _Over)
        except (EOFError, OSError, NotPlain):
            raise _how(case.pid) from None
        if isinstance(told, _Asks):
            self._answer(case, told)
        elif isinstance(told, _Over) and told.why:
            raise (NotJudged if told.machine else Ended)(told.why)
        else:
            case.until = time.monotonic() + _A_CHECK
        return None if isinstance(told, _Asks) else told

    def _answer(self, case: _Case, asked: _Asks) -> None:
        began = time.monotonic()
        record, why = b"", ""
        try:
            record = self._record(asked)
        except Exception as error:  # also of a task of the teacher's own
            why = f"the right answer in {self._solutions} did not run here: {error}"
        with contextlib.suppress(OSError):  # it has ended meanwhile
            messages.send(case.other, [record, why.encode()])
        for each in self._cases:  # which had to wait for it
            each.until += time.monotonic() - began

    def _record(self, asked: _Asks) -> bytes:
        """Records what the solution does with numbers that nobody has seen; empty where there is no solution."""
        if asked in self._records:
            return self._records[asked]
        if asked.exercise not in self._solved:
            file = self._solutions / asked.exercise / "mistakes.py"
            self._solved[asked.exercise] = Solved(file, self._seed) if file.exists() else None
        if (solved := self._solved[asked.exercise]) is None:
            return b""
        task = answers.tasks(asked.exercise)[asked.task]
        record = solved.whole(task) if asked.whole else solved.right(task)
        self._records[asked] = dumped({asked.task: record}).encode()
        return self._records[asked]


def fences() -> list[str]:
    """Lists what limits learners' code here."""
    outer = ["network", "sandbox"] if sandbox.works() else []
    return list(dict.fromkeys([*confine.fences().split(", "), *outer]))


def lacks(solutions: Path = SOLUTIONS) -> str:
    """Says why learners' code should not be judged here; empty where it can be. solutions: folder of the right answers."""
    missing = [fence for fence in confine.IMPORTANT if fence not in fences()]
    if missing:
        return f"this system does not fence {' and '.join(missing)}"
    if place := confine.opened(course := solutions.resolve().parent):
        return f"ranks may read all of {place}, where Python is, and {course} with the right answers lies in it; move it"
    return "you're root, and no fence holds root: run this as an ordinary user" if os.getuid() == 0 else ""


def _how(pid: int) -> Ended | NotJudged:
    """Says how the process ended. It has limits, so that only force from outside is not the doing of what it has read."""
    for _ in range(20):
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            break
        time.sleep(0.05)
    else:
        return Ended(f"{_IT_ENDED}: it sent something that isn't an answer")
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -_FULL:
        return Ended(f"its ranks wrote more than {scratches.MOST >> 20} MB, or {scratches.MOST_FILES} files")
    if code == -signal.SIGKILL:
        return NotJudged("the process that judged it was killed, as the system does when memory runs out")
    return Ended(f"{_IT_ENDED}: " + (f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"))


# In the process that judges one submission


def _live(read: Callable[[], NotebookNode], ranks: Confined, seed: int, above: socket.socket, server: local.Forkserver) -> None:
    """The whole life of that process. Never returns."""
    try:
        gc.freeze()  # what that process has left for its collector stays: an object's end may wait for its own thread
        os.setsid()  # an interrupt reaches the process above, which ends this one
        die_with_the_parent()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what cells print is no part of the table
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        confine.limit(_FILE, _MEMORY)
        local.use(server)
        _look_at_the_disk(ranks.seen, server, os.getpid())
        cells.open_no_files()
        _Court(above, seed, Terms(ranks, _SUBMISSION)).judge(read)
    finally:
        os._exit(1)


def _look_at_the_disk(folder: str, server: local.Forkserver, judge: int) -> None:
    """Starts a process that ends all where ranks fill it: a limit holds for one file only, and reading holds up a thread."""
    if os.fork() > 0:
        return
    die_with_the_parent()
    while os.getppid() == judge:
        if scratches.too_much(folder):
            server.kill_all()
            os.kill(judge, _FULL)
        time.sleep(_LOOK)
    os._exit(0)


def _may_compute(seconds: float) -> None:
    """Limits this process from its start on, by its own processor time, which no other program takes."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _Court:
    """The judging process.

    above: the one that knows what is right
    seed: of numbers that nobody has seen
    terms: on which the submission's code runs
    """

    def __init__(self, above: socket.socket, seed: int, terms: Terms):
        self._above, self._seed, self._terms = above, seed, terms
        self._never_end: Known | None = None  # what is said of cells that took too long: those below them run no more

    def judge(self, read: Callable[[], NotebookNode]) -> None:
        """Tells of one check after the other."""
        _may_compute(_READING)
        try:
            found = checks(read())
        except Exception as error:  # not a notebook: this raises many kinds
            return self._tell(_Over(f"cannot be read: {type(error).__name__}"))
        _may_compute(_READING + _JUDGING)
        for one in found:
            started = time.monotonic()
            missed = ""
            try:
                report = self._checked(one)
            except NotStarted as error:
                return self._tell(_Over(f"{_NOT_STARTED}: {error}"[:_WORDS], machine=True))
            except Exception as error:  # one of ours, or of what comes of forged notes
                known = isinstance(error, NotJudged)
                missed = f"{error}" if known else f"an error of the judge, or a forged answer: {type(error).__name__}: {error}"
                report = _no_points(one, f"{NOT_JUDGED}: {missed}"[:_WORDS], ok=None)
            self._tell(Judged(one.grade_id, one.index, one.points, report, time.monotonic() - started, missed[:_WORDS]))
        self._tell(_Over())
        os._exit(0)

    def _tell(self, what: Judged | _Asks | _Over) -> None:
        messages.send(self._above, pack(what))

    def _checked(self, check: Check) -> Report:
        task = _task(check)
        if self._terms.left <= 0:
            took = f"the cells and checks above it took more than {_SUBMISSION:.0f} s"
            return _no_points(check, "has time", took, "look at those that take long, or are not over")
        told, too_late = (self._never_end, False) if self._never_end else _asked(check, self._terms)
        self._never_end = self._never_end or (told if too_late else None)
        if told.kind == "missing":
            hint = "restart the kernel, run all cells, and look at this one"
            return _no_points(check, f"{check.name} is there", told.error, hint)
        answer = stand_in(check.source, check.name, told) if told.kind in ("class", "function") else told.kind
        if not isinstance(task, Task):
            raise ValueError(f"grade.{'.'.join(check.call)} is no task")
        if not callable(answer) or (right := self._record(task, whole=False)) is None:
            return checking.check(task, answer, checking.shipped(task.exercise)[task.name], self._terms)
        task = replace(task, seed=self._seed)
        tried = task.tried(answer, self._terms)
        report = checking.report(task, answer, tried, right)
        if report.passed or (tried[-1].trouble and tried[-1].trouble.unwritten):
            return report
        return checking.report(task, answer, tried, self._record(task, whole=True))

    def _record(self, task: Task, whole: bool) -> Record | None:
        self._tell(_Asks(task.exercise, task.name, whole))
        answer, why = (frame.tobytes().decode() for frame in messages.receive(self._above, messages.EXACTLY))
        if why:
            raise NotJudged(why)
        return loaded(answer)[task.name] if answer else None


def _no_points(check: Check, what: str, found: str = "", hint: str = "", ok: bool | None = False) -> Report:
    name = getattr(_task(check), "name", check.name)  # two tasks may be about one class
    return Report(name, 0.0, check.points, (Line(ok, what, found, hint),))


def _task(check: Check) -> object:
    """Finds what the check's text names in `grade`."""
    found: object = grade
    for part in check.call:
        found = getattr(found, part, None)
    return found


def _asked(check: Check, terms: Terms) -> tuple[Known, bool]:
    """Asks a rank about the learner's object, once the cells have run; notes whether they took too long."""
    try:
        with World(1, backend="gloo", timeout=trial.CELLS, confined=terms.fences) as world:
            world.slack = trial.SLACK
            try:
                told = msgspec.convert(world.run(known, check.source, check.name)[0], Known)
            finally:
                terms.spend(world, trial.FREE)
        return told._replace(kind=told.kind[:_WORDS], error=told.error[:_WORDS]), False
    except NotStarted:
        raise
    except WorldError as error:
        if not (isinstance(error, RankHung) and late(error)):
            return Known("missing", error=f"{error}".splitlines()[0][:_WORDS]), False
        where = next((state for state in error.states.values() if state.startswith("was running")), "")[:_WORDS]
        took = f"the cells above it took more than {trial.CELLS:.0f} s together: delete slow ones of your own"
        return Known("missing", error=f"{took}; the last one {where}" if where else took), True
    except msgspec.ValidationError:
        return Known("missing", error="the cells returned something that isn't an answer"), False
