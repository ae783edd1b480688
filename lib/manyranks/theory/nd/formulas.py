"""The fewest tokens per GPU that let an axis compute for longer than it sends, in closed form.

All counts are of one step, forward and backward, of a whole model, in 16 bits, for the N sequences of T tokens that a group of
N ranks gets. F: FLOPs of a token, six for each parameter that multiplies it; R: FLOP/s; β: bytes/s of one rank.

    dp      4Φ(N−1)/N bytes                T > (4Φ/F)·R/β·(N−1)/N, which is two thirds of R/β where F is 6Φ
    fsdp    6Φ(N−1)/N bytes                T > (6Φ/F)·R/β·(N−1)/N
    tp      2(t−1)h(10L + 5)·T bytes       whatever T is: t < 1 + F·β/(R·2h(10L + 5))
    cp      16(c−1)gDL·T bytes             under attention alone, 7·c·aDL·T² FLOPs: T > (16/7)·(g/a)·R/β·(c−1)/c
    ep      8hL·T·copies bytes             whatever T is
    pp      4ph·T bytes, and some to fill  whatever T is
    bubble  p − 1 micro-batches            T > MICROBATCH·(p−1)/p

Source of the idea: jax-ml/scaling-book, training.md and gpus.md, "Rooflines for LLM Scaling on GPUs", which has T > R/β for
data parallelism and t < f·β/R for tensor parallelism, for one pass through an MLP of two matrices.
"""

import math
from typing import NamedTuple

from manyranks.theory import calls, checks, expert, flops, network, stages
from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.calls import HALF, SUMS
from manyranks.theory.cluster import Cluster, Route
from manyranks.theory.hardware import Link
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.names import one_of
from manyranks.theory.plan import Plan

# "dp": ZeRO-1; "fsdp": ZeRO-3; "cp": a ring; "pp": a pipeline's messages; "bubble": what it waits, which is no message.
AXES = ("dp", "fsdp", "tp", "cp", "ep", "pp", "bubble")
MICROBATCH = 2048  # tokens of a pipeline's micro-batch


class Formula(NamedTuple):
    """Two times, in seconds of a step: compute(T) = slope·T + bend·T², communication(T) = fixed + each·T."""

    slope: float
    bend: float
    fixed: float
    each: float

    def ratio(self, tokens: float) -> float:
        """Seconds of communication ÷ seconds of computing."""
        return (self.fixed + self.each * tokens) / (self.slope * tokens + self.bend * tokens**2)

    @property
    def crossing(self) -> float:
        """The fewest tokens per GPU that make computing take longer: 0 if it always does, infinite if never."""
        gain = self.slope - self.each
        if self.bend:
            return max(0.0, (math.sqrt(gain**2 + 4 * self.bend * self.fixed) - gain) / (2 * self.bend))
        if gain <= 0:
            return math.inf
        return self.fixed / gain


def formula(axis: str, shape: ModelShape, cluster: Cluster, degree: int, constants: Constants = DEFAULT) -> Formula:
    """The closed form of an axis. R: the rate of matrix products; β: of a ring's narrowest link, or of a pair.

    Left out are kernels that only move memory, and all that a kernel moves. Raises ValueError for another axis or degree.
    """
    checks.kinds(shape=shape, cluster=cluster)
    check(axis, degree)
    if axis == "ep" and not shape.experts:
        raise ValueError(f"axis='ep': {shape.name} has no experts; give a shape that has some")
    chip, route = cluster.accelerator, cluster.route(degree)
    rate = chip.flops * chip.matmul_fraction * constants.matmul * (1 - cluster.reserved)
    if axis in ("pp", "bubble"):
        return _pipeline(axis, shape, route, constants, rate)
    linear, attention = _flops(shape)
    if axis == "cp":  # one sequence of N·T tokens
        linear = 0.0
        attention *= degree
    if axis == "tp":
        linear += _copied(shape, degree)
    return Formula(linear / rate, attention / rate, *_sent(axis, shape, route, constants))


def check(axis: str, degree: int) -> None:
    """Raises ValueError for what is none of AXES, and for a degree below 2."""
    one_of(AXES, axis=axis)
    if type(degree) is not int or degree < 2:
        raise ValueError(f"degree={degree!r}: must be a whole number, 2 or more, for one rank sends nothing")


def _flops(shape: ModelShape) -> tuple[float, float]:
    """F without attention's scores, and of those for each token of a sequence, causal, by flash attention."""
    short, long = (flops.hardware_per_token(shape, seq, flash=True) for seq in (0, 1))
    return short, long - short


class Sent(NamedTuple):
    """Seconds of a step's communication: fixed, and for each of a rank's tokens."""

    fixed: float
    each: float = 0.0


def _sent(axis: str, shape: ModelShape, route: Route, constants: Constants) -> Sent:
    if axis in ("dp", "fsdp"):
        return _data(shape, route, 3 if axis == "fsdp" else 2, constants)
    return {"tp": _tensor, "cp": _context, "ep": _expert}[axis](shape, route, constants)


def _data(shape: ModelShape, route: Route, times: int, constants: Constants) -> Sent:
    """Φ elements, so often reduced or gathered, layer by layer: 2Φ(N−1)/N bytes each time."""
    size = HALF * shape.parameters / shape.layers
    return Sent(times * shape.layers * network.fastest(route, size, constants))


def _tensor(shape: ModelShape, route: Route, constants: Constants) -> Sent:
    """Times gathers and reductions of h numbers for t·T tokens: each time a rank sends 2(t−1)h bytes per token of T."""
    often, size = _gathers(shape), HALF * (route.ranks - 1) * shape.hidden
    return Sent(often * network.gather(route, 0.0, constants), often * size / _bandwidth(route.ring, constants))


def _copied(shape: ModelShape, t: int) -> float:
    """FLOPs of a token for keys and values that several ranks compute, where there are fewer heads of them than ranks."""
    heads = parameters_of([one for one in shape.attention if one.cut == "heads" and one.decays])
    return 6 * shape.layers * heads * max(0, t - shape.kv_heads) / shape.kv_heads


def _gathers(shape: ModelShape) -> int:
    """A layer's four forward and, with its inputs once more, six backward (half of it where attention and MLP run side by
    side), the embedding's two, and the head's three: calls.tensor."""
    counts = {"dense": shape.layers, "embedding": 1, "head": 1}
    return sum(times * call.times for part, times in counts.items() for call in calls.tensor(shape, Plan().layer_plan, part))


def _context(shape: ModelShape, route: Route, constants: Constants) -> Sent:
    """Times calls.attention of one token's keys and values; context.least_shard has the same for one hop."""
    c = shape.latent
    elements = c.kv_rank + c.rope_size if c else 2 * shape.kv_size
    sent = calls.attention("ring", route.ranks, 0, elements, 0, HALF, SUMS)
    empty = constants.overhead + route.pair.latency
    hops, size = len({(call.when, call.hop) for call in sent}), sum(call.bytes for call in sent)
    return Sent(shape.layers * hops * empty, shape.layers * size / _bandwidth(route.pair, constants))


def _expert(shape: ModelShape, route: Route, constants: Constants) -> Sent:
    """Four all-to-alls a layer with experts: tokens there and back, gradients back and there; expert.travel of one token."""
    often, copies = 4 * shape.moe_layers, expert.travel(shape, route.ranks, route.inside)
    sizes = ([each * size for each in copies] for size in (0.0, HALF * shape.hidden))
    empty, one = (network.near_and_far(route, *each, constants) for each in sizes)
    return Sent(often * empty, often * (one - empty))


def _pipeline(axis: str, shape: ModelShape, route: Route, constants: Constants, rate: float) -> Formula:
    """The rank that computes most sets the pace, over p·T tokens. It sends 2h·MICROBATCH bytes for each of m micro-batches and
    p − 1 times more while the pipeline fills and drains, both ways; its bubble is one micro-batch on all others."""
    p, shares = route.ranks, _stage_flops(shape, route.ranks)
    slope = max(shares) * p / rate
    if axis == "bubble":
        return Formula(slope, 0.0, (sum(shares) - max(shares)) * MICROBATCH / rate, 0.0)
    once = 2 * network.hop(route, HALF * MICROBATCH * shape.hidden, constants)
    return Formula(slope, 0.0, (p - 1) * once, p * once / MICROBATCH)


def _stage_flops(shape: ModelShape, p: int) -> list[float]:
    """FLOPs of a token on each stage, forward and backward; attention's scores as in sequences of MICROBATCH tokens."""
    head = 3 * flops.forward(shape, 0).head
    linear, attention = _flops(shape)
    layer = (linear + attention * MICROBATCH - head) / shape.layers
    return [stage.layers * layer + stage.head * head for stage in stages.deal_stages(shape, p)]


def _bandwidth(link: Link, constants: Constants) -> float:
    return network.reached(link, constants).bandwidth
