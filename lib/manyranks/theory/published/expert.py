"""DeepSeek-V3's training step by phases next to what was measured, and other ways to lay it out on the same GPUs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import communicate, compute, data_parallel, memory, pace, pipeline, stages, states, step, tables
from manyranks.theory.memory import Peak
from manyranks.theory.pace import ForwardBackward
from manyranks.theory.plan import Plan
from manyranks.theory.published import steps
from manyranks.theory.step import StepTime

PHASES = ("1F", "bubble", "1B", "1W", "1F1B", "opt")


class Phase(NamedTuple):
    """Seconds of a step.

    predicted: of the rank that takes longest
    mean: of all ranks
    reason: why not as measured
    """

    name: str
    predicted: float
    mean: float
    measured: float
    reason: str

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1."""
        return self.predicted / self.measured - 1


def phases() -> list[Phase]:
    """DeepSeek-V3's step, from its configuration alone, next to "Insights into DeepSeek-V3" (arXiv 2505.09343), Table 4.

    How often a rank does what: pipeline.dualpipe_actions. The table does not name its rank: we take the one that has
    the most to do, which is the first. It has both ends of the model, with the head and with the module that predicts
    one more token, so that all others wait for it, and their bubble is longer. It also fits better than the mean, which
    is given, too.

    The sum is larger than step.estimate, which takes all micro-batches for halves of pairs and hides gradients under the last
    backward: by what lone passes wait for their all-to-alls, and by the gradients.
    """
    (row,) = steps.deepseek()
    time = step.estimate(row.shape, row.plan, row.cluster)
    ranks = [_work(time, rank) for rank in range(row.plan.pp // 2)]  # the others have the same stages
    first = max(ranks, key=lambda seconds: sum(seconds.values()))
    whole = sum(first.values()) + time.bubble + time.pipeline
    means = {phase: sum(each[phase] for each in ranks) / len(ranks) for phase in first}
    both = [each | {"bubble": whole - sum(each.values())} for each in (first, means)]
    printed = tables.rows("deepseek_isca_step_breakdown")
    said = {line["metric"].removesuffix(" (s)"): (float(line["MPFT"]), line["reason"]) for line in printed}
    return [Phase(name, *(each[name] for each in both), *said[name]) for name in PHASES]


def _work(time: StepTime, rank: int) -> dict[str, float]:
    """Seconds that one rank works, by phase."""
    plan, p = time.plan, time.plan.pp
    each = pace.of_ranks(time.shape, plan, time.cluster, time.constants)
    earlier, later = both = each[rank], each[p - 1 - rank]
    often = pipeline.dualpipe_actions(p, plan.microbatches, rank)
    forward = sum(n * each.forward.seconds for n, each in zip(often.F, both, strict=True))
    backward = sum(n * each.backward.seconds for n, each in zip(often.B, both, strict=True))
    backward += sum(n * (each.backward.seconds - each.weight) for n, each in zip(often.I, both, strict=True))
    weight = sum(n * each.weight for n, each in zip(often.W, both, strict=True))
    paired = (ForwardBackward(earlier.forward, later.backward), ForwardBackward(later.forward, earlier.backward))
    pairs = sum(n * pace.hide_experts(pair).seconds for n, pair in zip(often.pairs, paired, strict=True))
    return {"1F": forward, "1B": backward, "1W": weight, "1F1B": pairs, "opt": _update(time, rank)}


def _update(time: StepTime, rank: int) -> float:
    """Gradients and parameters travel with nothing to hide behind, and the optimizer steps."""
    held = states.hold(stages.deal(time.shape, time.plan.stage_plan))
    rows = states.rows(held, time.shape, time.plan)
    timed = communicate.timed(rows, compute.speeds(time.cluster, time.constants))
    alone = [(held.ranks[rank], 0.0, 0.0)]
    (sent,) = data_parallel.exposed(time.plan, time.cluster, time.constants, rows, timed, alone)
    return sent + time.optimizer


class Layout(NamedTuple):
    """A way to train DeepSeek-V3 on its GPUs.

    peak: bytes of the fullest one
    fits: into its memory
    """

    plan: Plan
    peak: Peak
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.time.cluster.accelerator.memory


def layouts(tensor: Iterable[int] = (1, 2, 4, 8)) -> list[Layout]:
    """DeepSeek-V3's plan with other tensor- and expert-parallel degrees, PP 16 on as many GPUs; an expert-parallel group has
    128 ÷ tp ranks at most. Tensor parallelism cuts attention and every expert: a routed token's row is gathered and summed once
    for each of its experts.

    Their own: TP 1, EP 64. Source: arXiv 2412.19437, sections 3.1 and 3.2.
    """
    (row,) = steps.deepseek()
    found = []
    for tp in tensor:
        dp = row.plan.dp // tp
        for ep in (8, 16, 32, 64, 128):
            if ep <= dp:
                plan = replace(row.plan, dp=dp, tp=tp, ep=ep)
                time = step.estimate(row.shape, plan, row.cluster, gpus=row.plan.gpus)
                found.append(Layout(plan, memory.peak(row.shape, plan), time))
    return found
