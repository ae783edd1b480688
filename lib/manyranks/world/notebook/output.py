"""The output of ranks, shown in the notebook in rank order under a heading per rank."""

import codecs
import os
import sys
from collections import defaultdict, deque
from typing import TextIO

from manyranks.world.rank.shown import FROM_STRANGERS, MARK, MOST, Shown, limited

SHOWN_BYTES = 200_000  # of one stream of one rank in one run
_TAIL = 6_000  # letters of a rank that are shown while it runs
_FIRST_LOOK, _NEXT_LOOK = 1.0, 0.5  # seconds: a short run is shown in one piece, a long one as it goes


class Output:
    """Gathers the bytes of one run and writes them to sys.stdout and sys.stderr."""

    def __init__(self, started: float):
        self._next = started + _FIRST_LOOK
        self._text: dict[tuple[str, int], str] = {}
        self._decoders: dict[tuple[str, int], codecs.IncrementalDecoder] = {}
        self._bytes: dict[tuple[str, int], int] = {}
        self.tails: dict[int, str] = {}  # rank -> the last that it has printed
        self._heading: tuple[str, int] | None = None
        self._shown: defaultdict[int, deque[Shown]] = defaultdict(deque)

    def read(self, fd: int, stream: str, rank: int) -> bool:
        """Takes what a pipe holds now. Returns False when nothing more can come."""
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return True
        key = stream, rank
        room = SHOWN_BYTES - self._bytes.get(key, 0)
        self._bytes[key] = self._bytes.get(key, 0) + len(data)
        if room > 0:
            decoder = self._decoders.setdefault(key, codecs.getincrementaldecoder("utf-8")("replace"))
            text = decoder.decode(data[:room])
            self._text[key] = self._text.get(key, "") + text
            self.tails[rank] = (self.tails.get(rank, "") + text.replace(MARK, "[shown at the end]\n"))[-_TAIL:]
        return bool(data)

    def printed(self, rank: int) -> int:
        return self._bytes.get(("stdout", rank), 0) + self._bytes.get(("stderr", rank), 0)

    def take(self, rank: int, what: Shown, stranger: bool = False) -> None:
        """Keeps what a rank shows for its place.

        stranger: whether only text and pictures are let through
        """
        if not stranger:
            self._shown[rank].append(what)
        elif len(self._shown[rank]) < MOST:
            self._shown[rank].append(Shown(limited(what.data, FROM_STRANGERS)))

    def show_live(self, now: float) -> None:
        """Writes the complete lines so far: after one second, then every half second."""
        if now < self._next:
            return
        self._next = now + _NEXT_LOOK
        for key in sorted(self._text, key=_by_rank):
            text = self._text[key]
            end = max(text.rfind(last) + len(last) if last in text else 0 for last in ("\n", "\r", MARK))
            if text.count(MARK, 0, end) <= len(self._shown[key[1]]):  # what stands there has come
                self._write(key, text[:end])
                self._text[key] = text[end:]

    def show_of(self, rank: int) -> None:
        """Writes all that a rank has printed by now."""
        for stream in ("stdout", "stderr"):
            self._write((stream, rank), self._text.pop((stream, rank), ""))
        sys.stdout.flush()

    def show_rest(self) -> None:
        """Writes all that is left, and what was left out."""
        for key in sorted(self._bytes, key=_by_rank):
            count = self._bytes[key]
            self._write(key, self._text.pop(key, ""))
            if count > SHOWN_BYTES:
                self._write(key, f"\n[rank {key[1]} printed {count:,} bytes; the first {SHOWN_BYTES:,} are shown]\n")
        for rank in sorted(self._shown):
            while self._shown[rank]:  # a rank that prints too much has places that nobody sees
                self._show(("stdout", rank))
        sys.stdout.flush()

    def _write(self, key: tuple[str, int], text: str) -> None:
        """Text, and at its marks what was shown there."""
        first, *others = text.split(MARK)
        self._print(key, first)
        for part in others:
            self._show(key)
            self._print(key, part)

    def _show(self, key: tuple[str, int]) -> None:
        if not self._shown[key[1]]:  # a program printed the mark itself
            return
        data = self._shown[key[1]].popleft().data
        if not type(sys.stdout).__module__.startswith("ipykernel."):  # it goes to a file or another program
            self._print(key, data.get("text/plain", ""))
            return
        from IPython.display import display

        self._head(key)
        sys.stdout.flush()
        display(data, raw=True)

    def _print(self, key: tuple[str, int], text: str) -> None:
        if not text:
            return
        out = self._head(key)
        text += "" if text.endswith(("\n", "\r")) else "\n"
        try:
            out.write(text)
        except UnicodeEncodeError:  # a terminal that knows only some letters
            out.write(text.encode("ascii", "backslashreplace").decode())
        out.flush()

    def _head(self, key: tuple[str, int]) -> TextIO:
        """The stream, with the rank's heading on it unless that stands there already."""
        stream, rank = key
        out = sys.stderr if stream == "stderr" else sys.stdout
        if key != self._heading:
            out.write(f"── rank {rank} ──\n")
            self._heading = key
        return out


def _by_rank(key: tuple[str, int]) -> tuple[int, bool]:
    return key[1], key[0] == "stderr"
