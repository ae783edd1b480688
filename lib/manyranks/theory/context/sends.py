"""The messages of one rank for one layer's attention, forward and backward: ring, all-gather, Ulysses, ring × Ulysses.

calls.attention lists them for all variants. Functions here take the sizes of the whole attention: b sequences of s tokens, a
query heads, g key/value heads of D numbers, on N ranks that have s/N tokens each. Bytes are what a rank sends, in the order of
theory.calls.Calls. Key/value gradients travel in the precision of their sums, `accumulating` bytes a number: by default 4, or 8
where the inputs have 8. Transformer Engine's ring sends them in the keys' own precision (p2p_comm_buffers in its
context_parallel.py): accumulating=2.
"""

from typing import NamedTuple

from manyranks.theory import checks, tensor
from manyranks.theory.calls import BACKWARD, Call, Passes, attention, counted
from manyranks.theory.plan import multiples


class Sizes(NamedTuple):
    """The sizes of the whole attention.

    n: ranks that share the sequence
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_size: int
    n: int

    @property
    def shard(self) -> int:
        """Tokens of one rank, all sequences of the batch together."""
        return self.batch * self.seq // self.n

    @property
    def queries(self) -> int:
        """Numbers of one rank's queries, and of its output."""
        return self.shard * self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Numbers of one rank's keys; its values are as many."""
        return self.shard * self.kv_heads * self.head_size


def sizes_of(batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int) -> Sizes:
    """Checked. Raises ValueError for sizes below 1, for key/value heads that do not divide the heads, and for a sequence that
    the ranks cannot share."""
    found = Sizes(batch, seq, heads, kv_heads, head_size, n)
    checks.whole(**found._asdict())
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}: choose a divisor of {heads}")
    if seq % n:
        raise ValueError(f"seq={seq} on n={n} ranks: give {multiples(seq, n)}")
    return found


def ring(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    n: int,
    itemsize: int = 2,
    accumulating: int | None = None,
    hops: int | None = None,
) -> Passes:
    """Keys and values go round in N − 1 messages of 2·b·g·(s/N)·D numbers; in backward again, and their gradients with them.

    itemsize: of inputs and output. hops: messages, where a window leaves fewer than N − 1 to do: len(stops(…)) − 1. Raises
    ValueError as sizes_of does, and for hops that are not 0 to N − 1.
    """
    if hops not in (None, *range(n)):
        raise ValueError(f"hops={hops!r} on n={n} ranks: give 0 to {n - 1}")
    return _counted("ring", sizes_of(batch, seq, heads, kv_heads, head_size, n), kv_heads, itemsize, accumulating, hops)


def latent_ring(
    batch: int, seq: int, kv_rank: int, rope_size: int, n: int, itemsize: int = 2, accumulating: int | None = None
) -> Passes:
    """The ring of multi-head latent attention: b·(s/N)·(kv_rank + rope_size) numbers travel, whatever the heads; as in ring.

    Raises ValueError as sizes_of does.
    """
    one, sums = sizes_of(batch, seq, 1, 1, kv_rank + rope_size, n), gradient_size(itemsize, accumulating)
    return counted(attention("ring", n, 0, one.keys, 0, itemsize, sums), n)


def states(batch: int, heads: int, key_size: int, value_size: int, n: int, itemsize: int = 4) -> Passes:
    """Linear attention's all-gathers of states and their decays, b·a·(D·V + 1) numbers of each rank, and of states' gradients
    in backward: no sequence length is in it. Raises ValueError for sizes below 1. Source: arXiv 2502.07563."""
    checks.whole(batch=batch, heads=heads, key_size=key_size, value_size=value_size, n=n, itemsize=itemsize)
    state, decay = batch * heads * key_size * value_size, batch * heads
    gather = Call("cp", "all_gather", n * (state + decay), itemsize)
    return counted([gather, gather._replace(elements=n * state, when=BACKWARD)], n)


def all_gather(
    batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int, itemsize: int = 2, accumulating: int | None = None
) -> Passes:
    """Keys and values of all tokens are gathered in one collective, again in backward, and their gradients reduce-scattered:
    the bytes of the ring. Raises ValueError as sizes_of does."""
    return _counted("all-gather", sizes_of(batch, seq, heads, kv_heads, head_size, n), kv_heads, itemsize, accumulating)


def ulysses(
    batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int, itemsize: int = 2, accumulating: int | None = None
) -> Passes:
    """An all-to-all each of queries, keys, values and output, backward of their gradients: 4·(s/N)·h·(N − 1)/N numbers each way
    with as many key/value heads as heads.

    With more ranks than key/value heads each rank gets a copy of the one that its query heads read. accumulating: not
    used, for no gradient is summed on the way. Raises ValueError as sizes_of does, for heads that N does not divide,
    and where N neither divides the key/value heads nor is a multiple of them.
    """
    one = sizes_of(batch, seq, heads, kv_heads, head_size, n)
    return _counted("ulysses", one, n * read_heads(heads, kv_heads, n), itemsize, None)


def _counted(variant: str, one: Sizes, read: int, itemsize: int, accumulating: int | None, hops: int | None = None) -> Passes:
    """Counts the bytes of a variant's messages.

    read: key/value heads that a rank sends in Ulysses
    """
    sums, read_elements = gradient_size(itemsize, accumulating), one.shard * read * one.head_size
    return counted(attention(variant, one.n, one.queries, 2 * one.keys, read_elements, itemsize, sums, hops), one.n)


def read_heads(heads: int, kv_heads: int, n: int) -> int:
    """Key/value heads that one rank of Ulysses reads: g/N, or 1 where there are more ranks.

    Raises ValueError for heads that N does not divide, and where neither of g and N divides the other: some ranks would then
    need parts of two heads.
    """
    if heads % n:
        raise ValueError(f"Ulysses needs n={n} to divide heads={heads}: choose a divisor of {heads}")
    if kv_heads % n and n % kv_heads:
        raise ValueError(f"Ulysses needs one of n={n} and kv_heads={kv_heads} to divide the other")
    return max(1, kv_heads // n)


def ring_ulysses(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    ring_ranks: int,
    ulysses_ranks: int,
    itemsize: int = 2,
    accumulating: int | None = None,
) -> Passes:
    """Ulysses inside groups of u ranks; rings between the r = N/u groups, with a/u heads and s/r tokens per rank.

    Raises ValueError as ulysses does. Source: arXiv 2405.07719, section 3.
    """
    sizes_of(batch, seq, heads, kv_heads, head_size, ring_ranks * ulysses_ranks)
    inner = ulysses(batch, seq // ring_ranks, heads, kv_heads, head_size, ulysses_ranks, itemsize)
    read = read_heads(heads, kv_heads, ulysses_ranks)
    outer = ring(batch, seq, heads // ulysses_ranks, read, head_size, ring_ranks, itemsize, accumulating)
    return inner + outer


def tensor_parallel(batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int, itemsize: int = 2) -> Passes:
    """Counts Megatron's tensor and sequence parallelism on as many ranks: theory.tensor.layer of a layer with h = a·D.

    kv_heads: not used. Raises ValueError as sizes_of and theory.tensor.layer do.
    """
    sizes_of(batch, seq, heads, kv_heads, head_size, n)
    return tensor.layer(batch * seq, heads * head_size, n, sequence_parallel=True, itemsize=itemsize)


VARIANTS = {"ring": ring, "all-gather": all_gather, "ulysses": ulysses}


def gradient_size(itemsize: int, accumulating: int | None) -> int:
    """Bytes of a number in a sum of gradients: at least 4, unless another size is given."""
    checks.whole(itemsize=itemsize, **({} if accumulating is None else {"accumulating": accumulating}))
    return accumulating or max(4, itemsize)
