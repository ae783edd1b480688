"""Compares the calls that the ranks of a group make, and says in a sentence where they first differ."""

from collections import Counter, defaultdict

from manyranks.measure.calls import RECENT, Call
from manyranks.measure.operators import POINT_TO_POINT

# Collectives where every rank must put in as much as every other.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def first_divergence(calls: dict[int, list[Call]]) -> str | None:
    """Compares the ranks' calls: collectives by their number in the group, messages by their number in the pair.

    calls: rank -> its calls, the most recent ones or all. Returns None where the ranks agree.
    """
    return _diverging_collective(calls) or _diverging_message(calls)


def describe(call: Call) -> str:
    """Describes a call: "all_reduce #7 of 4,000 bytes", "recv #0 of 16 bytes from rank 1"."""
    size = f" of {call.bytes:,} bytes" if call.op != "barrier" else ""
    group = "" if call.group == "default" else f" in group {call.group}"
    return f"{call.op} #{call.sequence}{size}{_side(call)}{group}"


def _side(call: Call) -> str:
    if call.peer is None:
        return " from any rank" if call.op == "recv" else ""
    if call.op in POINT_TO_POINT:
        return f" {'to' if call.op == 'send' else 'from'} rank {call.peer}"
    return f" with root {call.peer}"


def _diverging_collective(calls: dict[int, list[Call]]) -> str | None:
    table: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    last: Counter = Counter()
    for rank, issued in calls.items():
        for call in issued:
            if call.op not in POINT_TO_POINT:
                table[call.group, call.sequence][rank] = call
                last[call.group, rank] = call.sequence + 1
    for (group, sequence), by_rank in sorted(table.items()):
        first = min(by_rank)
        for rank in by_rank[first].ranks:
            if rank in by_rank and signature(by_rank[rank]) != signature(by_rank[first]):
                return _sentence(first, by_rank[first], rank, by_rank[rank])
            count = last[group, rank]
            known = rank in calls and (count > 0 or len(calls[rank]) < RECENT)  # a full list may have lost them all
            if known and count <= sequence:
                stopped = f"stopped after {count} collective{'s' if count > 1 else ''}" if count else "none"
                return f"rank {first} issued {_at(by_rank[first])}, rank {rank} {stopped}"
    return None


def signature(call: Call) -> tuple:
    """Returns what has to be the same in the calls of all members of a group."""
    return (call.op, call.peer, call.bytes, call.dtype) if call.op in _SAME_SIZE else (call.op, call.peer)


def _diverging_message(calls: dict[int, list[Call]]) -> str | None:
    ends: dict[tuple, dict[str, tuple[int, Call]]] = defaultdict(dict)
    from_anyone = set()  # groups, and ranks that receive from anyone in them
    for rank, issued in calls.items():
        for call in issued:
            if call.op == "recv" and call.peer is None:
                from_anyone.add((call.group, rank))
            elif call.op in POINT_TO_POINT:
                pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                ends[call.group, pair, call.tag, call.sequence][call.op] = rank, call
    for (group, (_, receiver), *_), both in ends.items():
        matched = len(both) == 2 and (group, receiver) not in from_anyone
        if matched and both["send"][1].bytes != both["recv"][1].bytes:
            return _sentence(*both["send"], *both["recv"])
    return None


def _sentence(a: int, call_a: Call, b: int, call_b: Call) -> str:
    return f"rank {a}'s call is {_at(call_a)}, rank {b}'s is {_at(call_b)}"


def _at(call: Call) -> str:
    dtype = f" of {call.dtype}" if call.dtype and call.op not in POINT_TO_POINT else ""
    return f"{describe(call)}{dtype}" + (f" ({call.where})" if call.where else "")
