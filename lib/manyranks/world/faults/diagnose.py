"""Says what went wrong, in the reader's terms: cells, lines, calls and who waits for whom."""

import re
import signal
from dataclasses import replace

from manyranks.measure.calls import Call
from manyranks.measure.divergence import describe, first_divergence
from manyranks.measure.location import machinery
from manyranks.measure.operators import POINT_TO_POINT
from manyranks.world import cells
from manyranks.world.errors import HUNG_UP, NODE_LOST, RankDied, RankFailed, RankHung, WorldError
from manyranks.world.faults.outcome import Outcome
from manyranks.world.processes.team import Team
from manyranks.world.rank import messages
from manyranks.world.rank.debugger import Left
from manyranks.world.rank.reply import Failure
from manyranks.world.rank.watch import Whereabouts

_FAULT_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def error_of(outcome: Outcome, team: Team, timeout: float | None) -> WorldError | None:
    """Returns the error that the reader sees, None if all went well."""
    if outcome.deaths:
        rank = next(iter(outcome.deaths))  # the first that was noticed: others may have died of it
        report = _death_report(rank, outcome, team.processes[rank].fault_lines())
        return RankDied(report, rank, outcome.deaths[rank])
    if outcome.failed:
        rank = outcome.failed[0]
        failure = outcome.replies[rank][0].failure
        exception = None if team.processes[rank].confined else _exception(failure.pickled)
        report, trace = _failure_report(rank, outcome), _traceback_text(failure)
        return RankFailed(report, rank, exception, trace, failure.kind, failure.said)
    if outcome.deadlock or outcome.late:
        return RankHung(hang_report(outcome, timeout), last_seen(outcome))
    return None


def _exception(pickled: bytes | None) -> BaseException | None:
    try:
        return messages.unpack([pickled]) if pickled else None
    except Exception:  # its class asks for other arguments than it keeps
        return None


def _failure_report(rank: int, outcome: Outcome) -> str:
    """Rank, exception and the rank's traceback with its source lines; what became of the others."""
    failure = outcome.replies[rank][0].failure
    same = [r for r in outcome.failed if outcome.replies[r][0].failure.rendered == failure.rendered]
    who = f"rank {rank}" if same == [rank] else ranks_text(sorted(same), len(outcome.ranks))
    if failure.kind == Left.__name__:
        return "\n".join([f"rank {rank}: {failure.said[0]}", *_stopped(outcome)])
    parts = [f"{who} raised {failure.rendered}", _traceback_text(failure), _hint(failure)]
    while failure := failure.cause:
        parts += [f"  caused by {failure.rendered}", _traceback_text(failure)]
    for other in sorted(set(outcome.failed) - set(same)):
        parts.append(f"rank {other} then raised {outcome.replies[other][0].failure.rendered}")
    parts += _stopped(outcome)
    return "\n".join(filter(None, parts))


def _hint(failure: Failure) -> str:
    """Says what a reader may not know: %%ranks cells don't see the notebook's variables."""
    missing = re.match(r"NameError: name '(\w+)' is not defined", failure.rendered)
    if failure.rendered.startswith("EOFError: EOF when reading a line"):
        return "nobody can type on a rank: call input() in the notebook, and send what it returns with world.set(name=...)"
    if missing is None or not cells.notebook_has(name := missing[1]):
        return ""
    return f"the notebook has a variable {name}, but the ranks don't: world.set({name}={name}) sends it to them"


def _traceback_text(failure: Failure) -> str:
    """The frames, outermost first, each with its line of source."""
    lines = []
    for file, line, function in failure.frames:
        inside = "" if function in ("<module>", "<cell>") else f", in {function}"
        lines += [f"  {cells.label((file, line))}{inside}", f"    {cells.source_line(file, line)}".rstrip()]
    return "\n".join(filter(None, lines))


def meanwhile(outcome: Outcome, ranks: list[int]) -> str:
    """Says what these ranks do and for whom they wait; those that do the same are named together."""
    states, alike = last_seen(outcome), {}
    for rank in ranks:
        culprit = waits_for(rank, outcome)
        state = "was in the debugger, too" if rank in outcome.debugged else states[rank]
        alike.setdefault((state, culprit), []).append(rank)
    return "; ".join(_doing(state, culprit, same) for (state, culprit), same in alike.items())


def _doing(state: str, culprit: int | None, ranks: list[int]) -> str:
    many = len(ranks) > 1
    now = re.sub("^waited", "wait" if many else "waits", re.sub("^was ", "are " if many else "is ", state))
    whom = f" for rank {culprit}" if culprit is not None and f"rank {culprit}" not in now else ""
    return f"{ranks_text(ranks, 0)} {now}{whom}"


def stack_text(rank: int, seen: Whereabouts | None) -> str:
    """Says where a rank is at this moment, outermost line first."""
    if seen is None:
        return f"rank {rank} does not answer"
    if not seen.running:
        return f"rank {rank} waits for the next run"
    doing = "is in the debugger" if seen.debugged else "runs" if seen.blocked is None else f"waits in {_waits(seen)}"
    lines = [f"  {cells.label(each[:2])}\n    {cells.source_line(*each[:2])}".rstrip() for each in seen.stack]
    return "\n".join([f"rank {rank} {doing}", *lines])


def _death_report(rank: int, outcome: Outcome, faults: str) -> str:
    """Says how the process ended, the line it was on where that is known, and what the others did."""
    parts = [f"rank {rank} {cause(outcome.deaths[rank], cells.label(_crash_place(faults)))}"]
    others = [r for r in sorted(outcome.deaths) if r != rank]
    parts += [f"rank {r} {cause(outcome.deaths[r])}" for r in others]
    for other in sorted(outcome.failed):
        recent = outcome.replies[other][0].recent
        last = f", in {describe(recent[-1])} ({cells.label(recent[-1].where)})" if recent else ""
        parts.append(f"rank {other} then raised {outcome.replies[other][0].failure.kind}{last}")
    parts += _stopped(outcome)
    return "\n".join(parts)


def _stopped(outcome: Outcome) -> list[str]:
    """Says what each rank was doing that was stopped because of another; those that did the same share a line."""
    alike: dict[str, list[int]] = {}
    for rank, state in last_seen(outcome).items():
        if rank in outcome.missing:
            alike.setdefault(state, []).append(rank)
    lines = []
    for state, ranks in alike.items():
        many = len(ranks) > 1
        doing, ended = (re.sub("^was ", "were ", state), "were stopped") if many else (state, "was stopped")
        lines.append(f"{ranks_text(ranks, len(outcome.ranks))} {doing} and {ended}")
    return lines


def _crash_place(faults: str) -> tuple[str, int] | None:
    """The innermost line of the reader's code in what faulthandler wrote."""
    for match in _FAULT_LINE.finditer(faults):
        if not machinery(match["file"]):
            return match["file"], int(match["line"])
    return None


def cause(code: int, where: str = "") -> str:
    """Says how a process with this exit code ended, and where if that is known."""
    died = f"died at {where}" if where else "died"
    if code == NODE_LOST:
        return f"{died} with its node: the machine, Ray on it, or the network to it is gone"
    if code == HUNG_UP:
        return f"{died}: it closed its connection to the notebook, and its process had not ended"
    if code >= 0:
        return f"{died}: its process exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = {
        "SIGKILL": ", as the system does when memory runs out",
        "SIGSEGV": ", a segmentation fault",
        "SIGABRT": ": C++ gave up, and what it printed is above. gloo does so when two ranks give different sizes",
    }.get(name, "")
    return f"{died}: its process was ended by {name}{why}"


def hang_report(outcome: Outcome, timeout: float | None) -> str:
    """A sentence on who waits for whom, where the calls diverge, and a table of what every rank does."""
    if outcome.deadlock and len(outcome.missing) == len(outcome.ranks):
        head = "the ranks wait for each other and nothing moves: a deadlock"
    elif outcome.deadlock:
        head = "nothing moves any more: ranks wait for what will not come"
    else:
        head = f"the run was not over after {timeout:g} s; World(..., timeout=...) sets the limit, None is no limit"
    diverging = divergence(outcome)
    lines = [head, *_sentences(outcome), *([f"the calls diverge: {diverging}"] if diverging else [])]
    return "\n".join([*lines, "", _table(outcome)])


def last_seen(outcome: Outcome) -> dict[int, str]:
    """Rank -> what it was doing when the run was given up."""
    states = dict.fromkeys(outcome.ranks, "had returned")
    states |= dict.fromkeys(outcome.failed, "had raised") | dict.fromkeys(outcome.deaths, "had died")
    return states | {rank: _state(seen, outcome.faults.get(rank, "")) for rank, seen in outcome.whereabouts.items()}


def ranks_text(ranks: list[int], size: int) -> str:
    """ "rank 2", "ranks 0 and 1", "both ranks", "all 4 ranks"."""
    if len(ranks) == size > 1:
        return "both ranks" if size == 2 else f"all {size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _state(seen: Whereabouts | None, faults: str) -> str:
    if seen is None:
        place = cells.label(_crash_place(faults))
        return f"was in code that holds the interpreter, at {place}" if place else "did not answer: its process is stopped"
    if seen.debugged:
        return f"was in the debugger at {cells.label(seen.place)}"
    if seen.blocked is None:
        between = seen.place is not None and seen.place.file == "<string>"  # no line of the reader's: it begins, or has ended
        return "was between runs" if between else f"was running {cells.label(seen.place)}".rstrip()
    return f"waited in {_waits(seen)}"


def _waits(seen: Whereabouts) -> str:
    """Names what a rank waits in, and where: "recv #0 of 16 bytes from rank 1 (cell 12, line 9)"."""
    what = describe(seen.blocked) if isinstance(seen.blocked, Call) else f"torch.distributed's {seen.blocked}"
    place = seen.blocked.where if isinstance(seen.blocked, Call) else seen.place
    return f"{what} ({cells.label(place)})" if place else what


def _sentences(outcome: Outcome) -> list[str]:
    """Writes one sentence per chain of ranks that wait for each other; a chain ends at a rank that does not wait, or closes."""
    told: set[int] = set()
    sentences = []
    for rank, seen in sorted(outcome.whereabouts.items()):
        if rank not in told and seen is not None and seen.blocked is not None:
            sentences.append(_chain(rank, outcome, told))
    return sentences


def _chain(rank: int, outcome: Outcome, told: set[int]) -> str:
    text, link = f"rank {rank} waits in", ""
    while True:
        told.add(rank)
        seen = outcome.whereabouts[rank]
        text += f"{link} {_waits(seen)}"
        culprit = _culprit(rank, seen.blocked, outcome)
        if culprit is None:
            return text
        if not (isinstance(seen.blocked, Call) and seen.blocked.op in POINT_TO_POINT):
            text += f" for rank {culprit}"
        other = outcome.whereabouts.get(culprit)
        if other is None or other.blocked is None:
            return f"{text}, which {_excuse(culprit, outcome)}"
        if culprit in told:
            return text
        rank, link = culprit, ", which waits in"


def waits_for(rank: int, outcome: Outcome) -> int | None:
    """The rank that this one waits for, if it waits and that can be said."""
    seen = outcome.whereabouts.get(rank)
    return None if seen is None or seen.blocked is None else _culprit(rank, seen.blocked, outcome)


def _culprit(rank: int, blocked: Call | str, outcome: Outcome) -> int | None:
    if not isinstance(blocked, Call):
        return None
    if blocked.op in POINT_TO_POINT:
        return blocked.peer
    absent = [member for member in blocked.ranks if member != rank and not _is_in(member, blocked, outcome)]
    return min(absent, key=lambda member: member in outcome.whereabouts, default=None)


def _is_in(rank: int, call: Call, outcome: Outcome) -> bool:
    seen = outcome.whereabouts.get(rank)
    other = seen.blocked if seen else None
    return isinstance(other, Call) and (other.group, other.op, other.sequence) == (call.group, call.op, call.sequence)


def _excuse(rank: int, outcome: Outcome) -> str:
    if rank not in outcome.ranks:
        return "does not run this cell"
    return last_seen(outcome)[rank].replace("had ", "has ").replace("was ", "is ")


def _table(outcome: Outcome) -> str:
    rows = [("rank", "in", "group", "peer", "where")]
    states = last_seen(outcome)
    for rank in outcome.ranks:
        seen = outcome.whereabouts.get(rank)
        call = seen.blocked if seen else None
        if isinstance(call, Call):
            peer = "" if call.peer is None else str(call.peer)
            rows.append((str(rank), f"{call.op} #{call.sequence}", call.group, peer, cells.label(call.where)))
        else:
            does, place = (states[rank], "") if seen is None else (call or "running", cells.label(seen.place))
            rows.append((str(rank), does, "", "", place))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def divergence(outcome: Outcome) -> str | None:
    """Describes the first place where the calls that ranks remember do not match; None if there is none."""
    recent = {rank: reply.recent for rank, (reply, _) in outcome.replies.items()}
    recent |= {rank: seen.recent for rank, seen in outcome.whereabouts.items() if seen is not None}
    readable = {rank: [replace(call, where=cells.label(call.where)) for call in calls] for rank, calls in recent.items()}
    return first_divergence(readable)
