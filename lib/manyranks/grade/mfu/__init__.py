"""Checks of exercise 09_mfu. Each takes the learner's function and returns a Report.

FLOPs and bytes are counted while real modules run: with logits for some tokens, with layers that do not learn, with fused
kernels. Times are those of a virtual clock: a device whose work is asynchronous, and ranks whose clocks do not agree.
"""

from manyranks.grade.mfu import budgets, forward, roofline, timing, training, utilisation
from manyranks.grade.old.check import check
from manyranks.grade.old.report import Report

__all__ = ["forward_flops", "lost_time", "mfu", "step_flops", "time_budget", "time_it"]


def forward_flops(function) -> Report:
    """Checks forward_flops(m, batch, seq, predicted): a forward pass, part by part."""
    return check(forward.ForwardFlops("forward_flops", 4, forward.cases, forward.CALL), function)


def step_flops(function) -> Report:
    """Checks step_flops(layers, head, recompute, flash): model and hardware FLOPs, where some layers do not learn."""
    return check(training.StepFlops("step_flops", 4, training.cases, training.CALL), function)


def mfu(function) -> Report:
    """Checks mfu(run, sheet, convention): from shapes, seconds and a data sheet to a share."""
    return check(utilisation.Mfu("mfu", 4, utilisation.cases, utilisation.CALL), function)


def time_it(function) -> Report:
    """Checks time_it(launch, synchronise, clock, warmup, repeats, inner): asynchronous work on several ranks."""
    return check(timing.TimeIt("time_it", 4, timing.cases, timing.CALL), function)


def time_budget(function) -> Report:
    """Checks time_budget(spans, arrived, step, zero): where each rank's step went."""
    return check(budgets.TimeBudget("time_budget", 5, budgets.cases, budgets.CALL), function)


def lost_time(function) -> Report:
    """Checks lost_time(operators, needed, peak, bandwidth): what memory costs, and what fusing gives back."""
    return check(roofline.LostTime("lost_time", 3, roofline.cases, roofline.CALL), function)
