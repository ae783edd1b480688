"""What a ring's ranks send in forward and backward: how often, to whom, how much; and what they compute meanwhile."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.context import buffers
from manyranks.grade.old.context.given import ATTENDED
from manyranks.grade.old.report import listed
from manyranks.grade.old.scripts import NOTHING
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.grade.watch import Event
from manyranks.measure.calls import Call

if TYPE_CHECKING:
    from manyranks.grade.old.context.task import ContextTask

FORWARD, BACKWARD = "forward", "backward"  # marks
WAIT = "isend and irecv return at once: keep what they return, and call .wait() on it before you use what came"
DIRECTION = "that is the wrong direction: here K and V travel to rank r − 1, and come from rank r + 1"
_NEIGHBOUR = "a ring has one neighbour to send to: rank r − 1, modulo N. What is farther comes to it by being passed on"
_GATHERED = (
    "that is no ring: K and V go from rank to rank by isend and irecv, one block at a time. Who gathers them holds those of "
    "the whole sequence"
)
_BARRIER = "a barrier is no message of the ring: a rank that waits for what it receives waits long enough. Leave it out"
_REDUCED = "a sum over ranks adds gradients of different tokens: those of a block travel with it, and come home to its own rank"
_TOGETHER = "K and V go in one message, as do dK and dV: torch.stack((k, v)). Each message costs its latency"
_TOO_FAR = "one hop too many: after N − 1 hops each block has been everywhere, and the N-th brings it home for nothing"
_TOO_NEAR = "too few hops: a block has been everywhere after N − 1 of them"
_OWN_AT_HOME = (
    "a rank's part for its own block stays at home, and is added when the rest arrives: the gradients begin to travel at the "
    "block's first stop abroad, which makes N − 1 hops"
)
_NO_WAY_HOME = "K and V go round again, N − 1 messages, and their gradients travel home, N − 1 messages"
_TWICE = "K and V went round twice: keep o and lse of forward"
_KV_AGAIN = "in backward, K and V have to go round again, N − 1 messages, for they were not kept"
_REPEATED = "send key/value heads as they are: {times} query heads share one, and repeated it is sent {times} times"
_ROUNDED = "what is sent is {dtype}: float64 has to stay float64 on its way"
_SIZES = "a message has K and V, or dK and dV, of one rank's tokens: 2·S·B·G·D numbers"
_LATE = (
    "begin to send and to receive the next block before you compute with this one: isend, irecv, compute, and only then wait"
)
_WAITED = "the next block has to be under way while this one is computed: wait() after computing, and not before"
_HALFWAY = "the next block has to be under way while this one is computed: wait only when all pairs of this block are computed"
_ONE_BY_ONE = "a rank computes with N blocks, those of the ranks r, r + 1, r + 2, … modulo N, with their positions"
_UNSEEN = "use what the check hands in for all scores: it notes what is computed"
_HIDDEN = (
    "a rank's tokens are two chunks: where the first key's position of a chunk is larger than the last query's, no query of "
    "this pair of chunks sees any key. Leave the pair out"
)


class Must(NamedTuple):
    """forward, backward: messages of a rank; bytes: of each; times: query heads of one key/value head; scores: of each rank;
    tokens: of a rank.

    limit: bytes that may be held; 0 where they are not counted.
    """

    forward: int
    backward: int
    bytes: int
    times: int
    scores: list[int]
    tokens: int
    limit: int = 0


def calls_in(trial: Trial, rank: int, phase: str) -> list[Call]:
    """The rank's, in order."""
    at, calls, found = "", iter(trial.calls[rank]), []
    for event in trial.answers[rank].events:
        if event.kind == "mark" and event.what in (FORWARD, BACKWARD):
            at = event.what
        call = next(calls, None) if event.kind == "call" else None
        found += [call] if call and at == phase else []
    return found


def _turned_round(trial: Trial, phase: str) -> bool:
    """Whether all that was sent went to rank r + 1, on more than two ranks."""
    n = trial.case.n
    sent = [(rank, call.peer) for rank in range(n) for call in calls_in(trial, rank, phase) if call.op == "send"]
    return n > 2 and bool(sent) and all(peer == (rank + 1) % n for rank, peer in sent)


def explained(task: "ContextTask", trial: Trial, phase: str, hint: str, source: str) -> str:
    """Of wrong values: the ring may turn the other way, and what was sent may explain what else is wrong.

    source: the hint that both a wrong source and a ring that turns the other way have.
    """
    if not any(_began(seen.events, phase) for seen in trial.answers):
        return hint or messages(task, trial).hint or _UNSEEN
    if hint == source and _turned_round(trial, phase):
        return DIRECTION
    if trial.unwaited:
        return WAIT
    return hint or messages(task, trial).hint or (buffers.HINT if buffers.changed(trial) else "")


def messages(task: "ContextTask", trial: Trial) -> Verdict:
    """Each rank sends what it must, and nothing else."""
    for phase in (FORWARD, BACKWARD):
        for rank in range(trial.case.n):
            found = _of_rank(trial, rank, phase, calls_in(trial, rank, phase))
            if found:
                return Verdict(False, f"rank {rank} {found[0]} in {phase}", found[1])
    if trial.unwaited:
        rank, op = trial.unwaited[0]
        return Verdict(False, f"rank {rank} did not wait for its {op}", WAIT)
    return Verdict(True)


def _of_rank(trial: Trial, rank: int, phase: str, calls: list[Call]) -> tuple[str, str] | None:
    must, n = trial.case.must, trial.case.n
    count = getattr(must, phase)
    if others := [call.op for call in calls if call.op not in ("send", "recv")]:
        return f"called {others[0]}", _of_others(others[0])
    sent = [call for call in calls if call.op == "send"]
    peers = Counter(call.peer for call in sent)
    if set(peers) - {(rank - 1) % n}:
        to = listed([f"rank {peer}" for peer in sorted(peers)])
        return f"sent to {to}; in this ring it sends to rank {(rank - 1) % n}", _peers_hint(set(peers), rank, n)
    total, right = sum(call.bytes for call in sent), count * must.bytes
    if total == right and len(sent) <= count:
        return None
    there, here = sizes(total, right)
    return f"sent {there} in {len(sent)} messages; right is {here} in {count}", _why(sent, must, phase, n)


def _of_others(op: str) -> str:
    if op == "barrier":
        return _BARRIER
    return _REDUCED if "reduce" in op else _GATHERED


def _peers_hint(peers: set[int], rank: int, n: int) -> str:
    return DIRECTION if peers == {(rank + 1) % n} else _NEIGHBOUR


def _why(sent: list[Call], must: Must, phase: str, n: int) -> str:
    count, each = getattr(must, phase), {call.bytes for call in sent}
    strange = [call.dtype for call in sent if call.dtype != "float64"]
    if not sent:
        return NOTHING if phase == FORWARD else _KV_AGAIN
    if strange:
        return _ROUNDED.format(dtype=strange[0])
    if must.bytes // 2 in each:
        return _TOGETHER
    if must.times > 1 and must.bytes * must.times in each:
        return _REPEATED.format(times=must.times)
    if each != {must.bytes}:
        return _SIZES
    if phase == BACKWARD:
        return _by_count(len(sent), count, n)
    return _TOO_FAR if len(sent) > count else _TOO_NEAR


def _by_count(sent: int, count: int, n: int) -> str:
    if sent == 3 * (n - 1) and n > 2:  # of two ranks, gradients that travel N times are as many
        return _TWICE
    if sent == count + 1:
        return _OWN_AT_HOME
    return _TOO_FAR if sent > count else _NO_WAY_HOME if sent <= n else _TOO_NEAR


class Attended(NamedTuple):
    """What a mark of attend says."""

    source: int
    scores: int
    queries: int


def attended(event: Event) -> Attended | None:
    """None where the event is another one."""
    return Attended(*map(int, event.what.removeprefix(ATTENDED).split())) if event.what.startswith(ATTENDED) else None


def overlap(blocks: int, phase: str, task: "ContextTask", trial: Trial) -> Verdict:
    """The first blocks, so many, are computed while the next one is under way, from their first pair of chunks to the last."""
    n = trial.case.n
    for rank, seen in enumerate(trial.answers):
        began = _began(seen.events, phase)
        if not began:
            return Verdict(False, f"rank {rank} did not call the function that the check hands in", _UNSEEN)
        if list(began) not in [[(rank + sign * hop) % n for hop in range(n)] for sign in (1, -1)]:
            return Verdict(
                None, f"not judged: rank {rank} computed with {len(began)} of {n} blocks in a ring's order", _ONE_BY_ONE
            )
        for number, (first, last) in enumerate([*began.values()][: min(blocks, n - 1)], 1):
            if why := _not_under_way(first, number):
                return Verdict(False, f"rank {rank} began to compute with its block {number} of {n} {why[0]}", why[1])
            if _waited(last):
                found = f"rank {rank} computed a part of its block {number} of {n} when it had waited for the next one"
                return Verdict(False, found, _HALFWAY)
    return Verdict(True)


def _began(events: list[Event], phase: str) -> dict[int, tuple[Counter, Counter]]:
    """For each block that a rank computed with, in order, what it had done before the first pair of chunks, and the last."""
    at, count, began = "", Counter(), {}
    for event in events:
        at = event.what if event.kind == "mark" and event.what in (FORWARD, BACKWARD) else at
        if at == phase:
            count[event.what if event.kind == "call" or event.what == buffers.ARRIVED else event.kind] += 1
            if mark := attended(event):
                now = count.copy()
                began[mark.source] = began.get(mark.source, (now,))[0], now
    return began


def _not_under_way(count: Counter, blocks: int) -> tuple[str, str] | None:
    if min(count["send"], count["recv"]) < blocks:
        return "before it had begun to send and to receive the next one", _LATE
    return ("when it had waited for the next one", _WAITED) if _waited(count) else None


def _waited(count: Counter) -> bool:
    """Whether less is under way than one block that is sent, and one that comes."""
    return count[buffers.ARRIVED] > count["send"] + count["recv"] - 2


def work(phase: str, task: "ContextTask", trial: Trial) -> Verdict:
    """No score of a pair of chunks of which nothing is seen."""
    for rank, seen in enumerate(trial.answers):
        at, got = "", 0
        for event in seen.events:
            at = event.what if event.kind == "mark" and event.what in (FORWARD, BACKWARD) else at
            mark = attended(event)
            got += mark.scores if mark and at == phase else 0
        right = trial.case.must.scores[rank]
        if not got:
            return Verdict(False, f"rank {rank} did not call the function that the check hands in", _UNSEEN)
        if got > right:
            return Verdict(False, f"rank {rank} computed {got:,} scores of each head; {right:,} are enough", _HIDDEN)
    return Verdict(True)
