"""What chapter 07's explorer says of a setting: its time, its bytes, what limits, and what would help."""

from manyranks.show import units
from manyranks.show.context_setting import LENGTHS, RANKS, VARIANTS, Setting

_MUCH = 0.15  # of the time: what takes more of it limits
_BETTER = 0.9  # of the time: what takes no more of it helps


def status(now: Setting) -> str:
    """One line. Raises ValueError for a variant that cannot share the heads."""
    times, peak, room = now.times(), now.peak(), now.on.accelerator.memory
    seconds = times.both("seconds")
    slower, messages = (times.both(part) / seconds for part in ("slower", "messages"))
    time = f"a layer's attention takes {units.duration(seconds)} forward + backward"
    idle = f"idle {slower:.0%} of that (slowest ÷ mean {now.balance():.2f}), {messages:.0%} in messages that nothing hides"
    fits = f"s = {now.longest():,} fits" if now.longest() else "no sequence fits"
    size = f"a rank sends {units.size(now.bytes())} and needs {units.size(peak)} of {units.size(room)} for the model; {fits}"
    said = f"{now.model}, s = {now.s:,}, N = {now.n}, {now.cluster}: {time}: {idle}; {size}"
    if peak > room:
        return f"Does not fit: {said}. Limit: memory; {_more_room(now, room)}. Of the time: {_limit(now)}."
    return f"{said}. Limit: {_limit(now)}."


def _more_room(now: Setting, room: float) -> str:
    larger = [now._replace(n=n) for n in RANKS if n > now.n]
    enough = [each.n for each in larger if each.possible and each.peak() <= room]
    if enough:
        return f"N = {enough[0]} fits"
    return "no N helps alone: recompute whole layers (chapter 04), or cut the model further (chapters 03, 05, 06)"


def _limit(now: Setting) -> str:
    times = now.times()
    if now.n == 1:
        return "one accelerator's arithmetic: nothing is cut, nothing is sent"
    alone = now._replace(n=1, variant="ring").times().both("computing")
    shares = {part: times.both(part) for part in ("slower", "messages")}
    shares["small"] = times.both("computing") - alone / now.n
    part = max(shares, key=shares.get)
    if shares[part] < _MUCH * times.both("seconds"):
        return "computing"
    if part == "slower":
        return f"ranks that wait for the slowest{_remedy(now, 'layout', ('zigzag',))}"
    if part == "messages":
        where = "inside a node" if now.n * now.tp <= now.on.node or now.on.torus else "between nodes"
        return f"messages {where}{_remedy(now, 'variant', VARIANTS) or _longer(now)}"
    ratio = now.n * times.both("computing") / alone
    return f"small blocks: {now.n} accelerators together compute {ratio:.3g} times as long as one"


def _remedy(now: Setting, name: str, values: tuple[str, ...]) -> str:
    """Another value of this control with which it takes less time."""
    others = [each for value in values if (each := now._replace(**{name: value})).possible]
    best = min(others, key=_seconds)
    if _seconds(best) > _BETTER * _seconds(now):
        return ""
    return f"; {getattr(best, name)} takes {units.duration(_seconds(best))}"


def _longer(now: Setting) -> str:
    """The least s with which messages take little of the time."""
    for s in LENGTHS:
        times = now._replace(s=s).times()
        if s > now.s and times.both("messages") < _MUCH * times.both("seconds"):
            return f"; they take less than {_MUCH:.0%} from s = {s:,} on"
    return "; no s of these hides them"


def _seconds(now: Setting) -> float:
    return now.times().both("seconds")
