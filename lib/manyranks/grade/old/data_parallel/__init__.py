"""Checks of exercise 02_data_parallel. Each takes the learner's function or class and returns a Report.

The ranks train toy.Toy: a tied weight, a frozen layer, a layer that not all ranks use, buffers. In float64.
"""

from manyranks.grade.old import toy
from manyranks.grade.old.check import check
from manyranks.grade.old.data_parallel import averages, cutting, wrapper
from manyranks.grade.old.data_parallel import buckets as _buckets
from manyranks.grade.old.report import Report

__all__ = ["average", "average_in_buckets", "cut", "no_sync", "overlapped", "replicate", "toy"]


def replicate(function) -> Report:
    """Checks replicate(model): all ranks' parameters and buffers become rank 0's."""
    return check(averages.Replicate("replicate", 2, averages.replicate_cases, "replicate(model)"), function)


def average(function) -> Report:
    """Checks average(model, examples): gradients become their mean over the examples of all ranks, one call a parameter."""
    return check(averages.Average("average", 4, averages.average_cases, "average(model, examples)"), function)


def cut(function) -> Report:
    """Checks cut(parameters, first_bytes, cap_bytes) -> lists of parameters: the buckets."""
    return check(cutting.Cut("cut", 2, cutting.cut_cases, "cut(parameters, first_bytes, cap_bytes)"), function)


def average_in_buckets(function) -> Report:
    """Checks average_in_buckets(buckets): gradients become their mean over the ranks, one call a bucket."""
    return check(
        _buckets.InBuckets("average_in_buckets", 3, _buckets.in_buckets_cases, "average_in_buckets(buckets)"), function
    )


def overlapped(wrapper_class) -> Report:
    """Checks Overlapped(module, first_bytes, cap_bytes): buckets leave while backward runs."""
    return check(wrapper.Wrapped("Overlapped", 6, wrapper.overlap_cases, wrapper.CALL), wrapper_class)


def no_sync(wrapper_class) -> Report:
    """Checks Overlapped(…).no_sync(): what accumulates inside is sent with the next backward outside."""
    return check(wrapper.Wrapped("no_sync", 3, wrapper.no_sync_cases, wrapper.CALL), wrapper_class)
