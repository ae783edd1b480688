"""Checks of exercise 08_expert. Each takes the learner's function or class and returns a Report.

Experts are dealt in turn, choices come first, ranks have different numbers of tokens, and a token chooses its ranks by their
best expert, unlike in the chapter and the library. One process computes what must come out on all ranks.
"""

from manyranks.grade.old.check import check
from manyranks.grade.old.expert import averaging, balancing, combining, dispatching, dropping, exchanging, routing
from manyranks.grade.old.report import Report

__all__ = ["average", "balance", "combine", "dispatch", "drop", "exchange", "route"]


def route(function) -> Report:
    """Checks route(logits, bias, top_k, n, limit): which experts, and gates without the bias."""
    return check(routing.Route("route", 3, routing.cases, "route(logits_TE, bias_E, top_k, n, limit)"), function)


def drop(function) -> Report:
    """Checks drop(experts, gates, experts, factor): which copies find no place."""
    return check(dropping.Drop("drop", 3, dropping.cases, "drop(experts_KT, gates_KT, experts, factor)"), function)


def exchange(kind) -> Report:
    """Checks the autograd Function Exchange: rows to their ranks, gradients the same way back."""
    return check(exchanging.Exchanging("Exchange", 3, exchanging.cases, "Exchange.apply(rows_SH, sent, received)"), kind)


def dispatch(function) -> Report:
    """Checks dispatch(x, experts, experts, exchange): copies to their experts' ranks, sorted by expert."""
    call = "dispatch(x_TH, experts_KT, experts, exchange)"
    return check(dispatching.Dispatching("dispatch", 5, dispatching.cases, call), function)


def combine(function) -> Report:
    """Checks combine(y, gates, way, exchange): results back to their tokens."""
    call = "combine(y_RH, gates_KT, way, exchange)"
    return check(combining.Combining("combine", 4, combining.cases, call), function)


def balance(function) -> Report:
    """Checks balance(probabilities, experts, bias, speed): the loss and the bias, by all ranks' counts."""
    call = "balance(probabilities_TE, experts_KT, bias_E, speed)"
    return check(balancing.Balancing("balance", 3, balancing.cases, call), function)


def average(function) -> Report:
    """Checks average(dense, experts, replicas): each gradient over its own group."""
    return check(averaging.Averaging("average", 3, averaging.cases, "average(dense, experts, replicas)"), function)
