"""Errors for arguments of the wrong kind: what was given, and how to get what is needed."""

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
