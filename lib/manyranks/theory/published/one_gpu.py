"""Measurements of one H100 and one H200, for this course by benchmarks/one_gpu.py: attention, steps of a Llama, peaks.

The steps ran under FSDP2 on a group of one rank. A prediction for dp=1 knows nothing of the copies into and out of that group's
buffers: it is too short by them where a step has few tokens for many parameters.
"""

from typing import NamedTuple

from manyranks.theory import kernels, layer, memory, step, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, clusters
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import Plan

CHIPS = {"H100": "h100-dgx", "H200": "h200-dgx"}  # chip -> a cluster of it
_STACKS = {"flash-2": "torchtitan", "cudnn": "megatron-core"}  # a stack that takes this kernel
_MODEL = ("layers", "hidden", "ffn", "heads", "vocab", "kv_heads")


class Measurement(NamedTuple):
    """Seconds that kernels ran, of an attention's forward and backward or of a step's; or bytes that a step used at once."""

    table: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


class MeasuredStep(NamedTuple):
    """A Llama's step.

    seconds: that the kernels of forward and backward ran
    used: bytes, at most at once
    held: bytes that the allocator held for them
    """

    name: str
    shape: ModelShape
    plan: Plan
    seconds: float
    used: float
    held: float


def runs(chip: str) -> list[MeasuredStep]:
    """Lists the steps on a chip of CHIPS."""
    return [_run(row) for row in tables.rows(f"{chip.lower()}_steps")]


def mean_error(rows: list[Measurement]) -> float:
    """Mean of the errors' absolute values."""
    return sum(abs(row.error) for row in rows) / len(rows)


def attentions(chip: str, kernel: str) -> list[Measurement]:
    """Lists the runs of one kernel on a chip of CHIPS, "flash-2" or "cudnn", forward and backward."""
    found = tables.rows(f"{chip.lower()}_attention")
    return [_attention(row, clusters[CHIPS[chip]]) for row in found if row["kernel"] == kernel]


def steps(chip: str) -> list[Measurement]:
    """Forward and backward of a step."""
    cluster, found = clusters[CHIPS[chip]], []
    for run in runs(chip):
        found.append(Measurement("step", run.name, step.estimate(run.shape, run.plan, cluster).compute, run.seconds))
    return found


def peaks(chip: str) -> list[Measurement]:
    """Bytes that a step used at once, without what the allocator held on top of them."""
    found = []
    for run in runs(chip):
        used = memory.peak(run.shape, run.plan).total / (1 + run.plan.framework.reserved)
        found.append(Measurement("bytes", run.name, used, run.used))
    return found


def _attention(row: dict[str, str], cluster: Cluster) -> Measurement:
    batch, heads, seq, size = (int(row[name]) for name in ("batch", "heads", "seq", "head_size"))
    shape = ModelShape("one layer", 1, heads * size, heads * size, heads, 1)
    plan = Plan(seq=seq, batch=batch, microbatch=batch, stack=_STACKS[row["kernel"]])
    [forward] = layer.core(shape, plan, size, size)
    both = (forward, *layer.gradients(forward, plan))
    predicted = sum(kernels.seconds(kernel, cluster.accelerator, DEFAULT) for kernel in both)
    measured = 1e-6 * (float(row["forward_us"]) + float(row["backward_us"]))
    return Measurement(row["kernel"], f"{batch} × {heads} heads of {size}, {seq:,} tokens", predicted, measured)


def _run(row: dict[str, str]) -> MeasuredStep:
    layers, hidden, ffn, heads, vocab, kv_heads = (int(row[name]) for name in _MODEL)
    shape = ModelShape("Llama", layers, hidden, ffn, heads, vocab, kv_heads)
    stack = "pytorch" if row["compiled"] == "True" else "pytorch-eager"
    batch = int(row["microbatch"])
    plan = Plan(seq=int(row["seq"]), batch=batch, microbatch=batch, recompute=row["recompute"], stack=stack)
    name = f"{layers} × {hidden:,}, {batch} × {plan.seq:,} tokens, {plan.recompute} recomputed, {stack}"
    return MeasuredStep(name, shape, plan, 1e-3 * float(row["kernels_ms"]), float(row["allocated"]), float(row["reserved"]))
