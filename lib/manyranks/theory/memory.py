"""Bytes that one rank holds: model states by ZeRO stage and precision, activations by recomputation and parallelism, the peak.

Where ranks differ (first and last stage, uneven stages), the numbers are those of the rank that needs the most.
"""

import functools
import math
from collections import Counter
from typing import NamedTuple

from manyranks.theory import pipeline, stages
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan, Recipe, plan_of
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
    each = [_offloaded(_states(held, plan), plan.offload) for held in set(rank_parameters(shape, plan))]
    return max(each, key=lambda states: (states.total, states.host))


def before_offload(shape: ModelShape | float, plan: Plan) -> ModelStates:
    """As model_states, wherever the states are kept."""
    return max((_states(held, plan) for held in set(rank_parameters(shape, plan))), key=lambda states: states.total)


def _offloaded(states: ModelStates, offload: str) -> ModelStates:
    if offload == "none":
        return states
    if offload == "optimizer":
        return states._replace(optimizer=0, host=states.optimizer)
    return ModelStates(0, 0, 0, host=states.total)


def rank_parameters(shape: ModelShape | float, plan: Plan) -> tuple[Held, ...]:
    """For each pipeline rank, the parameters that one of its tensor-parallel ranks holds before ZeRO.

    A tied embedding is held by the first and by the last rank. Whole on every tensor-parallel rank: norms, routers, and what
    latent attention compresses with. With fewer key/value heads than tensor-parallel ranks, each of these has one of them.
    """
    if isinstance(shape, ModelShape):
        plan.check(shape)
        return _rank_parameters(shape, plan.layout)
    if not isinstance(shape, int | float) or not shape >= 0:
        raise ValueError(f"shape={shape!r}: give a ModelShape, as models['llama3-8b'], or a number of parameters, 0 or more")
    return (Held(shape / (plan.tp * plan.pp), 0.0),) * plan.pp


@functools.lru_cache(maxsize=16384)
def _rank_parameters(shape: ModelShape, layout: tuple) -> tuple[Held, ...]:
    tp, _, ep, _, schedule, _ = layout
    dealt = stages.dealt(shape, layout)
    kinds = {stage: _held(shape, tp, ep, stage) for stage in set(dealt)}
    held = [kinds[stage] for stage in dealt]
    if schedule == "dualpipe" and layout[1] > 1:  # each rank has a copy of the stage at the other end, too
        return tuple(Held(a.dense + b.dense, a.experts + b.experts) for a, b in zip(held, reversed(held), strict=True))
    return tuple(held)


def activations(shape: ModelShape, plan: Plan) -> int:
    """Bytes that forward keeps for backward on the rank that keeps the most, all micro-batches in flight together.

    Source: arXiv 2205.05198, equations 1 to 6, and section 4.2.3 for the first stage and the embedding.
    """
    plan.check(shape)
    return max(rank.kept for rank in _ranks(shape, plan.layout, plan.local, plan.microbatches, plan.virtual))


def layer_activations(shape: ModelShape, plan: Plan, moe: bool = False) -> int:
    """Bytes that one layer keeps of one micro-batch: sbh(34 + 5as/h) for the layer of arXiv 2205.05198 without flash attention.

    Counted by its rule for other layers: the inputs of products, norms and activation functions, dropout masks (1 byte), the
    softmax's output; with flash attention each row's log-sum-exp (4 bytes) in place of the scores. A gated MLP's function is
    one kernel that keeps its two inputs. Norms' statistics, router scores and rotary tables are left out, as in the paper.
    moe: whether it is a layer with experts; the load is balanced. Source: section 4.
    """
    return _layer_activations(shape, plan.local, moe)


@functools.lru_cache(maxsize=16384)
def _layer_activations(shape: ModelShape, local: tuple, moe: bool) -> int:
    plan = plan_of(local)
    return round(_tokens(plan) * (_attention_bytes(shape, plan) + _mlp_bytes(shape, plan, moe)))


def peak(shape: ModelShape, plan: Plan) -> Peak:
    """The most that one rank holds at once: states, activations, and buffers for what is gathered or computed again."""
    plan.check(shape)
    ranks = _ranks(shape, plan.layout, plan.local, plan.microbatches, plan.virtual)
    sizes = [(_offloaded(_states(rank.held, plan), plan.offload).total, rank.kept, _buffers(rank, plan)) for rank in ranks]
    return Peak(*max(sizes, key=sum))


class Rank(NamedTuple):
    """What a pipeline rank holds whatever the ZeRO stage is. again: what backward recomputes of one layer, for that layer."""

    held: Held
    layers: int
    kept: int
    again: int


@functools.lru_cache(maxsize=16384)
def _ranks(shape: ModelShape, layout: tuple, local: tuple, m: int, virtual: int) -> list[Rank]:
    """One for each kind of rank, the earliest: of equal ranks it holds as many micro-batches in flight, or more."""
    p, schedule, found = layout[1], layout[4], {}
    dealt, held = stages.dealt(shape, layout), _rank_parameters(shape, layout)
    for rank, stage in enumerate(dealt):
        parts = {stage: pipeline.in_flight(schedule, p, m, virtual, rank)}
        if schedule == "dualpipe" and p > 1:  # half of them from each end, p + 1 in flight in all
            half = (m + 1) // 2
            parts = Counter({stage: min(half, p - rank)}) + Counter({dealt[-1 - rank]: min(half, rank + 1)})
        kind = (held[rank], *parts, *(parts.values() if len(parts) > 1 else ()))
        if kind not in found:
            kept = sum(_kept(shape, local, part, schedule, flying, min(m, p)) for part, flying in parts.items())
            layers = max(1, sum(part.layers for part in parts))
            found[kind] = Rank(held[rank], layers, kept, max(_again(shape, local, part) for part in parts))
    return list(found.values())


def _again(shape: ModelShape, local: tuple, stage: Stage) -> int:
    whole = tuple("none" if value in ("selective", "full") else value for value in local)
    kinds = [moe for moe, layers in ((False, stage.dense), (True, stage.moe)) if layers]
    return max((_layer_activations(shape, whole, moe) - _layer_activations(shape, local, moe) for moe in kinds), default=0)


def _held(shape: ModelShape, t: int, ep: int, stage: Stage) -> Held:
    split = stage.layers * (shape.attention_parameters + _copied_heads(shape, t))
    split += stage.dense * shape.mlp_parameters + stage.moe * shape.shared_parameters
    whole = stage.layers * shape.norm_parameters + stage.moe * shape.router_parameters
    if shape.latent:
        down = stage.layers * shape.hidden * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.rope_size)
        split, whole = split - down, whole + down
    moe = stage.moe
    split += stage.embedding * shape.embedding_parameters
    if stage.head:
        whole += shape.final_norm_parameters
        copied = shape.tied and not stage.embedding
        split += shape.vocab * shape.hidden if copied else shape.head_parameters
    if stage.mtp:
        moe += stage.mtp * shape.is_moe(shape.layers - 1)
        split += shape.mtp_parameters - (moe - stage.moe) * shape.experts * shape.expert_parameters
    return Held(split / t + whole, moe * shape.experts // ep * shape.expert_parameters / t)


def _copied_heads(shape: ModelShape, t: int) -> int:
    """Parameters of one layer's keys and values that several tensor-parallel ranks have, beside the first copy."""
    copies = 0 if shape.latent else max(0, t - shape.kv_heads)
    return copies * 2 * shape.head_size * (shape.hidden + (shape.bias or shape.qkv_bias))


def _states(held: Held, plan: Plan) -> ModelStates:
    return _sharded(held, plan.zero, plan.shards, max(1, plan.shards // plan.ep), plan.recipe)


@functools.lru_cache(maxsize=65536)
def _sharded(held: Held, zero: int, shards: int, expert_shards: int, recipe: Recipe) -> ModelStates:
    whole = math.ceil(held.dense) + math.ceil(held.experts)
    part = math.ceil(held.dense / shards) + math.ceil(held.experts / expert_shards)
    return ModelStates(
        recipe.parameters * (part if zero == 3 else whole),
        recipe.gradients * (part if zero >= 2 else whole),
        recipe.optimizer * (part if zero >= 1 else whole),
    )


def _tokens(plan: Plan) -> float:
    return plan.microbatch * plan.seq / plan.cp


def _item(plan: Plan) -> int:
    return 4 if plan.precision == "fp32" else 2


def _attention_bytes(shape: ModelShape, plan: Plan) -> float:
    """Of one token: with the paper's letters, 11sbh + 5as²b and a norm's 2sbh, divided by what is split."""
    item, t, h = _item(plan), plan.tp, shape.hidden
    split = t if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return item * h / split  # the layer's input
    again = plan.recompute == "selective"
    outside = item * h + (h if shape.dropout else 0)  # the norm's input, and the mask of the dropout after attention
    outside += 0 if again and shape.norm == "rmsnorm" else plan.recipe.matmul * h
    inside = _latent(shape, plan, again) if shape.latent else item * (shape.query_size + 2 * _kv_size(shape, t))
    inside += item * (shape.query_size + _kv_size(shape, t)) if shape.qk_norm and not again else 0  # before their norms
    output = shape.heads * shape.latent.value_size if shape.latent else shape.query_size
    inside += plan.recipe.matmul * output
    if plan.flash:
        inside += 4 * shape.heads  # each row's log-sum-exp, in 32 bits
    elif not again:
        inside += shape.heads * plan.seq * (2 * item + 1 if shape.dropout else item)  # softmax, its mask, what is left of it
    return outside / split + inside / t


def _kv_size(shape: ModelShape, t: int) -> int:
    """With more tensor-parallel ranks than key/value heads, each head is on several."""
    return shape.head_size * max(shape.kv_heads, t)


def _latent(shape: ModelShape, plan: Plan, again: bool) -> float:
    item, c = _item(plan), shape.latent
    compressed = item * plan.tp * (c.q_rank + c.kv_rank + c.rope_size)
    if again:
        return compressed
    return compressed + item * shape.heads * (2 * (c.nope_size + c.rope_size) + c.value_size)


def _mlp_bytes(shape: ModelShape, plan: Plan, moe: bool) -> float:
    """Of one token: the paper's 19sbh and a norm's 2sbh, divided by what is split."""
    item, t, h, saved = _item(plan), plan.tp, shape.hidden, plan.recipe.matmul
    split = t if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return 0.0
    again = plan.recompute == "selective"
    norms = 0 if shape.parallel_layers else shape.norms_per_layer - 1  # beside attention's; in parallel they read the same
    outside = item * h * norms + (h if shape.dropout else 0)
    shared = shape.parallel_layers and shape.norms_per_layer == 1  # the norm's output, too
    outside += 0 if shared or (again and shape.norm == "rmsnorm") else saved * h
    if not moe:
        return outside / split + _wide(shape, plan, shape.ffn, again) / t
    routed = shape.top_k * (saved * h + _wide(shape, plan, shape.expert_ffn, again))
    return outside / split + (routed + shape.shared_experts * _wide(shape, plan, shape.shared_ffn, again)) / t


def _wide(shape: ModelShape, plan: Plan, ffn: int, again: bool) -> float:
    """What is as wide as the feed-forward part: the input of its function, and the output, unless that is computed again."""
    function = (2 * plan.recipe.matmul if shape.gated else _item(plan)) * ffn
    return function + (0 if again and shape.gated else plan.recipe.matmul * ffn)


def _kept(shape: ModelShape, local: tuple, stage: Stage, schedule: str, flying: float, once: int) -> int:
    """flying: micro-batches in flight, each counted on all layers; once: those that 1F1B holds on the model's first stage."""
    plan = plan_of(local)
    split = plan.tp if plan.sequence_parallel else 1
    moe = stage.moe + (stage.mtp if shape.moe_layers else 0)
    kept = flying * (stage.layers + stage.mtp - moe) * _layer_activations(shape, local, False)
    kept += flying * moe * _layer_activations(shape, local, True) if moe else 0
    if stage.embedding and shape.dropout:  # its mask; arXiv 2205.05198, section 4.3
        kept += (once if schedule in ("1f1b", "interleaved") else flying) * _tokens(plan) * shape.hidden / split
    if stage.head:  # the last norm's input, the head's, and logits in 32 bits: (4sbh/t)(1 + V/h)
        one = _tokens(plan) * (2 * _item(plan) * shape.hidden / split + 4 * shape.vocab / plan.tp)
        kept += (flying if schedule == "gpipe" else 1) * (stage.head + stage.mtp) * one
    return round(kept)


def _buffers(rank: Rank, plan: Plan) -> int:
    """With ZeRO-3 or parameters in the host's memory, gathered parameters: two units (one in use, one under way), or all where
    forward's are kept; from ZeRO-2 on the whole gradients of a unit; what one layer computes again."""
    whole, unit = sum(rank.held), sum(rank.held) / rank.layers
    gathered = gradients = 0.0
    if plan.zero == 3 or plan.offload == "all":
        gathered = whole if plan.zero == 3 and not plan.reshard_after_forward else min(2 * unit, whole)
    if plan.zero >= 2 or plan.offload == "all":
        gradients = unit
    return rank.again + round(plan.recipe.parameters * gathered + plan.recipe.gradients * gradients)
