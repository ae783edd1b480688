"""What the functions of exercise 09_mfu are given: sizes and runs, operators, a device on a clock of its own, spans of ranks.

The device and the ranks' steps are on a virtual clock: what is read there is the same each time. No answer is here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import NamedTuple

from manyranks.given.numbers import drawn, seed_of
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


# What is asked; "drawn" is what only the judge asks


class Pass(NamedTuple):
    """What forward_flops is given."""

    model: Model
    batch: int
    seq: int
    predicted: int

    def __str__(self) -> str:
        m = self.model
        experts, gate = f"{m.experts} experts" if m.experts else "no experts", "gated" if m.gated else "no gate"
        return f"for {m.heads} heads, {m.kv_heads} key/value heads, {gate}, {experts}, {self.batch} × {self.seq} tokens"


def drawn_passes(random: Random) -> list[Pass]:
    """Behind the dense layers are some with experts, but for the last one's."""
    found = []
    for experts in (random.randint(4, 20), random.randint(4, 20), 0):
        groups, seq = random.randint(1, 5), random.randint(5, 40)
        heads, layers, gated = groups * random.randint(1, 4), random.randint(2, 9), random.random() < 0.5
        sizes = heads * random.randint(2, 9), heads, groups, random.randint(20, 90), gated, random.randint(20, 90)
        more = random.randint(1, 4), random.randint(5, 30), random.randint(1, 3)
        kinds = (random.randrange(layers), experts, *more) if experts else (layers,)
        found.append(Pass(Model(layers, *sizes, *kinds), random.randint(2, 9), seq, random.randint(1, seq)))
    return found


class Step(NamedTuple):
    """What step_flops is given. head: FLOPs of its forward pass."""

    layers: tuple[Layer, ...]
    head: int
    recompute: str
    flash: bool

    @property
    def which(self) -> str:
        """Whose weights get gradients."""
        learn = [("no", "yes")[one.learns] for one in self.layers]
        return f"layers learn: {', '.join(learn)}" if "no" in learn else "all layers learn"

    def __str__(self) -> str:
        return f"with recompute={self.recompute!r}, flash={self.flash}, {self.which}"


def drawn_steps(random: Random) -> list[Step]:
    """One for each way of recomputing; in the last one all layers learn."""
    found = []
    for recompute in random.sample(("none", "selective", "full"), 3):
        learns = [random.random() < 0.5 for _ in range(random.randint(3, 9))]
        learns = [True] * len(learns) if len(found) == 2 else [False, *learns[1:], True, False]
        layers = [Layer(12 * random.randint(999, 9999), 12 * random.randint(99, 999), one) for one in learns]
        found.append(Step(tuple(layers), 12 * random.randint(999, 9999), recompute, random.random() < 0.5))
    return found


class Job(NamedTuple):
    """A run on a chip, under a convention. config: a GPTConfig; counts: sequences, accumulate, replicas and chips."""

    config: object
    counts: tuple[int, int, int, int]
    dtype: str
    convention: str
    seconds: float
    sheet: dict[str, Row]

    def __str__(self) -> str:
        style = f"{'tied' if self.config.tied else 'untied'} head, {self.config.style}'s style"
        return f'under "{self.convention}", {style}, products in {self.dtype}'


def drawn_jobs(random: Random, conventions: Iterable[str], make: Callable) -> list[Job]:
    """One for each convention. make: GPTConfig."""
    found = []
    for convention in conventions:
        groups, style, dtype = random.randint(1, 3), random.choice(("llama", "gpt2")), random.choice([*SHEET])
        heads = groups * random.randint(1, 3)
        sizes = random.randint(2, 4), 4 * heads, heads, random.randint(20, 60), random.randint(20, 60), random.randint(8, 20)
        kv = {"kv_heads": groups} if style == "llama" else {}
        config = make(*sizes, **kv, style=style, tied=random.random() < 0.5)
        sheet = {name: Row(random.randint(9, 999) * 1e9, random.random() < 0.5) for name in SHEET}
        counts = tuple(random.randint(2, 20) for _ in range(4))
        found.append(Job(config, counts, dtype, convention, random.uniform(1e-4, 1e-3), sheet))
    return found


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


class Chain(NamedTuple):
    """What lost_time is given."""

    note: str
    operators: list[Operator]
    needed: list[str]
    peak: float
    bandwidth: float

    def __str__(self) -> str:
        return self.note


CHAINS = tuple(Chain(note, operators(*its[:2]), its[2].split(), *its[3:]) for note, its in KERNELS.items())


def drawn_chains(random: Random) -> list[Chain]:
    """Tensors have any sizes; an operator reads what comes from outside, or what others have made not long ago."""
    found = []
    for number in range(3):
        size = {f"in{i}": 4 * random.randint(9, 999) for i in range(4)}
        made, operators, chip = [], [], (random.uniform(1e7, 9e7), random.uniform(1e6, 9e6))
        for i in range(random.randint(9, 16)):
            reads = random.sample([*size], random.randint(1, 2)) + random.sample(
                made[-3:], min(len(made), random.randint(1, 2))
            )
            moved = sum(size[name] for name in {*reads})
            flops = round(moved * chip[0] / chip[1] * random.uniform(0.2, 3)) if random.random() < 0.3 else 0
            writes = {f"{letter}{i}": 4 * random.randint(9, 999) for letter in random.choice(("t", "t", "tu"))}
            made, size = [*made, *writes], size | writes
            operators.append(Operator("mm" if flops else "op", flops, {name: size[name] for name in reads}, writes))
        needed = [made[-1], *random.sample(made[:-1], 2)]
        found.append(Chain(f"for {len(operators)} operators, drawn, number {number + 1}", operators, needed, *chip))
    return found


# A device whose work is asynchronous

_UNIT = 2.0**-10  # seconds; sums of such times are exact
_MOST = 4000
_ENDLESS = "far more than a right answer needs: does the loop end?"
_PLACES = (0, 3, 1, 2)  # of the ranks: neither the first nor the last one of four is the fastest or the slowest


class Timing(NamedTuple):
    """What time_it is given. number: of a case that is drawn."""

    warmup: int
    repeats: int
    inner: int
    number: int = 0

    def __str__(self) -> str:
        return f"warmup={self.warmup}, repeats={self.repeats}, inner={self.inner}"


def drawn_timings(random: Random) -> list[Timing]:
    """With an odd and an even number of measurements."""
    return [Timing(random.randint(2, 5), repeats, random.randint(3, 6), 1 + random.randrange(2**20)) for repeats in (7, 8)]


class Device(NamedTuple):
    """Functions. launch: queues a kernel, and returns before it runs; synchronise: returns when nothing is queued any more;
    clock: the host's time; log: what was called, "launch" or "synchronise", up to each reading of the clock, "idle" or "busy".
    """

    launch: Callable[[], None]
    synchronise: Callable[[], None]
    clock: Callable[[], float]
    log: Callable[[], list[tuple[str, ...]]]


class Work(NamedTuple):
    """Of a rank's device. unit: seconds; now: its clock; busy: units of older work; warm: a first launch's, beside a kernel's.

    its: of each measurement, 16ths of a unit that a kernel takes beside 6; hiccup: in which one something takes longer.
    """

    timing: Timing
    unit: float
    now: float
    busy: int
    warm: int
    its: list[int]
    hiccup: int


def work(timing: Timing, rank: int, n: int, seed: int) -> Work:
    """Returns a rank's: other ranks have other times, and their device's work takes as many units."""
    draw, place = drawn(seed, timing, rank), _PLACES[rank]
    its = [draw.randrange(61) if seed else (22 * i + 50 * place + 40 * i * place) % 61 for i in range(timing.repeats)]
    more, unit = drawn(seed, timing).randrange(1000) * bool(seed), _UNIT * (1 + seed_of(seed) % 64 / 64 * bool(seed))
    hiccup = (3 * rank + 1 + more) % timing.repeats
    return Work(timing, unit, 3.0 + rank + more % 99, 700 + more, 40 + rank, its, hiccup)


def device(work: Work) -> Device:
    """A rank's, busy with older work. Its functions show nothing of what they work with.

    It gets a new kernel in two units, answers in one, and has a hiccup in a measurement of its own.
    """
    (warmup, repeats, inner, _), unit, now, busy, warm, its, hiccup = work
    launched, calls, free = 0, 0, now + busy * unit
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
            return warm
        measurement, turn = divmod(i - warmup, inner)
        slow = (140 + warm) * (measurement == hiccup and turn == inner // 2)
        return 6 + its[min(measurement, repeats - 1)] / 16 + slow

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


def _drawn_step(seed: int, rank: int) -> tuple:
    """Operators in operators, and calls that are waited for later, in any order. The ranks differ in their times only."""
    same, own = Random(seed), Random(f"{seed} {rank}")

    def operator(depth: int, *inside) -> Op:
        inside += tuple(operator(depth - 1) for _ in range(same.randint(0, depth)))
        kind, after = same.choice(("matmul", "other", CALLS)), own.randint(1, 9)
        return Op(f"{kind} {same.randint(0, 9)}", kind, own.randint(1, 60), inside, after)

    program, open_calls = [own.randint(1, 20)], []
    for call in range(calls := same.randint(3, 6)):
        program += [operator(2), Start(call)]
        open_calls.append(call)
        while open_calls and (call == calls - 1 or same.random() < 0.5):
            wait = Wait(open_calls.pop(same.randrange(len(open_calls))), same.randint(20, 90))
            program += [operator(1), same.choice((wait, operator(1, wait))), own.randint(1, 20)]
    return tuple(program)


_DRAWN = "with calls and operators that were drawn, "
STEPS = tuple(f"{_DRAWN}{number}" for number in (3, 5, 8))


def drawn_traces(random: Random) -> list[str]:
    """Names of steps, which `traces` knows, too."""
    return [f"{_DRAWN}{random.randrange(2**20)}" for _ in range(2)]


def traces(step: str, n: int, slower: float) -> list[Trace]:
    """Of n ranks in a step of this name. slower: by which factor."""
    ranks = [_Rank(8 + 3 * rank) for rank in range(n)]
    running = [_goes(rank, _drawn_step(int(step.removeprefix(_DRAWN)), i), ranks) for i, rank in enumerate(ranks)]
    while running:
        running = [one for one in running if next(one, "over") != "over"]
    return [_trace(rank, 8 + 3 * i, 11 + 14 * (3 * i % (n + 1)), slower * _UNIT) for i, rank in enumerate(ranks)]


def _trace(rank: _Rank, begin: int, zero: int, unit: float) -> Trace:
    """In seconds of the rank's clock. begin: of the step, in units; zero: what the clock showed then, in units."""
    ordered = sorted(rank.spans, key=lambda span: (span.started, -span.finished))
    spans = [one._replace(started=(zero + one.started) * unit, finished=(zero + one.finished) * unit) for one in ordered]
    arrived = [(zero + rank.arrived[call]) * unit for call in sorted(rank.arrived)]
    return Trace(spans, arrived, ((zero + begin) * unit, (zero + rank.now) * unit), zero * unit)
