"""What ranks print, shown in the notebook in rank order under a heading a rank."""

import codecs
import os
import sys

SHOWN_BYTES = 200_000  # of one stream of one rank in one run
_FIRST_LOOK, _NEXT_LOOK = 2.0, 1.0  # seconds: a short run is shown in one piece, a long one as it goes


class Output:
    """Gathers the bytes of one run and writes them to sys.stdout and sys.stderr."""

    def __init__(self, started: float):
        self._next = started + _FIRST_LOOK
        self._text: dict[tuple[str, int], str] = {}
        self._decoders: dict[tuple[str, int], codecs.IncrementalDecoder] = {}
        self._bytes: dict[tuple[str, int], int] = {}
        self._heading: tuple[str, int] | None = None

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
            self._text[key] = self._text.get(key, "") + decoder.decode(data[:room])
        return bool(data)

    def show_live(self, now: float) -> None:
        """Writes the whole lines there are, once a second, when the run has lasted a while."""
        if now < self._next:
            return
        self._next = now + _NEXT_LOOK
        for key in sorted(self._text, key=_by_rank):
            text = self._text[key]
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            self._write(key, text[:end])
            self._text[key] = text[end:]

    def show_rest(self) -> None:
        """Writes all that is left, and what was left out."""
        for key in sorted(self._bytes, key=_by_rank):
            count = self._bytes[key]
            self._write(key, self._text.pop(key, ""))
            if count > SHOWN_BYTES:
                self._write(key, f"\n[rank {key[1]} printed {count:,} bytes; the first {SHOWN_BYTES:,} are shown]\n")
        sys.stdout.flush()

    def _write(self, key: tuple[str, int], text: str) -> None:
        if not text:
            return
        stream, rank = key
        out = sys.stderr if stream == "stderr" else sys.stdout
        if key != self._heading:
            text = f"── rank {rank} ──\n{text}"
            self._heading = key
        text += "" if text.endswith(("\n", "\r")) else "\n"
        try:
            out.write(text)
        except UnicodeEncodeError:  # a terminal that knows only some letters
            out.write(text.encode("ascii", "backslashreplace").decode())
        out.flush()


def _by_rank(key: tuple[str, int]) -> tuple[int, bool]:
    return key[1], key[0] == "stderr"
