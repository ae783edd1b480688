"""The task plan: a plan for Llama 3 70B on 1,024 H100 that fits, and beats a given one."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from manyranks import theory
from manyranks.grade.journal import Stopped
from manyranks.grade.nd import answers
from manyranks.grade.nd.task import NdTask
from manyranks.grade.refused import refused
from manyranks.grade.report import listed, size
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.theory import memory, step
from manyranks.theory.plan import Plan
from manyranks.theory.planner import search
from manyranks.theory.step import StepTime

CALL = "plan()"
MODEL, CLUSTER, GPUS, SEQ, BATCH = "llama3-70b", "h100-dgx", 1024, 8192, 128
BASELINE = Plan(dp=16, pp=8, tp=8, seq=SEQ, batch=BATCH)
BEST = Plan(dp=64, pp=2, cp=2, tp=4, seq=SEQ, batch=BATCH, virtual=8, recompute="none")  # of theory.planner.search
FASTER = (1.25, 1.6)  # than the baseline, for some of the points
NEAR = 1.03  # times the planner's best, for all of them
_PLAN = "the plan"
_GIVEN = {"seq": SEQ, "batch": BATCH, "precision": "bf16"}  # fields that are not the learner's to choose
_SEARCHED = (
    "the answer is one plan, written down: search in a cell of your own, as long as you like, and return what you found, "
    "theory.Plan(dp=…, pp=…, …)"
)
_OTHERS = ("manyranks.", "torch.", "contextlib", "functools")
_READY = tuple(f"manyranks.theory.{name}" for name in ("planner", "step", "memory", "nd"))
_READY += ("manyranks.grade.nd.planning", "manyranks.show")
_FORM = "it returns a plan: return theory.Plan(dp=…, pp=…, cp=…, tp=…, seq=8192, batch=128, …)"
_STATES = (
    "of {peak}, {states} are parameters, gradients and the optimizer's states: more shards (zero=2, zero=3), more tp or pp"
)
_ACTIVATIONS = "of {peak}, {held} are activations: recompute more, or cut a micro-batch's tokens: more tp or cp"
_SAME = "that is the baseline itself, or just as slow: look at where its time goes, theory.step.estimate(…).parts"
_SLOWER = "that is slower than the baseline: look at where its time goes, theory.step.estimate(…).parts"
_NODE = "tp={tp} is larger than a node of 8: its all-reduces leave NVLink. Keep tp inside the node"
_RECOMPUTED = 'recompute="full" runs each layer\'s forward again, a third of the compute: it is needed only where memory is'
_BUBBLE = (
    "the bubble takes {bubble:.0%} of the step: the pipeline has {m} micro-batches for {pp} stages. Fewer stages, or more of "
    "them on a rank (virtual=…)"
)
_TENSOR = "tensor parallelism's messages take {tensor:.0%} of the step: a smaller tp, and something else in its place, cp or dp"
_DATA = (
    "gradients and parameters take {data:.0%} of the step: with {tokens:,} tokens a GPU there is little compute to hide them "
    "behind. A lower ZeRO stage, fewer dp ranks, or more tp and cp, which cut the model and the tokens of a rank"
)
_CONTEXT = "context parallelism's messages take {context:.0%} of the step: cp · tp inside a node, or a smaller cp"
_OTHER = "compare .parts of theory.step.estimate with those of plans that differ from yours in one degree"


@cache
def _setting() -> tuple:
    return theory.models[MODEL], theory.clusters[CLUSTER].of(GPUS)


def time_of(plan: Plan) -> StepTime:
    shape, cluster = _setting()
    return step.estimate(shape, plan, cluster)


def best() -> Plan:
    """What the planner finds; BEST holds it, for that takes seconds."""
    shape, cluster = _setting()
    return search(shape, cluster, GPUS, SEQ, BATCH)[0].plan


def _asked(function: Callable, watch) -> Tensors:
    with refused(_READY, _SEARCHED, _OTHERS):
        plan = function()
    if not isinstance(plan, Plan):
        raise Stopped(f"{CALL} returned {answers.kind_of(plan)}", _FORM)
    return {_PLAN: answers.said(dataclasses.asdict(plan))}


def _plan_of(trial: Trial) -> Plan:
    return Plan(**answers.heard(trial.answers[0].tensors[_PLAN]))


@cache
def cases(n: int) -> list[Scene]:
    return [Scene(1, _asked, [{_PLAN: answers.said(dataclasses.asdict(BEST))}], note=f"{MODEL} on {GPUS:,} GPUs")]


def _another_job(plan: Plan) -> bool:
    return any(getattr(plan, name) != value for name, value in _GIVEN.items())


def _impossible(plan: Plan) -> Verdict | None:
    """Where the plan is another job's, or none at all."""
    shape, cluster = _setting()
    if other := [f"{name}={getattr(plan, name)!r}" for name, value in _GIVEN.items() if getattr(plan, name) != value]:
        right = listed([f"{name}={value!r}" for name, value in _GIVEN.items()])
        return Verdict(False, f"the plan has {', '.join(other)}", f"the job is given: {right}")
    try:
        plan.check(shape, cluster.gpus)
        time_of(plan)
    except ValueError as error:
        return Verdict(False, "the plan cannot be", str(error))
    return None


def _fits(task: "Planning", trial: Trial) -> Verdict:
    plan, (shape, cluster) = _plan_of(trial), _setting()
    if wrong := _impossible(plan):
        return wrong
    peak, room = memory.peak(shape, plan), cluster.accelerator.memory
    states = memory.model_states(shape, plan)
    if peak.total > room:
        held = peak.total - states.total
        more = _STATES if states.total > held else _ACTIVATIONS
        hint = more.format(peak=size(peak.total), states=size(states.total), held=size(held))
        return Verdict(False, f"a GPU needs {size(peak.total)} and has {size(room)}", hint)
    if states.host > cluster.host_memory:
        found = f"a GPU's part of the host's memory is {size(cluster.host_memory)}, and holds {size(states.host)}"
        return Verdict(False, found, "offload less: nothing has to leave the GPU here")
    return Verdict(True)


def _in_seconds(most: float, task: "Planning", trial: Trial) -> Verdict:
    """Whether a step takes so long at most."""
    if not (fits := _fits(task, trial)).ok:
        return Verdict(None, f"not judged: {_instead(_plan_of(trial))}", fits.hint)
    time = time_of(_plan_of(trial))
    if time.seconds <= most:
        return Verdict(True)
    found = f"a step takes {time.seconds:.3f} s; {most:.3f} s are asked for"
    return Verdict(False, found, _why(time))


def _instead(plan: Plan) -> str:
    """Why its time is not judged."""
    if _another_job(plan):
        return "it is another job"
    return "the plan cannot be" if _impossible(plan) else "the plan does not fit"


def _parts(time: StepTime) -> str:
    """Those that take time, the longest first."""
    parts = sorted(time.parts.items(), key=lambda one: -one[1])
    return "of the step, " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts if seconds >= 0.0005)


def _why(time: StepTime) -> str:
    """What to change first: what is known to be needless, then what takes longest beside computing."""
    times = time.seconds / time_of(BASELINE).seconds
    slow = [_SLOWER] if times > 1.05 else [_SAME] if times >= 0.99 else []
    return "; ".join([*slow, _parts(time), _cause(time), _OTHER])


def _cause(time: StepTime) -> str:
    if time.plan.tp > time.cluster.node:
        return _NODE.format(tp=time.plan.tp)
    return _RECOMPUTED if time.plan.recompute == "full" else _lost(time)


def _lost(time: StepTime) -> str:
    plan, shares = time.plan, {name: part / time.seconds for name, part in time.parts.items()}
    known = {"bubble": _BUBBLE, "tensor": _TENSOR, "data": _DATA, "context": _CONTEXT}
    most = max(known, key=shares.get)
    return known[most].format(m=plan.microbatches, pp=plan.pp, tokens=plan.tokens // plan.gpus, **shares)


def _within(what: str, share: float, most: Callable[[], float]) -> Aspect:
    return Aspect(what, share, lambda task, trial: _in_seconds(most(), task, trial), each_world=True)


def _of_baseline(times: float) -> float:
    return time_of(BASELINE).seconds / times


@dataclass(frozen=True)
class Planning(NdTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"ValueError: ", "a Plan says what cannot be, and what can"),
        (r"unexpected keyword argument", "help(theory.Plan) names its fields"),
        *NdTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the plan is possible, and fits into memory", 0.25, _fits, each_world=True),
        *(_within(f"is {times} times as fast as the baseline", 0.25, partial(_of_baseline, times)) for times in FASTER),
        _within(f"is within {NEAR - 1:.0%} of the best that the planner finds", 0.25, lambda: NEAR * time_of(BEST).seconds),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        return ""
