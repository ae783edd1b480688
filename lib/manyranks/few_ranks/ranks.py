"""Ranks for "Measure it": they start with it, and end with it or when it's stopped."""

import math
import threading
from collections.abc import Callable, Mapping

from manyranks.measure.compared import SmallRun
from manyranks.world.counted.measurement import Measurement
from manyranks.world.world import World


class OnRanks:
    """Calls run(values, ranks, say) and ends the ranks that it has asked for.

    run: gets the explorer's values by name; ranks(n), a World of n ranks; and say(share, words), which tells how far it is.
        Returns a SmallRun
    """

    def __init__(self, run: Callable[[Mapping, Callable[[int], World], Callable[[float, str], None]], SmallRun]):
        self._run, self._worlds, self._stopped, self._lock = run, [], False, threading.Lock()
        self.__doc__ = run.__doc__

    def __call__(self, values: Mapping[str, object], say: Callable[[float, str], None] = lambda share, words: None) -> SmallRun:
        """Raises what the run raises, and what a World raises when it's closed under way."""
        self._stopped = False
        try:
            return self._run(values, self._ranks, say)
        finally:
            self._close()

    def stop(self) -> None:
        """Ends the ranks, from another thread than the one that waits for them."""
        with self._lock:
            self._stopped = True
        self._close()

    def _ranks(self, size: int) -> World:
        world = World(size, timeout=60)
        with self._lock:
            self._worlds.append(world)
            stopped = self._stopped
        if stopped:
            raise RuntimeError("stopped")
        return world

    def _close(self) -> None:
        with self._lock:
            worlds = self._worlds
            self._worlds = []
        for world in worlds:
            world.close()


def few(n: int, most: int = 8) -> int:
    """Returns as many ranks as asked for, but 2 to `most`."""
    return max(2, min(n, most))


def bytes_sent(counted: Measurement) -> dict[int, float]:
    """Returns what left each rank on its sockets, NaN where this system doesn't count it: what calls say is theory's number."""
    return dict(counted.sent_bytes or dict.fromkeys(counted.payload_bytes, math.nan))
