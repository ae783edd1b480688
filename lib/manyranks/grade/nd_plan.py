"""Task 6 of exercise 10_nd_parallel: a plan is judged by the time of its step, as theory.step.estimate has it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache

from manyranks import theory
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, by
from manyranks.grade.learner import Ready
from manyranks.grade.trial import Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.prints import Fact, size
from manyranks.measure.watch import Watch
from manyranks.theory import memory, step
from manyranks.theory.plan import Plan

_JOB = {"seq": 8192, "batch": 128, "precision": "bf16"}
_BASELINE = Plan(dp=16, pp=8, tp=8, **_JOB)
_MOST = {  # part of a step -> what to say where it takes most beside computing
    "bubble": "the bubble takes {:.0%} of the step: the pipeline has {m} micro-batches for {pp} stages. Fewer stages, or more "
    "of them on a rank (virtual=…)",
    "tensor": "tensor parallelism's messages take {:.0%} of the step: a smaller tp, and something else in its place, cp or dp",
    "data": "gradients and parameters take {:.0%} of the step: with {tokens:,} tokens a GPU there is little compute to hide "
    "them behind. A lower ZeRO stage, fewer dp ranks, or more tp and cp, which cut the model and the tokens of a rank",
    "context": "context parallelism's messages take {:.0%} of the step: cp · tp inside a node, or a smaller cp",
}


@cache
def _time_of(plan: Plan) -> step.StepTime:
    return step.estimate(theory.models["llama3-70b"], plan, theory.clusters["h100-dgx"].of(1024))


def _plan(case: str, function: Callable, watch: Watch) -> dict:
    if not isinstance(plan := function(), Plan):
        form = "it returns a plan: return theory.Plan(dp=…, pp=…, cp=…, tp=…, seq=8192, batch=128, …)"
        raise Stopped(f"plan() returned {kind_of(plan)}", form)
    return {"plan": {field.name: getattr(plan, field.name) for field in fields(Plan)}}


def _judged(case: str, given: str, results: Mapping[str, Fact]) -> dict:
    """What is judged of the plan that has come from a rank; nothing else that has come counts."""
    plan = Plan(**results["plan"])
    problem = _problem(plan)
    return {"problem": problem} if any(problem) else {"problem": problem, "seconds": _time_of(plan).seconds, "why": _why(plan)}


def _problem(plan: Plan) -> tuple[str, str]:
    """Why it cannot be, or does not fit, and a hint; empty where it can."""
    if any(getattr(plan, name) != value for name, value in _JOB.items()):
        its = ", ".join(f"{name}={getattr(plan, name)!r}" for name in _JOB)
        return f"the plan has {its}", "the job is given: " + ", ".join(f"{name}={value!r}" for name, value in _JOB.items())
    shape, cluster = _time_of(_BASELINE).shape, _time_of(_BASELINE).cluster
    try:
        plan.check(shape, cluster.gpus)
        _time_of(plan)
    except ValueError as error:
        return "the plan cannot be", str(error)
    peak, states, room = memory.peak(shape, plan).total, memory.model_states(shape, plan), cluster.accelerator.memory
    if peak > room:
        hint = (
            f"{size(states.total)} are parameters, gradients and the optimizer's states: zero=2, zero=3, more tp or pp make "
            f"them less; {size(peak - states.total)} are activations: recompute more, or fewer tokens a rank, by more tp or cp"
        )
        return f"a GPU needs {size(peak)} and has {size(room)}", hint
    if states.host > cluster.host_memory:
        return f"a GPU's states take {size(states.host)} of the host", "offload less: nothing has to leave the GPU here"
    return "", ""


def _why(plan: Plan) -> str:
    """What to change first."""
    time, baseline = _time_of(plan), _time_of(_BASELINE)
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
    return f"{slow * (time.seconds >= 0.99 * baseline.seconds)}of the step, {said}; {cause}"


def _within(what: str, most: Callable[[float], float]) -> Judge:
    """most: seconds, by those of the best plan."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        seen, limit = trial.seen[0].results, most(right[0].results["seconds"])
        found = f"a step takes {seen['seconds']:.3f} s; {limit:.3f} s are asked for"
        return Verdict(True) if seen["seconds"] <= limit else Verdict(False, found, seen["why"])

    return by(0.25, what, verdict, each_world=True)._replace(needs=1)


def _fits(trial: Trial, right: Right) -> Verdict:
    found, hint = trial.seen[0].results.get("problem", ("what came back is no plan", ""))
    return Verdict(not found, found, hint)


plan = Task(
    "10_nd_parallel",
    "plan()",
    4,
    _plan,
    (
        by(0.25, "the plan is possible, and fits into memory", _fits, each_world=True),
        _within("is 1.25 times as fast as the baseline", lambda best: _time_of(_BASELINE).seconds / 1.25),
        _within("is 1.6 times as fast as the baseline", lambda best: _time_of(_BASELINE).seconds / 1.6),
        _within("is within 3% of the best that the planner finds", lambda best: 1.03 * best),
    ),
    cases=("llama3-70b on 1,024 GPUs",),
    worlds=(1,),
    then=_judged,
    part=True,
    ready=Ready(
        given=tuple(f"manyranks.theory.{name}" for name in ("plan", "cluster", "hardware", "shapes")),
        hint="the answer is one plan, written down: search in a cell of your own, delete that cell, and return what you found, "
        "theory.Plan(dp=…, pp=…, …)",
    ),
    advice=(
        (r"ValueError: ", "a Plan says what cannot be, and what can"),
        (r"unexpected keyword argument", "help(theory.Plan) names its fields"),
    ),
)
