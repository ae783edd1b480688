"""Sizes and logs, a device with its own clock, and spans of ranks, for the functions of exercise 09_mfu.

The device and the ranks' steps are on a virtual clock: what is read there is the same each time. No answer is here.
"""

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from manyranks.given.numbers import drawn, seed_of


class Model(NamedTuple):
    """A GPT. shapes: name -> shape of each parameter, once; tied: whether the head's matrix is the embedding's."""

    shapes: dict[str, tuple[int, ...]]
    tied: bool
    layers: int
    hidden: int
    seq: int


class Row(NamedTuple):
    """A row of a data sheet: FLOP/s of one chip; sparse: whether half of each matrix is zero there."""

    flops: float
    sparse: bool


class Log(NamedTuple):
    """The log of a run. needed: FLOPs per token, forward and backward; recompute: whether the forward pass runs again."""

    needed: float
    tokens_per_second: float
    chips: int
    weights_dtype: str
    products_dtype: str
    recompute: bool


class Span(NamedTuple):
    """A time of the rank's clock, in seconds. kind: "operator" or "wait"; call: which one a wait is for."""

    name: str
    kind: str
    started: float
    finished: float
    call: int | None = None


class Product(NamedTuple):
    """A product of m × k with k × n. itemsize: bytes of an element."""

    m: int
    k: int
    n: int
    itemsize: int

    def __str__(self) -> str:
        return f"for {self.m} × {self.k} with {self.k} × {self.n}, {self.itemsize} bytes per element"


def drawn_products(random: Random) -> list[Product]:
    return [Product(*(random.randint(2, 999) for _ in range(3)), random.choice((1, 2, 4))) for _ in range(2)]


def drawn_configs(random: Random, make: Callable) -> list:
    """Draws a configuration in each style. make: GPTConfig."""
    groups, heads, (ffn, vocab) = random.randint(1, 3), random.randint(1, 3), random.sample(range(20, 60), 2)
    sizes = random.randint(2, 4), 4 * groups * heads, groups * heads, ffn, vocab, random.randint(8, 20)
    styles, tied = {"llama": {"kv_heads": groups}, "gpt2": {}}, random.random() < 0.5  # one style's head is tied
    return [make(*sizes, **kv, style=style, tied=tied == (style == "gpt2")) for style, kv in styles.items()]


class Job(NamedTuple):
    """A run on a chip."""

    log: Log
    sheet: dict[str, Row]

    def __str__(self) -> str:
        dtype, how = self.log.products_dtype, "with" if self.log.recompute else "without"
        return f"{how} recomputation, products in {dtype}, sparse={self.sheet[dtype].sparse}"


def drawn_jobs(random: Random) -> list[Job]:
    found = []
    for again in (True, False):
        sheet = {name: Row(random.randint(9, 999) * 1e9, random.random() < 0.5) for name in ("tf32", "bf16", "fp8")}
        sizes = random.randint(9, 999) * 3e6, random.uniform(9, 999), random.randint(3, 99)
        found.append(Job(Log(*sizes, "fp32", random.choice([*sheet]), again), {"fp32": Row(7e9, False)} | sheet))
    return found


OPERATOR, WAIT = "operator", "wait"  # kinds of spans
_UNIT, MOST = 2.0**-10, 4000  # seconds, so that sums of such times are exact; calls of a device
_PLACES = (0, 3, 1, 2)  # of the ranks: neither the first nor the last one of four is the fastest or the slowest


class Timing(NamedTuple):
    """The arguments of time_it. number: of a case that is drawn."""

    warmup: int
    repeats: int
    inner: int
    number: int = 0

    def __str__(self) -> str:
        return f"warmup={self.warmup}, repeats={self.repeats}, inner={self.inner}"


def drawn_timings(random: Random) -> list[Timing]:
    return [Timing(random.randint(2, 5), repeats, random.randint(3, 6), 1 + random.randrange(2**20)) for repeats in (7, 8)]


class Device:
    """A device with its own clock, busy with older work. It stays with the judge.

    Calls of other ranks' devices take other times, and their work as many units. One measurement has a hiccup.

    log: what was called, "launch" or "synchronize", up to each reading of the clock, "idle" or "busy"
    """

    def __init__(self, timing: Timing, rank: int, n: int, seed: int):
        draw, place = drawn(seed, timing, rank), _PLACES[rank]
        more = drawn(seed, timing).randrange(1000) if seed else 0
        self._timing, self._warm = timing, 40 + rank  # units of a first launch
        self._its = [  # of each measurement, 16ths of a unit that a kernel takes on top of 6
            draw.randrange(61) if seed else (22 * i + 50 * place + 40 * i * place) % 61 for i in range(timing.repeats)
        ]
        self._hiccup = (3 * rank + 1 + more) % timing.repeats
        self._unit = _UNIT * longer(seed)
        self._now = 3.0 + rank + more % 99
        self._free = self._now + (700 + more) * self._unit
        self._launched = self._calls = 0
        self.log: list[list[str]] = [[]]

    def launch(self) -> float:
        """Queues a kernel in two units."""
        self._now += 2 * self._unit
        self._free = max(self._free, self._now) + self._kernel(self._launched) * self._unit
        self._launched += 1
        return self._noted("launch")

    def synchronize(self) -> float:
        """Returns one unit after all is done."""
        self._now = max(self._now, self._free) + self._unit
        return self._noted("synchronize")

    def clock(self) -> float:
        """Returns the host's time."""
        result = self._noted("busy" if self._free > self._now else "idle", self._now)
        if self._calls <= MOST:
            self.log.append([])
        return result

    def _noted(self, what: str, result: float = 0.0) -> float:
        """Returns the result; NaN after far more calls than a right answer makes."""
        self._calls += 1
        if self._calls > MOST:
            return math.nan
        self.log[-1].append(what)
        return result

    def _kernel(self, i: int) -> float:
        """Units of work: the first launches are slow."""
        warmup, repeats, inner, _ = self._timing
        measurement, turn = divmod(i - warmup, inner)
        slow = 140 + self._warm if measurement == self._hiccup and turn == inner // 2 else 0
        return self._warm if i < warmup else 6 + self._its[min(measurement, repeats - 1)] / 16 + slow


class Trace(NamedTuple):
    """A rank's trace. spans: in order; arrived: when it came to each call; step: from, to; zero: what its clock showed when all
    ranks left a barrier together; flops: that the step needs of it; peak: FLOP/s.
    """

    spans: list[Span]
    arrived: list[float]
    step: tuple[float, float]
    zero: float
    flops: float
    peak: float


_DRAWN = "with operators and calls that were drawn, "
STEPS = tuple(f"{_DRAWN}{number}" for number in (3, 5, 8))


def drawn_traces(random: Random) -> list[str]:
    """Names of steps, which `traces` knows, too."""
    return [f"{_DRAWN}{random.randrange(2**60)}" for _ in range(2)]


def longer(seed: int) -> float:
    """Returns by how much the judge's times are longer, so that no table has them: 1 for those that everybody has."""
    return 1 + seed_of(seed) % 64 / 64 if seed else 1


def traces(step: str, n: int, slower: float) -> list[Trace]:
    """Returns n ranks of a step of this name: each computes, comes to one call or two, computes on, and waits, last call first.

    slower: a factor
    """
    number = int(step.removeprefix(_DRAWN))
    same, own = Random(number), [Random(f"{number} {rank}") for rank in range(n)]
    begun = [8 + 3 * rank for rank in range(n)]  # in units since the barrier
    now, spans, arrived = list(begun), [[] for _ in begun], [[] for _ in begun]

    def computes(rank: int) -> None:
        started = now[rank] + own[rank].randint(1, 20)
        now[rank] = started + own[rank].randint(5, 90)
        spans[rank].append(Span("operator", OPERATOR, started, now[rank]))

    calls = list(range(same.randint(3, 6)))
    while calls:
        together = [calls.pop(0) for _ in range(same.randint(1, min(2, len(calls))))]
        ends = {}
        for call in together:
            before = same.randint(1, 3)
            for rank in range(n):
                for _ in range(before):
                    computes(rank)
                arrived[rank].append(now[rank])
            ends[call] = max(moments[call] for moments in arrived) + same.randint(20, 90)
        for call in reversed(together):
            before = same.randint(0, 2)
            for rank in range(n):
                for _ in range(before):
                    computes(rank)
                started = now[rank]
                now[rank] = max(started, ends[call])
                spans[rank].append(Span("wait", WAIT, started, now[rank], call))
    found = []
    for i, (own_spans, moments) in enumerate(zip(spans, arrived, strict=True)):
        zero, unit, peak = 11 + 14 * (3 * i % (n + 1)), slower * _UNIT, 1e9 * (5 + i)
        at = [one._replace(started=(zero + one.started) * unit, finished=(zero + one.finished) * unit) for one in own_spans]
        computing = sum(one.finished - one.started for one in at if one.kind == OPERATOR)
        step = (zero + begun[i]) * unit, (zero + now[i] + 7) * unit
        flops = round(peak * computing * (0.3 + len(moments) / 20))
        found.append(Trace(at, [(zero + moment) * unit for moment in moments], step, zero * unit, flops, peak))
    return found
