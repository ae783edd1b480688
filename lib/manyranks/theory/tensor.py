"""Tensor and sequence parallelism: what one rank sends, keeps and holds of a layer.

    b·s       tokens of a micro-batch          h   hidden size        V   vocabulary
    t         tensor-parallel ranks            a, g   attention heads, key/value heads
    f, g      what a column-parallel layer does with its input, and a row-parallel layer with its output

Bytes are those that this rank sends, as measure counts them: a ring moves (t − 1)/t of a tensor in an all-gather or a
reduce-scatter, and twice that in an all-reduce. Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3;
Korthikanti et al., arXiv 2205.05198, section 4.
"""

from typing import NamedTuple

from manyranks.theory import checkpointing, checks, collectives, kept, memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan, uncut


class Calls(NamedTuple):
    """Collectives and messages of one rank, by operation, and the bytes that it sends in them."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    bytes: int = 0
    all_to_all: int = 0
    send: int = 0

    @property
    def count(self) -> int:
        return sum(self) - self.bytes

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(*(x + y for x, y in zip(self, other, strict=True)))

    def __rmul__(self, times: int) -> "Calls":
        return Calls(*(times * x for x in self))

    __mul__ = __rmul__


class Passes(NamedTuple):
    """Forward's calls and backward's."""

    forward: Calls = Calls()
    backward: Calls = Calls()

    @property
    def both(self) -> Calls:
        return self.forward + self.backward

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __rmul__(self, times: int) -> "Passes":
        return Passes(times * self.forward, times * self.backward)

    __mul__ = __rmul__


def column(
    tokens: int, hidden: int, t: int, sequence_parallel: bool = False, regather: bool = True, itemsize: int = 2, rank: int = 0
) -> Passes:
    """f: the input of column-parallel layers. Nothing forward, an all-reduce of its gradient backward; with sequence
    parallelism an all-gather, then a reduce-scatter and, with regather, the all-gather again.

    tokens: of the whole micro-batch; itemsize: bytes of an element; rank: its place in the group, which counts where t does not
    divide the tensor. Raises ValueError for sizes below 1, a rank that the group has not, and with sequence parallelism for
    tokens that t does not divide.
    """
    _check(tokens, hidden, t, sequence_parallel, itemsize)
    one = tokens * hidden, itemsize, t, rank
    if not sequence_parallel:
        return Passes(backward=_call("all_reduce", *one))
    gather, scatter = _call("all_gather", *one), _call("reduce_scatter", *one)
    return Passes(gather, scatter + gather if regather else scatter)


def row(
    tokens: int, hidden: int, t: int, sequence_parallel: bool = False, regather: bool = True, itemsize: int = 2, rank: int = 0
) -> Passes:
    """g: the output of a row-parallel layer. An all-reduce forward, nothing backward; with sequence parallelism a
    reduce-scatter, then an all-gather of its gradient, whatever regather says. As column otherwise."""
    _check(tokens, hidden, t, sequence_parallel, itemsize)
    one = tokens * hidden, itemsize, t, rank
    if not sequence_parallel:
        return Passes(forward=_call("all_reduce", *one))
    return Passes(_call("reduce_scatter", *one), _call("all_gather", *one))


def block(*sizes, **options) -> Passes:
    """Attention or the MLP alone: f and g, with the arguments of column."""
    return column(*sizes, **options) + row(*sizes, **options)


def layer(*sizes, **options) -> Passes:
    """A transformer layer, with the arguments of column: 2 all-reduces each way; with sequence parallelism 4 all-gathers and 4
    reduce-scatters in all, and with regather 2 all-gathers more. Source: arXiv 2205.05198, sections 4.2.1 and 4.2.2."""
    return 2 * block(*sizes, **options)


def embedding(*sizes, **options) -> Passes:
    """The vocabulary-parallel embedding, with the arguments of column: each rank looks up its rows, g sums."""
    return row(*sizes, **options)


def head(*sizes, **options) -> Passes:
    """The vocabulary-parallel head, a column-parallel layer, with the arguments of column."""
    return column(*sizes, **options)


def loss(tokens: int, t: int, itemsize: int = 4, rank: int = 0) -> Passes:
    """The vocabulary-parallel cross-entropy: of each token the largest logit is all-reduced, then the sum of exponentials with
    the target's logit; nothing backward. itemsize: of these numbers, 4 or more.

    Source: arXiv 1909.08053, section 3: b·s numbers instead of b·s·V.
    """
    _check(tokens, 1, t, False, itemsize)
    return Passes(sum((_call("all_reduce", k * tokens, itemsize, t, rank) for k in (1, 2)), Calls()))


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
    """Embedding, layers, head and loss of one micro-batch, before partial gradients are summed.

    Raises ValueError as column does, for a shape that t cannot share evenly, with experts or with latent attention.
    """
    _fits(shape, t)
    options = (tokens, shape.hidden, t, sequence_parallel, regather, itemsize, rank)
    blocks = shape.layers * (1 if shape.parallel_layers else 2)
    end = loss(tokens, t, loss_itemsize, rank)
    return embedding(*options) + blocks * block(*options) + head(*options) + end


def _call(op: str, elements: int, itemsize: int, t: int, rank: int) -> Calls:
    if rank not in range(t):
        raise ValueError(f"rank={rank!r} of {t} ranks: give 0 to {t - 1}")
    if t == 1:
        return Calls()
    return Calls(**{op: 1}, bytes=collectives.sent_bytes(op, elements, itemsize, t)[rank])


class Saved(NamedTuple):
    """Bytes that one layer keeps of one micro-batch on one rank.

    outside: norms, dropouts and inputs of column-parallel layers, 10sbh in the paper's layer, or 10sbh/t with sequence
    parallelism; inside: sbh(24/t + 5as/(ht)); statistics: of the norms, which the paper leaves out.
    """

    outside: float
    inside: float
    statistics: int

    @property
    def formula(self) -> float:
        """What the paper counts."""
        return self.outside + self.inside

    @property
    def total(self) -> float:
        return sum(self)


def saved(shape: ModelShape, plan: Plan, moe: bool = False, itemsize: int = 4) -> Saved:
    """What memory.layer_activations adds up, and the statistics that checkpointing.statistics counts, with their itemsize.

    plan: tp, sequence_parallel, regather, recompute, flash, precision, seq and microbatch count. Without regather the inputs of
    column-parallel layers stay whole: 4sbh(1 − 1/t) more. Raises ValueError where plan and shape do not fit.
    """
    memory.layer_activations(shape, plan, moe)  # raises
    statistics = checkpointing.statistics(shape, plan, itemsize) if plan.recompute != "full" else 0
    return Saved(*kept.parts(shape, plan, moe), statistics)


class Parameters(NamedTuple):
    """Of one layer on one rank, in elements. cut: slices that no other rank has; copied: key/value heads that other ranks have
    too; whole: what all have, the norms and the biases of row-parallel layers, which are added once."""

    cut: int
    copied: int
    whole: int

    @property
    def total(self) -> int:
        return sum(self)


def parameters(shape: ModelShape, t: int) -> Parameters:
    """What a rank holds of a layer. With more ranks than key/value heads, t/g of them have a copy of one each.

    Raises ValueError for a shape that t cannot share evenly, with experts or with latent attention.
    """
    _fits(shape, t)
    both, head = shape.kv_heads * _key_value(shape), _key_value(shape)
    rows = 2 * shape.hidden * shape.bias
    others = shape.attention_parameters + shape.mlp_parameters - rows - both
    copied = head if t > shape.kv_heads else 0
    return Parameters(others // t + (0 if copied else both // t), copied, shape.norm_parameters + rows)


def _key_value(shape: ModelShape) -> int:
    """Parameters of one key head and its value head."""
    return 2 * shape.head_size * (shape.hidden + (shape.bias or shape.qkv_bias))


class Partial(NamedTuple):
    """Elements of one rank whose gradient is only a part after backward. sequence: to be summed over all ranks, each of which
    has seen its own tokens only; copies: over the ranks that have the same key/value head."""

    sequence: int
    copies: int


def partial_gradients(shape: ModelShape, t: int, sequence_parallel: bool = False) -> Partial:
    """Of the whole model: with sequence parallelism norms, biases of row-parallel layers and learned positions; key/value heads
    with copies. Raises ValueError as parameters does. Source: arXiv 2205.05198, section 4.2.2."""
    each = parameters(shape, t)
    ends = (1 + shape.embedding_norm) * shape.final_norm_parameters + shape.positions * shape.hidden
    whole = shape.layers * each.whole + ends
    return Partial(whole if sequence_parallel and t > 1 else 0, shape.layers * each.copied)


def finish(
    shape: ModelShape, t: int, sequence_parallel: bool = False, itemsize: int = 2, copies_rank: int = 0, rank: int = 0
) -> Calls:
    """What sums the partial gradients, once a step: an all-reduce a group. itemsize: of a gradient's element; copies_rank:
    this rank's place among those with the same key/value head. Raises ValueError as parameters does."""
    sequence, copies = partial_gradients(shape, t, sequence_parallel)
    if shape.kv_heads == 1:  # all ranks have a copy: one group, and one message
        sequence, copies = sequence + copies, 0
    first = _call("all_reduce", sequence, itemsize, t, rank) if sequence else Calls()
    return first + (_call("all_reduce", copies, itemsize, t // shape.kv_heads, copies_rank) if copies else Calls())


def _fits(shape: ModelShape, t: int) -> None:
    checks.is_shape(shape)
    checks.whole(t=t)
    if left := uncut(shape, t):
        raise ValueError(left.replace("tp=", "t=", 1))
    if shape.experts or shape.latent:
        raise ValueError(f"{shape.name} has experts or latent attention: give a shape with plain attention and one MLP a layer")


def _check(tokens: int, hidden: int, t: int, sequence_parallel: bool, itemsize: int) -> None:
    checks.whole(tokens=tokens, hidden=hidden, t=t, itemsize=itemsize)
    if sequence_parallel and tokens % t:
        raise ValueError(f"tokens={tokens} on t={t} ranks with sequence parallelism: give a multiple of {t}")
