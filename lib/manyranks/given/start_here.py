"""Three programs that hang on four ranks, and measured times of messages, for exercise 00_start_here."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist

from manyranks.theory.hardware import Link
from manyranks.world.errors import RankHung
from manyranks.world.world import World


class Times(NamedTuple):
    """Times of messages over a link. Noise only ever adds to a time, and once per size there is none.

    latency, bandwidth: α in seconds and β in bytes per second, the link's own
    sizes: in bytes, in any order
    """

    latency: float
    bandwidth: float
    sizes: tuple[int, ...]

    def measured(self, seed: int) -> list[list[float]]:
        """Returns five times for each size, in seconds."""
        link, random = Link("", self.latency, self.bandwidth), Random(seed)
        noisy = [[link.seconds(n) * (1 + random.uniform(0.1, 2)) for _ in range(4)] for n in self.sizes]
        return [random.sample([*each, link.seconds(n)], 5) for n, each in zip(self.sizes, noisy, strict=True)]

    def __str__(self) -> str:
        return f"with {len(self.sizes)} sizes from {min(self.sizes):,} to {max(self.sizes):,} bytes"


def drawn_times(random: Random) -> list[Times]:
    sizes = tuple(random.sample([2**k + random.randint(0, 9) for k in range(4, 27, 3)], 5))
    return [Times(random.randint(2, 40) * 1e-6, random.randint(5, 90) * 1e9, sizes)]


def hangs(letter: str) -> None:
    """Runs program "A", "B" or "C" on four ranks and prints the report. Raises ValueError for another letter."""
    if letter not in _PROGRAMS:
        raise ValueError(f"hangs({letter!r}): choose {', '.join(map(repr, _PROGRAMS))}")
    with World(4) as world:
        try:
            world.run(_PROGRAMS[letter])
        except RankHung as hung:
            print(f"{hung}".partition("\n\nUntil the next run")[0])  # there is none


def _around() -> None:
    """Even ranks send to the next one first, odd ranks receive first. So the ring says."""
    (rank, n), x = (dist.get_rank(), dist.get_world_size()), torch.ones(3)
    following = (rank + 1) % n if rank != 2 else 0
    if rank % 2 == 0:
        dist.send(x, following)
        dist.recv(x, (rank - 1) % n)
    else:
        dist.recv(x, (rank - 1) % n)
        dist.send(x, following)


def _epoch() -> None:
    """An all-reduce per batch."""
    for _ in range(4 if dist.get_rank() != 1 else 3):
        dist.all_reduce(torch.ones(3))


def _step() -> None:
    """Rank 3 writes a log before it reduces; the others reduce first."""
    calls: list[Callable[[], object]] = [lambda: dist.all_reduce(torch.ones(3)), dist.barrier]
    for call in calls[:: -1 if dist.get_rank() == 3 else 1]:
        call()


_PROGRAMS = {"A": _around, "B": _epoch, "C": _step}
