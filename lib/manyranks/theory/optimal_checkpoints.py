"""The fastest plan of a chain of unequal layers within a memory budget, by dynamic programming.

Let E(s, t, m) be the least time of forwards beyond the first for layers s to t in m slots of memory, a_(s−1) being held by
someone else, and the gradient of a_t among what the slots hold. Either layer s is kept, or the plan runs on to an a_(r−1) that
it stores, finishes with layers r to t, and starts again with s to r − 1:

    E(s, t, m) = min( E(s+1, t, m − saved_s),
                      min over r of  forward_s + … + forward_(r−1) + E(r, t, m − output_(r−1)) + E(s, r−1, m) )

The plan is the best of those that hold what they have stored until it is used. Those that drop it earlier and compute it again
can be better by little, and rarely. Work: N³/6 · slots; with
equal layers N²/2 · slots.
Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214, section 4; for layers of equal
size and binomial checkpoints, Griewank and Walther, "Revolve", ACM TOMS 26(1), 2000.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import add

from manyranks.theory import checkpointing
from manyranks.theory.checkpointing import BACKWARD, FORWARD, KEEP, STORE, Action, Layer

_NEVER = math.inf


def optimal(chain: Sequence[Layer], budget: int, slots: int = 256, gradient: int = 0) -> list[Action]:
    """The fastest plan whose peak, as checkpointing.run counts it, is within the budget.

    slots, gradient: as in Schedules. Raises ValueError for a budget in which no plan fits.
    """
    return Schedules(chain, budget, slots, gradient).plan(budget)


class Schedules:
    """The fastest plans of a chain for all budgets up to `most` bytes.

    slots: into how many the memory is cut. Sizes are rounded up to whole ones: a plan never needs more than its budget, but
    may be slower than the best one. Where all sizes are multiples of a unit of which `most` has no more than `slots`, nothing
    is rounded. gradient: bytes of the gradient of the chain's input. least: bytes in which some plan fits.
    Raises ValueError for an empty chain, sizes or times below 0, and where no plan fits.
    """

    def __init__(self, chain: Sequence[Layer], most: int, slots: int = 256, gradient: int = 0):
        _check(chain, most, slots, gradient)
        self._n, self._chain = len(chain), (None, *chain)
        common = math.gcd(gradient, *(size for layer in chain for size in layer[2:]))
        self._unit = common if common and most // common <= slots else -(-most // slots)
        self._output = [self._slots(gradient), *(self._slots(layer.output) for layer in chain)]
        self._saved = [0, *(self._slots(layer.saved) for layer in chain)]
        self._most = min(most // self._unit, self._enough())
        self._rows = self._solve()
        whole = self._rows[1][self._n]
        fits = next((m for m, extra in enumerate(whole) if extra < _NEVER), None)
        if fits is None:
            raise ValueError(f"budget={most} bytes: no plan for these {self._n} layers fits; give more, or more slots")
        self.least = fits * self._unit

    def _slots(self, size: int) -> int:
        return -(-size // self._unit)

    def _enough(self) -> int:
        """Slots in which nothing needs to be computed twice."""
        return sum(self._saved) + max(map(add, self._output, self._output[1:]))

    def extra(self, budget: int) -> float:
        """Time of the forwards that the plan for this budget adds; infinite where none fits."""
        return self._rows[1][self._n][self._within(budget)]

    def _within(self, budget: int) -> int:
        return max(0, min(budget // self._unit, self._most))

    def plan(self, budget: int) -> list[Action]:
        """The fastest plan for this budget. Raises ValueError where it is less than `least`, or more than `most`."""
        if self.extra(budget) == _NEVER:
            raise ValueError(f"budget={budget} bytes: the least in which a plan for these layers fits is {self.least}")
        actions, todo = [], [(1, self._n, self._within(budget))]
        while todo:
            step = todo.pop()
            if isinstance(step, Action):
                actions.append(step)
            else:
                todo += reversed(self._first(*step))
        return actions

    def _first(self, s: int, t: int, m: int) -> list:
        """What layers s to t begin with, and what is left to plan."""
        kept, (stored, r) = self._kept(s, t, m), self._split(s, t, m)
        if kept <= stored:
            rest = [(s + 1, t, m - self._saved[s])] if s < t else []
            return [Action(KEEP, s), *rest, Action(BACKWARD, s)]
        way = [Action(FORWARD, i) for i in range(s, r)]
        return [*way, Action(STORE, r - 1), (r, t, m - self._output[r - 1]), (s, r - 1, m)]

    def _kept(self, s: int, t: int, m: int) -> float:
        if m < self._needed(s, t):
            return _NEVER
        return self._rows[s + 1][t][m - self._saved[s]] if s < t else 0

    def _split(self, s: int, t: int, m: int) -> tuple[float, int]:
        """The best r, and the extra time with it."""
        way = list(accumulate(layer.forward for layer in self._chain[s:t]))
        best = _NEVER, t
        for r in range(s + 1, t + 1):
            if self._passing(s, r) + self._output[t] > m or m < self._output[r - 1]:
                continue
            extra = way[r - 1 - s] + self._rows[s][r - 1][m] + self._rows[r][t][m - self._output[r - 1]]
            best = min(best, (extra, r))
        return best

    def _needed(self, s: int, t: int) -> int:
        """Slots to keep layer s while the gradient of a_t waits, and to take it backward.

        In the first pass no gradient waits yet; but where it would not fit, layer N cannot go backward later.
        """
        return self._saved[s] + max(self._output[s - 1] + self._output[s], self._output[t])

    def _passing(self, s: int, r: int) -> int:
        """Slots to run from layer s to the output of layer r − 1: two activations at a time; a_(s−1) is not ours."""
        pairs = map(add, self._output[s : r - 1], self._output[s + 1 : r])
        return max(pairs, default=self._output[s])

    def _solve(self) -> list[list]:
        """rows[s][t][m]: E(s, t, m). Intervals of equal layers share a row."""
        n, slots = self._n, range(self._most + 1)
        rows = [[None] * (n + 1) for _ in range(n + 2)]
        after = [[[] for _ in slots] for _ in range(n + 1)]  # [t][m]: E(r, t, m − output_(r−1)) for r = t, t − 1, …
        numbers = {layer: number for number, layer in enumerate(self._chain)}
        kinds = [numbers[layer] for layer in self._chain]
        known: dict[tuple, tuple] = {}
        for s in range(n, 0, -1):
            before = [[] for _ in slots]  # [m]: the way to a_e, and E(s, e, m), for e = s, s + 1, …
            way = list(accumulate(layer.forward for layer in self._chain[s:]))
            passing = [self._passing(s, r) for r in range(s + 1, n + 1)]
            for t in range(s, n + 1):
                key = self._output[s - 1], *kinds[s : t + 1]
                if key not in known:
                    row = self._row(s, t, rows[s + 1][t], before, after[t], way, passing)
                    known[key] = row, [way[t - s] + extra for extra in row]
                rows[s][t], ways = known[key]
                for place, extra in zip(before, ways, strict=True):
                    place.append(extra)
                for place, extra in zip(after[t], [_NEVER] * self._output[s - 1] + rows[s][t], strict=False):
                    place.append(extra)
        return rows

    def _row(self, s: int, t: int, rest: list, before: list, after: list, way: list, passing: list) -> list[float]:
        """E(s, t, m) for all m. It falls as m rises, and no way longer than the best so far can be better."""
        needed, saved, waiting = self._needed(s, t), self._saved[s], self._output[t]
        row, best, some, short = [], _NEVER, 0, t - s
        for m in range(self._most + 1):
            if m >= needed and (kept := rest[m - saved] if s < t else 0) < best:
                best = kept
            while some < short and passing[some] + waiting <= m:
                some += 1
            while short and way[short - 1] >= best:
                short -= 1
            if ends := min(some, short):
                best = min(best, min(map(add, before[m][:ends], reversed(after[m]))))
            row.append(best)
            if not best:
                break
        return row + [0] * (self._most + 1 - len(row))


def strategies(chain: Sequence[Layer], slots: int = 1024) -> dict[str, list[Action]]:
    """Plans for the same chain, by name; those of √N have as many segments, rounded.

    The optimal one is within the peak of "√N, once", to slots of that. Raises ValueError for an empty chain.
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
        "optimal": optimal(chain, checkpointing.run(chain, once).peak, slots),
    }


def _check(chain: Sequence[Layer], most: int, slots: int, gradient: int) -> None:
    if not chain or min(min(layer) for layer in chain) < 0 or gradient < 0:
        raise ValueError(f"chain={chain!r}, gradient={gradient}: give one layer or more, its times and bytes 0 or more")
    if any(layer.saved < layer.output for layer in chain):
        raise ValueError("a layer's saved bytes include its output: give saved >= output")
    if most < 1 or slots < 1:
        raise ValueError(f"most={most}, slots={slots}: give 1 or more of both")
