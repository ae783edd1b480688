"""Bytes of model states that one rank of a composed run holds, padding and all: what parallel's held() finds there."""

from manyranks.theory import sharding
from manyranks.theory.architecture import ModelShape
from manyranks.theory.nd import holds
from manyranks.theory.nd.holds import At
from manyranks.theory.plan import Plan
from manyranks.theory.sharding import Holding


def of_rank(shape: ModelShape, plan: Plan, at: At = None) -> Holding:
    """Parameters, gradients, masters and AdamW's two moments of the rank at these coordinates, after backward.

    at: as Mesh.coordinates gives them, all 0 by default. Where plan.precision has less than 4 bytes a parameter, masters,
    moments and ZeRO-3's gradients have 4; AdamW's counts of steps have 4, one for each tensor. But for padding and counts it's
    what theory.memory counts, with experts whole on each tensor-parallel rank. Raises ValueError as holds.parts does.
    """
    size = plan.recipe.parameters
    wide = max(4, size)
    each = {"parameter": size, "gradient": size, "master": wide * (size < wide), "states": (wide, wide), "counter": 4}
    if plan.zero == 3 and size < wide:  # units are made of the masters
        each |= {"parameter": 0, "gradient": wide}
    if plan.zero == 0:
        tensors = [p.elements for part in holds.parts(shape, plan, at) for p in part.parameters]
        return sharding.held(tensors, 1, 0, **each)
    found = []
    for row in holds.rows(shape, plan, at, size):
        own = {"rank": holds.place(row, plan, at), "tensors": len(row.parameters)} if plan.zero == 3 else {}
        found.append(sharding.held([row.elements], row.shards, plan.zero, **each, **own))
    return Holding(*map(sum, zip(*found, strict=True)))
