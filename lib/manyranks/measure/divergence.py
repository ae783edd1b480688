"""Do the ranks of a group make the same calls? The first place where they do not, as a sentence."""

from collections import defaultdict

from manyranks.measure.calls import Call
from manyranks.measure.operators import POINT_TO_POINT

# Collectives in which every rank must put in as much as every other.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


def first_divergence(calls: dict[int, list[Call]]) -> str | None:
    """Compares the ranks' calls: collectives by their number in the group, messages by their number in the pair.

    calls: rank -> its calls, the most recent ones or all. Returns None where the ranks agree.
    """
    return _diverging_collective(calls) or _diverging_message(calls)


def describe(call: Call) -> str:
    """ "all_reduce #7 of 4,000 bytes", "recv #0 of 16 bytes from rank 1"."""
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
    last: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(calls, -1))
    for rank, issued in calls.items():
        for call in issued:
            if call.op not in POINT_TO_POINT:
                table[call.group, call.sequence][rank] = call
                last[call.group][rank] = call.sequence
    for (group, sequence), by_rank in sorted(table.items()):
        first = min(by_rank)
        for rank in by_rank[first].ranks:
            if rank in by_rank and _signature(by_rank[rank]) != _signature(by_rank[first]):
                return _sentence(first, by_rank[first], rank, by_rank[rank])
            if rank in calls and last[group][rank] < sequence:
                count = last[group][rank] + 1 or "no"
                return f"rank {first} issued {_at(by_rank[first])}, rank {rank} {count} collectives in that group before"
    return None


def _signature(call: Call) -> tuple:
    return (call.op, call.peer, call.bytes, call.dtype) if call.op in _SAME_SIZE else (call.op, call.peer)


def _diverging_message(calls: dict[int, list[Call]]) -> str | None:
    ends: dict[tuple, dict[str, tuple[int, Call]]] = defaultdict(dict)
    for rank, issued in calls.items():
        for call in issued:
            if call.op in POINT_TO_POINT and call.peer is not None and call.tag == 0:
                pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                ends[call.group, pair, call.sequence][call.op] = rank, call
    for both in ends.values():
        if len(both) == 2 and (both["send"][1].bytes != both["recv"][1].bytes):
            return _sentence(*both["send"], *both["recv"])
    return None


def _sentence(a: int, call_a: Call, b: int, call_b: Call) -> str:
    return f"rank {a}'s call is {_at(call_a)}, rank {b}'s is {_at(call_b)}"


def _at(call: Call) -> str:
    dtype = f" of {call.dtype}" if call.dtype and call.op not in POINT_TO_POINT else ""
    return f"{describe(call)}{dtype} ({call.where})"
