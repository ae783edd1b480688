"""Theory next to what real ranks have counted, as an explorer's "Measure it" shows it."""

from typing import NamedTuple


class Compared(NamedTuple):
    """A quantity in theory, and as it was counted.

    measured: NaN where this system doesn't count it
    unit: "bytes", "seconds", "share", "number" or "flops"
    """

    name: str
    theory: float
    measured: float
    unit: str = "bytes"


class SmallRun(NamedTuple):
    """The results of a small run on real ranks.

    where: what ran, in a few words
    rows: quantities in theory and as they were counted
    roof: FLOP/s and bytes/s of the machine, if it was measured
    points: name, FLOPs per byte and FLOP/s of what ran under the roof
    """

    where: str
    rows: tuple[Compared, ...]
    roof: tuple[float, ...] = ()
    points: tuple[tuple[str, float, float], ...] = ()
