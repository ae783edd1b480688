"""Errors for arguments of the wrong kind: what was given, and what is needed or how to get it."""

from manyranks.theory import names
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import Constants
from manyranks.theory.plan import Plan

whole, positive, not_negative = names.whole, names.positive, names.not_negative


def is_shape(value: object) -> None:
    if not isinstance(value, ModelShape):
        raise ValueError(f"shape={value!r}: give a ModelShape, as theory.models['llama3-8b']")


def is_plan(value: object) -> None:
    if not isinstance(value, Plan):
        raise ValueError(f"plan={value!r}: give a Plan, as theory.Plan(dp=8, zero=3)")


def is_cluster(value: object) -> None:
    if not isinstance(value, Cluster):
        raise ValueError(f"cluster={value!r}: give a Cluster, as theory.clusters['h100-dgx']")


def are_constants(value: object) -> None:
    if not isinstance(value, Constants) or not all(type(one) in (int, float) for one in value):
        raise ValueError(f"constants={value!r}: give kernels.Constants")
    if not (0 < value.matmul <= 1 and 0 < value.bandwidth <= 1 and value.overhead >= 0):
        raise ValueError(f"{value}: matmul and bandwidth are shares above 0 and up to 1, overhead is 0 s or more")


def has_8_bits(plan: Plan, cluster: Cluster) -> None:
    """Raises ValueError for a plan whose products are in 8 bits on a chip that does not multiply those."""
    chip = cluster.accelerator
    if plan.recipe.matmul == 1 and chip.flops_fp8 <= chip.flops:
        raise ValueError(f"precision={plan.precision!r} on {chip.name}, which has no products in 8 bits: say precision='bf16'")
