"""Intervals of time, (started, finished) in seconds: joined, cut, left over."""

from collections.abc import Iterable

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The parts that at least one of them covers, in order, without overlaps."""
    merged: list[Interval] = []
    for started, finished in sorted(intervals):
        if merged and started <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], finished)
        elif finished > started:
            merged.append((started, finished))
    return merged


def outside(intervals: Iterable[Interval], started: float, finished: float) -> list[Interval]:
    """The parts of started … finished that none of them covers."""
    left, at = [], started
    for began, ended in joined(intervals):
        if min(began, finished) > at:
            left.append((at, min(began, finished)))
        at = max(at, ended)
    return [*left, (at, finished)] if finished > at else left


def within(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The parts that both cover, in order, without overlaps."""
    ours, theirs, both = joined(intervals), joined(others), []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        started, finished = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if finished > started:
            both.append((started, finished))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return both


def total(intervals: Iterable[Interval]) -> float:
    """Seconds in all of them together."""
    return sum((finished - started for started, finished in intervals), 0.0)
