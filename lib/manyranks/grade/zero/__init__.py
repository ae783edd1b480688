"""Checks of exercise 03_zero. Each takes the learner's function or class and returns a Report.

The ranks train models.Net, and models.layers(): tied weights, frozen layers, parameters that not all ranks use, odd sizes.
"""

from manyranks.grade.check import check
from manyranks.grade.report import Report
from manyranks.grade.zero import pieces, stages

__all__ = ["gather", "prefetch", "shard", "stage1", "stage2", "unit"]


def shard(function) -> Report:
    """Checks shard(tensor) -> this rank's piece of it, padded with zeros."""
    return check(pieces.Shard("shard", 2, pieces.shard_cases, "shard(tensor)"), function)


def gather(function) -> Report:
    """Checks gather(shard_S, shape) -> the whole tensor."""
    return check(pieces.Gather("gather", 2, pieces.gather_cases, "gather(shard_S, shape)"), function)


def stage1(optimizer) -> Report:
    """Checks Stage1(params, optimizer_class, **kwargs): optimizer states are sharded."""
    return check(stages.Stage1("Stage1", 5, stages.stage1_cases, stages.ONE), optimizer)


def stage2(optimizer) -> Report:
    """Checks Stage2(params, optimizer_class, **kwargs): gradients are sharded, too."""
    return check(stages.Stage2("Stage2", 4, stages.stage2_cases, stages.TWO), optimizer)


def unit(kind) -> Report:
    """Checks Unit(module): parameters that are there only while they are needed."""
    from manyranks.grade.zero import units

    return check(units.UnitTask("Unit", 4, units.unit_cases, units.CALL), kind)


def prefetch(schedule) -> Report:
    """Checks Prefetch(units): the next unit is gathered while one computes."""
    from manyranks.grade.zero import prefetching

    return check(prefetching.PrefetchTask("Prefetch", 3, prefetching.cases, prefetching.CALL), schedule)
