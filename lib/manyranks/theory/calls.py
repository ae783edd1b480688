"""Lists what a rank says to others, as collectives and messages: a function for each axis, all in one form.

tensor, context, experts and between_stages are of one micro-batch, data_parallel of a step. From a list follow bytes (counted)
and seconds (network.seconds).
"""

from collections.abc import Iterable
from typing import NamedTuple

from manyranks.theory import collectives
from manyranks.theory.architecture import ModelShape
from manyranks.theory.layer import sent_bytes
from manyranks.theory.plan import LayerPlan
from manyranks.theory.states import SentRow

HALF, SUMS = 2, 4  # bytes: of an activation that travels, and of a gradient that ranks sum up
# When a call is made. In backward some overlap with computing a weight's gradient, and some gather again what forward has
# gathered, which overlaps with computing an input's gradient.
FORWARD, BACKWARD, WITH_WEIGHT, REGATHER = "forward", "backward", "with weight", "regather"


class Call(NamedTuple):
    """A collective of a group, or a message to another member.

    group: "tp"; "etp", the ranks that cut an expert; "cp"; "ep"; "pp"; of data parallelism "data", or "shards" and "replicas"
    op: of collectives, or "send"
    elements: as collectives counts them, of a message its own
    itemsize: bytes of an element
    when: see FORWARD
    times: how often
    far: elements of an all-to-all that leave the node, where ranks don't all get as much; `elements` are those that stay
    hop: of a ring of messages, the block under which it travels
    """

    group: str
    op: str
    elements: float
    itemsize: int = HALF
    when: str = FORWARD
    times: float = 1
    far: float | None = None
    hop: int | None = None

    @property
    def bytes(self) -> float:
        return self.itemsize * self.elements


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

    def __mul__(self, times: int) -> "Calls":
        return times * self


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

    def __mul__(self, times: int) -> "Passes":
        return times * self


def counted(calls: Iterable[Call], n: int, rank: int = 0) -> Passes:
    """Counts these calls of a group of n, and the bytes that the rank at this place of it sends; one rank says nothing.

    elements are whole numbers here. The place counts where n does not divide the tensor; ValueError if it is none.
    """
    found = Passes()
    for call in calls:
        if rank not in range(n):
            raise ValueError(f"rank={rank!r} of {n} ranks: give 0 to {n - 1}")
        if n == 1:
            break
        sent = call.bytes if call.op == "send" else collectives.sent_bytes(call.op, call.elements, call.itemsize, n)[rank]
        one = call.times * Calls(**{call.op: 1}, bytes=sent)
        found += Passes(forward=one) if call.when == FORWARD else Passes(backward=one)
    return found


def tensor(shape: ModelShape, plan: LayerPlan, part: str, imbalance: float = 1.0) -> list[Call]:
    """Lists what tensor and sequence parallelism send for one micro-batch.

    part: "dense" or "moe", a layer; "embedding"; "head", without the loss, which sends a few bytes per token more
    imbalance: copies that come to a rank's experts ÷ what would come if loads were balanced

    The etp ranks that cut an expert gather the rows that came for it, and sum its results; with etp = 1 they need not. Shared
    experts, which tp cuts, have another f and g: they read the rank's rows, not those that came for its experts.
    Sources: arXiv 2205.05198, sections 4.2.1 and 4.2.2; Megatron-LM, megatron/core/transformer/moe/shared_experts.py.
    """
    elements, options = plan.rank_tokens * shape.hidden, (plan.sequence_parallel, plan.regather)
    if part in ("head", "embedding"):
        return (column_parallel if part == "head" else row_parallel)(elements, *options)
    blocks, found = 1 if shape.parallel_layers else 2, []
    if part == "moe":
        blocks -= 1
        rows = shape.hidden * plan.expert_tokens
        found += [one._replace(group="etp", times=imbalance * shape.top_k) for one in block(rows, *options)]
        found += block(elements, *options) if shape.shared_experts else []
    return found + [one._replace(times=blocks) for one in block(elements, *options)]


def column_parallel(elements: float, sequence_parallel: bool, regather: bool = True, itemsize: int = HALF) -> list[Call]:
    """Lists the calls of f. In backward a sum overlaps with the weight's gradient, a repeated gather with the input's."""
    if not sequence_parallel:
        return [Call("tp", "all_reduce", elements, itemsize, WITH_WEIGHT)]
    found = [Call("tp", "all_gather", elements, itemsize), Call("tp", "reduce_scatter", elements, itemsize, WITH_WEIGHT)]
    return found + ([found[0]._replace(when=REGATHER)] if regather else [])


def row_parallel(elements: float, sequence_parallel: bool, regather: bool = True, itemsize: int = HALF) -> list[Call]:
    """Lists the calls of g, whatever regather says."""
    if not sequence_parallel:
        return [Call("tp", "all_reduce", elements, itemsize)]
    gather = Call("tp", "all_gather", elements, itemsize, BACKWARD)
    return [gather._replace(op="reduce_scatter", when=FORWARD), gather]


def block(elements: float, sequence_parallel: bool, regather: bool = True, itemsize: int = HALF) -> list[Call]:
    """Lists the calls of a column-parallel layer and the row-parallel one after it."""
    options = elements, sequence_parallel, regather, itemsize
    return column_parallel(*options) + row_parallel(*options)


def attention(
    variant: str, n: int, queries: float, block: float, read: float, itemsize: int, sums: int, hops: int | None = None
) -> list[Call]:
    """Lists the calls of one layer's attention on n ranks.

    queries: numbers of a rank's queries, and of its output
    block: numbers of the keys and values that travel from rank to rank
    read: numbers of the keys, and of the values, that Ulysses sends, copies for ranks that share a head among them
    itemsize: bytes of all these
    sums: bytes of a gradient that is summed on its way
    hops: that a ring makes; by default N − 1

    A ring: while a rank computes on its own block, the next one travels already. From the second block on, the
    gradients that a rank finds for another's block travel under the block after it, and home after the last. Both make
    N − 1 messages. Sources: arXiv 2310.01889, section 3; Llama 3, arXiv 2407.21783, section 3.3.2 (all-gather); arXiv
    2309.14509, section 3 (Ulysses).
    """
    if n == 1:
        return []
    if variant == "ulysses":  # queries and the output, keys and values
        there = [Call("cp", "all_to_all", each, itemsize, times=2) for each in (queries, read)]
        return there + [call._replace(when=BACKWARD) for call in there]
    if variant == "all-gather":
        gather = Call("cp", "all_gather", n * block, itemsize)
        return [gather, gather._replace(when=BACKWARD), Call("cp", "reduce_scatter", n * block, sums, BACKWARD)]
    hops = range(n - 1 if hops is None else hops)
    keys = [Call("cp", "send", block, itemsize, hop=k) for k in hops]
    gradients = [Call("cp", "send", block, sums, BACKWARD, hop=k + 2) for k in hops]
    return keys + [call._replace(when=BACKWARD) for call in keys] + gradients


def context(shape: ModelShape, plan: LayerPlan) -> list[Call]:
    """Lists what a rank sends of one micro-batch in one layer, in 16 bits, and gradients' sums in 32.

    With latent attention the compressed keys and values travel.
    """
    T, t = plan.rank_tokens, plan.tp
    heads = shape.heads if plan.framework.repeats_keys else max(shape.kv_heads, t)
    block = shape.latent.kv_rank + shape.latent.rope_size if shape.latent else 2 * heads * shape.head_size / t
    read = T * (shape.head_size * max(shape.kv_heads, t * plan.cp)) / t  # copies, where there are more ranks
    return attention(plan.context, plan.cp, T * shape.query_size / t, T * block, read, HALF, SUMS)


def experts(shape: ModelShape, plan: LayerPlan, copies: tuple[float, float], imbalance: float = 1.0) -> list[Call]:
    """Lists a rank's calls of one micro-batch in one layer: tokens to their experts and back; backward gradients as well.

    With sequence parallelism each tensor-parallel rank sends its own T/t tokens. They leave in the recipe's bytes,
    results come back in 16 bits.

    copies: of a token, to other ranks of its node and to other nodes: expert.travel
    imbalance: copies that come to the fullest rank ÷ what would come under a balanced load: all wait for its messages,
        there and back; its node is taken to be as full as itself
    """
    if plan.ep == 1:
        return []
    row = imbalance * plan.split_tokens * shape.hidden
    own, far = (each * row for each in copies)
    sizes = sent_bytes(plan), HALF
    return [Call("ep", "all_to_all", own, size, when, far=far) for when in (FORWARD, BACKWARD) for size in sizes]


def between_stages(shape: ModelShape, plan: LayerPlan) -> list[Call]:
    """Lists the calls of one micro-batch from a stage to the next, one way: each tensor-parallel rank sends its share.

    Source: arXiv 2104.04473, section 4.1.
    """
    elements = plan.rank_tokens * shape.hidden
    whole = [] if plan.sequence_parallel else [Call("tp", "all_gather", elements)]
    return [Call("pp", "send", elements / plan.tp), *whole]


def data_parallel(row: SentRow) -> list[Call]:
    """Lists data parallelism's calls for one row, once: gradients are summed, and parameters gathered if they're sharded.

    Source: arXiv 1910.02054, sections 5 and 7; between replicas of the shards, arXiv 2304.11277, section 3.2.2.
    """
    elements, group, recipe, sharded = row
    if not sharded:
        return [Call("data", "all_reduce", elements, recipe.reduced, BACKWARD)]
    across = Call("replicas", "all_reduce", elements / group.shards, recipe.reduced, BACKWARD)
    gather = Call("shards", "all_gather", elements, recipe.parameters, FORWARD)
    return [Call("shards", "reduce_scatter", elements, recipe.reduced, BACKWARD), across, gather]
