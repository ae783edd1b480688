"""How published models were laid out over their accelerators, and what their neighbours would have cost.

What a report says and what we assume stand apart in each layout. Where a report leaves numbers out, the time of a step says
little by itself; what counts is how the layout compares with its neighbours on the same work.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import memory, published, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, clusters
from manyranks.theory.memory import Peak
from manyranks.theory.plan import RECOMPUTE, Plan
from manyranks.theory.published import steps
from manyranks.theory.shapes import models
from manyranks.theory.step import StepTime


class Layout(NamedTuple):
    """published: what the report says; assumed: what we put in; hours: measured GPU hours for a trillion tokens, or None."""

    name: str
    shape: ModelShape
    plan: Plan
    cluster: Cluster
    published: str
    assumed: str
    source: str
    hours: float | None = None

    @property
    def time(self) -> StepTime:
        return step.estimate(self.shape, self.plan, self.cluster)

    @property
    def predicted_hours(self) -> float:
        """GPU hours for a trillion tokens."""
        return 1e12 / (self.time.tokens_per_second / self.plan.gpus) / 3600


def layouts() -> list[Layout]:
    """Llama 3 405B's three, Yi-34B's, Gemma 2's three, DeepSeek-V2's and DeepSeek-V3's."""
    return [*llama3(), yi(), *gemma2(), deepseek_v2(), deepseek_v3()]


def llama3() -> Iterator[Layout]:
    """As steps.llama3 has them."""
    for row in steps.llama3():
        yield Layout(
            f"Llama 3 405B, {row.name}",
            row.shape,
            row.plan,
            row.cluster,
            f"TP 8, CP {row.plan.cp}, PP 16 of stages of one layer, DP {row.plan.dp}, optimizer sharded, keys all-gathered",
            "8 stages a rank, ZeRO-1, tensor parallelism not overlapped, selective recomputation (the report: none at 8K)",
            "arXiv 2407.21783, Table 4 and section 3.3.2",
        )


def yi() -> Layout:
    return Layout(
        "Yi-34B",
        models["yi-34b"],
        Plan(dp=128, pp=2, tp=4, seq=4096, batch=1024, recompute="none"),
        clusters["a100-dgx"],
        "ZeRO-1; tensor and pipeline parallelism together inside a node; no activation checkpointing; flash attention",
        "1,024 A100 of 80 GB, TP 4, PP 2, 1,024 sequences of 4,096: the report gives none of these numbers",
        "arXiv 2403.04652, section 4",
    )


def gemma2() -> Iterator[Layout]:
    """Of the 2B model's two pods only one: another network than ours joins them."""
    for row in published.rows("gemma2_training"):
        data, tensor, chips = (int(row[column]) for column in ("data_shards", "model_shards", "chips"))
        cluster = clusters[row["chip"].lower().replace(" ", "-")]
        pods = -(-chips // cluster.levels[-1].size)
        data //= pods
        yield Layout(
            f"Gemma 2 {row['model']}",
            models[f"gemma2-{row['model'].lower()}"],
            Plan(dp=data, tp=tensor, seq=8192, batch=data, zero=3, recompute="full" if pods > 1 else "selective"),
            cluster.of(chips // pods),
            f"{chips} chips, {row['data_shards']} data shards × {tensor} model shards, optimizer as in ZeRO-3, GSPMD",
            "one sequence of 8,192 tokens for each data shard, ZeRO-3, recomputation" + ", one pod of two" * (pods > 1),
            "arXiv 2408.00118, section 3.3 and Table 3",
        )


def deepseek_v2() -> Layout:
    plan = Plan(dp=64, pp=16, ep=8, seq=4096, batch=9216, schedule="zb-h1")
    return Layout(
        "DeepSeek-V2",
        models["deepseek-v2"],
        plan,
        clusters["h800"],
        "PP 16 with zero bubbles, EP 8, ZeRO-1, no TP, some operators recomputed; 9,216 sequences of 4,096; H800",
        "1,024 GPUs, ZB-H1, bf16, processors reserved for communication as by DeepSeek-V3; shared experts hide no all-to-all",
        "arXiv 2405.04434, sections 3.1.2, 3.1.3 and 3.2.3",
        172.8e3,
    )


def deepseek_v3() -> Layout:
    (row,) = steps.deepseek()
    config = {line["key"]: line["value"] for line in published.rows("deepseek_v3_config")}
    return Layout(
        "DeepSeek-V3",
        row.shape,
        row.plan,
        row.cluster,
        "2,048 H800, PP 16 with DualPipe, EP 64 over 8 nodes, ZeRO-1, no TP, fp8, 15,360 sequences of 4,096",
        "micro-batches of one sequence",
        "arXiv 2412.19437, sections 3 and 4.2",
        1e3 * float(config["gpu_hours_per_T_tokens_K"]),
    )


class Neighbour(NamedTuple):
    """A layout beside a published one. fits: in the memory, with no more recomputation than plan says; impossible: why there is
    no such plan, and nothing else then."""

    name: str
    plan: Plan | None = None
    fits: bool = False
    peak: Peak | None = None
    time: StepTime | None = None
    slower: float = 0.0  # its seconds ÷ those of the published one, − 1
    impossible: str = ""

    @property
    def limit(self) -> str:
        """What it has most of beside computing, or why it cannot be."""
        return self.impossible or (self.time.limit if self.fits else "memory")


def why_not(layout: Layout) -> list[Neighbour]:
    """The published layout, and others on as many accelerators with the same batch: one change each. A neighbour that does not
    fit recomputes more, and has what it takes then."""
    found = [_neighbour("as published", layout, {})]
    found += [_neighbour(name, layout, change) for name, change in _changes(layout.plan, layout.shape, layout.cluster.node)]
    return found


def _changes(plan: Plan, shape: ModelShape, node: int) -> Iterator[tuple[str, dict[str, object]]]:
    dp, tp, pp, cp, ep = plan.dp, plan.tp, plan.pp, plan.cp, plan.ep
    for other in dict.fromkeys((1, tp // 2, 2 * tp)):
        if other and other != tp:
            yield (f"TP {other}" if other > 1 else "no TP"), {"tp": other, "dp": _share(dp * tp, other)}
    for other in dict.fromkeys((1, pp // 2, 2 * pp)):
        if other and other != pp and pp > 1:
            yield (f"PP {other}" if other > 1 else "no PP"), {"pp": other, "dp": _share(dp * pp, other)} | _stages(plan, other)
    for other in dict.fromkeys((1, ep // 2, 2 * ep, node)):
        if other and other != ep and shape.experts:
            yield (f"EP {other}" if other > 1 else "no EP"), {"ep": other}
    if cp > 1:
        yield f"CP {cp // 2}", {"cp": cp // 2, "dp": 2 * dp}
    if plan.zero == 3:
        yield "ZeRO-1", {"zero": 1}
    else:
        yield "ZeRO-3", {"zero": 3}
    if tp * pp > 1:
        yield "ZeRO-3 alone", {"zero": 3, "tp": 1, "pp": 1, "dp": dp * tp * pp} | _stages(plan, 1)
    if plan.schedule != "1f1b":
        yield "1F1B", {"schedule": "1f1b"}


def _share(ranks: int, other: int) -> int:
    return max(1, ranks // other)


def _stages(plan: Plan, pp: int) -> dict[str, object]:
    """As many stages as before, where ranks have several; one rank has no schedule."""
    if pp == 1:
        return {"virtual": 1, "schedule": "1f1b"}
    return {"virtual": max(1, plan.virtual * plan.pp // pp)} if plan.virtual > 1 else {}


def _neighbour(name: str, layout: Layout, change: dict[str, object]) -> Neighbour:
    shape, cluster, gpus = layout.shape, layout.cluster, layout.plan.gpus
    try:
        changed = replace(layout.plan, **change)
        plans = [replace(changed, recompute=more) for more in _more(layout.plan.recompute)]
        peaks = [memory.peak(shape, plan) for plan in plans]
        fitting = [peak.total <= cluster.accelerator.memory for peak in peaks]
        index = fitting.index(True) if any(fitting) else len(plans) - 1
        time = step.estimate(shape, plans[index], cluster, gpus=gpus)
    except ValueError as error:
        return Neighbour(name, impossible=str(error))
    return Neighbour(name, plans[index], fitting[index], peaks[index], time, time.seconds / layout.time.seconds - 1)


def _more(recompute: str) -> tuple[str, ...]:
    """This much recomputation, or more."""
    return RECOMPUTE[RECOMPUTE.index(recompute) :]
