"""What chapter 09's explorer says of a setting: utilisation, speed, memory, what limits, and what would help."""

from collections.abc import Iterator

from manyranks.show import units
from manyranks.show.mfu_setting import DATA, RECOMPUTE, SEQUENCES, TENSOR, Setting

_MUCH = 0.1  # of the time: what takes more of it limits
_BETTER = 1.03  # times the speed: what gives no more does not help
_SAID = {"b": "a micro-batch of", "tp": "TP", "dp": "DP", "recompute": "recompute", "flash": "flash attention"}
_VALUES = {"b": SEQUENCES, "tp": TENSOR, "dp": DATA, "recompute": RECOMPUTE, "flash": ("on", "off")}
# A part of the budget: what it is, and the control that may help.
_LIMITS = {
    "other": ("memory: operators that only move it", "flash"),
    "overhead": ("overhead: starting kernels", "b"),
    "tensor": ("tensor-parallel messages", "tp"),
    "expert": ("tokens on their way to experts", "dp"),
    "data": ("gradients and parameters", "b"),
    "optimizer": ("the optimizer's memory traffic", "b"),
}


def status(now: Setting) -> str:
    """One line. Raises ValueError for a setting that model or chip does not allow."""
    now.check()
    time, peak, room = now.step(), now.peak().total, now.on.accelerator.memory
    degrees = f"TP {now.tp} × DP {now.dp:,}" + f", EP {now.ep}" * (now.ep > 1)
    said = f"{now.model}, {now.cluster}, {degrees}, {now.b} × {now.s:,} tokens a DP rank: "
    said += f"MFU {now.mfu:.1%} ({now.convention}), HFU {now.hfu:.1%} of {units.flop_rate(now.roof.peak)}; "
    if now.hfu > 1:
        said += f"above 100%: {now.convention} counts scores that the causal mask hides, and flash attention skips these; "
    said += f"{units.duration(time.seconds)} a step, {_tokens(now)}/s a GPU; "
    said += f"{units.size(peak)} of {units.size(room)}"
    if peak > room:
        return f"Does not fit: {said}. Limit: memory; {_more_room(now)}. Of the time: {_limit(now)}."
    return f"{said}. Limit: {_limit(now)}."


def speed(now: Setting) -> float:
    """Tokens a second of one GPU."""
    return now.step().tokens_per_second / now.gpus


def _tokens(now: Setting) -> str:
    return f"{float(f'{speed(now):.3g}'):,.6g} tokens" if speed(now) < 1e6 else f"{speed(now) / 1e6:.3g} million tokens"


def limit(now: Setting) -> str:
    """The part of the time budget that limits: the longest one beside products, unless these wait for memory most of all."""
    budget = now.budget()
    part = max((name for name in budget if name != "matmul"), key=budget.get)
    starved = _longest(now).bound == "memory" and budget["matmul"] >= budget[part]
    return "matmul" if starved or budget[part] < _MUCH * sum(budget.values()) else part


def _longest(now: Setting):
    """The kind of product that takes the most time."""
    return max((part for part in now.parts() if part.flops), key=lambda part: part.seconds - part.overhead)


def _limit(now: Setting) -> str:
    budget, part = now.budget(), limit(now)
    share = budget[part] / sum(budget.values())
    if part != "matmul":
        named, control = _LIMITS[part]
        return f"{named}, {share:.0%} of the time{_remedy(now, control)}"
    longest, ridge = _longest(now), now.roof.ridge
    if longest.bound == "memory":
        few = f"the {longest.name} does {units.short(longest.intensity)} FLOPs a byte, the ridge is at {units.short(ridge)}"
        return f"memory: {few}{_remedy(now, 'flash' if longest.name == 'attention core' else 'b')}"
    rate = longest.flops_per_second / now.roof.peak
    return f"computing: products take {share:.0%} of the time, the {longest.name} at {rate:.0%} of the peak"


def _remedy(now: Setting, name: str) -> str:
    """Another value of this control with which a GPU is faster, and which fits if this does."""
    best = max((each for each in _others(now, name) if each.fits), key=speed, default=now)
    if not now.fits or speed(best) < _BETTER * speed(now):
        return ""
    return f"; {_SAID[name]} {getattr(best, name)} gives {_tokens(best)}/s"


def _more_room(now: Setting) -> str:
    for name in ("flash", "recompute", "b", "dp", "tp"):
        fitting = [each for each in _others(now, name) if each.fits]
        if fitting:
            best = max(fitting, key=speed)
            return f"{_SAID[name]} {getattr(best, name)} fits"
    return "no single control helps: move two of them"


def _others(now: Setting, name: str) -> Iterator[Setting]:
    """The other values of this control that the model allows."""
    each = (now._replace(**{name: value}) for value in _VALUES[name] if value != getattr(now, name))
    return (other for other in each if other.possible)
