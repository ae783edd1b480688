"""Theory beside what real ranks have counted, as an explorer's "Measure it" shows it."""

from typing import NamedTuple


class Beside(NamedTuple):
    """A quantity in theory, and as it was counted. unit: "bytes", "seconds", "share", "number" or "flops"."""

    name: str
    theory: float
    measured: float
    unit: str = "bytes"


class Small(NamedTuple):
    """What was run small on real ranks, in a few words, and what was counted there. picture: a PNG, if there is one."""

    where: str
    rows: tuple[Beside, ...]
    picture: bytes = b""
