"""The fastest plan of a chain of unequal layers within a memory budget, by dynamic programming.

Let E(s, t, m) be the least time of forwards beyond the first for layers s to t in m slots of memory, a_(s−1) being held by
someone else, and the gradient of a_t among what the slots hold. Either layer s is kept, or the plan runs on to an a_(r−1) that
it stores, finishes with layers r to t, and starts again with s to r − 1:

    E(s, t, m) = min( E(s+1, t, m − saved_s),
                      min over r of  forward_s + … + forward_(r−1) + E(r, t, m − output_(r−1)) + E(s, r−1, m) )

The plan is the best of those that hold what they have stored until it is used. Those that drop it earlier and compute it again
can be better by little, and rarely. Work: N³/6 · slots; with equal layers N²/2 · slots. Memory: N² · slots numbers.
Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214, section 4; for layers of equal
size and binomial checkpoints, Griewank and Walther, "Revolve", ACM TOMS 26(1), 2000.
"""

import math
from collections.abc import Sequence
from operator import add

import numpy as np

from manyranks.theory import checkpointing
from manyranks.theory.checkpointing import BACKWARD, FORWARD, KEEP, STORE, Action, Layer

_NEVER = math.inf


def optimal(chain: Sequence[Layer], budget: int, slots: int = 256) -> list[Action]:
    """The fastest plan whose peak, as checkpointing.run counts it, is within the budget.

    slots: as in Schedules. Raises ValueError for a budget that no plan fits in.
    """
    return Schedules(chain, budget, slots).plan(budget)


class Schedules:
    """The fastest plans of a chain for all budgets up to `most` bytes.

    slots: how many the memory is cut into
    gradient: bytes of the gradient of the chain's input
    least: the smallest budget that some plan fits

    Sizes are rounded up to whole slots: a plan never needs more than its budget, but may be slower than the best one. Nothing
    is rounded where all sizes are multiples of a unit, and `most` is at most `slots` units.
    Raises ValueError for an empty chain, sizes or times below 0, and where no plan fits.
    """

    def __init__(self, chain: Sequence[Layer], most: int, slots: int = 256, gradient: int = 0):
        _check(chain, most, slots, gradient)
        self._n, self._chain = len(chain), (None, *chain)
        common = math.gcd(gradient, *(size for layer in chain for size in layer[2:]))
        self._unit = common if common and most // common <= slots else -(-most // slots)
        self._most = most // self._unit
        self._output = [self._slots(gradient), *(self._slots(layer.output) for layer in chain)]
        self._saved = [0, *(self._slots(layer.saved) for layer in chain)]
        enough = sum(self._saved) + max(map(add, self._output, self._output[1:]))  # to compute nothing twice
        self._most = min(self._most, enough)
        self._solve()
        fits = np.flatnonzero(self._extra[1, self._n] < _NEVER)
        if not len(fits):
            raise ValueError(f"budget={most} bytes: no plan for these {self._n} layers fits; give more, or more slots")
        self.least = int(fits[0]) * self._unit

    def _slots(self, size: int) -> int:
        """Returns how many slots so many bytes take; where there are not so many, one more than there are."""
        return min(-(-size // self._unit), self._most + 1)

    def extra(self, budget: int) -> float:
        """Time of the forwards that the plan for this budget adds; infinite where none fits."""
        return float(self._extra[1, self._n, self._within(budget)])

    def _within(self, budget: int) -> int:
        return max(0, min(budget // self._unit, self._most))

    def plan(self, budget: int) -> list[Action]:
        """The fastest plan for this budget. Raises ValueError where it is less than `least`, or more than `most`."""
        if self.extra(budget) == _NEVER:
            raise ValueError(f"budget={budget} bytes: a plan for these layers needs at least {self.least}")
        actions, todo = [], [(1, self._n, self._within(budget))]
        while todo:
            step = todo.pop()
            if isinstance(step, Action):
                actions.append(step)
            else:
                todo += reversed(self._first(*step))
        return actions

    def _first(self, s: int, t: int, m: int) -> list:
        """Returns what layers s to t begin with, and what is left to plan."""
        ways = self._ways(s, t, slice(m, m + 1))
        if self._kept(s, t)[m] <= ways.min(initial=_NEVER):
            rest = [(s + 1, t, m - self._saved[s])] if s < t else []
            return [Action(KEEP, s), *rest, Action(BACKWARD, s)]
        r = s + 1 + int(ways.argmin())
        way = [Action(FORWARD, i) for i in range(s, r)]
        return [*way, Action(STORE, r - 1), (r, t, m - self._output[r - 1]), (s, r - 1, m)]

    def _solve(self) -> None:
        """_extra[s, t, m]: E(s, t, m), 0 for no layers; _after[t, r, m]: E(r, t, m − output_(r−1))."""
        n, m, input_ = self._n, self._most + 1, [0, *self._output]
        self._extra, self._after = np.zeros((n + 2, n + 1, m)), np.empty((n + 1, n + 1, m))
        self._runs = [(), *map(self._run, range(1, n + 1))]
        for s in range(n, 0, -1):
            equal = self._equal(s)
            for t in range(s, n + 1):
                self._extra[s, t] = self._extra[s + 1, t + 1] if t < equal else self._row(s, t)
                self._after[t, s, : input_[s]] = _NEVER
                self._after[t, s, input_[s] :] = self._extra[s, t, : m - input_[s]]

    def _equal(self, s: int) -> int:
        """Finds before which t E(s, t, m) is E(s + 1, t + 1, m): layers s to t + 1 are equal, and so are both inputs' sizes."""
        t = s
        while self._output[s - 1] == self._output[s] and t < self._n and self._chain[t] == self._chain[t + 1]:
            t += 1
        return t

    def _run(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """Time and slots to run from layer s to the output of layer r − 1, for r = s + 1, s + 2, …: two activations at a time;
        a_(s−1) is not ours."""
        time = np.cumsum([layer.forward for layer in self._chain[s:]], dtype=float)
        slots = np.maximum.accumulate([self._output[s], *map(add, self._output[s:], self._output[s + 1 :])])
        return time[:, None], slots[:, None]

    def _row(self, s: int, t: int) -> np.ndarray:
        """E(s, t, m) for all m. It falls as m rises; from where layer s can be kept for less than its forward, it is."""
        row = self._kept(s, t)
        dear = slice(np.count_nonzero(row > self._chain[s].forward))
        row[dear] = np.minimum(row[dear], self._ways(s, t, dear).min(axis=0, initial=_NEVER))
        return row

    def _kept(self, s: int, t: int) -> np.ndarray:
        """E(s, t, m) for all m if layer s is kept. That needs slots for the layer and, to take it backward, for the
        gradients. In the first pass no gradient waits yet; but where a_t's would not fit, layer N cannot go backward
        later."""
        saved, output = self._saved[s], self._output
        needed = saved + max(output[s - 1] + output[s], output[t])
        row = np.full(self._most + 1, _NEVER)
        row[needed:] = self._extra[s + 1, t, needed - saved :][: len(row[needed:])]
        return row

    def _ways(self, s: int, t: int, m: slice) -> np.ndarray:
        """Returns [r, m]: for r = s + 1 … t, and for these m, if what is stored first is a_(r−1)."""
        time, slots = (each[: t - s] for each in self._runs[s])
        extra = time + self._extra[s, s:t, m]
        extra += self._after[t, s + 1 : t + 1, m]
        extra[np.arange(self._most + 1)[m] < slots + self._output[t]] = _NEVER
        return extra


def strategies(chain: Sequence[Layer]) -> dict[str, list[Action]]:
    """Plans for the same chain, by name; the √N ones have as many segments, rounded.

    The optimal one has the peak of "√N, once" as its budget, in 1,024 slots. Raises ValueError for an empty chain.
    """
    n = len(chain)
    root = max(1, round(math.sqrt(n)))
    once = checkpointing.segments(n, root)
    return {
        "keep everything": checkpointing.keep_all(n),
        "every layer": checkpointing.every_layer(n),
        "√N, once": once,
        "√N, nearest": checkpointing.nearest(n, root),
        "from the input": checkpointing.from_input(n),
        "optimal": optimal(chain, checkpointing.run(chain, once).peak, slots=1024),
    }


def _check(chain: Sequence[Layer], most: int, slots: int, gradient: int) -> None:
    if not chain or min(min(layer) for layer in chain) < 0 or gradient < 0:
        raise ValueError(f"chain={chain!r}, gradient={gradient}: give one layer or more, its times and bytes 0 or more")
    if any(layer.saved < layer.output for layer in chain):
        raise ValueError("a layer's saved bytes include its output: give saved >= output")
    if most < 1 or slots < 1:
        raise ValueError(f"most={most}, slots={slots}: give 1 or more of both")
