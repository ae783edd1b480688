"""What chapter 08's explorer says of a setting: its time, its memory, what limits, and what would help."""

from collections.abc import Iterator

from manyranks.show import units
from manyranks.show.expert_setting import EXPERT, PIPELINE, SCHEDULES, TENSOR, Setting

_MUCH = 0.1  # of the time: what takes more of it limits
_BETTER = 0.97  # of the time: what takes no more of it helps


def status(now: Setting) -> str:
    """One line. Raises ValueError for a setting that the model does not allow."""
    time, peak, room, way = now.step(), now.peak().total, now.on.accelerator.memory, now.way()
    fewer = f" (asked: {now.ep}, but there are {now.most[1]})" if now.ranks < now.ep else ""
    degrees = f"PP {now.pp} × EP {now.ranks}{fewer}, TP {now.tp}, DP {now.dp}, {now.schedule}"
    said = (
        f"{now.model} on {now.run.gpus:,} GPUs, {now.cluster}, {degrees}: {seconds(time.seconds)} a step, MFU {time.mfu:.0%}; "
    )
    sent = f"{units.size(way.inside)} inside its node and {units.size(way.between)} beyond" if way.seconds else "nothing"
    said += f"{units.size(peak)} of {units.size(room)}; a GPU sends {sent} to the experts of a layer and back"
    if peak > room:
        return f"Does not fit: {said}. Limit: memory; {_more_room(now)}. Of the time: {_limit(now)}."
    return f"{said}. Limit: {_limit(now)}."


def seconds(of_a_step: float) -> str:
    """Of steps that are compared, always in the same unit."""
    return f"{of_a_step:,.3g} s"


def _more_room(now: Setting) -> str:
    for name, said in (("ep", "EP"), ("pp", "PP"), ("tp", "TP")):
        more = (each for each in _others(now, name) if getattr(each, name) > getattr(now, name))
        if enough := next((each for each in more if each.fits), None):
            return f"{said} {getattr(enough, name)} fits"
    return "no single degree helps: raise two of them"


def _limit(now: Setting) -> str:
    parts = now.parts()
    part = max((name for name in parts if name != "compute"), key=parts.get)
    share = parts[part] / sum(parts.values())
    if share < _MUCH:
        return "computing"
    if part == "waits":
        balanced = now._replace(imbalance=1).step().seconds
        return f"all wait for the fullest rank, {share:.0%} of the time; balanced it takes {seconds(balanced)}"
    named, name = {
        "tensor": ("tensor-parallel messages", "tp"),
        "expert": ("tokens on their way to experts", "schedule"),
        "bubble": ("the pipeline's bubble", "pp"),
        "rest": ("gradients and parameters", "ep"),
    }[part]
    return f"{named}, {share:.0%} of the time{_remedy(now, name)}"


def _remedy(now: Setting, name: str) -> str:
    """Another value of this control with which it takes less time, and fits if this does."""
    others = [each for each in _others(now, name) if each.fits or not now.fits]
    best = min(others, key=lambda each: each.step().seconds, default=now)
    if best.step().seconds > _BETTER * now.step().seconds:
        return ""
    value, said = getattr(best, name), {"tp": "TP ", "pp": "PP ", "ep": "EP "}.get(name, "")
    return f"; {said}{value} takes {seconds(best.step().seconds)}"


def _others(now: Setting, name: str) -> Iterator[Setting]:
    """The other values of this control that the model allows."""
    values = {"tp": TENSOR, "pp": PIPELINE, "ep": EXPERT, "schedule": SCHEDULES}[name]
    each = (now._replace(**{name: value}) for value in values if value != getattr(now, name))
    return (other for other in each if other.possible)
