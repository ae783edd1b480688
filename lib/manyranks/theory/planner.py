"""Ways to split one training step over a cluster that fit in memory, fastest first, each with what it loses to the best."""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, overload

from manyranks import progress_bar
from manyranks.theory import bounds, checks, memory, pace, pipeline, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.compute import site
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import nearest
from manyranks.theory.plan import RECOMPUTE, LayerPlan, Plan, stages_passed, why_no_ulysses, why_uncut
from manyranks.theory.published.error_bars import barely_fits, confidence, of_plan, peak_confidence
from manyranks.theory.stacks import STACKS, Stack
from manyranks.theory.step import StepTime

# What is tried; a keyword of `search` fixes a field or gives other values.
# GPipe is 1F1B with more memory. Tried where the stack ships them; the last where there are experts: it pays twice for
# parameters to hide their traffic.
TRIED_SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe")
ZERO = (1, 2, 3)  # ZeRO-0 is ZeRO-1 with more memory
MICROBATCHES = (1, 2, 4, 8)
VIRTUAL = (1, 2, 3, 4, 6, 8)
SMALLEST_SHARD = 1024  # tokens of a sequence that a context-parallel rank keeps at least, where it has so many

_SAME = 1e-3  # a share of a step that is no difference

_DEGREES = ("dp", "pp", "cp", "tp", "ep", "etp", "dp_shard")
# Fields that the search chooses itself; all others are given to each plan as they are.
_CHOSEN = ("dp", "pp", "cp", "tp", "ep", "etp", "microbatch", "schedule", "virtual", "recompute", "zero")


Degrees = tuple[int, int, int, int, int, int | None]  # dp, pp, cp, tp, ep, etp


@dataclass(frozen=True, slots=True, repr=False)
class Found:
    """A plan that fits, its time and its peak in bytes."""

    plan: Plan
    time: StepTime
    peak: memory.Peak
    best: StepTime

    def __repr__(self) -> str:
        time = self.time.said(str(confidence(self.time)))
        peak = self.peak.said(str(peak_confidence(self.time.shape, self.plan)))
        tight = f"tight={self.tight!r}, " if self.tight else ""
        return f"Found({time}, {self.plan!r}, {peak}, {tight}why={self.why!r})"

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def tight(self) -> str:
        """Says so where the plan fits by less than the error bar of its peak, so that it may not fit; else empty."""
        return barely_fits(self.time.shape, self.plan, self.time.cluster.accelerator.memory)

    @property
    def why(self) -> str:
        """The part where the plan loses most against the best, what in it does that, and whether the two are within their error
        bars; empty for the best."""
        if self.time is self.best:
            return ""
        return "; ".join(filter(None, (_why(self.time, self.best), undecided(self.time, self.best))))


class Ranking(Sequence[Found]):
    """Plans that fit, the fastest first. Each is looked for when it's asked for; the last one, or the length, asks for all."""

    def __init__(self, task: "_Task"):
        self._task, self._steps, self._found = task, _fastest_first(_branches(task)), []
        self._find(1)

    @overload
    def __getitem__(self, index: int) -> Found: ...

    @overload
    def __getitem__(self, index: slice) -> list[Found]: ...

    def __getitem__(self, index: int | slice) -> Found | list[Found]:
        first, last = (index.start or 0, index.stop) if isinstance(index, slice) else (index, index + 1)
        self._find(math.inf if last is None or min(first, last) < 0 else last)
        return self._found[index]

    def __len__(self) -> int:
        self._find(math.inf)
        return len(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None

    def __repr__(self) -> str:
        if not self:
            return f"Ranking(no plan for {self._task.gpus} GPUs divides the model and the batch and fits in memory)"
        return f"Ranking(best={self[0]!r}, {len(self.tied)} too close to call, checked={self.checked!r})"

    @functools.cached_property
    def tied(self) -> list[Found]:
        """The plans that are too close to call: from the best on, while they are no further from it than their error bars.

        Where neither of two has one, both have to be as fast.
        """
        return list(itertools.takewhile(lambda one: tie(one.time, self[0].time), self))

    @functools.cached_property
    def checked(self) -> Found | None:
        """The fastest plan like which runs were published, so that its time has an error bar; None where there's none."""
        if not self or not confidence(self[0].time).missing:
            return self[0] if self else None
        with progress_bar.bar("trying plans like which runs were published") as bar:
            for found in _fastest_first(_branches(self._task._replace(checked=True))):
                bar.step(0)
                if found:
                    return Found(found[0].plan, *found, self[0].time)
        return None

    def _find(self, count: float) -> None:
        if len(self._found) >= count:
            return
        with progress_bar.bar("trying plans") as bar:
            for found in self._steps:
                bar.step(0)
                if found:
                    best = self._found[0].time if self._found else found[0]
                    self._found.append(Found(found[0].plan, *found, best))
                    if len(self._found) >= count:
                        return


def search(
    shape: ModelShape,
    cluster: Cluster,
    gpus: int | None = None,
    seq: int = 8192,
    batch: int = 2048,
    **choices: object,
) -> Ranking:
    """Ranks plans for `batch` sequences of `seq` tokens on `gpus` accelerators, fastest first; empty where none fits.

    gpus: default the cluster's own
    choices: any field of Plan, as one value (tp=8) or as the values to try (zero=(1, 3)); values that do not go together, or
        not with the shape, are left out

    A plan fits if its predicted peak does; Found.tight says where that is within the error bar.
    Sets of plans that bounds show to be slower, or not to fit, are left unopened until somebody asks for what is in them.
    Routed experts are tried cut as attention is, and whole on tensor-parallel ranks (etp=1).
    Raises ValueError for an unknown field, a value that no plan can have, or where no number of GPUs is given or it is not the
    cluster's.
    """
    checks.kinds(shape=shape, cluster=cluster)
    known = [field.name for field in fields(Plan)]
    if unknown := sorted(choices.keys() - set(known)):
        raise ValueError(f"{unknown[0]}={choices[unknown[0]]!r}: {nearest(unknown[0], known)}")
    checks.whole(seq=seq, batch=batch)
    tried = {name: _values(name, value) for name, value in choices.items()}
    return Ranking(_Task(shape, cluster, _gpus(cluster, gpus), seq, batch, tried))


def tie(time: StepTime, best: StepTime) -> bool:
    """Returns whether two predicted steps are too close to call: within the larger of their error bars, or as fast where
    neither has one."""
    bar = max((bar.error for bar in map(confidence, (time, best)) if not bar.missing), default=_SAME)
    return time.seconds <= (1 + bar) * best.seconds


def undecided(time: StepTime, other: StepTime) -> str:
    """Says why nobody can call one of two predicted steps shorter: they are closer than their error bars, or no run like one
    of them was published. Empty where they are further apart.
    """
    for one in (time, other):
        if not isinstance(one, StepTime):
            raise ValueError(f"{one!r}: give two StepTimes, as step.estimate returns")
    bars = [confidence(one) for one in (time, other)]
    if missing := next((str(bar) for bar in bars if bar.missing), ""):
        return missing
    error = max(bar.error for bar in bars)
    longer, shorter = sorted((time.seconds, other.seconds), reverse=True)
    return f"closer than the error bar of ± {error:.0%}" if longer <= (1 + error) * shorter else ""


def _gpus(cluster: Cluster, gpus: int | None) -> int:
    if gpus is None and cluster.gpus is None:
        raise ValueError(f"{cluster.name} has no fixed size: give gpus=, how many accelerators there are")
    if gpus is not None and cluster.gpus not in (None, gpus):
        raise ValueError(f"gpus={gpus} on a cluster of {cluster.gpus}: leave gpus out, or take cluster.of({gpus})")
    return (cluster if gpus is None else cluster.of(gpus)).gpus


def _values(name: str, value: object) -> tuple:
    values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for one in values:  # alone, so that a value which is wrong in every plan is said to be so
        Plan(**({"dp": one, "seq": one} if name in _DEGREES and one is not None else {}) | {name: one})
    return values


class _Task(NamedTuple):
    """The task of a search.

    tried: values of fields that are given
    checked: only plans like which runs were published
    """

    shape: ModelShape
    cluster: Cluster
    gpus: int
    seq: int
    batch: int
    tried: dict[str, tuple]
    checked: bool = False

    @property
    def recompute(self) -> list[str]:
        """The ways that are tried, the least recomputation first."""
        return sorted(self.tried.get("recompute", RECOMPUTE), key=RECOMPUTE.index)

    @property
    def given(self) -> list[dict[str, object]]:
        """Combinations of the fields that the search does not choose itself."""
        given = {name: values for name, values in self.tried.items() if name not in _CHOSEN}
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


class _Order(NamedTuple):
    """The place of a plan in the order of the search: indices among the values that are tried.

    A set of plans stands before its first one: −1 where it has all values. So no two places are alike.
    """

    degrees: int
    microbatch: int
    schedule: int = -1
    recompute: int = 0
    zero: int = -1
    given: int = 0


# A set of plans: seconds that each takes at least, its order, and what opens it, into smaller sets; or one plan: its seconds,
# its order, and what is found.
_Node = tuple[float, _Order, Callable[[], Iterator] | tuple[StepTime, memory.Peak]]


def _fastest_first(nodes: Iterable[_Node]) -> Iterator[tuple[StepTime, memory.Peak] | None]:
    """Plans that fit by their seconds, and for equal seconds in the order of the search; None for each step on the way.

    The set with the lowest bound is opened next. So when a plan is the first, all that is in unopened sets is slower.
    """
    heap = list(nodes)
    heapq.heapify(heap)
    while heap:
        *_, first = heapq.heappop(heap)
        if callable(first):
            for node in first():
                heapq.heappush(heap, node)
        yield None if callable(first) else first


def _branches(task: _Task) -> Iterator[_Node]:
    """Sets of plans with the same degrees, micro-batch and given fields."""
    shape, cluster, gpus, seq, batch, tried, _ = task
    degrees = list(_degrees(shape, cluster, gpus, seq, tried))
    for g, more in enumerate(task.given):
        for i, each in enumerate(degrees):
            for j, microbatch in enumerate(tried.get("microbatch", MICROBATCHES)):
                if batch % (each[0] * microbatch) or not _together(shape, each, seq, each[1], more):
                    continue
                if not task.checked or _may_be_checked(task, each, microbatch, more):
                    order = _Order(i, j, given=g)
                    yield _branch(task, order, each, _layer_plan(task, each, microbatch, more), more, 0)


def _may_be_checked(task: _Task, degrees: Degrees, microbatch: int, more: dict[str, object]) -> bool:
    """Returns whether runs like one of these plans were published: with 1F1B, if with any schedule."""
    zeros, own = task.tried.get("zero", ZERO), (*degrees[:-1], task.seq, task.batch, microbatch)
    ways = itertools.product(zeros, task.recompute)
    plans = (Plan(*own, zero=zero, recompute=way, **more | {"etp": degrees[-1]}) for zero, way in ways)
    return any(not of_plan(task.shape, plan, task.cluster).missing for plan in plans)


def _branch(task: _Task, order: _Order, degrees: Degrees, layer_plan: LayerPlan, more: dict[str, object], n: int) -> _Node:
    """The unopened set of these plans that recompute in the n-th of the tried ways or a later one: more takes no less time."""
    pp, m, ways = degrees[1], task.batch // (degrees[0] * layer_plan.microbatch), task.recompute
    layer_plan = layer_plan._replace(recompute=ways[n])
    model = pace.of_model(site(task.shape, layer_plan, task.cluster, DEFAULT))
    pipes = _pipes(task, order, degrees, layer_plan, more, model)
    if m < 2 * pp:  # then all schedules have bubbles that count
        pipes = list(pipes)
        bound = min((node[0] for node in pipes), default=math.inf)
    else:
        known = _schedules(task.shape, pp, m, task.tried, layer_plan.framework)
        bound = bounds.passes(model, pp, m, any(pace.hides_experts(layer_plan, name, pp, m, v) for name, v in known))

    def opened() -> Iterator[_Node]:
        yield from pipes
        if bound < math.inf and n + 1 < len(ways):  # else no schedule goes with these degrees
            yield _branch(task, order, degrees, layer_plan, more, n + 1)

    return bound, order._replace(recompute=n), opened


def _pipes(
    task: _Task, order: _Order, degrees: Degrees, layer_plan: LayerPlan, more: dict[str, object], model: pace.ForwardBackward
) -> Iterator[_Node]:
    """Yields unopened sets of these plans, one for each schedule."""
    shape, _, _, seq, batch, tried, _ = task
    pp, m = degrees[1], batch // (degrees[0] * layer_plan.microbatch)
    order = order._replace(recompute=tried.get("recompute", RECOMPUTE).index(layer_plan.recompute))
    fields = {"recompute": layer_plan.recompute, "etp": degrees[-1]}
    for s, (schedule, virtual) in enumerate(_schedules(shape, pp, m, tried, layer_plan.framework)):
        if _together(shape, degrees, seq, stages_passed(schedule, pp, virtual), more):
            own = functools.partial(Plan, *degrees[:-1], seq, batch, layer_plan.microbatch, schedule, virtual, **more, **fields)
            bound = bounds.seconds(model, layer_plan, schedule, pp, m, virtual)
            here = order._replace(schedule=s)
            yield bound, here, functools.partial(_fitting, task, here, own)


def _fitting(task: _Task, order: _Order, plan_of: Callable[..., Plan]) -> Iterator[_Node]:
    """Yields the plans that fit in memory, of a set with the same pipeline."""
    shape, cluster, room, zeros = task.shape, task.cluster, task.cluster.accelerator.memory, task.tried.get("zero", ZERO)
    if bounds.bytes_held(shape, plan_of(zero=max(zeros))) > room:
        return
    for z, zero in enumerate(zeros):
        plan = plan_of(zero=zero)
        if bounds.bytes_held(shape, plan) > room or (task.checked and of_plan(shape, plan, cluster).missing):
            continue
        peak = memory.peak(shape, plan)
        if peak.total <= room and memory.host(shape, plan) <= cluster.host_memory:
            time = step.estimate(shape, plan, cluster)
            yield time.seconds, order._replace(zero=z), (time, peak)


def _layer_plan(task: _Task, degrees: Degrees, microbatch: int, more: dict[str, object]) -> LayerPlan:
    """Returns what of these plans decides a layer's time."""
    _, _, cp, tp, ep, etp = degrees
    own = {"cp": cp, "tp": tp, "ep": ep, "expert_tp": etp or tp, "seq": task.seq, "microbatch": microbatch}
    return LayerPlan(**{name: own[name] if name in own else more.get(name, getattr(Plan, name)) for name in LayerPlan._fields})


def _together(shape: ModelShape, degrees: Degrees, seq: int, on_stages: int, more: dict[str, object]) -> bool:
    """Returns whether degrees agree with the other fields that restrict them: HSDP's shards, Ulysses' heads, sequence
    parallelism's shards, places for stages."""
    _, _, cp, tp, _, etp = degrees
    if STACKS[more.get("stack", Plan.stack)].data_only and not on_stages == tp == cp == degrees[4] == 1:
        return False
    shards = not more.get("dp_shard") or _sharded(degrees, more["dp_shard"])
    heads = more.get("context") != "ulysses" or not why_no_ulysses(shape, tp, cp)
    tokens = seq % (cp * tp) == 0 if more.get("sequence_parallel", True) else tp == 1 or etp in (None, tp)
    return shards and heads and tokens and on_stages <= shape.layers + (2 if more.get("embedding_slots") else 0)


def _sharded(degrees: Degrees, dp_shard: int) -> bool:
    """Returns whether groups of so many data-parallel ranks hold whole groups of experts, or parts of one."""
    dp, _, cp, tp, ep, etp = degrees
    own, experts = tp * cp * dp_shard, (etp or tp) * ep
    return dp % dp_shard == 0 and (own % experts == 0 or experts % own == 0)


def _degrees(shape: ModelShape, cluster: Cluster, gpus: int, seq: int, tried: dict[str, tuple]) -> Iterator[Degrees]:
    """Degrees that make up the number of GPUs and divide heads, layers, sequence, experts and the experts' width."""
    tensor = tried.get("tp", [t for t in _divisors(shape.heads) if t <= 2 * cluster.node])
    context = tried.get("cp", [c for c in _divisors(seq) if c == 1 or seq // c >= SMALLEST_SHARD])
    experts = [e for e in tried.get("ep", _divisors(shape.experts or 1)) if (shape.experts or 1) % e == 0]
    for tp, cp, pp in itertools.product(tensor, context, tried.get("pp", range(1, _slots(shape, tried) + 1))):
        dp, left = divmod(gpus, tp * cp * pp)
        if left or not dp or dp not in tried.get("dp", (dp,)) or seq % cp:
            continue
        given = tried.get("etp", (None, 1) if tp > 1 else (None,))  # None is tp
        cuts = [etp for etp in given if (shape.experts or etp is None) and not why_uncut(shape, tp, etp)]
        yield from ((dp, pp, cp, tp, ep, etp) for etp in cuts for ep in experts if dp * cp * tp % ((etp or tp) * ep) == 0)


def _schedules(shape: ModelShape, pp: int, m: int, tried: dict[str, tuple], stack: Stack) -> Iterator[tuple[str, int]]:
    """Schedules that a stack ships, and stages a rank, that a pipeline of pp ranks can have with m micro-batches."""
    given, alone = tried.get("schedule", ("1f1b",)), 1 in tried.get("virtual", (1,))
    if pp == 1:
        if "1f1b" in given and alone:
            yield "1f1b", 1
        return
    slots = _slots(shape, tried)
    known = [name for name in TRIED_SCHEDULES if name in stack.schedules and (shape.experts or name != "dualpipe")]
    possible = [name for name in tried.get("schedule", known) if not (pp % 2 and name == "dualpipe")]
    for schedule in possible:
        if schedule in ("1f1b", "interleaved"):
            for virtual in tried.get("virtual", VIRTUAL):
                if pp * virtual <= slots:
                    yield schedule, virtual
        elif alone and m >= pipeline.fewest(schedule, pp) and stages_passed(schedule, pp, 1) <= slots:
            yield schedule, 1


def _slots(shape: ModelShape, tried: dict[str, tuple]) -> int:
    """Places for stages: the layers, and with embedding_slots the embedding and the head."""
    return shape.layers + (2 if any(tried.get("embedding_slots", ())) else 0)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _why(time: StepTime, best: StepTime) -> str:
    if time.seconds <= (1 + _SAME) * best.seconds:
        return "as fast as the best"
    lost = {name: seconds - best.parts[name] for name, seconds in time.parts.items()}
    part = max(lost, key=lost.get)
    return f"{part} +{lost[part]:.3g} s ({_cause(part, time.plan, best.plan, time.cluster)})"


def _cause(part: str, plan: Plan, best: Plan, cluster: Cluster) -> str:
    each, tokens = f"{plan.microbatches} micro-batches", plan.microbatch * plan.seq // plan.cp
    if plan.stack != best.stack:
        return f"stack {plan.stack}"
    if part == "compute":
        if RECOMPUTE.index(plan.recompute) > RECOMPUTE.index(best.recompute):
            return f"{plan.recompute} recomputation"
        if (plan.stages, plan.schedule) != (best.stages, best.schedule):
            return f"layers on {plan.stages} stages: the slowest sets the pace"
        return f"other sizes of products: TP {plan.tp}, CP {plan.cp}, micro-batch {plan.microbatch}"
    if part == "tensor" and (plan.tp, tokens) == (best.tp, best.microbatch * best.seq // best.cp):
        return f"TP {plan.tp}, recompute {plan.recompute}"
    if part == "tensor":
        cut = f"with ETP {plan.etp} " if plan.expert_tp != plan.tp else ""
        return f"TP {plan.tp} {cut}" + ("leaves the node" if plan.tp > cluster.node else f"on {tokens} tokens")
    if part == "context":
        return f"CP {plan.cp} moves keys and values" + (" between nodes" if plan.cp * plan.tp > cluster.node else "")
    if part == "expert":
        return f"EP {plan.ep} under {plan.schedule}" + (" leaves the node" if plan.ep * plan.expert_tp > cluster.node else "")
    if part == "data":
        return f"ZeRO-{plan.zero} over {plan.shards} ranks, {each}"
    if part == "optimizer":
        return f"ZeRO-{plan.zero} spreads the states over {plan.shards} ranks"
    stages = plan.stages // plan.pp
    return f"PP {plan.pp}, {stages} stage{'s' if stages > 1 else ''} per rank, {each}, {plan.schedule}"
