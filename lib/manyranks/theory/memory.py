"""Bytes that one rank holds: model states by ZeRO stage and precision, activations by recomputation and parallelism, the peak.

Where ranks differ (first and last stage, uneven stages), the numbers are those of the rank that needs the most.
"""

import functools
import math
from typing import NamedTuple

from manyranks.theory import checks, pipeline, stages
from manyranks.theory.architecture import ModelShape
from manyranks.theory.kept import itemsize, of_layer, tokens
from manyranks.theory.plan import Layout, Local, Plan, Recipe
from manyranks.theory.stages import Stage


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


class Peak(NamedTuple):
    """Bytes at the moment when one rank holds the most."""

    states: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


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
    """For each pipeline rank, the parameters that one of its tensor-parallel ranks holds before ZeRO.

    A tied embedding is held by the first and by the last rank. Whole on every tensor-parallel rank: norms, routers, the gate of
    shared experts, biases of row-parallel layers, learned positions, and what latent attention compresses with. With fewer
    key/value heads than tensor-parallel ranks, each of these has one of them.

    This is Megatron-LM's layout: etp cuts routed experts, and tp cuts shared ones. In this course's own code every
    tensor-parallel rank has both whole. For routed experts etp=1 says so; nd.of_rank counts all that such a rank holds.
    Source: Megatron-LM, megatron/core/transformer/moe/README.md and shared_experts.py.
    """
    checks.is_plan(plan)
    if isinstance(shape, ModelShape):
        plan.check(shape)
        return held_by_rank(shape, plan.layout)
    if not isinstance(shape, int | float) or not 0 <= shape < math.inf:
        raise ValueError(f"shape={shape!r}: give a ModelShape, as models['llama3-8b'], or a number of parameters, 0 or more")
    if (plan.ep, plan.etp) != (1, None):
        raise ValueError(f"ep={plan.ep}, etp={plan.etp}: a number of parameters says nothing of experts; give a ModelShape")
    return (Held(shape / (plan.tp * plan.pp), 0.0),) * plan.pp


@functools.lru_cache(maxsize=16384)
def held_by_rank(shape: ModelShape, layout: Layout) -> tuple[Held, ...]:
    """As rank_parameters, from Plan.layout alone."""
    dealt = stages.dealt(shape, layout)
    kinds = {stage: _held(shape, layout, stage) for stage in set(dealt)}
    held = [kinds[stage] for stage in dealt]
    if layout.schedule == "dualpipe" and layout.pp > 1:  # each rank has a copy of the stage at the other end, too
        return tuple(Held(a.dense + b.dense, a.experts + b.experts) for a, b in zip(held, reversed(held), strict=True))
    return tuple(held)


def activations(shape: ModelShape, plan: Plan) -> int:
    """Bytes that forward keeps for backward on the rank that keeps the most, all micro-batches in flight together.

    Source: arXiv 2205.05198, equations 1 to 6, and section 4.2.3 for the first stage and the embedding.
    """
    _check(shape, plan)
    return max(rank.kept for rank in _ranks(shape, plan.layout, plan.local, plan.microbatches, plan.virtual))


def layer_activations(shape: ModelShape, plan: Plan, moe: bool = False) -> int:
    """Bytes that one layer keeps of one micro-batch: sbh(34 + 5as/h) for the layer of arXiv 2205.05198 without flash attention.

    Counted by its rule for other layers: the inputs of products, norms and activation functions, dropout masks (1 byte), the
    softmax's output; with flash attention each row's log-sum-exp (4 bytes) in place of the scores. A gated MLP's function is
    one kernel that keeps its two inputs. Norms' statistics, router scores and rotary tables are left out, as in the paper.
    moe: whether it is a layer with experts; the load is balanced. Source: section 4.
    """
    _check(shape, plan)
    if moe and not shape.moe_layers:
        raise ValueError(f"moe=True: {shape.name} has no layer with experts")
    return of_layer(shape, plan.local, moe)


def _check(shape: ModelShape, plan: Plan) -> None:
    checks.is_shape(shape)
    checks.is_plan(plan)
    plan.check(shape)


def peak(shape: ModelShape, plan: Plan) -> Peak:
    """The most that one rank holds at once: states, activations, and buffers for what is gathered or computed again.

    That is at the loss or in the first layer's backward after it. Where gradients are made in backward only, it may be at the
    end of backward, or while the optimizer updates.
    """
    _check(shape, plan)
    ranks = _ranks(shape, plan.layout, plan.local, plan.microbatches, plan.virtual)
    states, kept, buffers = max([moment for rank in ranks for moment in _moments(rank, plan)], key=sum)
    return Peak(states, kept, buffers + round(plan.framework.reserved * (states + kept + buffers)))


class Rank(NamedTuple):
    """What a pipeline rank holds whatever the ZeRO stage is. kept: of all micro-batches in flight; loss: what of it one of them
    keeps at the head, and gives back before layers run backward; again: what backward recomputes of one layer, for that layer.
    """

    held: Held
    layers: int
    kept: int
    loss: int
    again: int


@functools.lru_cache(maxsize=16384)
def _ranks(shape: ModelShape, layout: Layout, local: Local, m: int, virtual: int) -> list[Rank]:
    """One for each kind of rank, the earliest: of equal ranks it holds as many micro-batches in flight, or more."""
    p, schedule = layout.pp, layout.schedule
    dealt, held = stages.dealt(shape, layout), held_by_rank(shape, layout)
    if schedule == "dualpipe" and p > 1:
        return _dualpipe_ranks(shape, local, dealt, held, m)
    found = []
    for stage in dict.fromkeys(dealt):
        rank = dealt.index(stage)
        kept = _kept(shape, local, stage, schedule, pipeline.in_flight(schedule, p, m, virtual, rank), min(m, p))
        loss = round(_loss(shape, local, stage))
        found.append(Rank(held[rank], max(1, stage.layers), kept, loss, _again(shape, local, stage)))
    return found


def _dualpipe_ranks(shape: ModelShape, local: Local, dealt: tuple[Stage, ...], held: tuple[Held, ...], m: int) -> list[Rank]:
    """Half the micro-batches come from each end, p + 1 in flight in all: p − r on a rank's own stage, r + 1 on its mirror's."""
    p, half = len(dealt), (m + 1) // 2
    kept = [_kept(shape, local, stage, "dualpipe", min(half, p - rank), min(m, p)) for rank, stage in enumerate(dealt)]
    again = {stage: _again(shape, local, stage) for stage in set(dealt)}
    pairs = zip(dealt, reversed(dealt), map(sum, zip(kept, reversed(kept), strict=True)), held, strict=True)
    return [Rank(of, max(1, a.layers + b.layers), both, 0, max(again[a], again[b])) for a, b, both, of in pairs]


def _again(shape: ModelShape, local: Local, stage: Stage) -> int:
    kinds = [moe for moe, layers in ((False, stage.dense), (True, stage.moe)) if layers]
    return max((_again_of_layer(shape, local, moe) for moe in kinds), default=0)


@functools.lru_cache(maxsize=16384)
def _again_of_layer(shape: ModelShape, local: Local, moe: bool) -> int:
    return of_layer(shape, local._replace(recompute="none"), moe) - of_layer(shape, local, moe)


def _held(shape: ModelShape, layout: Layout, stage: Stage) -> Held:
    t, etp = layout.tp, layout.expert_tp
    dense = stage.layers * (shape.attention_parameters + shape.norm_parameters + _copied_heads(shape, t))
    dense += stage.dense * shape.mlp_parameters + stage.moe * (shape.shared_parameters + shape.router_parameters)
    dense += stage.embedding * shape.embedding_parameters
    moe = stage.moe
    if stage.head:
        copied = shape.tied and not stage.embedding
        dense += shape.final_norm_parameters + (shape.vocab * shape.hidden if copied else shape.head_parameters)
    if stage.mtp:
        moe += stage.mtp * shape.is_moe(shape.layers - 1)
        dense += shape.mtp_parameters - (moe - stage.moe) * shape.experts * shape.expert_parameters
    whole, bias = _whole(shape, stage), shape.hidden * shape.bias
    experts = moe * shape.experts // layout.ep
    return Held((dense - whole) / t + whole, experts * ((shape.expert_parameters - bias) / etp + bias) if experts else 0.0)


def _whole(shape: ModelShape, stage: Stage) -> int:
    """What of a stage every tensor-parallel rank has: see rank_parameters. What multi-token prediction adds counts as cut."""
    sums = stage.layers + stage.dense + stage.moe * shape.shared_experts  # row-parallel layers, whose bias joins the sum
    whole = stage.layers * shape.norm_parameters + stage.moe * shape.router_parameters + sums * shape.hidden * shape.bias
    if shape.latent:
        whole += stage.layers * shape.hidden * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.rope_size)
    whole += stage.moe * shape.hidden * shape.shared_gate
    whole += stage.embedding * (shape.embedding_parameters - shape.vocab * shape.hidden)  # positions, and a norm
    return whole + stage.head * shape.final_norm_parameters


def _copied_heads(shape: ModelShape, t: int) -> int:
    """Parameters of one layer's keys and values that several tensor-parallel ranks have, beside the first copy."""
    copies = 0 if shape.latent else max(0, t - shape.kv_heads)
    return copies * 2 * shape.head_size * (shape.hidden + (shape.bias or shape.qkv_bias))


def states_of(held: Held, plan: Plan) -> ModelStates:
    """Bytes of a rank that holds these parameters before ZeRO: the dense ones are sharded over all data-parallel ranks, an
    expert's over those that have the same part of it."""
    return _states(held, plan.zero, plan.shards, plan.expert_shards, plan.stored)


@functools.lru_cache(maxsize=16384)
def _states(held: Held, zero: int, shards: int, expert_shards: int, recipe: Recipe) -> ModelStates:
    whole = math.ceil(held.dense) + math.ceil(held.experts)
    part = math.ceil(held.dense / shards) + math.ceil(held.experts / expert_shards)
    return ModelStates(
        recipe.parameters * (part if zero == 3 else whole),
        recipe.gradients * (part if zero >= 2 else whole),
        recipe.optimizer * (part if zero >= 1 else whole),
    )


def _kept(shape: ModelShape, plan: Local, stage: Stage, schedule: str, flying: float, once: int) -> int:
    """flying: micro-batches in flight, each counted on all layers; once: those that 1F1B holds on the model's first stage."""
    split = plan.tp if plan.sequence_parallel else 1
    moe = stage.moe + (stage.mtp if shape.moe_layers else 0)
    kept = flying * (stage.layers + stage.mtp - moe) * of_layer(shape, plan, False)
    kept += flying * moe * of_layer(shape, plan, True) if moe else 0
    if stage.embedding and shape.dropout:  # its mask; arXiv 2205.05198, section 4.3
        kept += (once if schedule in ("1f1b", "interleaved") else flying) * tokens(plan) * shape.hidden / split
    kept += (flying if schedule == "gpipe" else 1) * _loss(shape, plan, stage)
    return round(kept)


def _loss(shape: ModelShape, plan: Local, stage: Stage) -> float:
    """The last norm's input, the head's, and logits in 32 bits: (4sbh/t)(1 + V/h)."""
    if not stage.head:
        return 0.0
    split = plan.tp if plan.sequence_parallel else 1
    inputs = 2 if plan.regather or not plan.sequence_parallel else 1 + split  # the head's is kept whole
    logits = max(plan.framework.logits, plan.framework.cut_logits if plan.tp > 1 else 0)
    one = tokens(plan) * (inputs * itemsize(plan) * shape.hidden / split + logits * shape.vocab / plan.tp)
    return (stage.head + stage.mtp) * one


def _moments(rank: Rank, plan: Plan) -> list[tuple[int, int, int]]:
    """Bytes of states, activations and buffers when a rank may hold the most."""
    states, gathered, framework = states_of(rank.held, plan), _gathered(rank, plan), plan.framework
    if plan.offload != "none":
        states = _offloaded(states, plan.offload)
    at_loss = sum(states[:3]), rank.kept, gathered + max(0, rank.again - rank.loss)
    if not framework.fp32_shards:
        return [at_loss]
    total, found = at_loss[0], [at_loss]
    if plan.pp == plan.microbatches == 1:  # no gradient yet
        found = [(total - states.gradients, *at_loss[1:]), (total, 0, gathered + rank.again)]
    if plan.offload == "none":
        found.append((total, 0, states.gradients))  # the update has a tensor in 32 bits, as gradients are
    return found


def _gathered(rank: Rank, plan: Plan) -> int:
    """With ZeRO-3 or parameters in the host's memory, gathered parameters: two units (one in use, one under way), or all where
    forward's are kept; from ZeRO-2 on the whole gradients of a unit."""
    if plan.offload != "all" and (plan.zero < 2 or plan.shards == plan.expert_shards == 1):
        return 0
    whole, unit = sum(rank.held), sum(rank.held) / rank.layers
    gathered = gradients = 0.0
    if plan.zero == 3 or plan.offload == "all":
        gathered = whole if plan.zero == 3 and not plan.reshard_after_forward else min(2 * unit, whole)
    if plan.zero >= 2 or plan.offload == "all":
        gradients = whole if plan.pp > 1 and plan.framework.reduce_once else unit
    return round(plan.recipe.parameters * gathered + plan.recipe.gradients * gradients)
