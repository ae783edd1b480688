"""Exceptions for what can go wrong with a world: their text is the report that the reader sees."""

NODE_LOST = -256  # the exit code of a rank whose machine is gone: no signal has this number
HUNG_UP = -257  # of one that has closed its connection, and whose process has not ended


class WorldError(RuntimeError):
    """A world could not do what it was asked; the text says why and what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a traceback: the frames of this library would hide the report.
        return [f"{type(self).__name__}: {self}"]


class NotStarted(WorldError):
    """The ranks could not be started: for want of memory, files or room on the disk, and not because of what they run."""


class NoRoom(NotStarted, ValueError):
    """More ranks than this machine has memory or files for now: seen before any process starts."""


class RankFailed(WorldError):
    """A rank raised.

    rank: which
    exception: what it raised, None if it could not be sent
    traceback: the rank's, as text
    kind, said: the exception's class and its arguments, as words
    """

    def __init__(
        self,
        message: str,
        rank: int,
        exception: BaseException | None,
        traceback: str,
        kind: str = "",
        said: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.rank, self.exception, self.traceback = rank, exception, traceback
        self.kind, self.said = kind, said


class RankDied(WorldError):
    """A rank's process ended.

    rank: which
    exit_code: its exit code, negative for a signal, as subprocess has it; NODE_LOST where the rank's machine is gone, HUNG_UP
        where it has closed its connection and lives on
    """

    def __init__(self, message: str, rank: int, exit_code: int):
        super().__init__(message)
        self.rank, self.exit_code = rank, exit_code


class RankHung(WorldError):
    """Ranks wait for each other, or ran out of time.

    states: rank -> what it was doing, as text
    """

    def __init__(self, message: str, states: dict[int, str]):
        super().__init__(message)
        self.states = states


class RunInterrupted(KeyboardInterrupt):
    """The reader stopped a run. Code that catches KeyboardInterrupt catches this."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]
