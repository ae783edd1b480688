"""How far a prediction can be trusted: the error of the published runs that are closest to it."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import Plan
from manyranks.theory.published import steps
from manyranks.theory.step import StepTime

CLOSEST = 12  # runs whose errors are said
FAR = 4  # doublings of a size beyond which a run says nothing about the prediction
FASTER = 1  # the same of a rate: of the chip's products and its memory, of the innermost and the outermost links
ONE_WAY = 0.1  # runs that are all off by more, and in the same direction, are no error bar around the prediction
_GENERATIONS = {"A100": ("A100",), "H100": ("H100", "H200", "H800", "H20", "GH200"), "B200": ("B200", "GB200", "B300")}


class Checked(NamedTuple):
    """What published runs say of a prediction. runs: how many are close; error: mean of |predicted ÷ measured − 1| of their
    step times; missing: why there is no run to compare with, "" if there is one; least, most: the smallest and
    the largest predicted ÷ measured − 1.
    """

    runs: int
    error: float
    missing: str = ""
    least: float = math.nan
    most: float = math.nan

    def __str__(self) -> str:
        if self.missing:
            return f"not checked: no published run {self.missing}"
        if self.runs == 1:
            return f"{self.error:.0%} off in the only similar run"
        if min(abs(self.least), abs(self.most)) > ONE_WAY and self.least * self.most > 0:
            small, large = sorted((abs(self.least), abs(self.most)))
            return f"{small:.0%} to {large:.0%} too {'short' if self.most < 0 else 'long'} in {self.runs} runs"
        return f"± {self.error:.0%} ({self.runs} runs)"


class _Known(NamedTuple):
    """A published run, as far as it decides whether it is close."""

    chip: str
    stack: str
    uses: frozenset[str]
    sizes: tuple[float, ...]
    rates: tuple[float, ...]
    error: float


def confidence(time: StepTime) -> Checked:
    """Says how far a predicted step can be trusted. Compares with runs of the same stack on the same generation of chips that
    use all that the plan uses; of these, with the closest in hidden size, sequence length, tokens of a micro-batch and
    accelerators. Other constants, and chips or links with other rates, count as not checked."""
    shape, plan, cluster, constants = time.shape, time.plan, time.cluster, time.constants
    if constants != DEFAULT:
        return Checked(0, math.nan, f"with {constants}")
    chip, uses, sizes = _generation(cluster), frozenset(_uses(shape, plan)), _sizes(shape, plan)
    here = [run for run in _known() if run.chip == chip]
    if not here:
        return Checked(0, math.nan, f"on {chip}")
    here = [run for run in here if run.stack == plan.stack]
    if not here:
        return Checked(0, math.nan, f"of {plan.stack} on {chip}")
    here = [run for run in here if _near(run.rates, _rates(cluster), FASTER)]
    if not here:
        return Checked(0, math.nan, f"of {plan.stack} on such a chip, with such links")
    same = [run for run in here if uses <= run.uses]
    if not same:
        return Checked(0, math.nan, f"of {plan.stack} on {chip} with {_missing(uses, here)}")
    near = [run for run in same if _near(run.sizes, sizes, FAR)]
    if not near:
        return Checked(0, math.nan, f"of {plan.stack} on {chip} of similar size")
    errors = [run.error for run in sorted(near, key=lambda run: math.dist(run.sizes, sizes))[:CLOSEST]]
    return Checked(len(errors), sum(map(abs, errors)) / len(errors), least=min(errors), most=max(errors))


def _near(some: tuple[float, ...], others: tuple[float, ...], doublings: float) -> bool:
    return all(abs(a - b) <= doublings for a, b in zip(some, others, strict=True))


def _missing(uses: frozenset[str], runs: list[_Known]) -> str:
    """What no run has. If each thing is in some run, everything the plan uses, together."""
    never = sorted(one for one in uses if not any(one in run.uses for run in runs))
    return " or ".join(never) if never else f"{_joined(sorted(uses))} together"


def _joined(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _uses(shape: ModelShape, plan: Plan) -> Iterator[str]:
    for name in ("tp", "pp", "cp"):
        if getattr(plan, name) > 1:
            yield name.upper()
    if plan.cp > 1 and plan.context == "ulysses":
        yield "Ulysses"
    if plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"):
        yield plan.schedule
    if shape.experts:
        yield "experts"
    if plan.expert_tp != plan.tp:
        yield "ETP other than TP"
    yield f"ZeRO-{plan.zero}" if plan.zero > 1 else "ZeRO-1 or less"
    if plan.dp_shard not in (None, plan.dp):
        yield "HSDP"
    if plan.offload != "none":
        yield "offloading"
    if plan.precision in ("fp8", "fp32"):
        yield plan.precision.upper()
    yield "flash attention" if plan.flash else "stored scores"
    if not plan.overlap:
        yield "no overlap"


def _sizes(shape: ModelShape, plan: Plan) -> tuple[float, ...]:
    tokens = plan.microbatch * plan.seq / plan.cp
    return tuple(math.log2(size) for size in (shape.hidden, plan.seq, tokens, plan.gpus))


def _rates(cluster: Cluster) -> tuple[float, ...]:
    chip, near, far = cluster.accelerator, cluster.levels[0], cluster.levels[-1]
    rates = (chip.flops * chip.matmul_fraction, chip.memory_bandwidth, near.share, far.share)
    return tuple(math.log2(rate) for rate in rates)


def _generation(cluster: Cluster) -> str:
    name = cluster.accelerator.name
    return next((chip for chip, names in _GENERATIONS.items() if name.startswith(names)), name)


@functools.cache
def _known() -> list[_Known]:
    return [
        _Known(
            _generation(row.cluster),
            row.plan.stack,
            frozenset(_uses(row.shape, row.plan)),
            _sizes(row.shape, row.plan),
            _rates(row.cluster),
            row.time_error(),
        )
        for row in steps.rows()
    ]
