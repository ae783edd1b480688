"""All ways to split one training step over a cluster that fit in memory, fastest first, each with what it loses to the best."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from manyranks import busy
from manyranks.theory import checks, memory, pipeline, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import nearest
from manyranks.theory.plan import RECOMPUTE, Plan, uncut, unread
from manyranks.theory.published.error_bars import confidence
from manyranks.theory.stacks import STACKS
from manyranks.theory.step import StepTime

# What is tried; a keyword of `search` fixes a field or gives other values. ZeRO-0 is ZeRO-1 with more memory, GPipe is 1F1B
# with more.
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
HIDES_EXPERTS = "dualpipe"  # tried too where there are experts: it pays twice for parameters to hide their traffic
ZERO = (1, 2, 3)
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
        return f"Found({self.time.said(str(confidence(self.time)))}, {self.plan!r}, {self.peak!r}, why={self.why!r})"

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def why(self) -> str:
        """Where the plan loses most against the best, what in it does that, and whether the two are within their error bars;
        empty for the best."""
        if self.time is self.best:
            return ""
        return "; ".join(filter(None, (_why(self.time, self.best), undecided(self.time, self.best))))


def search(
    shape: ModelShape,
    cluster: Cluster,
    gpus: int | None = None,
    seq: int = 8192,
    batch: int = 2048,
    **choices: object,
) -> list[Found]:
    """Plans for `batch` sequences of `seq` tokens on `gpus` accelerators, fastest first; empty where none fits.

    gpus: default the cluster's own. choices: any field of Plan, as one value (tp=8) or as the values to try (zero=(1, 3));
    values that do not go together, or not with the shape, are left out. Routed experts are tried cut as attention is, and whole
    on tensor-parallel ranks (etp=1).
    Raises ValueError for an unknown field, a value that no plan can have, or where no number of GPUs is given or it is not the
    cluster's.
    """
    checks.kinds(shape=shape, cluster=cluster)
    known = [field.name for field in fields(Plan)]
    if unknown := sorted(choices.keys() - set(known)):
        raise ValueError(f"{unknown[0]}={choices[unknown[0]]!r}: {nearest(unknown[0], known)}")
    checks.whole(seq=seq, batch=batch)
    tried, found = {name: _values(name, value) for name, value in choices.items()}, []
    for plan in _plans(shape, cluster, _gpus(cluster, gpus), seq, batch, tried):
        peak = memory.peak(shape, plan)
        host = 0 if plan.offload == "none" else memory.model_states(shape, plan).host
        if peak.total <= cluster.accelerator.memory and host <= cluster.host_memory:
            time = step.estimate(shape, plan, cluster)
            found.append((time.seconds, time, peak))
    found.sort(key=lambda one: one[0])
    return [Found(time.plan, time, peak, found[0][1]) for _, time, peak in found]


def undecided(time: StepTime, other: StepTime) -> str:
    """What speaks against saying that one of two predicted steps is shorter: they are closer than their error bars, or no run
    like one of them was published. Empty where they are further apart.
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


def _plans(shape: ModelShape, cluster: Cluster, gpus: int, seq: int, batch: int, tried: dict[str, tuple]) -> Iterator[Plan]:
    """Every plan that Plan and the shape allow, as far as it is worth trying, whether or not it fits in memory."""
    given = {name: values for name, values in tried.items() if name not in _CHOSEN}
    kept = itertools.product(tried.get("recompute", RECOMPUTE), tried.get("zero", ZERO), *given.values())
    kept = [(recompute, zero, dict(zip(given, rest, strict=True))) for recompute, zero, *rest in kept]
    for degrees in busy.each(_degrees(shape, cluster, gpus, seq, tried), "trying plans"):
        dp, pp, *_, etp = degrees
        for microbatch in tried.get("microbatch", MICROBATCHES):
            if batch % (dp * microbatch):
                continue
            for schedule, virtual in _schedules(shape, pp, batch // (dp * microbatch), tried):
                own = (*degrees[:-1], seq, batch, microbatch, schedule, virtual)
                for recompute, zero, more in kept:
                    if _together(shape, degrees, seq, pp * virtual * _halves(schedule), more):
                        yield Plan(*own, zero=zero, recompute=recompute, etp=etp, **more)


def _together(shape: ModelShape, degrees: Degrees, seq: int, stages: int, more: dict[str, object]) -> bool:
    """Whether degrees agree with the other fields that restrict them: HSDP's shards, Ulysses' heads, sequence parallelism's
    shards, places for stages."""
    _, _, cp, tp, _, etp = degrees
    if STACKS[more.get("stack", Plan.stack)].data_only and not stages == tp == cp == degrees[4] == 1:
        return False
    shards = not more.get("dp_shard") or _sharded(degrees, more["dp_shard"])
    heads = more.get("context") != "ulysses" or not unread(shape, tp, cp)
    tokens = seq % (cp * tp) == 0 if more.get("sequence_parallel", True) else tp == 1 or etp in (None, tp)
    return shards and heads and tokens and stages <= shape.layers + (2 if more.get("embedding_slots") else 0)


def _sharded(degrees: Degrees, dp_shard: int) -> bool:
    """Whether groups of so many data-parallel ranks hold whole groups of experts, or parts of one."""
    dp, _, cp, tp, ep, etp = degrees
    own, experts = tp * cp * dp_shard, (etp or tp) * ep
    return dp % dp_shard == 0 and (own % experts == 0 or experts % own == 0)


def _halves(schedule: str) -> int:
    """Stages that a schedule itself gives a rank: the V-shaped ones two."""
    return 2 if schedule.endswith("-v") else 1


def _degrees(shape: ModelShape, cluster: Cluster, gpus: int, seq: int, tried: dict[str, tuple]) -> Iterator[Degrees]:
    """Degrees that make up the number of GPUs and divide heads, layers, sequence, experts and the experts' width."""
    tensor = tried.get("tp", [t for t in _divisors(shape.heads) if t <= 2 * cluster.node])
    context = tried.get("cp", [c for c in _divisors(seq) if c == 1 or seq // c >= SMALLEST_SHARD])
    experts = [e for e in tried.get("ep", _divisors(shape.experts or 1)) if (shape.experts or 1) % e == 0]
    for tp, cp, pp in itertools.product(tensor, context, tried.get("pp", range(1, _slots(shape, tried) + 1))):
        dp, left = divmod(gpus, tp * cp * pp)
        if left or not dp or dp not in tried.get("dp", (dp,)) or seq % cp:
            continue
        cuts = [etp for etp in _cuts(shape, tp, tried) if not uncut(shape, tp, etp)]
        yield from ((dp, pp, cp, tp, ep, etp) for etp in cuts for ep in experts if dp * cp * tp % ((etp or tp) * ep) == 0)


def _cuts(shape: ModelShape, tp: int, tried: dict[str, tuple]) -> list[int | None]:
    """Values of etp: None, which is tp, and 1 where that is something else."""
    given = tried.get("etp", (None, 1) if tp > 1 else (None,))
    return [etp for etp in given if shape.experts or etp is None]


def _schedules(shape: ModelShape, pp: int, m: int, tried: dict[str, tuple]) -> Iterator[tuple[str, int]]:
    """Schedules, and stages a rank, that a pipeline of pp ranks can have with m micro-batches."""
    if pp == 1:
        yield "1f1b", 1
        return
    slots = _slots(shape, tried)
    known = (*SCHEDULES, HIDES_EXPERTS) if shape.experts else SCHEDULES
    possible = [name for name in tried.get("schedule", known) if not (pp % 2 and name == "dualpipe")]
    for schedule in possible:
        if schedule in ("1f1b", "interleaved"):
            for virtual in tried.get("virtual", VIRTUAL):
                if pp * virtual <= slots:
                    yield schedule, virtual
        elif m >= pipeline.fewest(schedule, pp) and pp * _halves(schedule) <= slots:
            yield schedule, 1


def _slots(shape: ModelShape, tried: dict[str, tuple]) -> int:
    """Places for stages: the layers, and with embedding_slots the embedding and the head."""
    return shape.layers + 2 * any(tried.get("embedding_slots", ()))


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
        return _compute_cause(plan, best)
    if part == "tensor" and (plan.tp, tokens) == (best.tp, best.microbatch * best.seq // best.cp):
        return f"TP {plan.tp}, recompute {plan.recompute}"
    if part == "tensor":
        return _tensor_name(plan) + ("leaves the node" if plan.tp > cluster.node else f"on {tokens} tokens")
    if part == "context":
        return f"CP {plan.cp} moves keys and values" + (" between nodes" if plan.cp * plan.tp > cluster.node else "")
    if part == "expert":
        return f"EP {plan.ep} under {plan.schedule}" + (" leaves the node" if plan.ep * plan.expert_tp > cluster.node else "")
    if part == "data":
        return f"ZeRO-{plan.zero} over {plan.shards} ranks, {each}"
    if part == "optimizer":
        return f"ZeRO-{plan.zero} spreads the states over {plan.shards} ranks"
    stages = plan.stages // plan.pp
    return f"PP {plan.pp}, {stages} stage{'s' * (stages > 1)} per rank, {each}, {plan.schedule}"


def _tensor_name(plan: Plan) -> str:
    return f"TP {plan.tp} " + (f"with ETP {plan.etp} " if plan.expert_tp != plan.tp else "")


def _compute_cause(plan: Plan, best: Plan) -> str:
    if RECOMPUTE.index(plan.recompute) > RECOMPUTE.index(best.recompute):
        return f"{plan.recompute} recomputation"
    if (plan.stages, plan.schedule) != (best.stages, best.schedule):
        return f"layers on {plan.stages} stages: the slowest sets the pace"
    return f"other sizes of products: TP {plan.tp}, CP {plan.cp}, micro-batch {plan.microbatch}"
