"""Whether a ring's messages hide behind its attention: seconds of a hop, and the least shard with which they do.

Source: arXiv 2310.01889, section 3: a block of c tokens takes 4·c²·a·D FLOPs, and 4·c·g·D bytes of keys and values travel under
it in 16 bits, so that c ≥ R/β with as many key/value heads as heads. R is the FLOP/s, β the bytes/s of one rank's messages.
"""

from manyranks.theory import checks, kernels, network
from manyranks.theory.calls import BACKWARD, FORWARD
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import masks, sends
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.layer import FLASH_BACKWARD, Kernel
from manyranks.theory.network import Hops


def least_shard(
    rate: float,
    bandwidth: float,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = False,
    layout: str = "zigzag",
    backward: bool = False,
    itemsize: int = 2,
    accumulating: int | None = None,
) -> float:
    """Tokens of a rank, s/N, from which a hop computes for as long as its message travels, of a long sequence.

    Full attention, forward, 16 bits: (R/β)·(g/a). A causal mask lets half of a hop through, zigzag or striped, which doubles
    it; contiguous chunks are whole on the ranks that do not idle. Backward computes 5 products instead of 2 and moves keys and
    values, and their gradients in `accumulating` bytes. Raises ValueError for a rate or a bandwidth that is not above 0.
    """
    if not (rate > 0 and bandwidth > 0):
        raise ValueError(f"rate={rate}, bandwidth={bandwidth}: both must be above 0")
    one = sends.sizes_of(1, 2, heads, kv_heads, 1, 2)
    masks.chunk_length(4, 2, layout)  # raises
    flops = masks.flops(1, 1, one.heads, 1, backward) / (2 if causal and layout != "contiguous" else 1)
    moved = 2 * one.kv_heads * (itemsize + (sends.gradient_size(itemsize, accumulating) if backward else 0))
    return rate / bandwidth * moved / flops


def hops(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    n: int,
    cluster: Cluster,
    layout: str = "zigzag",
    causal: bool = True,
    tile: int | None = 1,
    backward: bool = False,
    stride: int = 1,
    itemsize: int = 2,
    accumulating: int | None = None,
    constants: Constants = DEFAULT,
) -> Hops:
    """Ring attention, forward or backward, on ranks that are each `stride` after the one before.

    compute: of the slowest rank in each hop, which is one kernel of flash attention. A message goes from one rank to the next
    by that rank's own share of the slowest link on the way. Raises ValueError as work and ring do, and for a group that the
    cluster has no room for.
    """
    checks.is_cluster(cluster)
    one = sends.sizes_of(batch, seq, heads, kv_heads, head_size, n)
    counts = masks.in_step(masks.work(seq, n, layout, causal, tile)).hops
    compute = {scores: _kernel_seconds(one, scores, backward, itemsize, cluster, constants) for scores in set(counts)}
    sums, route = sends.gradient_size(itemsize, accumulating), cluster.route(n, stride)
    sent = sends.messages("ring", n, one.queries, 2 * one.keys, one.keys, itemsize, sums)
    sent = [call for call in sent if call.when == (BACKWARD if backward else FORWARD)]
    return Hops(tuple(compute[scores] for scores in counts), network.hops(sent, route, constants))


def _kernel_seconds(
    one: sends.Sizes, scores: int, backward: bool, itemsize: int, cluster: Cluster, constants: Constants
) -> float:
    flops = masks.flops(scores, one.batch, one.heads, one.head_size)
    rate = "fp32" if itemsize >= 4 else "bf16"
    kernel = Kernel("core", flops, 2 * itemsize * (one.queries + one.keys), rate, specials=one.batch * one.heads * scores)
    if backward:
        kernel = kernel._replace(flops=FLASH_BACKWARD * flops, bytes=2 * kernel.bytes, specials=2 * kernel.specials)
    return kernels.seconds(kernel, cluster.accelerator, constants, cluster.reserved)
