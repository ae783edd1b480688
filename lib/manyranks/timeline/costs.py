"""Costs: how long each instruction of a Program takes. `theory` knows real clusters; Durations are given by hand."""

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, NamedTuple, Protocol


class Transfer(NamedTuple):
    """The demand of a message or a collective: `latency` seconds, then `amount` bytes through all its channels.

    channels: (key, capacity in bytes/s) of each; transfers that name the same key share it. The slowest sets the pace.
    """

    latency: float
    amount: float = 0
    channels: tuple[tuple[Hashable, float], ...] = ()

    @property
    def seconds(self) -> float:
        """The time it takes alone: latency + amount / least capacity."""
        return self.latency + (self.amount / min(capacity for _, capacity in self.channels) if self.channels else 0.0)


class Costs(Protocol):
    """Seconds of computing, and what communication asks of the network. Equal arguments must give equal costs."""

    def compute(self, rank: int, work: Any) -> float: ...  # as in the program that it is for; hashable

    def message(self, source: int, destination: int, bytes: float) -> Transfer: ...

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer: ...


@dataclass(frozen=True)
class Durations:
    """Costs for abstract schedules: times[work] seconds on every rank; latency + bytes / bandwidth for any transfer.

    Each directed pair, and each group, has its own channel. Raises ValueError for work that `times` does not name.
    """

    times: Mapping[Any, float]
    latency: float = 0.0
    bandwidth: float = inf

    def compute(self, rank: int, work: Hashable) -> float:
        if work in self.times:
            return self.times[work]
        names = {str(known): known for known in self.times}
        near = [names[name] for name in difflib.get_close_matches(str(work), names, n=3, cutoff=0)]
        raise ValueError(f"no time for work {work!r}; the nearest that have one: {', '.join(map(repr, near)) or 'none'}")

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        return Transfer(self.latency, bytes, ((("message", source, destination), self.bandwidth),))

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer:
        return Transfer(self.latency, bytes, ((("collective", ranks), self.bandwidth),))


def check_transfer(transfer: Transfer) -> None:
    """Raises ValueError for a transfer that could not take place, or not end."""
    capacities = dict(transfer.channels)
    if not (is_size(transfer.latency) and is_size(transfer.amount)):
        raise ValueError(f"{transfer}: latency and amount must be finite and not negative")
    if not all(isinstance(capacity, Real) and capacity > 0 for capacity in capacities.values()):
        raise ValueError(f"{transfer}: each channel needs a capacity above 0 bytes/s")
    if len(capacities) != len(transfer.channels):
        raise ValueError(f"{transfer}: a transfer takes each channel once; give more of its capacity to a key, or two keys")


def is_size(value: float) -> bool:
    """Returns whether it is a number that seconds or bytes can be: finite, and not negative."""
    return isinstance(value, Real) and 0 <= value < inf
