"""Checks of exercise 06_tensor. Each takes the learner's function or class and returns a Report.

Ranks are in a group that is the world, or in two pairs; one process computes in lockstep what must come out.
"""

from functools import partial

from manyranks.grade.old.check import check
from manyranks.grade.old.report import Report
from manyranks.grade.old.tensor import feed_forward, heads, pairs, sequence, vocabulary

__all__ = ["attention", "block", "copy_in", "cross_entropy", "mlp", "reduce_out"]


def copy_in(function) -> Report:
    """Checks copy_in(tensors, group): f of several tensors."""
    return check(pairs.Pairs("copy_in", 2, partial(pairs.cases, summing=False), "copy_in(tensors, group)"), function)


def reduce_out(function) -> Report:
    """Checks reduce_out(tensors, group): g of several tensors."""
    return check(pairs.Pairs("reduce_out", 2, partial(pairs.cases, summing=True), "reduce_out(tensors, group)"), function)


def mlp(kind) -> Report:
    """Checks the class MLP(whole, f, g, group): a gated MLP with its residual connection."""
    return check(feed_forward.FeedForward("MLP", 5, feed_forward.cases, "MLP(whole, f, g, group)"), kind)


def attention(kind) -> Report:
    """Checks the class Attention(whole, f, g, group, sharers): attention to a memory, by heads."""
    return check(heads.ByHeads("Attention", 5, heads.cases, "Attention(whole, f, g, group, sharers)"), kind)


def cross_entropy(function) -> Report:
    """Checks cross_entropy(logits_SBW, targets_SB, z, group): of logits whose tokens are dealt in turn."""
    call = "cross_entropy(logits_SBW, targets_SB, z, group)"
    return check(vocabulary.Vocabulary("cross_entropy", 4, vocabulary.cases, call), function)


def block(kind) -> Report:
    """Checks the class Block(whole, p, f, group): norm, MLP, dropout and residual connection on shards of the sequence."""
    return check(sequence.Block("Block", 6, sequence.cases, "Block(whole, p, f, group)"), kind)
