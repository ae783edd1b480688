"""Lower bounds of a step's seconds and of a rank's bytes, which let the planner discard plans without estimating them.

Each leaves out some of what step.estimate or memory.peak adds up, and says what.
"""

import functools

from manyranks.theory import activations, pace, pipeline, stages, states
from manyranks.theory.architecture import ModelShape
from manyranks.theory.pace import ForwardBackward
from manyranks.theory.plan import LayerPlan, Plan, StagePlan, stages_passed
from manyranks.theory.stages import Stage
from manyranks.theory.states import Held

_ROUNDING = 1 - 1e-6  # so that no rounding lifts a bound above what it bounds


def passes(model: ForwardBackward, p: int, m: int, hides: bool) -> float:
    """Returns seconds that a step takes at least: its passes on a pipeline rank with an equal share of the model.

    model: one micro-batch in the whole model, from pace.of_model
    p, m: the pipeline's ranks and its micro-batches
    hides: whether experts' messages hide behind another micro-batch

    The slowest rank takes no less than the mean of all ranks, and experts' exposed messages, a maximum of sums, are on the mean
    of ranks no less than on the mean rank. Left out are uneven stages, bubbles, messages between stages, gradients and
    parameters on their way, and the optimizer.
    """
    return _ROUNDING * m / p * (pace.hide_experts(model) if hides else model).seconds


def seconds(model: ForwardBackward, plan: LayerPlan, schedule: str, p: int, m: int, v: int) -> float:
    """Returns the same with the schedule's bubble, which is another maximum of sums."""
    least = passes(model, p, m, pace.hides_experts(plan, schedule, p, m, v))
    if p == 1:
        return least
    model = model.apart() if schedule in pipeline.SPLIT else model
    each = (seconds / p for seconds in (model.forward.seconds, model.backward.seconds, model.weight))
    return least + _ROUNDING * pipeline.bubble(schedule, p, m, v, *each)


def bytes_held(shape: ModelShape, plan: Plan) -> float:
    """Returns bytes that the fullest rank holds at least: its layers' states, and what they keep for backward.

    Left out are the embedding, the head and the loss, multi-token prediction, and buffers.
    """
    whole = StagePlan(plan.tp, 1, plan.ep, plan.expert_tp, 1, "1f1b", False)
    dense, moe = (states.of_stage(shape, whole, one) for one in (Stage(dense=1), Stage(moe=1)))
    keeps = (0, 0) if plan.offload_layers else [activations.of_layer(shape, plan.layer_plan, moe) for moe in (False, True)]
    most = 0.0
    for kind in _layers(shape, plan.schedule, plan.pp, plan.microbatches, plan.virtual, plan.embedding_slots):
        layers, kept = kind[:2], sum(often * each for often, each in zip(kind[2:], keeps, strict=True))
        held = Held(layers[0] * dense.dense + layers[1] * moe.dense, layers[1] * moe.experts)
        most = max(most, kept + states.least(held, plan))
    return _ROUNDING * most


@functools.lru_cache(maxsize=16384)
def _layers(shape: ModelShape, schedule: str, p: int, m: int, v: int, slots: bool) -> tuple[tuple[float, ...], ...]:
    """Lists dense layers and those with experts of each kind of pipeline rank, and both times the micro-batches in flight."""
    dealt = stages.deal(shape, StagePlan(1, p, 1, 1, stages_passed(schedule, p, v), schedule, slots))
    flying = pipeline.flights(schedule, p, m, v, dealt.firsts)
    held = [(dealt.ranks[rank], n) for rank, n in zip(dealt.firsts, flying, strict=True)]
    own = [(one.dense, one.moe, n * one.dense, n * one.moe) for one, n in held]
    if schedule == "dualpipe" and p > 1:  # each rank has the stage at the other end, too
        own = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(own, reversed(own), strict=True)]
    return tuple(dict.fromkeys(own))
