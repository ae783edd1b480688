"""Tensor and sequence parallelism: what one rank sends, keeps and holds of a layer.

    b·s       tokens of a micro-batch          h   hidden size        V   vocabulary
    t         tensor-parallel ranks            a, g   attention heads, key/value heads
    f, g      what a column-parallel layer does with its input, and a row-parallel layer with its output

Bytes are those that this rank sends, as measure counts them: a ring moves (t − 1)/t of a tensor in an all-gather or a
reduce-scatter, and twice that in an all-reduce. Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3;
Korthikanti et al., arXiv 2205.05198, section 4.
"""

from collections.abc import Callable
from typing import NamedTuple

from manyranks.theory import activations, calls, checkpointing, checks, memory
from manyranks.theory.activations import Kept as Saved
from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.calls import Call, Calls, Passes, counted
from manyranks.theory.plan import Plan, why_uncut


def _counted(
    calls_of: Callable,
    tokens: int,
    hidden: int,
    t: int,
    sequence_parallel: bool = False,
    regather: bool = True,
    itemsize: int = 2,
    rank: int = 0,
) -> Passes:
    _check(tokens, hidden, t, sequence_parallel, itemsize)
    return counted(calls_of(tokens * hidden, sequence_parallel, regather, itemsize), t, rank)


def block(*sizes: int, **options) -> Passes:
    """Counts what attention sends, or the MLP: f and g.

    f sends nothing forward and all-reduces its input's gradient backward; g all-reduces its output. With sequence parallelism
    f gathers, scatters sums and, with regather, gathers again; g scatters and gathers.

    sizes: tokens of the whole micro-batch, hidden, t
    options: sequence_parallel=False; regather=True; itemsize=2, bytes of an element; rank=0, its place in the group, which
        counts where t doesn't divide the tensor

    Raises ValueError for sizes below one, a rank that isn't in the group, and tokens that t doesn't divide with sequence
    parallelism.
    """
    return _counted(calls.block, *sizes, **options)


def layer(*sizes: int, **options) -> Passes:
    """Counts what a transformer layer sends, two blocks: 2 all-reduces each way.

    With sequence parallelism it's 4 all-gathers and 4 reduce-scatters in all, and with regather 2 all-gathers more. Arguments
    are block's. Source: arXiv 2205.05198, sections 4.2.1 and 4.2.2.
    """
    return 2 * block(*sizes, **options)


def embedding(*sizes: int, **options) -> Passes:
    """Counts what the cut embedding sends: each rank looks up its rows, g sums. Arguments are block's."""
    return _counted(calls.row_parallel, *sizes, **options)


def head(*sizes: int, **options) -> Passes:
    """Counts what the cut head sends, a column-parallel layer, so f. Arguments are block's."""
    return _counted(calls.column_parallel, *sizes, **options)


def loss(tokens: int, t: int, itemsize: int = 4, rank: int = 0) -> Passes:
    """Counts what the cut cross-entropy sends: the largest logit, then exponentials' sum and target's logit.

    itemsize: bytes of these numbers, 4 or more

    Backward sends nothing. Source: arXiv 1909.08053, section 3: b·s numbers instead of b·s·V.
    """
    _check(tokens, 1, t, False, itemsize)
    return counted([Call("tp", "all_reduce", k * tokens, itemsize) for k in (1, 2)], t, rank)


def model(
    shape: ModelShape,
    tokens: int,
    t: int,
    sequence_parallel: bool = False,
    regather: bool = True,
    itemsize: int = 2,
    loss_itemsize: int = 4,
    rank: int = 0,
) -> Passes:
    """Counts what embedding, layers, head and loss send for one micro-batch, before partial gradients are summed.

    Raises ValueError as block does, for a shape that t can't share evenly, with experts or with latent attention.
    """
    _fits(shape, t)
    options = (tokens, shape.hidden, t, sequence_parallel, regather, itemsize, rank)
    blocks = shape.layers * (1 if shape.parallel_layers else 2)
    end = loss(tokens, t, loss_itemsize, rank)
    return embedding(*options) + blocks * block(*options) + head(*options) + end


def saved(shape: ModelShape, plan: Plan, moe: bool = False, itemsize: int = 4) -> Saved:
    """Returns what memory.layer_activations adds up, and the statistics that checkpointing.statistics counts.

    plan: tp, sequence_parallel, regather, recompute, flash, precision, seq and microbatch count. Without regather the inputs of
        column-parallel layers stay whole: 4sbh(1 − 1/t) more
    itemsize: bytes of a statistic

    Raises ValueError where plan and shape don't fit.
    """
    memory.layer_activations(shape, plan, moe)  # raises
    statistics = checkpointing.statistics(shape, plan, itemsize) if plan.recompute != "full" else 0
    return activations.parts(shape, plan, moe)._replace(statistics=statistics)


class Parameters(NamedTuple):
    """Holds one layer's elements on one rank.

    cut: slices that no other rank has
    copied: key/value heads that other ranks have too
    whole: what all ranks have: norms, and the biases of row-parallel layers, which are added once
    """

    cut: int
    copied: int
    whole: int

    @property
    def total(self) -> int:
        return sum(self)


def parameters(shape: ModelShape, t: int) -> Parameters:
    """Returns what a rank holds of a layer. With more ranks than key/value heads, t/g of them have a copy of one each.

    Raises ValueError for a shape that t can't share evenly, with experts or with latent attention.
    """
    _fits(shape, t)
    held = {"slices": 0, "heads": 0, "whole": 0}
    for one in shape.layer_tensors(moe=False):
        held[one.cut] += one.on_rank(t, shape.kv_heads)
    slices, heads, whole = held.values()
    return Parameters(slices, heads, whole) if t > shape.kv_heads else Parameters(slices + heads, 0, whole)


class Partial(NamedTuple):
    """Holds the elements of one rank whose gradient is only a part after backward.

    sequence: to be summed over all ranks; each has seen only its own tokens
    copies: to be summed over the ranks that have the same key/value head
    """

    sequence: int
    copies: int


def partial_gradients(shape: ModelShape, t: int, sequence_parallel: bool = False) -> Partial:
    """Returns the whole model's.

    With SP these are norms, biases of row-parallel layers and learned positions; and always key/value heads with copies.
    Raises ValueError as parameters does. Source: arXiv 2205.05198, section 4.2.2.
    """
    each = parameters(shape, t)
    ends = [one for one in shape.embedding + shape.final_norm if one.cut == "whole"]
    whole = shape.layers * each.whole + parameters_of(ends)
    return Partial(whole if sequence_parallel and t > 1 else 0, shape.layers * each.copied)


def finish(shape: ModelShape, t: int, sequence_parallel: bool = False, itemsize: int = 2, rank: int = 0) -> Calls:
    """Counts what sums the partial gradients, once per step: an all-reduce per group.

    itemsize: bytes of a gradient's element

    Raises ValueError as parameters does, and for a rank that isn't in the group.
    """
    sequence, copies = partial_gradients(shape, t, sequence_parallel)
    if rank not in range(t):
        raise ValueError(f"rank={rank!r} of {t} ranks: give 0 to {t - 1}")
    if shape.kv_heads == 1:  # all ranks have a copy: one group, and one message
        sequence += copies
        copies = 0
    first = [Call("tp", "all_reduce", sequence, itemsize)] if sequence else []
    second = [Call("tp", "all_reduce", copies, itemsize)] if copies else []
    share = max(1, t // shape.kv_heads)  # neighbors with the same key/value head
    return (counted(first, t, rank) + counted(second, share, rank % share)).both


def _fits(shape: ModelShape, t: int) -> None:
    checks.kinds(shape=shape)
    checks.whole(t=t)
    if left := why_uncut(shape, t):
        raise ValueError(left.replace("tp=", "t=", 1))
    if shape.experts or shape.latent:
        raise ValueError(f"{shape.name} has experts or latent attention: give a shape with plain attention and one MLP a layer")


def _check(tokens: int, hidden: int, t: int, sequence_parallel: bool, itemsize: int) -> None:
    checks.whole(tokens=tokens, hidden=hidden, t=t, itemsize=itemsize)
    if sequence_parallel and tokens % t:
        raise ValueError(f"tokens={tokens} on t={t} ranks with sequence parallelism: give a multiple of {t}")
