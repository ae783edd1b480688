"""What the functions of exercise 09_mfu are given: sizes and runs, operators, a device on a clock of its own, spans of ranks.

The device and the ranks' steps are on a virtual clock: what is read there is the same each time. No answer is here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from manyranks.measure.journal import Stopped


class Model(NamedTuple):
    """Sizes of a GPT. The first dense_layers of its layers have an MLP, all others experts.

    heads share hidden evenly. gated: whether an MLP, or an expert, has three matrices, or only up and down. A token goes to
    top_k of the experts, and to each of the shared_experts, which are as large.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    dense_layers: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0


class Layer(NamedTuple):
    """FLOPs of one layer's forward pass. products: with weights; scores: QKᵀ and the product with V; learns: whether its
    weights get gradients.
    """

    products: int
    scores: int
    learns: bool


class Row(NamedTuple):
    """A row of a data sheet: FLOP/s of one chip; sparse: whether half of each matrix is zero there."""

    flops: float
    sparse: bool


SHEET = {"fp64": Row(7e9, False), "fp32": Row(31e9, False), "tf32": Row(210e9, True)}
SHEET |= {"bf16": Row(432e9, True), "fp8": Row(910e9, True)}
OTHERS = SHEET | {"bf16": Row(216e9, False)}  # another vendor's, for the same chip


class Run(NamedTuple):
    """A training run. shapes: name -> shape of each parameter, once; tied: whether the head's matrix is the embedding's.

    sequences, accumulate: of one replica, a micro-batch, and micro-batches a step; chips: of one replica; seconds: a step.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: bool
    layers: int
    hidden: int
    seq: int
    sequences: int
    accumulate: int
    replicas: int
    chips: int
    seconds: float
    weights_dtype: str
    products_dtype: str


class Span(NamedTuple):
    """A time of the rank's clock, in seconds. kind: "matmul", "other", "calls" or "wait"; call: which one a wait is for."""

    name: str
    kind: str
    started: float
    finished: float
    call: int | None = None


class Operator(NamedTuple):
    """A kernel. flops: 0 for what is no product; reads, writes: bytes of each tensor, by its name."""

    name: str
    flops: int
    reads: dict[str, int]
    writes: dict[str, int]


# Operators: what each makes, its name, what it reads; with the shapes of these tensors, which are of float32

_GATED = (
    "u = mm x up, g = mm x gate, s = sigmoid g, silu = mul s g, a = mul silu u, d = mm a down, total = add d residual, "
    "size = abs total, root = sqrt size, out = mul root residual, logits = mm out thin, half = mul logits, y = tanh half"
)
_OF_GATED = {
    (96, 40): "x residual d total size root out",
    (96, 120): "u g s silu a",
    (96, 2): "logits half y",
    **{(40, 120): "up gate", (120, 40): "down", (40, 2): "thin"},
}
_SOFTMAX = (  # later runs read what earlier ones have made, or have read; a product reads what no neighbour does
    "scores = mm q k, scaled = mul scores scale, biased = add scaled bias, powers = exp biased, sums = sum powers, "
    "weights = div powers sums, columns = sum powers, o = mm weights v, twice = mul o, more = add twice q, "
    "less = mul more scale, y = add less sums, mean = mm columns v, z = mul y mean, w = div z sums"
)
_OF_SOFTMAX = {
    (64, 256): "scores scaled bias biased powers weights",
    (64, 8): "q o twice more less y z w",
    **{(8, 256): "k", (256, 8): "v", (64, 1): "sums", (1, 256): "columns", (1, 8): "mean", (1, 1): "scale"},
}
_Kernels = tuple[str, dict[tuple[int, int], str], str, float, float]
KERNELS: dict[str, _Kernels] = {  # operators, shapes, what is needed in the end, the chip's peak and bandwidth
    "for a gated MLP with a residual": (_GATED, _OF_GATED, "total y", 40e6, 4e6),
    "for scores and their weights": (_SOFTMAX, _OF_SOFTMAX, "w", 9e6, 4.5e6),
}


def operators(steps: str, shapes: dict[tuple[int, int], str]) -> list[Operator]:
    """New ones, with their FLOPs and bytes."""
    shape = {name: its for its, names in shapes.items() for name in names.split()}
    size = {name: 4 * rows * columns for name, (rows, columns) in shape.items()}
    found = []
    for makes, _, name, *reads in map(str.split, steps.split(", ")):
        flops = 2 * shape[reads[0]][0] * shape[reads[0]][1] * shape[reads[-1]][1] if name == "mm" else 0
        found.append(Operator(name, flops, {one: size[one] for one in reads}, {makes: size[makes]}))
    return found


# A device whose work is asynchronous

_UNIT = 2.0**-10  # seconds; sums of such times are exact
_MOST = 4000
_ENDLESS = "far more than a right answer needs: does the loop end?"
_PLACES = (0, 3, 1, 2)  # of the ranks: neither the first nor the last one of four is the fastest or the slowest


class Device(NamedTuple):
    """Functions. launch: queues a kernel, and returns before it runs; synchronise: returns when nothing is queued any more;
    clock: the host's time; log: what was called, "launch" or "synchronise", up to each reading of the clock, "idle" or "busy".
    """

    launch: Callable[[], None]
    synchronise: Callable[[], None]
    clock: Callable[[], float]
    log: Callable[[], list[tuple[str, ...]]]


def device(rank: int, warmup: int, repeats: int, inner: int, slower: float) -> Device:
    """A rank's, busy with older work. Its functions show nothing of what they work with. slower: by which factor.

    It gets a new kernel in two units, answers in one, and has a hiccup in a measurement of its own.
    """
    unit, launched, calls, hiccup, place = slower * _UNIT, 0, 0, (3 * rank + 1) % repeats, _PLACES[rank]
    now, free = 3.0 + rank, 3.0 + rank + 700 * unit
    log: list[list[str]] = [[]]

    def note(what: str) -> None:
        nonlocal calls
        calls += 1
        log[-1].append(what)
        if calls > _MOST:
            raise Stopped(f"launch, synchronise and clock were called more than {_MOST:,} times", _ENDLESS)

    def kernel(i: int) -> float:
        """Units of work: the first launches are slow."""
        if i < warmup:
            return 40 + rank
        measurement, turn = divmod(i - warmup, inner)
        slow = (180 + 20 * rank) * (measurement == hiccup and turn == inner // 2)
        return 6 + (22 * measurement + 50 * place + 40 * measurement * place) % 61 / 16 + slow

    def launch() -> None:
        nonlocal now, free, launched
        note("launch")
        now += 2 * unit
        free = max(free, now) + kernel(launched) * unit
        launched += 1

    def synchronise() -> None:
        nonlocal now
        note("synchronise")
        now = max(now, free) + unit

    def clock() -> float:
        note("busy" if free > now else "idle")
        log.append([])
        return now

    return Device(*map(_sealed, (launch, synchronise, clock, lambda: [*map(tuple, log)])))


def _sealed(function: Callable) -> Callable:
    """It does the same. It is C's: it has no closure, no code and no `__self__` to read, and it keeps no result."""
    sealed = lru_cache(maxsize=0)(function)
    del sealed.__wrapped__
    return sealed


# Steps of several ranks, with what a profiler would note of them

CALLS, WAIT = "calls", "wait"  # kinds of spans besides "matmul" and "other"


class Op(NamedTuple):
    """An operator, or a module: works for `before` units, then does what is inside, then works for `after` units."""

    name: str
    kind: str
    before: int
    inside: tuple = ()
    after: int = 0


class Start(NamedTuple):
    """The rank comes to a collective."""

    call: int


class Wait(NamedTuple):
    """It waits for its end: so many units after all ranks have come."""

    call: int
    units: int


class Trace(NamedTuple):
    """A rank's. spans: in the order of their beginnings; arrived: when it came to each call; step: from, to; zero: what its
    clock showed when all ranks left a barrier together.
    """

    spans: list[Span]
    arrived: list[float]
    step: tuple[float, float]
    zero: float


@dataclass
class _Rank:
    """now: units since the barrier."""

    now: int
    spans: list[Span] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)


def _goes(rank: _Rank, program: tuple, ranks: list[_Rank]) -> Iterator[None]:
    """Goes on as far as it can; yields where it has to wait for a rank that has not come so far."""
    for item in program:
        started = rank.now
        if isinstance(item, int):
            rank.now += item
        elif isinstance(item, Start):
            rank.arrived[item.call] = rank.now
        elif isinstance(item, Wait):
            while any(item.call not in one.arrived for one in ranks):
                yield
            rank.now = max(started, max(one.arrived[item.call] for one in ranks) + item.units)
            rank.spans.append(Span("wait", WAIT, started, rank.now, item.call))
        else:
            rank.now += item.before
            yield from _goes(rank, item.inside, ranks)
            rank.now += item.after
            rank.spans.append(Span(item.name, item.kind, started, rank.now))


def _at_once(rank: int) -> tuple:
    """Operators in operators, three deep, and a call in one; the ranks come at different times, each is the last one once."""
    slow, late = (40, 90, 65, 110)[rank], 55 if rank == 0 else 5 + 2 * rank
    linear = Op("linear", CALLS, 3, (Op("addmm", "matmul", slow, (Op("copy_", "other", 4),), 1),), 2)
    layer = Op("layer", CALLS, 7, (linear, 4, Op("norm", "other", 9, (Op("mean", "other", 5),), 6)), 1)
    scores = Op("scores", "other", 5, (Op("bmm", "matmul", 30 - 7 * (rank % 3)), Op("view", CALLS, 2)), 1)
    attention = Op("attention", "other", 6, (scores, Op("softmax", "other", 8)), 10)
    waits = (Start(0), Wait(0, 25), 3, layer, Start(1), Op("sync", CALLS, 2, (Wait(1, 14),), 1))
    return (11, layer, *waits, Op("update", "other", late), attention, Start(2), Wait(2, 31), 9)


def _asynchronous(rank: int) -> tuple:
    """Of three calls one ends behind what is computed, and for one a rank comes late; the last one is waited for first."""
    late, product = (5, 190, 220, 33)[rank], Op("mm", "matmul", (60, 70, 60, 100)[rank])
    matmul, attention = Op("matmul", CALLS, 1, (product,), 2), Op("attention", "other", 12, (Op("bmm", "matmul", 5),), 2)
    block = Op("block", CALLS, 4, (matmul, attention), 3)
    first = (Op("embedding", "other", late), Start(0), block, Start(1), Op("mm", "matmul", 25))
    backward = Op("backward", CALLS, 2, (Wait(0, 20), block, Start(2), 6), 2)
    return (
        7,
        *first,
        2,
        backward,
        Op("flatten", "other", 3, (Wait(2, 40),), 2),
        Op("add_", "other", 15 + 4 * rank),
        Wait(1, 150),
        13,
    )


_STEPS = {"with calls that are waited for at once": _at_once, "with asynchronous calls": _asynchronous}
STEPS = tuple(_STEPS)


def traces(step: str, n: int, slower: float) -> list[Trace]:
    """Of n ranks in one of the STEPS. slower: by which factor."""
    ranks = [_Rank(8 + 3 * rank) for rank in range(n)]
    running = [_goes(rank, _STEPS[step](i), ranks) for i, rank in enumerate(ranks)]
    while running:
        running = [one for one in running if next(one, "over") != "over"]
    return [_trace(rank, 8 + 3 * i, 11 + 14 * (3 * i % (n + 1)), slower * _UNIT) for i, rank in enumerate(ranks)]


def _trace(rank: _Rank, begin: int, zero: int, unit: float) -> Trace:
    """In seconds of the rank's clock. begin: of the step, in units; zero: what the clock showed then, in units."""
    ordered = sorted(rank.spans, key=lambda span: (span.started, -span.finished))
    spans = [one._replace(started=(zero + one.started) * unit, finished=(zero + one.finished) * unit) for one in ordered]
    arrived = [(zero + rank.arrived[call]) * unit for call in sorted(rank.arrived)]
    return Trace(spans, arrived, ((zero + begin) * unit, (zero + rank.now) * unit), zero * unit)
