"""Sick clusters of exercise 10_nd_parallel: steps of training on real ranks, with the times of a virtual clock.

A step is small, and by hand, with every axis of a mesh. x are a rank's tokens, G a vector that all tp ranks have whole, A and
B matrices that are cut over tp. Each layer: h = x·G + the mean of all tokens of the cp ranks; y = x + (h A) B, summed over tp.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks import theory, timeline
from manyranks.given import numbers
from manyranks.measure.fingerprints import Fact, size
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.mesh import AXES, Mesh
from manyranks.parallel.tensor.layers import copy_in, reduce_out
from manyranks.theory.hardware import Link
from manyranks.theory.plan import Plan
from manyranks.world.counted.measurement import Measurement, payload
from manyranks.world.counted.programs import key_of
from manyranks.world.world import World

Sizes = dict[str, int]  # axis -> degree, the outermost first
COMPUTES, SENDS, _DATA = "computes", "sends", "data"  # data: dp × cp, over which gradients are averaged
_RANKS, _HIDDEN, _RATE = 8, 16, 0.1
_SECONDS_A_FLOP = 5e-8  # round numbers: a layer of the small step takes as long as its messages
_NEAR, _FAR = Link("inside a node", 5e-6, 20e6), Link("between nodes", 500e-6, 4e6)


class Weight(NamedTuple):
    """A parameter of this rank, with its gradient in .grad.

    kind: "cut": each tp rank has another part of it, and the whole gradient of this part; "whole": all tp ranks have
    all of it, and the same gradient; "partial": all have all of it, but each has the gradient of a part of the tokens.
    """

    parameter: nn.Parameter
    kind: str


class Call(NamedTuple):
    """A call of one rank. number: the same on all ranks that take part; axis: what it was made for.

    ranks: those that really take part; of a "send" or a "recv" the source, then the destination. sent: bytes that this rank
    sends in it: to the next of `ranks`, and from the last one to the first; a recv sends none.
    """

    number: int
    op: str
    axis: str
    ranks: tuple[int, ...]
    sent: int


class Span(NamedTuple):
    """A stretch of a rank's time, in seconds; the ranks' clocks agree.

    kind: "compute", or "call": from when this rank came to it until it was over; call: the number of that call
    """

    kind: str
    started: float
    finished: float
    call: int | None = None


class Run(NamedTuple):
    """A step of a cluster. sizes: axis -> degree, outermost first; node: GPUs of one node, ranks 0 to node − 1 on the first.

    calls, spans, weights: by rank; weights: name -> tensor after the step. pp ranks are stages: they have other weights, and
    may have other work.
    """

    sizes: Sizes
    node: int
    calls: list[list[Call]]
    spans: list[list[Span]]
    weights: list[dict[str, Tensor]]


class Work(NamedTuple):
    """A rank's part. width: of a layer, over all tp ranks; layers: of a stage; more: added to each; frozen: how names begin."""

    tokens: int = 8
    width: int = 32
    layers: int = 2
    more: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()


class Forgotten(NamedTuple):
    """The groups that average gradients leave out an axis, dp or cp: in one stage, or everywhere."""

    axis: str
    stage: int | None = None


class Slow(NamedTuple):
    """A rank that computes so many times slower, or has a link to other nodes that is so many times narrower."""

    rank: int
    cause: str
    times: float


class Sick(NamedTuple):
    """A cluster of up to 8 ranks. node: GPUs in one; forgotten, slow: what ails it."""

    sizes: Sizes
    node: int
    work: Work = Work()
    forgotten: Forgotten | None = None
    slow: Slow | None = None


# A: axes that lie across nodes; B: an axis that is forgotten when gradients are averaged; C: a slow rank.
KINDS: dict[str, list[Sick]] = {
    "A": [
        Sick({"tp": 2, "pp": 2, "dp": 2}, 4, Work(tokens=64)),
        Sick({"pp": 2, "dp": 2, "tp": 2}, 2, Work(tokens=4, width=64)),
        Sick({"tp": 2, "dp": 2, "pp": 2}, 2, Work(tokens=24)),
        Sick({"pp": 2, "dp": 4}, 2, Work(tokens=100, layers=1, more=(0, 1))),
        Sick({"dp": 2, "pp": 2, "tp": 2}, 4, Work(tokens=24)),
        Sick({"dp": 4, "pp": 2}, 4, Work(tokens=60, layers=1, more=(0, 1))),
        Sick({"tp": 2, "dp": 4}, 2, Work(tokens=24)),
        Sick({"dp": 2, "pp": 3}, 3, Work(tokens=64, width=16, layers=1, more=(0, 5, 0))),
        Sick({"tp": 2, "dp": 3}, 2, Work(tokens=11)),  # dp sends most, and tp gains by the best order
    ],
    "B": [
        Sick({"dp": 2, "cp": 2, "tp": 2}, 4, forgotten=Forgotten("cp")),
        Sick({"cp": 2, "tp": 2, "dp": 2}, 4, forgotten=Forgotten("dp")),
        Sick({"pp": 2, "dp": 2, "cp": 2}, 4, forgotten=Forgotten("cp", stage=1)),
        Sick({"cp": 2, "dp": 4}, 4, forgotten=Forgotten("cp")),
        Sick({"pp": 2, "dp": 2, "cp": 2}, 4, Work(frozen=("layer0",)), Forgotten("cp", stage=0)),
        Sick({"cp": 2, "pp": 2, "dp": 2}, 4, Work(frozen=("layer1",)), Forgotten("dp", stage=0)),
        Sick({"cp": 2, "pp": 2, "dp": 2}, 4, forgotten=Forgotten("dp", stage=1)),
    ],
    "C": [
        Sick({"pp": 2, "dp": 2, "tp": 2}, 2, slow=Slow(5, COMPUTES, 1.5)),
        Sick({"dp": 2, "pp": 2, "tp": 2}, 2, slow=Slow(3, SENDS, 4.0)),
        Sick({"dp": 2, "tp": 2, "pp": 2}, 4, Work(more=(0, 1)), slow=Slow(2, COMPUTES, 1.4)),
        Sick({"pp": 2, "tp": 2, "dp": 2}, 2, slow=Slow(6, SENDS, 3.0)),
        Sick({"pp": 3, "dp": 2}, 2, slow=Slow(0, SENDS, 3.0)),
        # the slow rank has many small calls, which latency rules, and a rank that sends to it has few
        Sick({"pp": 2, "cp": 2, "tp": 2}, 2, Work(tokens=64, layers=1, more=(0, 9)), slow=Slow(6, SENDS, 10.0)),
    ],
}


def sick(letter: str) -> Run:
    """The first cluster of each kind, which learners see; "A", "B" or "C".

    Raises ValueError for another letter, and on a rank.
    """
    if "MANYRANKS_RANK" in os.environ:
        raise ValueError("sick() doesn't work where answers are checked: call it in a cell without an answer")
    if letter in KINDS:
        return recorded(0, letter)[0]
    raise ValueError(f"sick({letter!r}): choose one of {', '.join(map(repr, KINDS))}")


@cache
def recorded(seed: int, kind: str) -> tuple[Run, ...]:
    """Records one step of each cluster of a kind: all on the same ranks, one after the other.

    seed: 0 for the clusters that everybody has; with another, also some that are sick like them in another place.
    """
    every = [*KINDS[kind], *(_like(one, seed, kind, i) for i, one in enumerate(KINDS[kind]) if seed)]
    if seed and kind == "A":  # a ring over 4 nodes has few ways back, pipelines as many as there: dp sends most, then pp
        every += [Sick({"dp": 4, "pp": 2}, 1, Work(numbers.drawn(seed).randint(*few), 16)) for few in ((55, 90), (108, 138))]
    with World(_RANKS, backend="gloo", timeout=60) as world:
        return tuple(_run(one, world.measure(_step, one, flops=True)) for one in every)


def _like(one: Sick, *words) -> Sick:
    """A cluster with what ails this one, elsewhere."""
    random, ranks = numbers.drawn(*words), math.prod(one.sizes.values())
    if one.slow:  # of six ranks, some have too few messages to tell
        cause, times = random.choice(((COMPUTES, 1.5), (SENDS, 3.0))) if ranks != 6 and one.work == Work() else one.slow[1:]
        rank = one.slow.rank if ranks == 6 else random.randrange(ranks)
        return one._replace(slow=Slow(rank, cause, times * random.uniform(1, 1.5)))
    one = one._replace(sizes=dict(random.sample([*one.sizes.items()], len(one.sizes))))
    if one.forgotten:
        axis, stage = random.choice(("dp", "cp")), random.choice((0, 1)) if "pp" in one.sizes else None
        return one._replace(forgotten=Forgotten(axis, stage))
    return one._replace(work=one.work._replace(tokens=random.randint(4, 100), width=random.choice((16, 32, 64))))


def mesh_of(sizes: Sizes) -> Mesh:
    """Makes the mesh with its axes in this order."""
    return Mesh(**sizes, order=(*sizes, *(axis for axis in AXES if axis not in sizes)))


# A step


def _step(sick: Sick) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Runs a step on each rank: one micro-batch, forward and backward; then gradients are averaged, and the weights change.

    Returns the axis of each of its groups, by the group's name; the weights after the step.
    """
    groups, mesh = _made(sick), mesh_of(sick.sizes)
    if dist.get_rank() >= mesh.ranks:  # the mesh has no place for it
        return {}, {}
    at = mesh.coordinates(dist.get_rank())
    tokens, stage = sick.work.tokens, at["pp"]
    weights = {name: one.requires_grad_(not name.startswith(sick.work.frozen)) for name, one in _weights(sick, mesh, at)}
    above, below = (mesh.rank(**at | {"pp": one % mesh.pp}) for one in (stage - 1, stage + 1))
    x = numbers.normal((tokens, _HIDDEN), at["dp"], at["cp"])
    if stage:
        dist.recv(x, above)
        x.requires_grad_()
    y = _forward(x, weights, groups.get("tp"), groups.get("cp"), mesh.cp)
    grad = y.detach() / tokens
    if stage < mesh.pp - 1:
        dist.send(y.detach(), below)
        dist.recv(grad, below)
    y.backward(grad)
    if stage:
        dist.send(x.grad, above)
    learn = [one for one in weights.values() if one.requires_grad]
    flat = torch.nn.utils.parameters_to_vector([one.grad for one in learn])
    dist.all_reduce(flat, group=groups[_DATA])
    flat *= _RATE / dist.get_world_size(groups[_DATA])
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(learn) - flat, learn)
    names = {group.group_name: axis for axis, group in groups.items()}
    return names, {name: one.detach().clone() for name, one in weights.items()}


def _made(sick: Sick) -> dict[str, dist.ProcessGroup]:
    """Axis -> this rank's group; all ranks make all groups."""
    mesh = mesh_of(sick.sizes)
    wanted = {axis: mesh.groups(axis) for axis in ("tp", "cp") if axis in sick.sizes} | {_DATA: _averaging(sick, mesh)}
    made = [(axis, ranks, dist.new_group(list(ranks))) for axis, every in wanted.items() for ranks in every]
    return {axis: group for axis, ranks, group in made if dist.get_rank() in ranks}


def _averaging(sick: Sick, mesh: Mesh) -> list[tuple[int, ...]]:
    """The groups over which gradients are averaged: without the forgotten axis where it is forgotten."""
    axis, stage = sick.forgotten or ("", mesh.pp)
    well, wrong = mesh.groups(_DATA), mesh.groups("cp" if axis == "dp" else "dp")
    sick_ranks = {rank for rank in range(mesh.ranks) if stage in (None, mesh.coordinates(rank)["pp"])}
    return [ranks for ranks in well if ranks[0] not in sick_ranks] + [ranks for ranks in wrong if ranks[0] in sick_ranks]


def _weights(sick: Sick, mesh: Mesh, at: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    work, t, own = sick.work, mesh.tp, at["tp"]
    for layer in range(work.layers + (work.more[at["pp"]] if work.more else 0)):
        where, width = (at["pp"], layer), work.width // t
        yield f"layer{layer}.G", 1 + 0.1 * numbers.normal((_HIDDEN,), *where)
        yield f"layer{layer}.A", 0.2 * numbers.normal((t, _HIDDEN, width), *where, "A")[own]
        yield f"layer{layer}.B", 0.2 * numbers.normal((t, width, _HIDDEN), *where, "B")[own]


def _forward(x: Tensor, weights: dict[str, Tensor], tp: Group, cp: Group, c: int) -> Tensor:
    """Runs the layers of this rank's stage. c: ranks of its cp group."""
    every = iter(weights.values())
    for g, a, b in zip(every, every, every, strict=True):
        scaled = x * g
        mean = scaled.mean(0) / c
        h = scaled + (reduce_out(copy_in(mean, cp), cp) if cp else mean)
        x = x + (reduce_out(copy_in(h, tp) @ a @ b, tp) if tp else h @ a @ b)
    return x


def _run(sick: Sick, measured: Measurement) -> Run:
    keys = (key_of(call, rank) for rank, issued in measured.calls.items() for call in issued)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    names, weights = zip(*measured.results[: mesh_of(sick.sizes).ranks], strict=True)
    calls = [[_call(call, rank, its, numbers, sick.sizes) for call in measured.calls[rank]] for rank, its in enumerate(names)]
    meeting = [[i._replace(rendezvous=True) if type(i) is timeline.Send else i for i in own] for own in measured.program.ranks]
    happened = timeline.replay(timeline.Program(meeting), _Costs(sick))
    return Run(dict(sick.sizes), sick.node, calls, [_spans(happened.of(r), own) for r, own in enumerate(calls)], list(weights))


def _call(call, rank: int, names: dict[str, str], numbers: dict[tuple, int], sizes: Sizes) -> Call:
    number, sent = numbers[key_of(call, rank)], payload(call, rank)
    if call.op in ("send", "recv"):
        return Call(number, call.op, "pp", (rank, call.peer) if call.op == "send" else (call.peer, rank), sent)
    axis = names[call.group]
    return Call(number, call.op, "dp" if axis == _DATA and "cp" not in sizes else axis, call.ranks, sent)


def _spans(happened: list[timeline.Span], calls: list[Call]) -> list[Span]:
    """Says what a rank did when. It comes to a call as soon as what it did before is over."""
    came, found, left = 0.0, [], iter(calls)
    for kind, finished in ((span.kind, span.finished) for span in happened):
        found.append(Span("compute", came, finished) if kind == "compute" else Span("call", came, finished, next(left).number))
        came = finished
    return found


class _Costs(NamedTuple):
    """The seconds that a cluster's ranks compute, and that their calls take once all have come."""

    sick: Sick

    def compute(self, rank: int, work: timeline.Work) -> float:
        return work.flops * _SECONDS_A_FLOP * self._times(COMPUTES, [rank])

    def message(self, source: int, to: int, bytes: float) -> timeline.Transfer:
        return self._transfer(bytes, (source, to))

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> timeline.Transfer:
        """An all-reduce is all that a step has."""
        return self._transfer(2 * bytes * (len(ranks) - 1) / len(ranks), ranks)

    def _transfer(self, sent: float, ranks: tuple[int, ...]) -> timeline.Transfer:
        if len({rank // self.sick.node for rank in ranks}) == 1:
            return timeline.Transfer(_NEAR.seconds(sent))
        return timeline.Transfer(_FAR.seconds(sent * self._times(SENDS, ranks)))

    def _times(self, cause: str, ranks: Iterable[int]) -> float:
        slow = self.sick.slow
        return slow.times if slow and slow.cause == cause and slow.rank in ranks else 1.0


# Jobs whose axes have to be placed

FIT, COMPETE = "with axes that fit into a node", "with axes that compete for one"
_JOBS = {  # axis -> degree and GB, and the GPUs of a node
    FIT: (
        ({"tp": (8, 9), "pp": (2, 0.125), "dp": (4, 2)}, 8),
        ({"dp": (4, 1), "tp": (2, 2), "cp": (4, 6), "pp": (2, 0.25)}, 8),
        ({"dp": (2, 4), "tp": (8, 6), "cp": (4, 4)}, 8),
        ({"tp": (8, 7), "cp": (1, 0), "dp": (4, 2)}, 8),
    ),
    COMPETE: (
        ({"cp": (16, 10), "dp": (8, 8), "pp": (2, 0.5)}, 8),
        ({"cp": (16, 10), "dp": (8, 9), "pp": (2, 0.5)}, 8),
        ({"dp": (2, 4), "tp": (8, 6), "cp": (4, 5)}, 4),
        ({"dp": (2, 3), "tp": (4, 4), "cp": (2, 3)}, 4),
        ({"cp": (2, 6), "dp": (3, 1), "tp": (8, 1)}, 8),
    ),
}


def jobs() -> Iterator[tuple]:  # what a report calls each, and the arguments of the call
    return (_job(note, *job) for note, jobs in _JOBS.items() for job in jobs)


def _job(note: str, axes: dict[str, tuple[int, float]], node: int) -> tuple[str, tuple]:
    traffic = {axis: round(gb * 1e9) for axis, (_, gb) in sorted(axes.items())}
    degrees = ", ".join(f"{axis} {degree} ({size(traffic[axis])})" for axis, (degree, _) in axes.items())
    sizes = {axis: degree for axis, (degree, _) in axes.items()}
    return f"{note}, {degrees}, nodes of {node}", (traffic, sizes, node)


# What a judge asks in addition to what everybody sees


def drawn_meshes(random: Random) -> list[Sizes]:
    """Draws three meshes, of too many kinds for a table of all of them."""
    return [{axis: random.randint(1, 20) for axis in random.sample(["pp", "dp", "cp", "tp"], 3)} for _ in range(3)]


def drawn_jobs(random: Random) -> Iterator[tuple[str, tuple]]:
    """Draws a job whose axes compete for a node, and one with some axes that fit into it, not those that send most."""
    degrees = random.sample((2, 3, 4, 6, 8), 3)  # at most 192 ranks
    axes = {axis: (degree, random.uniform(1, 9)) for axis, degree in zip(("cp", "dp", "tp"), degrees, strict=True)}
    yield _job(COMPETE, axes, random.choice((4, 6, 8)))
    large, small, middle = random.sample(["cp", "dp", "tp"], 3)
    yield _job(FIT, {large: (8, 5 + random.random() / 2), small: (2, 4 + random.random()), middle: (4, 4 + random.random())}, 8)


# Questions about a mesh: what a report calls each of them -> the arguments of the call


def ranks_asked(sizes: Sizes) -> Iterator[tuple]:
    n = math.prod(sizes.values())
    for rank in range(n) if n < 100 else (*(some for some in (0, 1, 9, 1234, 7777) if some < n - 2), n - 2, n - 1):
        yield f"the place of rank {rank}", (rank, sizes)


def places_asked(sizes: Sizes) -> Iterator[tuple]:
    """Asks for places whose axes come in another order each time; some leave one out."""
    for i in range(12):
        at = [(axis, (37 * i + 11 * j) % degree) for j, (axis, degree) in enumerate(sizes.items())]
        turned = (at[i % len(at) :] + at[: i % len(at)])[:: 1 if i % 2 else -1]
        at = dict(turned[1:] if i % 3 == 0 else turned)
        yield f"the rank at {at}", (at, sizes)


def axes_asked(sizes: Sizes) -> Iterator[tuple]:
    """Asks for each axis, each pair of them, in both orders, and all of them; of many ranks one, and one pair."""
    pairs = [pair if i % 2 else pair[::-1] for i, pair in enumerate(combinations(sizes, 2))]
    every = [*((axis,) for axis in sizes), *pairs, tuple(sizes)[1:], tuple(sizes)]
    for axes in every if math.prod(sizes.values()) < 100 else [one for one in (("tp",), ("cp", "dp")) if {*one} <= {*sizes}]:
        yield f"groups(sizes, {axes})", (sizes, axes)


def between_nodes(order: Sequence[str], traffic: dict[str, float], sizes: Sizes, node: int) -> float:
    """Bytes that a rank sends from node to node in the learner's order, in the mean over ranks."""
    if isinstance(order, str) or sorted(order) != sorted(sizes):
        raise ValueError("not an order")
    degrees = [sizes[axis] for axis in order]
    home = torch.arange(math.prod(degrees)).view(degrees) // node
    return sum(traffic[axis] * (home != home.roll(-1, i)).double().mean().item() for i, axis in enumerate(order))


def sent_between(order: Sequence[str], run: Run) -> float:
    """Counts the bytes that ranks of a recorded step would send from node to node in this order, in the mean."""
    traffic = dict.fromkeys(run.sizes, 0.0)
    for call in chain(*run.calls):
        traffic[call.axis] += call.sent / len(run.calls)
    return between_nodes(order, traffic, run.sizes, run.node)


# A plan, judged by the time of its step, as theory.step.estimate has it

_JOB = {"seq": 8192, "batch": 128, "precision": "bf16"}
BASELINE = Plan(dp=16, pp=8, tp=8, **_JOB)
_MOST = {  # part of a step -> what to say where it takes most apart from computing
    "bubble": "the bubble takes {:.0%} of the step: the pipeline has {m} micro-batches for {pp} stages. Fewer stages, or more "
    "of them on a rank (virtual=…)",
    "tensor": "tensor parallelism's messages take {:.0%} of the step: a smaller tp, and something else in its place, cp or dp",
    "data": "gradients and parameters take {:.0%} of the step: with {tokens:,} tokens a GPU there is little compute to hide "
    "them behind. A lower ZeRO stage, fewer dp ranks, or more tp and cp, which cut the model and the tokens of a rank",
    "context": "context parallelism's messages take {:.0%} of the step: cp · tp inside a node, or a smaller cp",
}


@cache
def time_of(plan: Plan) -> theory.step.StepTime:
    return theory.step.estimate(theory.models["llama3-70b"], plan, theory.clusters["h100-dgx"].of(1024))


def plan_judged(case: str, given: str, results: Mapping[str, Fact]) -> dict:
    """Returns what is judged of the plan that has come from a rank; nothing else that has come counts."""
    plan = Plan(**results["plan"])
    problem = _problem(plan)
    return {"problem": problem} if any(problem) else {"problem": problem, "seconds": time_of(plan).seconds, "why": _why(plan)}


def _problem(plan: Plan) -> tuple[str, str]:
    """Says why a plan cannot be or does not fit, and gives a hint; empty where it can."""
    if any(getattr(plan, name) != value for name, value in _JOB.items()):
        its = ", ".join(f"{name}={getattr(plan, name)!r}" for name in _JOB)
        return f"the plan has {its}", "the job is given: " + ", ".join(f"{name}={value!r}" for name, value in _JOB.items())
    shape, cluster = time_of(BASELINE).shape, time_of(BASELINE).cluster
    try:
        plan.check(shape, cluster.gpus)
        time_of(plan)
    except ValueError as error:
        return "the plan cannot be", str(error)
    states, room = theory.memory.model_states(shape, plan), cluster.accelerator.memory
    if (peak := theory.memory.peak(shape, plan).total) > room:
        hint = (
            f"{size(states.total)} are parameters, gradients and the optimizer's states: zero=2, zero=3, more tp or pp make "
            f"them less; {size(peak - states.total)} are activations: recompute more, or fewer tokens a rank, by more tp or cp"
        )
        return f"a GPU needs {size(peak)} and has {size(room)}", hint
    if (host := theory.memory.host(shape, plan)) > cluster.host_memory:
        return f"a GPU keeps {size(host)} on its host", "offload less: nothing has to leave the GPU here"
    return "", ""


def _why(plan: Plan) -> str:
    """Says what to change first."""
    time, baseline = time_of(plan), time_of(BASELINE)
    parts = sorted(time.parts.items(), key=lambda one: -one[1])
    most = next(name for name, _ in parts if name in _MOST)
    shares = {"m": plan.microbatches, "pp": plan.pp, "tokens": plan.tokens // plan.gpus}
    cause = _MOST[most].format(time.parts[most] / time.seconds, **shares)
    if plan.tp > time.cluster.node:
        cause = f"tp={plan.tp} is larger than a node of 8: its all-reduces leave NVLink. Keep tp inside the node"
    elif plan.recompute == "full":
        cause = 'recompute="full" runs each layer\'s forward again, a third of the compute: it is needed only where memory is'
    slow = "slower than the baseline" if time.seconds > 1.05 * baseline.seconds else "the baseline itself, or just as slow"
    slow = f"that is {slow}: look at where its time goes, theory.step.estimate(…).parts; "
    said = ", ".join(f"{name} {part:.3f} s" for name, part in parts if part >= 0.0005)
    return f"{slow if time.seconds >= 0.99 * baseline.seconds else ''}of the step, {said}; {cause}"
