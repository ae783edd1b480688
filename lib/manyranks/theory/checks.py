"""Errors for arguments of the wrong kind: what was given, and what is needed or how to get it."""

from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.plan import Plan


def is_shape(value: object) -> None:
    if not isinstance(value, ModelShape):
        raise ValueError(f"shape={value!r}: give a ModelShape, as theory.models['llama3-8b']")


def is_plan(value: object) -> None:
    if not isinstance(value, Plan):
        raise ValueError(f"plan={value!r}: give a Plan, as theory.Plan(dp=8, zero=3)")


def is_cluster(value: object) -> None:
    if not isinstance(value, Cluster):
        raise ValueError(f"cluster={value!r}: give a Cluster, as theory.clusters['h100-dgx']")


def whole(**sizes: int) -> None:
    """Raises ValueError, by name, for a size that is not a whole number from 1 up."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size!r}: must be a whole number, 1 or more")
