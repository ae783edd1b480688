"""Runs a group of benchmarks in a separate process, so that nothing another group imported, started or broke affects it."""

import multiprocessing
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection

from benchmarks.compare import Row


def rows(group: str) -> Iterator[Row]:
    """Yields a group's rows as they're measured.

    group: its module's name.
    Raises ChildProcessError if the group fails; its process has printed why.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(group, there))
    process.start()
    there.close()  # only the group has the other end now, so the pipe ends with it
    try:
        while True:
            yield here.recv()
    except EOFError:
        process.join()
    if process.exitcode:
        raise ChildProcessError(f"{group} ended with {process.exitcode}")


def _send(group: str, there: Connection) -> None:
    for row in import_module(f"benchmarks.{group}").rows():
        there.send(row)
