"""Stages of a pipeline: which layers lie on which stage, and which stages on which rank."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import V_SHAPED, Plan, StagePlan


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


@dataclass(frozen=True, eq=False, slots=True)
class Dealt:
    """A model's layers on the ranks of a pipeline; compute, states and activations all begin with it.

    ranks: for each pipeline rank, the sum of its stages
    parts: of each kind of rank, how often a micro-batch passes a "dense" layer, one with experts ("moe"), the "head" and the
        "embedding"
    firsts: of each kind the earliest rank, or under DualPipe all ranks
    names: of all parts
    """

    shape: ModelShape
    plan: StagePlan
    ranks: tuple[Stage, ...]
    parts: dict[Stage, tuple[tuple[int, str], ...]]
    firsts: tuple[int, ...]
    names: tuple[str, ...]


def of_ranks(shape: ModelShape, plan: Plan) -> tuple[Stage, ...]:
    """Returns, for each pipeline rank, the sum of its stages. Raises ValueError where the plan does not fit the shape."""
    plan.check(shape)
    return deal(shape, plan.stage_plan).ranks


@functools.lru_cache(maxsize=16384)
def deal(shape: ModelShape, plan: StagePlan) -> Dealt:
    """The layers of a shape, dealt as Plan.stage_plan says."""
    mtp = shape.mtp_depth if plan.schedule != "dualpipe" else 0  # which has both ends of the model on one rank
    each, p = deal_stages(shape, plan.stages, plan.embedding_slots, mtp), plan.pp
    own = [[each[s] for s in stages_of(rank, p, plan.stages, plan.schedule)] for rank in range(p)]
    ranks = tuple(Stage(*map(sum, zip(*mine, strict=True))) for mine in own)
    kinds = dict.fromkeys(ranks)
    firsts = range(p) if plan.schedule == "dualpipe" and p > 1 else (ranks.index(kind) for kind in kinds)
    passed = {kind: parts(shape, kind) for kind in kinds}
    names = tuple(sorted({name for own in passed.values() for _, name in own}))
    return Dealt(shape, plan, ranks, passed, tuple(firsts), names)


def parts(shape: ModelShape, stage: Stage) -> tuple[tuple[int, str], ...]:
    """Counts how often a micro-batch passes each part of a stage: see Dealt."""
    found = [(stage.dense, "dense"), (stage.moe, "moe"), (stage.head + stage.mtp, "head")]
    if stage.mtp:
        found.append((stage.mtp, "moe" if shape.is_moe(shape.layers - 1) else "dense"))
    return tuple(part for part in (*found, (stage.embedding, "embedding")) if part[0])


@functools.lru_cache(maxsize=1024)
def parts_of_model(shape: ModelShape) -> tuple[tuple[int, str], ...]:
    """Counts how often a micro-batch passes each part on its way through the whole model."""
    return parts(shape, deal_stages(shape, 1)[0])


def stages_of(rank: int, p: int, stages: int, schedule: str) -> list[int]:
    """The stages of a rank: every p-th, or for a V there and back."""
    if schedule in V_SHAPED:
        return [rank, 2 * p - 1 - rank]
    return list(range(rank, stages, p))


def deal_stages(shape: ModelShape, stages: int, slots: bool = False, mtp: int = 0) -> list[Stage]:
    """Deals layers to stages in order, as evenly as possible; the first and the last stage get the fewer.

    slots: the embedding and the head take the place of a layer each
    mtp: multi-token-prediction modules, which take another each, and then the embedding and the head do, too, if a stage has
        room for them: Megatron-Bridge's layouts of DeepSeek-V3

    Raises ValueError for fewer layers (or slots) than stages.
    """
    mtp = mtp if stages > 1 and (shape.layers + 2 + mtp) // stages > mtp else 0
    slots = slots or mtp > 0
    total = shape.layers + (2 if slots else 0) + mtp
    if not 1 <= stages <= total:
        raise ValueError(f"stages={stages}: {shape.name} has {total} {'slots' if slots else 'layers'}, choose 1 to {total}")
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    larger = set(order[: total % stages])
    stages_in_order, first = [], 0
    for index in range(stages):
        ends = (index == 0, index == stages - 1)
        count = total // stages + (index in larger) - (sum(ends) if slots else 0) - mtp * ends[1]
        moe = sum(shape.is_moe(i) for i in range(first, first + count)) if shape.experts else 0
        stages_in_order.append(Stage(count - moe, moe, *map(int, ends), shape.mtp_depth if ends[1] else 0))
        first += count
    return stages_in_order
