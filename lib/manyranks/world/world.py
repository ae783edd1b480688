"""World: N ranks that a notebook talks to."""

import contextlib
import html
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable

from manyranks import progress_bar
from manyranks.world import collect, limits
from manyranks.world.counted.measurement import Measurement, measurement
from manyranks.world.errors import RankDied, RankFailed, RankHung, RunInterrupted, WorldError
from manyranks.world.faults import diagnose
from manyranks.world.faults.outcome import Outcome
from manyranks.world.fences.confine import Confined
from manyranks.world.notebook.live import show_live
from manyranks.world.notebook.output import Output
from manyranks.world.notebook.prompt import Prompt
from manyranks.world.processes.team import Server, Team, server_of
from manyranks.world.processes.waiting import Clock
from manyranks.world.rank import debugger, messages, plain, tasks, watch
from manyranks.world.rank.recording import checked_counts

_open: list["weakref.ref[World]"] = []  # in the order they were made: %%ranks runs on the newest
_LOST = "\n\nThe variables of %%ranks cells are gone: the next run starts fresh ranks."
_DEBUG = "\n\nUntil the next run, world.debug() lets you look at the frames and variables of that moment."
_A_MOMENT = 0.05
_AFTER_INTERRUPT = 0.4  # seconds that ranks have to come back before they are replaced


class Each(tuple):
    """An argument of World.run or measure, positional or a keyword's: each rank gets its own part alone, rank 0 the first."""

    def part(self, rank: int, size: int):
        """The part of one rank. Raises ValueError where there is not one for each of `size` ranks."""
        if len(self) != size:
            raise ValueError(f"Each(…) with {len(self)} parts, but {size} ranks run: give one part for each rank")
        return self[rank]


class World:
    """`size` processes in one torch.distributed group; gloo on the CPU, NCCL where every rank can have a GPU.

    backend: "auto", "gloo" or "nccl"
    timeout: seconds one run may take (None: no limit; deadlocks on gloo are found in 3 s even then, on NCCL never)
    engine: "local", or "ray": ranks on the nodes of the Ray cluster that ray.init() has connected to, one per CPU
    confined: what ranks may do that run code of strangers

    A context manager. Raises ValueError for what cannot be, before any process starts.
    """

    def __init__(
        self,
        size: int,
        backend: str = "auto",
        timeout: float | None = 300.0,
        engine: str = "local",
        confined: Confined | None = None,
    ):
        limits.check_place()
        self.size = limits.checked_size(size)
        self.timeout = limits.checked_timeout(timeout)
        self.slack = 1.0  # how many times its timeout a run may last while other programs have the processors
        self.took = 0.0  # seconds of the last run, without those in which other programs had them
        self._engine = limits.resolved_engine(engine, backend, confined)
        self.backend = "gloo" if engine == "ray" else limits.resolved_backend(backend, size)
        if engine == "local":
            limits.check_room(size)
        self._lock = threading.RLock()
        self._closed = False
        self._confined = confined
        self._unpack: Callable = plain.unpack if confined else messages.unpack
        self._servers: list[Server] = []  # what forks ranks: one, once there was need of it
        self._team: Team | None = self._new_team()
        self._went_wrong: tuple[Team, Outcome, int] | None = None  # what debug looks at, and the rank it begins with
        self._holder = [self._team]  # what the finalizer closes: the present team, not the first
        weakref.finalize(self, _end, self._holder, self._servers)
        _open.append(weakref.ref(self))

    def run(self, fn: Callable, /, *args, **kwargs) -> list:
        """Calls fn(*args, **kwargs) on every rank; returns the results, rank 0's first. Tensors come back on the CPU.

        Raises RankFailed, RankDied or RankHung, and RunInterrupted when it's stopped; the next run works after any of them.
        Raises ValueError for what can't be sent to ranks.
        """
        return self._results(self._run(range(self.size), fn, args, kwargs))

    def measure(
        self, fn: Callable, /, *args, flops: bool = False, memory: bool = False, profile: bool = False, **kwargs
    ) -> Measurement:
        """Calls fn as run() does, and counts calls, bytes and times.

        flops, memory: also counts these; both slow the run down
        profile: also measures where each rank's time went
        Raises ValueError for profile together with one of the others.
        """
        return self._measure(range(self.size), fn, args, kwargs, checked_counts(flops, memory, profile))

    def get(self, name: str) -> list:
        """The value of a variable of the %%ranks cells on each rank."""
        return self.run(tasks.get_variable, name)

    def set(self, **values) -> None:
        """Sets variables for the %%ranks cells, the same on each rank."""
        self._run(range(self.size), tasks.set_variables, (values,), {})

    def run_cell(self, source: str, name: str, ranks: Iterable[int] | None = None) -> None:
        """Runs a cell's source among the variables that ranks keep.

        name: the file name that tracebacks give to its lines
        ranks: those that run it, None for all
        """
        self._run(self.checked_ranks(ranks), tasks.run_cell, (source, name), {})

    def time_cell(self, source: str, name: str, ranks: Iterable[int] | None = None) -> dict[int, float]:
        """Runs a cell as run_cell does. Returns each rank's seconds."""
        outcome = self._run(self.checked_ranks(ranks), tasks.time_cell, (source, name), {})
        return dict(zip(outcome.ranks, self._results(outcome), strict=True))

    def names(self, begun: str) -> list[str]:
        """Names on rank 0 that start with `begun`, for Tab; none when there are no ranks. It is no run: nothing changes."""
        team = self._team
        seen = team.look((0,), watch.NAMES + begun.encode())[0] if team is not None and not self._closed else None
        return [] if seen is None else seen.names

    def measure_cell(self, source: str, name: str, ranks: Iterable[int] | None = None, **counts: bool) -> Measurement:
        """Runs a cell as run_cell does, and measures it.

        counts: measure's flops, memory and profile
        """
        return self._measure(self.checked_ranks(ranks), tasks.run_cell, (source, name), {}, checked_counts(**counts))

    def checked_ranks(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        """The ranks in order, all for None. Raises ValueError for one that isn't there."""
        chosen = tuple(range(self.size)) if ranks is None else tuple(sorted(set(ranks)))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks {list(chosen)}: this world has the ranks 0 to {self.size - 1}")
        return chosen

    def debug(self, rank: int | None = None) -> None:
        """Opens Python's debugger on a rank, where the last run raised or hung: frames and variables of that moment.

        rank: by default the first that raised, or the first that hung. q leaves it. Raises WorldError where no run has just
        failed or hung, ValueError for a rank that the run did not have, RankDied for one that dies meanwhile.
        """
        with self._lock:
            if self._closed or self._went_wrong is None:
                raise WorldError(
                    "there is nothing to debug: the last run must have raised or hung, and after a death its ranks are gone"
                )
            team, outcome, first = self._went_wrong
            rank = first if rank is None else rank
            if type(rank) is not int or rank not in outcome.ranks:
                raise ValueError(f"rank={rank!r}: the run that failed had the ranks {', '.join(map(str, outcome.ranks))}")
            alone, output = Outcome((rank,)), Output(time.monotonic())
            if rank in outcome.missing:
                team.processes[rank].question(watch.DEBUG)
            else:
                with contextlib.suppress(ConnectionError):  # it has just died, which collect finds out
                    team.processes[rank].ask(_packed((debugger.after, (), {}, None)), self.timeout)
            answer = Prompt(team, alone, output, over=True).answer
            try:
                collect.collect(team, alone, output, None, watched=False, answer_debugger=answer)
            except BaseException:
                collect.collect(team, alone, output, _AFTER_INTERRUPT, watched=False)  # its reply to what was left
                raise
            output.show_rest()
            if self._closed:
                raise WorldError("the world was closed while a rank was in the debugger")
            if error := diagnose.error_of(alone, team, None):
                if isinstance(error, RankDied):
                    self._drop_team()
                raise error

    def stacks(self) -> None:
        """Prints where each rank is now, by the reader's lines of its stack: after a hang, or during a run from a thread."""
        team = self._went_wrong[0] if self._went_wrong else self._team
        if self._closed or team is None:
            raise WorldError("there are no ranks now; the next run starts them")
        failed = self._went_wrong[1].failed if self._went_wrong else []
        for rank, seen in team.look(range(self.size), watch.DETAILS).items():
            print(f"rank {rank} has raised" if rank in failed else diagnose.stack_text(rank, seen))

    def close(self) -> None:
        """Ends the ranks, also from another thread than the one whose run is under way. Closing twice does nothing.

        The process that has started them, with torch in its 300 MB, stays for ten minutes, so that the next World is there
        at once; then it ends, too.
        """
        self._closed = True
        for team in self._holder:
            team.kill()
        with self._lock:
            self._drop_team()
            _end(self._holder, self._servers)
        _open[:] = [ref for ref in _open if ref() not in (None, self)]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"World({self.size}, backend={self.backend!r}): {state}"

    def _repr_html_(self) -> str:
        device = "a GPU each" if self.backend == "nccl" else "the CPU, one compute thread each"
        boxes = "".join(
            f"<span style='display:inline-block;min-width:1.6em;margin:1px;padding:1px 4px;text-align:center;"
            f"border:1px solid #888;border-radius:3px'>{rank}</span>"
            for rank in range(self.size)
        )
        state = "closed" if self._closed else "open"
        return f"<div><b>World of {self.size} ranks</b>, {state}: {html.escape(self.backend)}, on {device}<br>{boxes}</div>"

    def __reduce__(self):
        raise TypeError("a World cannot be sent to its own ranks; inside the function use dist.get_rank() and get_world_size()")

    def _measure(self, ranks, fn, args, kwargs, counts: frozenset[str]) -> Measurement:
        outcome = self._run(ranks, fn, args, kwargs, counts)
        recordings = {rank: outcome.replies[rank][0].recording for rank in outcome.ranks}
        return measurement(self._results(outcome), recordings)

    def _run(self, ranks, fn, args, kwargs, counts: frozenset | None = None) -> Outcome:
        """Sends these ranks the task, waits until they have replied, and judges what came of it.

        counts: what to measure; None: nothing
        """
        if self._closed:
            raise WorldError("this world is closed; make a new one: mr.World(...)")
        if not callable(fn):
            raise ValueError(f"run({fn!r}): the first argument must be a function; its arguments follow it")
        frames = _packed_for(ranks, (fn, args, kwargs, counts))
        with self._lock:
            team = self._ready_team()
            if stale := team.stale(fn):
                _warn(stale, UserWarning)
            team.kept |= fn in (tasks.run_cell, tasks.time_cell, tasks.set_variables)
            output, outcome = Output(time.monotonic()), Outcome(tuple(ranks))
            with show_live(outcome, output) as shown:
                try:
                    self._ask(team, outcome, frames, output, shown.step)
                    output.show_rest()
                except BaseException as error:  # an interrupt, most of the time
                    fresh = "" if self._interrupted(team, outcome, output) else ", on fresh ranks"
                    if isinstance(error, KeyboardInterrupt):
                        raise RunInterrupted(f"the run was stopped; the next one works{fresh}") from None
                    raise
                self._judge(outcome, team)
        return outcome

    def _ask(self, team: Team, outcome: Outcome, frames: dict[int, list], output: Output, show_progress: Callable) -> None:
        clock = Clock((process.pid for process in team.processes if process.pid), self.slack)
        try:
            for k, rank in enumerate(outcome.ranks):
                if k and self.timeout is not None and clock.over(self.timeout):  # those before took their tasks slowly
                    raise TimeoutError
                with contextlib.suppress(ConnectionError):  # it has just died, which collect finds out
                    team.processes[rank].ask(frames[rank], self.timeout)
        except TimeoutError:
            outcome.late = True
        prompt, watched = Prompt(team, outcome, output), self.backend == "gloo"
        self.took = collect.collect(team, outcome, output, self.timeout, watched, show_progress, prompt.answer, clock)

    def _ready_team(self) -> Team:
        if self._team is not None and (dead := self._team.dead()):
            rank, code = next(iter(dead.items()))
            lost = _LOST if self._team.kept else ""
            self._drop_team()
            raise RankDied(f"rank {rank} {diagnose.cause(code)}. That was after the last run{lost}", rank, code)
        if self._team is None:
            self._drop_team()  # debug may have looked at what was left of it
            self._team = self._new_team()
            self._holder[:] = [self._team]
        self._went_wrong = None
        return self._team

    def _new_team(self) -> Team:
        if not self._servers or not self._servers[-1].alive():
            _end([], self._servers)
            self._servers[:] = [server_of(self._engine, self.size, self._confined is not None)]
        return Team(self.size, self.backend, self._servers[-1], self._confined)

    def _drop_team(self) -> None:
        self._team = self._went_wrong = None
        _close_team(self._holder)

    def _set_aside(self, team: Team, outcome: Outcome) -> None:
        """Ranks that can't be used again stay for debug until the next run. None of them may compute meanwhile: those that do
        are interrupted where they are, and if they don't stop, all are ended."""
        self._team = None
        computing = [rank for rank, seen in outcome.whereabouts.items() if seen is None or seen.blocked is None]
        if not computing:
            return
        outcome.stopped |= set(computing)
        team.interrupt(computing)
        until = time.monotonic() + _AFTER_INTERRUPT
        while any(rank in outcome.missing for rank in computing) and time.monotonic() < until:
            collect.collect(team, outcome, Output(time.monotonic()), _A_MOMENT, watched=False)
            outcome.late = False
        if any(rank in outcome.missing for rank in computing):
            self._drop_team()

    def _interrupted(self, team: Team, outcome: Outcome, output: Output) -> bool:
        """Brings the ranks back if they come at once; they are replaced if not. Returns whether they came."""
        usable = False
        try:
            if not team.torn:
                team.interrupt(outcome.missing)
                collect.collect(team, outcome, output, _AFTER_INTERRUPT, watched=False)
                usable = outcome.agrees and not team.torn
                output.show_rest()
        finally:
            if not usable:
                self._drop_team()
                print(_LOST.strip() if team.kept else "", end="", file=sys.stderr)
        return usable

    def _judge(self, outcome: Outcome, team: Team) -> None:
        """Raises or warns as the outcome calls for, and lets go of ranks that cannot be used again."""
        if self._closed:
            raise WorldError("the world was closed while a run was under way")
        usable = outcome.agrees and not team.torn
        lost = _LOST if team.kept and not usable else ""
        try:
            if outcome.missing and not outcome.deadlock:  # what proves one is noted already
                outcome.whereabouts = team.look(outcome.missing)
                outcome.faults = team.lines_of_silent(outcome.whereabouts)
            error = diagnose.error_of(outcome, team, self.timeout)
            left = isinstance(error, RankFailed) and error.kind == debugger.Left.__name__  # by the reader, with q in a debugger
            if isinstance(error, RankFailed | RankHung) and not self._confined and not left:
                self._went_wrong = team, outcome, [*outcome.failed, *outcome.missing][0]
        finally:
            if not usable and self._went_wrong is None:
                self._drop_team()
        if not usable and self._went_wrong:
            self._set_aside(team, outcome)
        if error is not None:
            hint = _DEBUG if self._went_wrong and progress_bar.notebook() else ""
            error.args = (error.args[0] + hint + lost,)
            raise error
        if diverging := diagnose.divergence(outcome):
            _warn(f"the ranks' calls diverge: {diverging}.{lost}")
        elif not usable:
            _warn(f"a message was sent that nobody received, or the group was destroyed; the next run has fresh ranks.{lost}")

    def _results(self, outcome: Outcome) -> list:
        results = []
        for rank in outcome.ranks:
            try:
                results.append(self._unpack(outcome.replies[rank][1]))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise WorldError(f"rank {rank}'s result cannot be read in the notebook: {why}") from error
        return results


def newest() -> World:
    """The world that %%ranks runs on. Raises WorldError where none is open."""
    for ref in reversed(_open):
        if (world := ref()) is not None:
            return world
    raise WorldError("no world is open; make one first: world = mr.World(4)")


def _warn(message: str, kind: type[Warning] = RuntimeWarning) -> None:
    """A warning that points at the reader's line, past this file's lines."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


def _close_team(holder: list[Team]) -> None:
    while holder:
        holder.pop().close()


def _end(holder: list[Team], servers: list[Server]) -> None:
    _close_team(holder)
    while servers:
        servers.pop().release()


def _packed_for(ranks, task: tuple) -> dict[int, list]:
    """Rank -> frames, the same for all where no argument is Each."""
    fn, args, kwargs, counts = task
    if not any(isinstance(one, Each) for one in (*args, *kwargs.values())):
        return dict.fromkeys(ranks, _packed(task))

    def own(value, rank: int):
        return value.part(rank, len(ranks)) if isinstance(value, Each) else value

    frames = {}
    for rank in ranks:
        its_args = tuple(own(value, rank) for value in args)
        its_kwargs = {name: own(value, rank) for name, value in kwargs.items()}
        frames[rank] = _packed((fn, its_args, its_kwargs, counts))
    return frames


def _packed(task: tuple) -> list:
    try:
        return messages.pack(task)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        name = getattr(task[0], "__name__", type(task[0]).__name__)
        raise ValueError(
            f"{name} and its arguments cannot be sent to the ranks: {error}. Functions, tensors, numbers and "
            "containers of them can; open files, locks, generators and worlds cannot"
        ) from None
