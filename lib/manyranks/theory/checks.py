"""Errors for arguments of the wrong kind: what was given, and what is needed or how to get it."""

from manyranks.theory import names
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.hybrid import HybridShape
from manyranks.theory.kernels import Constants
from manyranks.theory.plan import Plan

whole, positive, not_negative = names.whole, names.positive, names.not_negative
_KINDS = {
    "shape": (ModelShape, "a ModelShape, as theory.models['llama3-8b']"),
    "plan": (Plan, "a Plan, as theory.Plan(dp=8, zero=3)"),
    "cluster": (Cluster, "a Cluster, as theory.clusters['h100-dgx']"),
}


def kinds(**values: object) -> None:
    """Raises ValueError, by name, for a shape, plan or cluster that is none."""
    for name, value in values.items():
        if isinstance(value, HybridShape):
            raise ValueError(f"{name}={value.name!r}: only a hybrid's parameters are counted; give {_KINDS['shape'][1]}")
        if not isinstance(value, _KINDS[name][0]):
            raise ValueError(f"{name}={value!r}: give {_KINDS[name][1]}")


def are_constants(value: object) -> None:
    if not isinstance(value, Constants) or not all(type(one) in (int, float) for one in value):
        raise ValueError(f"constants={value!r}: give kernels.Constants")
    if not (0 < value.matmul <= 1 and 0 < value.bandwidth <= 1 and value.overhead >= 0):
        raise ValueError(f"{value}: matmul and bandwidth are shares above 0 and up to 1, overhead is 0 s or more")


def check_precision(plan: Plan, cluster: Cluster) -> None:
    """Raises ValueError for a plan whose products are in 8 or 4 bits on a chip that does not multiply those."""
    chip = cluster.accelerator
    if plan.recipe.quantized and chip.flops_fp8 <= chip.flops:
        raise ValueError(f"precision={plan.precision!r} on {chip.name}, which has no products in 8 bits: say precision='bf16'")
    if plan.recipe.block and not chip.scaled:
        raise ValueError(f"precision={plan.precision!r} on {chip.name}, whose products read no scales of blocks: say 'fp8'")
