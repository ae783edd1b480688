"""Waits for the ranks' replies and notices at once when something is wrong."""

import time
from collections.abc import Callable

from manyranks.world.errors import HUNG_UP
from manyranks.world.faults.deadlock import Case
from manyranks.world.faults.outcome import Outcome
from manyranks.world.notebook.output import Output
from manyranks.world.processes.handle import RankProcess
from manyranks.world.processes.team import Team
from manyranks.world.processes.waiting import Clock
from manyranks.world.rank import watch
from manyranks.world.rank.debugger import Asked
from manyranks.world.rank.plain import NotPlain
from manyranks.world.rank.reply import ASKED, SHOWN, Reply
from manyranks.world.rank.shown import Shown

_TICK = 0.1
_DRAINING = 1.0
_ENDING, _BUSY = 1.0, 30.0  # seconds until it is known how a process ended that has hung up, on a busy machine, too
_QUIET, _SETTLED = 0.1, 1.0  # after the first trouble: what is quiet, and how long to wait in all for ranks that compute
_LOOK = 0.5  # seconds between two looks at ranks that have not replied
_AT_ONCE, _AGAIN_AFTER = 0.02, 10.0  # seconds for idle ranks to answer, and until a question is asked again
_AGAIN = 0.3  # seconds that a rank that is debugged has to ask for its next line before another one gets its turn


def collect(
    team: Team,
    outcome: Outcome,
    output: Output,
    timeout: float | None,
    watched: bool = True,
    show_progress: Callable[[dict], None] = lambda looks: None,
    answer_debugger: Callable[[int, Asked], None] | None = None,
    clock: Clock | None = None,
) -> float:
    """Waits until every rank has replied, or until that will not happen: one raised or died, all wait for each other, or the
    time is over. Returns the seconds that it took, without those in which other programs had the processors.

    outcome: what is known so far, completed here
    watched: whether to look for deadlocks (their signs are known for gloo)
    show_progress: called again and again with what ranks did when they were last looked at
    answer_debugger: gives a rank's debugger its line
    clock: of the run, which has begun; by default it begins here
    """
    clock = clock or Clock()
    gathering = _Gathering(team, outcome, output, lambda: timeout is not None and clock.over(timeout))
    looks = _Looks(team)
    while outcome.missing and not gathering.settled() and not outcome.late:
        gathering.step()
        show_progress(looks.seen)
        if gathering.asking and answer_debugger:
            clock.forget(gathering.answer(answer_debugger))  # a reader's time does not count
        if gathering.trouble is not None:
            continue
        outcome.late |= bool(outcome.missing) and gathering.over()
        deadlocked = looks.deadlocked(outcome)  # also where ranks are not watched, for it looks at what show_progress shows
        if deadlocked and watched:
            outcome.deadlock = True
            break
    gathering.drain()
    if not outcome.missing:  # the last one came just as the time ran out
        outcome.late = outcome.deadlock = False
    return clock.seconds()


class _Gathering:
    """Reads replies, output and deaths as they come.

    over: returns whether the time is over, so that no strangers' are read
    """

    def __init__(self, team: Team, outcome: Outcome, output: Output, over: Callable[[], bool]):
        self.over = over
        self._team, self._outcome, self._output, self._selector = team, outcome, output, team.selector
        self._handlers = {"command": self._reply, "status": self._death, "stdout": self._print, "stderr": self._print}
        self.trouble: float | None = None
        self.asking: dict[int, Asked] = {}  # ranks that are in the debugger
        self._debugged: int | None = None  # the one that the reader is busy with
        self._latest = 0.0

    def step(self, seconds: float = _TICK) -> bool:
        """Handles what comes within this time. Returns whether anything came."""
        events = self._selector.select(seconds)
        for key, _ in events:
            process, what = key.data
            self._handlers[what](process, what)
            if process.confined and self.over():  # a message may take long to come whole, and those of others as long
                break
        return bool(events)

    def answer(self, answer_debugger: Callable[[int, Asked], None]) -> float:
        """Lets ranks' debuggers have what they ask for, one rank until it goes on. Returns how long that took."""
        began = time.monotonic()
        if self._debugged is None:
            while self.step(_AGAIN / 3):  # others may come to the same line
                pass
        while self.asking and self.trouble is None:  # a run that ends asks no other rank
            rank = self._debugged if self._debugged in self.asking else min(self.asking)
            self._debugged, self._outcome.debugged = rank, set(self.asking)
            answer_debugger(rank, self.asking.pop(rank))
            self._outcome.debugged = set(self.asking)
            until = time.monotonic() + _AGAIN
            while rank not in self.asking and rank in self._outcome.missing and time.monotonic() < until:
                self.step(_AGAIN / 10)
        return time.monotonic() - began

    def drain(self) -> None:
        """Reads what the ranks had printed by the time they replied."""
        until = time.monotonic() + _DRAINING
        self.over = lambda: time.monotonic() > until
        while self.step(0) and not self.over():  # one of their threads may print without end
            pass

    def settled(self) -> bool:
        """Returns whether, after a first trouble, the others have had the time to say that they are in trouble too."""
        now = time.monotonic()
        if self.trouble is None or now - self._latest <= _QUIET:
            return False
        if now - self.trouble > _SETTLED:
            return True
        looks = self._team.look(self._outcome.missing, watch.BRIEFLY)  # who waits for nobody may be about to raise
        return all(seen is not None and seen.blocked is not None for seen in looks.values())

    def _reply(self, process: RankProcess, _: str) -> None:
        """Reads what has come: things that are shown, and at last the reply."""
        while self._message(process) and process.more:
            pass

    def _message(self, process: RankProcess) -> bool:
        """Returns False after a reply, and where no other message will come."""
        try:
            kind, reply, *frames = process.answer()
        except TimeoutError:
            self._outcome.late = True
            return False
        except (EOFError, OSError, ValueError):  # of a confined rank: a message of too few frames
            self._death(process, "command")
            return False
        try:
            if bytes(kind) == ASKED and not process.confined:
                self.asking[process.rank] = process.read([reply], Asked)
                return True
            if bytes(kind) == SHOWN:
                self._output.take(process.rank, process.read([reply], Shown), process.confined)
                return True
            reply = process.read([reply], Reply)
            if process.confined and process.rank in self._outcome.replies:
                raise NotPlain("one reply is enough, and who sends many would never be done")
        except NotPlain:  # of a confined rank: what it has sent is no reply
            process.kill()
            self._death(process, "command")
            return False
        self._outcome.replies[process.rank] = reply, frames
        self._note(reply.failure is not None)
        return False

    def _death(self, process: RankProcess, what: str) -> None:
        self._selector.unregister(getattr(process, what))
        self._outcome.replies.pop(process.rank, None)
        code = process.poll(_ENDING if process.confined else _BUSY)
        self._outcome.deaths[process.rank] = HUNG_UP if code is None else code
        self._note(True)

    def _print(self, process: RankProcess, stream: str) -> None:
        fd = getattr(process, stream)
        if not self._output.read(fd, stream, process.rank):
            self._selector.unregister(fd)

    def _note(self, trouble: bool) -> None:
        self._latest = time.monotonic()
        if trouble and self.trouble is None:
            self.trouble = self._latest


class _Looks:
    """Looks at the ranks that have not replied, round after round, and finds a deadlock.

    Busy ranks answer late, so a round lasts until all have. If another look has taken an answer, asks again.
    """

    def __init__(self, team: Team):
        self._team, self._case, self._question = team, Case(), watch.BRIEFLY
        self.seen: dict[int, watch.Whereabouts] = {}  # what ranks did when they were last looked at
        self._next = time.monotonic() + _LOOK
        self._asked: tuple[float, list[int]] = (0.0, [])
        self._heard: dict[int, watch.Whereabouts] = {}

    def deadlocked(self, outcome: Outcome) -> bool:
        """Returns whether the ranks wait forever. If so, puts the looks that prove it into the outcome."""
        ranks, now = outcome.missing, time.monotonic()
        if now < self._next or not ranks or not self._complete(ranks, now):
            return False
        looks, self._asked, self._next = self._heard, (0.0, []), now + _LOOK
        detailed, self._question = self._question == watch.DETAILS, watch.BRIEFLY
        if any(seen.blocked is None for seen in looks.values()):
            self._case = Case()
            return False
        self._question = watch.DETAILS
        if not detailed or not self._case.proved(looks, now, {rank: reply for rank, (reply, _) in outcome.replies.items()}):
            return False
        outcome.whereabouts = looks
        return True

    def _complete(self, ranks: list[int], now: float) -> bool:
        began, asked = self._asked
        if asked != ranks or now - began > _AGAIN_AFTER:
            self._asked, self._heard = (now, ranks), {}
            self._team.ask(ranks, self._question)
        silent = [rank for rank in ranks if rank not in self._heard]
        self._heard |= self._team.answers(silent, _AT_ONCE)
        self.seen |= self._heard
        return len(self._heard) == len(ranks)
