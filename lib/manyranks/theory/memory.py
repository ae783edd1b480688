"""Bytes that one rank holds: model states by ZeRO stage and precision, activations by recomputation and parallelism, the peak.

Where ranks differ (first and last stage, uneven stages), the numbers are for the rank that needs the most.
"""

from typing import NamedTuple

from manyranks.theory import activations as kept
from manyranks.theory import checks, pipeline, stages, states
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan
from manyranks.theory.stages import Dealt
from manyranks.theory.states import Held, ModelStates, model_states, rank_parameters

__all__ = [
    "Held",
    "ModelStates",
    "Peak",
    "activations",
    "host",
    "layer_activations",
    "model_states",
    "peak",
    "peaks",
    "rank_parameters",
]


class Peak(NamedTuple):
    """Bytes at the moment when one rank holds the most."""

    states: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)

    def said(self, checked: str) -> str:
        """Returns what is printed where it's known what published.peak_confidence says of it.

        checked: that
        """
        parts = ", ".join(f"{name}={size}" for name, size in self._asdict().items())
        return f"Peak(total={self.total}, checked={checked!r}, {parts})"


def activations(shape: ModelShape, plan: Plan) -> int:
    """Bytes that forward keeps for backward on the rank that keeps the most, all micro-batches in flight together.

    Source: arXiv 2205.05198, equations 1 to 6, and section 4.2.3 for the first stage and the embedding.
    """
    _check(shape, plan)
    return max(rank.kept for rank in _kept(stages.deal(shape, plan.stage_plan), plan))


def host(shape: ModelShape, plan: Plan) -> int:
    """Bytes that a rank keeps in its host's memory: states, and activations that wait there."""
    _check(shape, plan)
    waiting = max(rank.host for rank in _kept(stages.deal(shape, plan.stage_plan), plan)) if plan.offload_layers else 0
    return waiting + (0 if plan.offload == "none" else model_states(shape, plan).host)


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
    return kept.of_layer(shape, plan.layer_plan, moe)


def _check(shape: ModelShape, plan: Plan) -> None:
    checks.kinds(shape=shape, plan=plan)
    plan.check(shape)


def peak(shape: ModelShape, plan: Plan) -> Peak:
    """The most that one rank holds at once: states, activations, and buffers for what is gathered or computed again.

    That is at the loss or in the first layer's backward after it. Where gradients are made in backward only, it may be at the
    end of backward, or while the optimizer updates.
    """
    return max(peaks(shape, plan).values(), key=sum)


def peaks(shape: ModelShape, plan: Plan) -> dict[int, Peak]:
    """Returns each pipeline rank's peak; of several with equal stages only the first one's, which is highest."""
    _check(shape, plan)
    dealt = stages.deal(shape, plan.stage_plan)
    each, framework = [], plan.framework
    for (held, gathered), rank in zip(states.on_ranks(dealt, plan), _kept(dealt, plan), strict=True):
        total = held.total
        at_loss = total, rank.kept, gathered + max(0, rank.again - rank.loss)
        if framework.fp32_shards and plan.pp == plan.microbatches == 1:  # no gradient yet
            found = [(total - held.gradients, *at_loss[1:]), (total, 0, gathered + rank.again)]
        else:
            found = [at_loss]
        if framework.fp32_shards and plan.offload == "none":
            found.append((total, 0, held.gradients))  # the update has a tensor in 32 bits, as gradients are
        most = max(found, key=sum)
        used = sum(most) if framework.fp32_shards else sum(most[1:])
        each.append(Peak(*most[:2], most[2] + round(framework.reserved * used)))
    return dict(zip(dealt.firsts, each, strict=True))


def _kept(dealt: Dealt, plan: Plan) -> list[kept.Rank]:
    flying = pipeline.flights(plan.schedule, plan.pp, plan.microbatches, plan.virtual, dealt.firsts)
    return kept.of_ranks(dealt, plan.layer_plan, plan.microbatches, flying)
