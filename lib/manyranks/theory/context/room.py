"""The longest sequence that fits."""

from dataclasses import replace

from manyranks.theory import checks, memory
from manyranks.theory.activations import itemsize
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import holds, sends
from manyranks.theory.plan import Plan

LONGEST = 2**31  # tokens; beyond it nothing is searched


def longest(shape: ModelShape, plan: Plan, cluster: Cluster) -> int:
    """Tokens of the longest sequence with which a rank's peak fits its memory: a multiple of 2·c·t, as zigzag chunks and
    sequence parallelism need; 0 where none fits.

    plan: all but seq. The peak is memory.peak's, and the blocks of keys and values that one layer's attention has of others.
    Raises ValueError where plan and shape do not fit.
    """
    checks.is_cluster(cluster)
    checks.is_plan(plan)
    unit, room = 2 * plan.cp * plan.tp, cluster.accelerator.memory

    def fits(units: int) -> bool:
        longer = replace(plan, seq=units * unit)
        return memory.peak(shape, longer).total + of_others(shape, longer) <= room

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high * unit > LONGEST:
            raise ValueError(f"more than {LONGEST:,} tokens of {shape.name} fit: nothing is kept that grows with them")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def of_others(shape: ModelShape, plan: Plan) -> int:
    """Bytes of holds.buffers in one layer's backward; with latent attention the compressed keys and values travel."""
    each = 2 * max(1, shape.kv_heads // plan.tp) * shape.head_size
    if shape.latent:
        each = shape.latent.kv_rank + shape.latent.rope_size
    numbers, item = plan.rank_tokens * each, itemsize(plan)
    return holds.buffers(item * numbers, sends.gradient_size(item, None) * numbers, plan.cp, plan.context)
