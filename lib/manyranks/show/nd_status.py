"""What the plan board says of a setting: its time, its memory, what limits, what would help, and what the planner found."""

from collections.abc import Iterator, Sequence

from manyranks.show import units
from manyranks.show.nd_plans import PARTS, degrees, kept
from manyranks.show.nd_setting import (
    ALL,
    CONTEXT,
    EXPERT,
    MICROBATCHES,
    PIPELINE,
    RECOMPUTE,
    SCHEDULES,
    SHARDS,
    TENSOR,
    VIRTUAL,
    ZERO,
    Setting,
)
from manyranks.theory.planner import Found

_MUCH = 0.05  # of the time: what takes more of it limits
_BETTER = 0.98  # of the time: what takes no more of it helps
_EQUAL = 1.005  # of the best plan's time
_SAID = {"tp": "TP ", "cp": "CP ", "pp": "PP ", "ep": "EP ", "dp_shard": "dp_shard ", "microbatch": "micro-batch "}
_SAID |= {"virtual": "v = ", "zero": "ZeRO-", "recompute": "recompute ", "schedule": ""}
_VALUES = {"tp": TENSOR, "cp": CONTEXT, "pp": PIPELINE, "ep": EXPERT, "dp_shard": SHARDS, "microbatch": MICROBATCHES}
_VALUES |= {"virtual": VIRTUAL, "zero": ZERO, "recompute": RECOMPUTE, "schedule": SCHEDULES}
# The controls that may help where a part of the time limits.
_REMEDIES = {
    "compute": ("recompute", "microbatch"),
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": ("ep", "schedule"),
    "pipeline": ("pp", "virtual"),
    "bubble": ("virtual", "schedule", "pp", "microbatch"),
    "data": ("zero", "microbatch", "dp_shard", "tp", "pp"),
    "optimizer": ("zero", "pp"),
}
_ROOM = ("dp_shard", "zero", "recompute", "pp", "tp", "cp", "ep", "microbatch")


def status(now: Setting, best: Sequence[Found] = ()) -> str:
    """One line. best: the planner's plans, for a comparison. Raises ValueError for a setting that cannot be."""
    now.check()
    task, time, peak, room = now.task, now.step(), now.peak().total, now.task.on.accelerator.memory
    each = task.batch * task.seq / task.gpus
    said = f"{task.model} on {task.gpus:,} GPUs, {task.cluster}, {units.short(each)} tokens a GPU; "
    said += f"{degrees(now.plan)}; {kept(now.plan)}: {units.duration(time.seconds)} a step, MFU {time.mfu:.1%}; "
    said += f"{units.size(peak)} of {units.size(room)}"
    if peak > room:
        return f"Does not fit: {said}. Limit: memory; {_more_room(now)}."
    return f"{said}. Limit: {_limit(now)}.{_compared(now, best)}"


def limit(now: Setting) -> str:
    """The part of the step that limits: the longest one beside computing, unless that is short."""
    time = now.step()
    return time.limit if time.parts[time.limit] > _MUCH * time.seconds else "compute"


def _limit(now: Setting) -> str:
    part, time = limit(now), now.step()
    if (more := _fullest_stage(now)) > max(_MUCH, time.parts.get(part, 0.0) / time.seconds):
        layers, stages = now.task.shape.layers, now.pp * now.virtual
        return f"uneven stages: with {layers} layers on {stages} the fullest has {more:.0%} more than the mean"
    if part == "compute":
        return f"computing, {time.compute / time.seconds:.0%} of the time{_remedy(now, part)}"
    return f"{PARTS[part][0]}, {time.parts[part] / time.seconds:.0%} of the time{_where(now, part)}{_remedy(now, part)}"


def _fullest_stage(now: Setting) -> float:
    """By how much of the mean the fullest stage has more layers."""
    layers, stages = now.task.shape.layers + 2 * now.plan.embedding_slots, now.pp * now.virtual
    return -(-layers // stages) * stages / layers - 1


def _where(now: Setting, part: str) -> str:
    """On which link an axis's messages travel."""
    axis = {"tensor": "tp", "context": "cp", "expert": "ep", "pipeline": "pp", "data": "dp"}.get(part)
    link = next((now.link(reach) for reach in now.reaches() if reach.axis == axis), "")
    return f" on {link}" if link else ""


def _remedy(now: Setting, part: str) -> str:
    """Another value of one control with which a step takes less time, and which fits."""
    others = [each for name in _REMEDIES[part] for each in _others(now, name) if each.fits]
    best = min(others, key=lambda each: each.step().seconds, default=now)
    if best.step().seconds > _BETTER * now.step().seconds:
        return ""
    return f"; {_change(now, best)} takes {units.duration(best.step().seconds)}"


def _more_room(now: Setting) -> str:
    for name in _ROOM:
        fitting = [each for each in _others(now, name) if each.fits]
        if fitting:
            best = min(fitting, key=lambda each: each.step().seconds)
            return f"{_change(now, best)} fits"
    return "no single control helps: move two of them, or take more GPUs"


def _others(now: Setting, name: str) -> Iterator[Setting]:
    """The other values of this control that can be."""
    each = (now._replace(**{name: value}) for value in _VALUES[name] if value != getattr(now, name))
    return (other for other in each if other.possible)


def _change(now: Setting, other: Setting) -> str:
    """What is another: TP 4, recompute full, ZB-V."""
    name = next(name for name in _VALUES if getattr(now, name) != getattr(other, name))
    value = getattr(other, name)
    return f"{_SAID[name]}{'all' if name == 'dp_shard' and value == ALL else value}"


def _compared(now: Setting, best: Sequence[Found]) -> str:
    """Against the planner's fastest, and where this plan loses most."""
    if not best:
        return ""
    first = best[0]
    if now.step().seconds * _EQUAL < first.seconds:
        return f" Faster than the planner's best, {units.duration(first.seconds)}: it tries fewer values here."
    if now.step().seconds <= _EQUAL * first.seconds:
        return " As fast as the planner's best."
    own = Found(now.plan, now.step(), now.peak(), first.time)
    return f" The planner's best takes {units.duration(first.seconds)}; here {own.why}."
