"""Checks of exercise 07_context. Each takes the learner's function or class and returns a Report.

The ring runs downwards, the layout is folded with the late half first, and heads are dealt, unlike those of the chapter and
the library. One process computes what must come out on all ranks.
"""

from manyranks.grade.old.check import check
from manyranks.grade.old.context import by_heads, cutting, forward, homeward, merging
from manyranks.grade.old.report import Report

__all__ = ["merge", "positions", "ring", "ring_forward", "ulysses", "unshard"]


def merge(function) -> Report:
    """Checks merge(parts): of pairs (output, log-sum-exp) of blocks of keys."""
    return check(merging.Merging("merge", 3, merging.cases, "merge(parts)"), function)


def positions(function) -> Report:
    """Checks positions(seq, rank, n): which tokens a rank has."""
    return check(cutting.Positions("positions", 2, cutting.places_cases, "positions(seq, rank, n)"), function)


def unshard(function) -> Report:
    """Checks unshard(parts): the whole sequence from all ranks' parts."""
    return check(cutting.Unshard("unshard", 2, cutting.whole_cases, "unshard(parts)"), function)


def ring_forward(function) -> Report:
    """Checks ring_forward(q, k, v, positions, attend, merge): causal attention whose keys and values travel."""
    call = "ring_forward(q_SBAD, k_SBGD, v_SBGD, positions, attend, merge)"
    return check(forward.Forward("ring_forward", 6, forward.cases, call), function)


def ring(kind) -> Report:
    """Checks the autograd Function Ring: the gradients of keys and values travel home."""
    call = "Ring.apply(q_SBAD, k_SBGD, v_SBGD, positions, ring, attend_backward)"
    return check(homeward.Homeward("Ring", 6, homeward.cases, call), kind)


def ulysses(function) -> Report:
    """Checks ulysses(q, k, v, positions, attention): all-to-alls from all heads of some tokens to some heads of all."""
    call = "ulysses(q_SBAD, k_SBGD, v_SBGD, positions, attention)"
    return check(by_heads.ByHeads("ulysses", 5, by_heads.cases, call), function)
