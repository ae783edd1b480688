"""The actor on each node of a Ray cluster: it forks that node's ranks and carries their channels to the notebook.

A rank is the same process as on the notebook's own machine, forked by the same forkserver. Each of its channels, a socket or a
pipe, gets a TCP connection to the notebook, and a thread for each direction copies bytes.
"""

import contextlib
import os
import signal
import socket
import struct
import threading

import psutil

from manyranks.world.processes.handle import RankProcess
from manyranks.world.processes.local import Forkserver

HELLO = struct.Struct("<16sIB")  # the world's secret, rank, channel
SOCKETS, PIPES = ("command", "control"), ("stdout", "stderr", "faults", "status")
CHANNELS = SOCKETS + PIPES
_AT_ONCE = 1 << 16
_IDLE, _BETWEEN, _TIMES = 5, 2, 3  # seconds until a silent peer is asked, between questions, and how often


class Node:
    """The ranks of one world on this node.

    notebook: the address that it waits at
    secret: what it knows its ranks by
    """

    def __init__(self, notebook: tuple[str, int], secret: bytes, address: str):
        self._notebook, self._secret, self._server = notebook, secret, Forkserver(interface_of(address))
        self._ranks: dict[int, RankProcess] = {}
        self._pids: dict[int, int] = {}
        self._server.hold()
        self._server.wait_until_ready()

    def free_port(self) -> int:
        """Returns a port that nobody listens on, for the group's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def fork(self, rank: int) -> None:
        """Starts a rank and connects its channels. One of this number that was there before has ended by now."""
        self._pids.pop(rank, None)
        if before := self._ranks.pop(rank, None):
            before.close()
        process = self._ranks[rank] = self._server.fork(rank)
        for number, name in enumerate(CHANNELS):
            there = patient(socket.create_connection(self._notebook))
            there.sendall(HELLO.pack(self._secret, rank, number))
            if name in SOCKETS:
                _carry(getattr(process, name), there)
                _carry(there, getattr(process, name))
            else:
                os.set_blocking(pipe := getattr(process, name), True)
                _carry(os.fdopen(pipe, "rb", buffering=0, closefd=False), there)

    def told(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to the rank; SIGKILL also to what it started."""
        if pid := self._pids.get(rank):
            with contextlib.suppress(OSError):
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def close(self) -> None:
        self._server.close()


def patient(connection: socket.socket) -> socket.socket:
    """A connection that sends at once, and whose end is noticed where the other machine has just gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE), ("TCP_KEEPINTVL", _BETWEEN), ("TCP_KEEPCNT", _TIMES)):
        if hasattr(socket, name):  # not on macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def interface_of(address: str) -> str:
    """The network interface that has the address. Raises ValueError where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise ValueError(f"this node has no interface with Ray's address {address}")


def _carry(source, target) -> None:
    threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source, target) -> None:
    """Copies bytes until one side is gone; then the other one learns of it."""
    read = source.recv if isinstance(source, socket.socket) else source.read
    with contextlib.suppress(OSError):
        while data := read(_AT_ONCE):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
