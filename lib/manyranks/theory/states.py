"""Parameters of a rank, the bytes of model states by ZeRO stage and precision, and the rows that these travel in.

Where ranks differ (first and last stage, uneven stages), the numbers are for the rank that needs the most.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import checks, stages
from manyranks.theory.architecture import ModelShape, Tensor
from manyranks.theory.plan import Plan, Recipe, StagePlan
from manyranks.theory.stages import Dealt, Stage

BUCKET = 25 * 2**20  # bytes that close a bucket: PyTorch DDP's default bucket_cap_mb; arXiv 2006.15704, section 3.2.3


class ModelStates(NamedTuple):
    """Bytes on one accelerator, and what offloading has moved to its host's memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the accelerator."""
        return self.parameters + self.gradients + self.optimizer


class Held(NamedTuple):
    """Parameters of one rank before ZeRO shards them: those that all data-parallel ranks have, and its routed experts."""

    dense: float
    experts: float


def model_states(shape: ModelShape | float, plan: Plan) -> ModelStates:
    """Parameters, gradients and optimizer states of a rank, in bytes.

    shape: or a number of parameters, split evenly over tp·pp. Source: arXiv 1910.02054, sections 3.1 and 5; with the recipe of
    16 bytes, 4Φ + 12Φ/N, 2Φ + 14Φ/N and 16Φ/N for stages 1, 2 and 3. Raises ValueError where plan and shape do not fit.
    """
    each = [_offloaded(states_of(held, plan), plan.offload) for held in set(rank_parameters(shape, plan))]
    return max(each, key=lambda states: (states.total, states.host))


def _offloaded(states: ModelStates, offload: str) -> ModelStates:
    if offload == "none":
        return states
    if offload == "optimizer":
        return states._replace(optimizer=0, host=states.optimizer)
    return ModelStates(0, 0, 0, host=states.total)


def rank_parameters(shape: ModelShape | float, plan: Plan) -> tuple[Held, ...]:
    """Counts, for each pipeline rank, the parameters that one of its tensor-parallel ranks holds before ZeRO.

    A tied embedding is held by the first and by the last rank. Whole on every tensor-parallel rank: norms, routers, the gate of
    shared experts, biases of row-parallel layers, learned positions, and what latent attention compresses with. With fewer
    key/value heads than tensor-parallel ranks, each of these has one of them.

    This is Megatron-LM's layout: etp cuts routed experts, and tp cuts shared ones. In this course's own code every
    tensor-parallel rank has both whole. For routed experts etp=1 says so; nd.of_rank counts all that such a rank holds.
    Source: Megatron-LM, megatron/core/transformer/moe/README.md and shared_experts.py.
    """
    checks.kinds(plan=plan)
    if isinstance(shape, ModelShape):
        plan.check(shape)
        return hold(stages.deal(shape, plan.stage_plan)).ranks
    if not isinstance(shape, int | float) or not 0 <= shape < math.inf:
        raise ValueError(f"shape={shape!r}: give a ModelShape, as models['llama3-8b'], or a number of parameters, 0 or more")
    if (plan.ep, plan.etp) != (1, None):
        raise ValueError(f"ep={plan.ep}, etp={plan.etp}: a number of parameters says nothing of experts; give a ModelShape")
    return (Held(shape / (plan.tp * plan.pp), 0.0),) * plan.pp


@dataclass(frozen=True, eq=False, slots=True)
class RankParameters:
    """The parameters of each pipeline rank before ZeRO shards them, and each kind of them once."""

    ranks: tuple[Held, ...]
    kinds: tuple[Held, ...]


@functools.lru_cache(maxsize=16384)
def hold(dealt: Dealt) -> RankParameters:
    """Counts as rank_parameters does, of stages that are dealt."""
    shape, plan = dealt.shape, dealt.plan
    kinds = {stage: of_stage(shape, plan, stage) for stage in dealt.parts}
    held = [kinds[stage] for stage in dealt.ranks]
    if plan.schedule == "dualpipe" and plan.pp > 1:  # each rank has a copy of the stage at the other end, too
        held = [Held(a.dense + b.dense, a.experts + b.experts) for a, b in zip(held, reversed(held), strict=True)]
    return RankParameters(tuple(held), tuple(dict.fromkeys(held)))


@functools.lru_cache(maxsize=16384)
def of_stage(shape: ModelShape, plan: StagePlan, stage: Stage) -> Held:
    """Parameters of a rank with this stage."""
    t, etp, vocabulary = plan.tp, plan.expert_tp, [Tensor(shape.vocab * shape.hidden)]
    head = shape.final_norm + (vocabulary if shape.tied and not stage.embedding else shape.head)
    parts = [(stage.layers, shape.attention + shape.norms), (stage.dense, shape.mlp), (stage.moe, shape.router + shape.shared)]
    cut, whole = _shares([*parts, (stage.embedding, shape.embedding), (stage.head, head)], shape, t)
    moe = stage.moe
    if stage.mtp:  # all of it counts as cut
        with_experts = stage.mtp if shape.is_moe(shape.layers - 1) else 0
        moe += with_experts
        cut += shape.mtp_parameters - with_experts * shape.experts * shape.expert_parameters
    expert, of_each = _shares([(1, shape.expert)], shape, etp)
    experts = moe * shape.experts // plan.ep
    return Held(cut / t + whole, experts * (expert / etp + of_each) if experts else 0.0)


def _shares(parts: list[tuple[int, list[Tensor]]], shape: ModelShape, t: int) -> tuple[int, int]:
    """Parameters that t ranks share, with a copy counted each time; and parameters that each rank has whole.

    parts: how often, and the tensors
    """
    found = {"slices": 0, "heads": 0, "whole": 0}
    for often, tensors in parts:
        for tensor in tensors:
            found[tensor.cut] += often * tensor.elements
    return found["slices"] + found["heads"] * max(t, shape.kv_heads) // shape.kv_heads, found["whole"]


def states_of(held: Held, plan: Plan) -> ModelStates:
    """Bytes of a rank that holds these parameters before ZeRO: the dense ones are sharded over all data-parallel ranks, an
    expert's over those that have the same part of it."""
    return _states(held, plan.zero, plan.shards, plan.expert_shards, plan.stored)


def least(held: Held, plan: Plan) -> int:
    """Bytes of the states that a rank with these parameters has on its accelerator at any time of a step."""
    states = _offloaded(states_of(held, plan), plan.offload)
    return states.total - (states.gradients if plan.framework.fp32_shards else 0)  # which makes gradients in backward only


def optimizer_bytes(held: RankParameters, plan: Plan) -> int:
    """Counts the bytes of the optimizer's states on the rank that has most of them."""
    return max(states_of(each, plan).optimizer for each in held.kinds)


@functools.lru_cache(maxsize=16384)
def _states(held: Held, zero: int, shards: int, expert_shards: int, recipe: Recipe) -> ModelStates:
    whole = math.ceil(held.dense) + math.ceil(held.experts)
    part = math.ceil(held.dense / shards) + math.ceil(held.experts / expert_shards)
    return ModelStates(
        recipe.parameters * (part if zero == 3 else whole),
        recipe.gradients * (part if zero >= 2 else whole),
        recipe.optimizer * (part if zero >= 1 else whole),
    )


def on_ranks(dealt: Dealt, plan: Plan) -> list[tuple[ModelStates, int]]:
    """Returns the states of the ranks in dealt.firsts, and at most how many bytes more are gathered or not yet reduced.

    With ZeRO-3 or parameters in the host's memory, gathered parameters: two units (one in use, one under way), or all where
    forward's are kept; from ZeRO-2 on the whole gradients of a unit.
    """
    held, away, recipe = hold(dealt).ranks, plan.offload == "all", plan.recipe
    found = [_offloaded(states_of(held[rank], plan), plan.offload) for rank in dealt.firsts]
    if not away and (plan.zero < 2 or plan.shards == plan.expert_shards == 1):
        return [(each, 0) for each in found]
    kept = plan.zero == 3 and not plan.reshard_after_forward
    whole_gradients = plan.pp > 1 and plan.framework.reduce_once
    gathered = []
    for rank in dealt.firsts:
        mirrored = dealt.ranks[-1 - rank].layers if plan.schedule == "dualpipe" and plan.pp > 1 else 0
        whole = sum(held[rank])
        unit = whole / max(1, dealt.ranks[rank].layers + mirrored)
        parameters = 0.0 if plan.zero < 3 and not away else whole if kept else min(2 * unit, whole)
        gathered.append(round(recipe.parameters * parameters + recipe.gradients * (whole if whole_gradients else unit)))
    return list(zip(found, gathered, strict=True))


class Group(NamedTuple):
    """The ranks with a copy of the same parameters: `shards` of them share one copy of the states; stride between them."""

    ranks: int
    shards: int
    stride: int

    @property
    def replicas(self) -> int:
        return self.ranks // self.shards


def groups(plan: Plan) -> tuple[Group, Group]:
    """The groups of the parameters that all data-parallel ranks have, and of an expert's (edp ranks: see Plan.etp)."""
    own = Group(plan.dp * plan.cp, plan.shards, plan.tp)
    return own, Group(plan.expert_ranks, plan.expert_shards, plan.expert_tp * plan.ep)


class SentRow(NamedTuple):
    """Elements that travel together, between ranks with a copy of them.

    sharded: whether their states are
    """

    elements: float
    group: Group
    recipe: Recipe
    sharded: bool

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Ranks and their stride, as LayerPlan.groups has them."""
        ranks, shards, stride = self.group
        if not self.sharded:
            return {"data": (ranks, stride)}
        return {"shards": (shards, stride), "replicas": (self.group.replicas, stride * shards)}


@dataclass(frozen=True, eq=False, slots=True)
class SentRows:
    """Rows that ranks send gradients and gather parameters in: for each kind of rank equal rows of the parameters that all
    data-parallel ranks have ("dense"), and of routed "experts".

    units: how many of each a rank has
    """

    items: dict[tuple[Held, str], SentRow]
    units: dict[Held, int]


def rows(held: RankParameters, shape: ModelShape, plan: Plan) -> SentRows:
    """Returns the rows of these ranks: at most one bucket per layer, none below BUCKET bytes unless it is the only one;
    for ZeRO-3 units of one layer."""
    return _rows(held, plan.zero == 3, plan.zero > 0, max(1, shape.layers // plan.pp), plan.recipe, groups(plan))


@functools.lru_cache(maxsize=65536)
def _rows(
    held: RankParameters, in_units: bool, sharded: bool, layers: int, recipe: Recipe, of_each: tuple[Group, Group]
) -> SentRows:
    items, units = {}, {}
    for kind in held.kinds:
        units[kind] = often = layers if in_units else max(1, min(layers, int(sum(kind) * recipe.reduced / BUCKET)))
        each = zip(Held._fields, kind, of_each, strict=True)
        items |= {(kind, name): SentRow(size / often, group, recipe, sharded) for name, size, group in each if size}
    return SentRows(items, units)
