"""Which layers lie on which stage of a pipeline, and which stages on which rank."""

import functools
from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Layout, Plan


class Stage(NamedTuple):
    """Consecutive layers: how many with a dense and with a mixture-of-experts MLP, and what stands at the model's ends.

    mtp: multi-token-prediction modules, on the last stage: each one more layer and one more pass of the head.
    """

    dense: int = 0
    moe: int = 0
    embedding: int = 0
    head: int = 0
    mtp: int = 0

    @property
    def layers(self) -> int:
        return self.dense + self.moe


def of_rank(shape: ModelShape, plan: Plan) -> tuple[Stage, ...]:
    """For each pipeline rank, the sum of its stages. Raises ValueError where the plan does not fit the shape."""
    plan.check(shape)
    return dealt(shape, plan.layout)


@functools.lru_cache(maxsize=16384)
def dealt(shape: ModelShape, layout: Layout) -> tuple[Stage, ...]:
    """As of_rank, from Plan.layout alone."""
    each = deal(shape, layout.stages, layout.embedding_slots)
    own = [[each[s] for s in stages_of(rank, layout.pp, layout.stages, layout.schedule)] for rank in range(layout.pp)]
    return tuple(Stage(*map(sum, zip(*mine, strict=True))) for mine in own)


def stages_of(rank: int, p: int, stages: int, schedule: str) -> list[int]:
    """The stages of a rank: every p-th, or for a V there and back."""
    if schedule in ("zb-v", "dualpipe-v"):
        return [rank, 2 * p - 1 - rank]
    return list(range(rank, stages, p))


def deal(shape: ModelShape, stages: int, slots: bool = False) -> list[Stage]:
    """Layers dealt to stages in order, as evenly as possible; the first and the last stage get the fewer.

    slots: the embedding and the head take the place of a layer each. Raises ValueError for fewer layers (or slots) than stages.
    """
    total = shape.layers + (2 if slots else 0)
    if not 1 <= stages <= total:
        raise ValueError(f"stages={stages}: {shape.name} has {total} {'slots' if slots else 'layers'}, choose 1 to {total}")
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    larger = set(order[: total % stages])
    stages_in_order, first = [], 0
    for index in range(stages):
        ends = (index == 0, index == stages - 1)
        count = total // stages + (index in larger) - (sum(ends) if slots else 0)
        moe = sum(shape.is_moe(i) for i in range(first, first + count)) if shape.experts else 0
        stages_in_order.append(Stage(count - moe, moe, *map(int, ends), shape.mtp_depth if ends[1] else 0))
        first += count
    return stages_in_order
