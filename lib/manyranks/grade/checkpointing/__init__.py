"""Checks of exercise 04_checkpointing. Each takes the learner's function and returns a Report.

All but the last run on one rank, the last on several. What must come out is what the same script gives without checkpoints.
"""

from manyranks.grade.check import check
from manyranks.grade.checkpointing import chain, choosing, selecting, sharing, single
from manyranks.grade.report import Report

__all__ = ["checkpoint", "checkpoint_sqrt", "choose", "selective", "shared_checkpoint"]


def checkpoint(function) -> Report:
    """Checks checkpoint(function, x) -> function(x), of which only x is kept."""
    return check(single.Single("checkpoint", 7, single.cases, "checkpoint(function, x)"), function)


def checkpoint_sqrt(function) -> Report:
    """Checks checkpoint_sqrt(checkpoint, layers, x): a chain in about √N segments, the last of which is kept."""
    return check(chain.Chain("checkpoint_sqrt", 4, chain.cases, "checkpoint_sqrt(checkpoint, layers, x)"), function)


def selective(function) -> Report:
    """Checks selective(checkpoint, layer, x): only the core of attention is computed again."""
    return check(selecting.Selective("selective", 2, selecting.cases, "selective(checkpoint, layer, x)"), function)


def choose(function) -> Report:
    """Checks choose(layers, budget) -> the numbers of the layers to checkpoint."""
    return check(choosing.Choose("choose", 4, choosing.cases, "choose(layers, budget)"), function)


def shared_checkpoint(function) -> Report:
    """Checks shared_checkpoint(function, x, group): each rank keeps its share of x."""
    call = "shared_checkpoint(function, x, group)"
    return check(sharing.Shared("shared_checkpoint", 5, sharing.cases, call), function)
