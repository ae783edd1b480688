"""A rank's process as the notebook sees it, whether it was forked here or on another machine."""

import contextlib
import os
import select
import signal
import socket
import struct
import time

from manyranks.world.processes import forkserver
from manyranks.world.rank import messages, plain, watch

_WHOLE = 8.0  # seconds for a confined rank to send the whole of a message that it has begun
_TICK, _SMALL = 0.05, 1 << 20  # seconds, and bytes, of an answer to "where are you?"
_REST = 0.05  # seconds in which faulthandler writes all its lines after the first
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the operating system says them


def readable(fd: int, seconds: float = 0.0) -> bool:
    """Returns whether something can be read within this time. (select.select would refuse numbers from 1024 up.)"""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class RankProcess:
    """A rank's process as the notebook sees it: sockets to talk to it, pipes with what it prints, its exit code."""

    gone = -signal.SIGKILL  # the exit code where none was written: the forkserver itself was killed, and the ranks with it

    def __init__(self, rank: int, command: socket.socket, control: socket.socket, pipes: dict[str, int]):
        self.rank, self.command, self.control = rank, command, control
        self._stream = messages.Stream(command)
        self.confined = False  # whether it runs code of strangers: its messages are plain data, not too large, and in time
        self.stdout, self.stderr, self.faults, self.status = (pipes[name] for name in ("stdout", "stderr", "faults", "status"))
        self.pid: int | None = None  # the rank's first message says it
        self.sandboxed = False
        for output in (self.stdout, self.stderr, self.faults):
            os.set_blocking(output, False)
        self.exit_code: int | None = None
        self._orphaned = False  # whether nobody says how it ended; without PR_SET_PDEATHSIG (macOS) it may live on
        self._pipes = list(pipes.values())
        self.torn = False  # whether a message was cut short: nothing that follows on the connection can be read
        self._cut = False  # the same of its answers to questions
        self._questions = 0

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code, negative for a signal; None while the process lives. Waits for it at most `seconds`."""
        if self.exit_code is None and readable(self.status, seconds):
            written = os.read(self.status, forkserver.EXIT.size)
            self.exit_code = forkserver.EXIT.unpack(written)[0] if written else self.gone
            self._orphaned = not written
        return self.exit_code

    def read_pid(self) -> None:
        """Reads its first message, for the process's number: inside a sandbox it is another one than outside."""
        if self.sandboxed:
            _, ((_, _, credentials),), *_ = self.command.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_PEEK)
        (pid,) = messages.receive(self.command)
        self.pid = _CREDENTIALS.unpack(credentials)[0] if self.sandboxed else int(pid.tobytes())

    def send_signal(self, number: int) -> None:
        if self.pid and self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and what it started."""
        if self.pid and (self.poll() is None or self._orphaned):
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self.hang_up()

    def hang_up(self) -> None:
        """Shuts the connections: a rank that is still starting ends then."""
        for connection in (self.command, self.control):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process if it still runs, waits for its end and closes what leads to it; again if it was interrupted."""
        if self._pipes:
            self.kill()
            self.poll(seconds=5.0)
        self.command.close()
        self.control.close()
        self.close_pipes()

    def close_pipes(self) -> None:
        while self._pipes:
            os.close(self._pipes.pop())

    def ask(self, frames: list[messages.Frame], seconds: float | None) -> None:
        """Sends a task. Raises ConnectionError if the process is gone, TimeoutError if it does not take all of it in time."""
        self.torn = True
        self.command.settimeout(seconds)
        messages.send(self.command, frames, seconds)
        self.command.settimeout(seconds)  # as it was: what is left of the time is not what the answer may take
        self.torn = False

    def answer(self) -> list[messages.Frame]:
        """Reads the reply that is there. Raises EOFError or ConnectionError if the process is gone, TimeoutError."""
        self.torn = True
        limits = {"largest": plain.LARGEST, "seconds": _WHOLE} if self.confined else {}
        frames = messages.receive(self._stream, **limits)
        self.torn = False
        return frames

    @property
    def more(self) -> bool:
        """Returns whether a message that followed has been read, as far as it had come."""
        return bool(self._stream.rest)

    def read(self, frames: list[messages.Frame], kind):
        """Unpacks a message, which is a `kind`. Raises plain.NotPlain where a confined rank has sent anything else."""
        return plain.unpack(frames, kind) if self.confined else messages.unpack(frames)

    def question(self, kind: bytes) -> None:
        """Asks the rank's second thread what the first one is doing."""
        self._questions += 1
        with contextlib.suppress(OSError):
            messages.send(self.control, [kind, str(self._questions).encode()])

    def whereabouts(self, seconds: float):
        """The answer to the last question (watch.Whereabouts), or None if none comes in this time."""
        limits = {"largest": _SMALL, "seconds": max(seconds, _TICK)} if self.confined else {}
        with contextlib.suppress(OSError, EOFError, ValueError, plain.NotPlain):
            until = time.monotonic() + seconds
            while not self._cut and readable(self.control.fileno(), max(0.0, until - time.monotonic())):
                self._cut = True
                *frames, answered = messages.receive(self.control, messages.EXACTLY, **limits)
                self._cut = False
                if answered.tobytes() == str(self._questions).encode():  # and not a late one to an earlier question
                    return self.read(frames, watch.Whereabouts)
                if time.monotonic() > until:  # late ones without end would hold this process
                    break
        return None

    def fault_lines(self, seconds: float = 0.0) -> str:
        """Reads what faulthandler wrote: the Python lines that a crashed or silent process was on. Waits so long for one."""
        if seconds > 0 and readable(self.faults, seconds):
            time.sleep(_REST)  # the other lines follow at once
        with contextlib.suppress(BlockingIOError):
            return os.read(self.faults, 65536).decode(errors="replace")
        return ""
