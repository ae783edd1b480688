"""Checks of exercise 05_pipeline. Each takes the learner's function or class and returns a Report.

Tables are verified and replayed on the virtual clock; a step is run on worlds of 2, 3 and 4 ranks.
"""

from manyranks.grade.check import check
from manyranks.grade.pipeline import capped, halves, loops, steady, training
from manyranks.grade.report import Report

__all__ = ["interleaved", "one_f_one_b", "split", "train_step", "under_a_cap"]


def one_f_one_b(function) -> Report:
    """Checks one_f_one_b(p, m, rank) -> [("F", 0), …], the rank's table."""
    return check(steady.Steady("one_f_one_b", 4, steady.cases, "one_f_one_b(p, m, rank)"), function)


def train_step(function) -> Report:
    """Checks train_step(stage, actions, shapes, inputs, targets, loss_fn): one rank's table, run."""
    call = "train_step(stage, actions, shapes, inputs, targets, loss_fn)"
    return check(training.Training("train_step", 7, training.cases, call), function)


def interleaved(function) -> Report:
    """Checks interleaved(p, m, v, rank) -> [("F", 0, 0), …], the rank's table."""
    return check(loops.Loops("interleaved", 4, loops.cases, "interleaved(p, m, v, rank)"), function)


def split(kind) -> Report:
    """Checks the class Split(layers): .forward(x), .input_gradient(grad), .weight_gradient()."""
    return check(halves.Halves("Split", 4, halves.cases, "Split(layers)"), kind)


def under_a_cap(function) -> Report:
    """Checks under_a_cap(p, m, cap, times) -> the table of each rank."""
    return check(capped.Capped("under_a_cap", 5, capped.cases, "under_a_cap(p, m, cap, times)"), function)
