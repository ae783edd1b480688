"""The notebook's side of a rank's debugger: what it says is printed, and the reader's line goes back."""

import contextlib
import linecache
import os
import re
import sys
from dataclasses import replace

from manyranks.world import cells
from manyranks.world.faults import diagnose
from manyranks.world.faults.diagnose import Outcome
from manyranks.world.notebook.output import Output
from manyranks.world.processes.team import Team
from manyranks.world.rank import messages, watch
from manyranks.world.rank.debugger import Asked

NOBODY = "\n(no one can type here, so the rank goes on)\n"


class Prompt:
    """Answers what ranks of one run ask; says who waits for the rank whenever that changes.

    over: the run has ended, and its frames are looked at: an interrupt leaves the debugger
    """

    def __init__(self, team: Team, outcome: Outcome, output: Output, over: bool = False):
        self._team, self._outcome, self._output, self._over, self._waiting = team, outcome, output, over, ""

    def answer(self, rank: int, asked: Asked) -> None:
        """Reads a line, or the sources that the rank lacks, and sends it."""
        if asked.files:
            sources = {file: text for file in asked.files if (text := "".join(linecache.getlines(file)))}
            self._send(rank, messages.pack(sources))
            return
        self._output.show_of(rank)
        text, _, prompt = asked.text.rpartition("\n")
        self._say_who_waits(rank)
        print(_readable(text), end="\n" if text else "")
        sys.stdout.flush()
        try:
            line = input(prompt) + "\n"
        except (EOFError, OSError, RuntimeError):  # no terminal, or a notebook that is run by a program
            print(NOBODY, file=sys.stderr)
            line = "continue\n"
        except BaseException as error:
            if not self._over:
                raise  # the run is stopped, and the rank with it
            self._send(rank, messages.pack("quit\n"))
            if not isinstance(error, KeyboardInterrupt):
                raise
            return
        self._send(rank, messages.pack(line))

    def _send(self, rank: int, frames: list) -> None:
        with contextlib.suppress(OSError):  # the rank has died meanwhile, or the world was closed, which others find out
            self._team.processes[rank].ask(frames, seconds=10.0)

    def _say_who_waits(self, rank: int) -> None:
        others = [other for other in self._outcome.missing if other != rank]
        looks = self._team.look(others, watch.BRIEFLY)
        seen = replace(self._outcome, whereabouts=looks)
        said = diagnose.meanwhile(seen, others)
        if said and said != self._waiting:
            self._waiting = said
            print(f"Meanwhile {said}.")


def _readable(text: str) -> str:
    """A notebook's cell by its number, and not by the file that it isn't in."""
    for file, label in cells.labels().items():
        text = text.replace(file, label).replace(os.path.basename(file), label)
    return re.sub(r"<(cell \d+)>(?=[(:])", r"\1", text)
