"""The bytes that forward keeps for backward: of one layer and one micro-batch, and of all in flight on a rank of a pipeline.

Korthikanti's count, and its rule for other layers. Source: arXiv 2205.05198, section 4.
"""

import functools
from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.blocks import LSE
from manyranks.theory.plan import LayerPlan, OneRank
from manyranks.theory.stages import Dealt, Stage


class Rank(NamedTuple):
    """Bytes on a pipeline rank.

    kept: of all micro-batches in flight
    loss: what of it one of them keeps at the head, and gives back before layers run backward
    again: what backward recomputes of one layer, for that layer, and makes with it where scores are stored
    host: what waits in the host's memory
    """

    kept: int
    loss: int
    again: int
    host: int = 0


@functools.lru_cache(maxsize=16384)
def of_ranks(dealt: Dealt, plan: LayerPlan, m: int, flying: tuple[float, ...]) -> list[Rank]:
    """Lists the ranks in dealt.firsts: of equal ranks the earliest holds as many micro-batches in flight, or more.

    flying: how many each has. Under DualPipe half the micro-batches come from each end, p + 1 in flight in all: p − r on a
    rank's own stage, r + 1 on its mirror's.
    """
    shape, schedule, p = dealt.shape, dealt.plan.schedule, len(dealt.ranks)
    held = [(dealt.ranks[rank], most) for rank, most in zip(dealt.firsts, flying, strict=True)]
    kept = [_kept(shape, plan, stage, schedule, most, min(m, p)) for stage, most in held]
    kinds = [[moe for moe, layers in ((False, stage.dense), (True, stage.moe)) if layers] for stage, _ in held]
    again = [max((_again(shape, plan, moe) for moe in each), default=0) for each in kinds]
    away = [offloaded(shape, plan, stage, most) for stage, most in held]
    if schedule == "dualpipe" and p > 1:
        pairs = zip(kept, reversed(kept), again, reversed(again), away, reversed(away), strict=True)
        return [Rank(own + other, 0, max(a, b), here + there) for own, other, a, b, here, there in pairs]
    losses = [round(_loss(shape, plan, stage)) for stage, _ in held]
    return [Rank(*each) for each in zip(kept, losses, again, away, strict=True)]


def _kept(shape: ModelShape, plan: LayerPlan, stage: Stage, schedule: str, flying: float, once: int) -> int:
    """Counts the bytes that are kept.

    flying: micro-batches in flight, each counted on all layers
    once: those that 1F1B holds on the model's first stage
    """
    split = plan.tp if plan.sequence_parallel else 1
    moe = stage.moe + (stage.mtp if shape.moe_layers else 0)
    kept = flying * (stage.layers + stage.mtp - moe) * of_layer(shape, plan, False)
    kept += flying * moe * of_layer(shape, plan, True) if moe else 0
    if away := min(plan.offload_layers, stage.layers):
        kept -= max(0, offloaded(shape, plan, stage, flying) - 2 * offloaded(shape, plan, stage) / away)
    if stage.embedding and shape.dropout:  # its mask; arXiv 2205.05198, section 4.3
        kept += (once if schedule in ("1f1b", "interleaved") else flying) * tokens(plan) * shape.hidden / split
    kept += (flying if schedule == "gpipe" else 1) * _loss(shape, plan, stage)
    return round(kept)


def offloaded(shape: ModelShape, plan: LayerPlan, stage: Stage, flying: float = 1) -> int:
    """Bytes of a stage's layers that wait in the host's memory, of micro-batches in flight. Two layers' are always on the chip:
    one computes, and one is on its way."""
    if not plan.offload_layers or not stage.layers:
        return 0
    layers = sum(count * of_layer(shape, plan, moe) for moe, count in ((False, stage.dense), (True, stage.moe)) if count)
    return round(flying * layers * min(1, plan.offload_layers / stage.layers))


def _loss(shape: ModelShape, plan: LayerPlan, stage: Stage) -> float:
    """The last norm's input, the head's, and logits in 32 bits: (4sbh/t)(1 + V/h)."""
    if not stage.head:
        return 0.0
    split = plan.tp if plan.sequence_parallel else 1
    inputs = 2 if plan.regather or not plan.sequence_parallel else 1 + split  # the head's is kept whole
    logits = max(plan.framework.logits, plan.framework.cut_logits if plan.tp > 1 else 0)
    columns = shape.vocab / (1 if plan.framework.gathers_logits else plan.tp)
    one = tokens(plan) * (inputs * itemsize(plan) * shape.hidden / split + logits * columns)
    return (stage.head + stage.mtp) * one


@functools.lru_cache(maxsize=16384)
def _again(shape: ModelShape, plan: LayerPlan, moe: bool) -> int:
    again = of_layer(shape, plan._replace(recompute="none"), moe) - of_layer(shape, plan, moe)
    if plan.flash:
        return again
    # In backward a softmax's operators also hold two tensors as large as what it keeps in 32 bits.
    return again + round(2 * plan.framework.keeps.softmax * tokens(plan) * plan.seq * shape.heads / plan.tp)


class Kept(NamedTuple):
    """Bytes of one layer and one micro-batch on one rank.

    outside: of norms, dropouts and inputs of column-parallel layers, whole on each tensor-parallel rank without sequence
        parallelism: 10sbh in arXiv 2205.05198's layer, and 10sbh/t with it
    inside: of what lies between those layers and row-parallel ones, cut by t: sbh(24/t + 5as/(ht)) there
    statistics: of the norms, which the paper and layer_activations leave out
    """

    outside: float
    inside: float
    statistics: int = 0

    @property
    def total(self) -> float:
        return sum(self)


@functools.lru_cache(maxsize=16384)
def of_layer(shape: ModelShape, plan: LayerPlan, moe: bool) -> int:
    return round(sum(parts(shape, plan, moe)))


def parts(shape: ModelShape, plan: OneRank, moe: bool) -> Kept:
    """Counts as of_layer does, apart."""
    if plan.recompute == "selective" and plan.framework.every_other:
        return Kept(*(tokens(plan) * part for part in _every_other(shape, plan)))
    both = zip(_attention_bytes(shape, plan), _mlp_bytes(shape, plan, moe), strict=True)
    return Kept(*(tokens(plan) * sum(part) for part in both))


def _every_other(shape: ModelShape, plan: OneRank) -> Kept:
    """Counts, per token, the layer's input, attention's result, and every other product's: queries, values, gate, down."""
    item = itemsize(plan)
    split = plan.tp if plan.sequence_parallel else 1
    inside = item * (2 * shape.query_size + _kv_size(shape, plan.tp) + shape.ffn) + 4 * shape.heads
    return Kept(2 * item * shape.hidden / split, inside / plan.tp)


def tokens(plan: OneRank) -> float:
    return plan.microbatch * plan.seq / plan.cp


def itemsize(plan: OneRank) -> int:
    return 4 if plan.recipe.rate == "fp32" else 2


def _attention_bytes(shape: ModelShape, plan: OneRank) -> Kept:
    """Counts the bytes of one token: with the paper's letters, 11sbh + 5as²b and a norm's 2sbh, divided by what is split."""
    item, t, h = itemsize(plan), plan.tp, shape.hidden
    split = t if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return Kept(item * h / split, 0.0)  # the layer's input
    again = plan.recompute == "selective"
    outside = (item + _norm_keeps(shape, plan)) * h + (h if shape.dropout else 0)  # of the norm, and of attention's dropout
    read = _kv_size(shape, t * plan.cp if plan.context == "ulysses" else t)  # heads that ranks read, copied for them
    inside = _latent(shape, plan, again) if shape.latent else item * (shape.query_size + 2 * read)
    inside += item * (shape.query_size + _kv_size(shape, t)) if shape.qk_norm and not again else 0  # before their norms
    output = shape.heads * shape.latent.value_size if shape.latent else shape.query_size
    inside += plan.recipe.matmul * output
    if plan.flash:
        inside += LSE * shape.heads
    elif not again:
        softmax = item + plan.framework.keeps.softmax
        inside += shape.heads * plan.seq * (softmax + item + 1 if shape.dropout else softmax)  # its mask, what is left of it
    return Kept((outside + _norm_output(shape, plan)) / split, inside / t)


def _norm_output(shape: ModelShape, plan: OneRank) -> float:
    """Counts the bytes of one token in the input of column-parallel layers, before `split` divides it."""
    whole = plan.recipe.matmul * shape.hidden
    if plan.tp > 1 and plan.sequence_parallel and not plan.regather:
        return plan.tp * whole  # gathered once, and kept so
    return 0 if plan.recompute == "selective" and shape.norm == "rmsnorm" else whole


def _norm_keeps(shape: ModelShape, plan: OneRank) -> float:
    return plan.framework.keeps.norm if shape.norm == "rmsnorm" and plan.recompute == "none" else 0


def _kv_size(shape: ModelShape, t: int) -> int:
    """Counts a token's keys on t ranks: with more of these than key/value heads, each head is on several."""
    return shape.head_size * max(shape.kv_heads, t)


def _latent(shape: ModelShape, plan: OneRank, again: bool) -> float:
    item, c = itemsize(plan), shape.latent
    compressed = item * plan.tp * (c.q_rank + c.kv_rank + c.rope_size)
    if again:
        return compressed
    return compressed + item * shape.heads * (2 * (c.nope_size + c.rope_size) + c.value_size)


def _mlp_bytes(shape: ModelShape, plan: OneRank, moe: bool) -> Kept:
    """Counts the bytes of one token: the paper's 19sbh and a norm's 2sbh, divided by what is split."""
    item, t, h, saved = itemsize(plan), plan.tp, shape.hidden, plan.recipe.matmul
    split = t if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return Kept(0.0, 0.0)
    again = plan.recompute == "selective"
    norms = 0 if shape.parallel_layers else shape.norms_per_layer - 1  # other than attention's; in parallel they read the same
    outside = (item + _norm_keeps(shape, plan)) * h * norms + (h if shape.dropout else 0)
    shared = shape.parallel_layers and shape.norms_per_layer == 1  # the norm's output, too
    outside += 0 if shared else _norm_output(shape, plan)
    if not moe:
        return Kept(outside / split, _wide(shape, plan, shape.ffn, again) / t)
    # The same for every etp: a rank's experts have T·etp/t tokens, and 1/etp of the width.
    routed = shape.top_k * (saved * h + _wide(shape, plan, shape.expert_ffn, again))
    return Kept(outside / split, (routed + shape.shared_experts * _wide(shape, plan, shape.shared_ffn, again)) / t)


def _wide(shape: ModelShape, plan: OneRank, ffn: int, again: bool) -> float:
    """Counts what is as wide as the feed-forward part: its function's input, and the output, unless that is computed again."""
    function = (2 * plan.recipe.matmul if shape.gated else itemsize(plan)) * ffn
    if again and shape.gated:
        return function
    return function + (plan.recipe.matmul + (plan.framework.keeps.gated if shape.gated else 0)) * ffn
