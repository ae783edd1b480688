"""Published runs and their failures: causes, rates, the share of useful time, and how fast they recovered."""

from typing import NamedTuple

from manyranks.theory import published

DAY, HOUR = 86400, 3600


class Cause(NamedTuple):
    """Says how often one component interrupted a run.

    component: what failed
    category: "GPU", "Host", "Network", …
    count: number of interruptions
    share: of all, as printed, between 0 and 1
    """

    component: str
    category: str
    count: int
    share: float


def interruptions() -> list[Cause]:
    """Reads the causes of Llama 3 405B's unexpected interruptions in 54 days on 16,384 GPUs.

    The counts add up to 419, but the shares to 94.9 %: 30.1 % is printed for 148 faulty GPUs, which are 35.3 % of 419.
    Source: arXiv 2407.21783, Table 5.
    """
    return [
        Cause(row["component"], row["category"], int(row["count"]), float(row["share_pct"]) / 100)
        for row in published.rows("llama3_interruptions")
    ]


class Run(NamedTuple):
    """Tells what a run's authors print; most don't print everything.

    name: the model, or the system that trained it
    gpus: number of GPUs
    lasted: the time that the figures are of
    unexpected: number of interruptions
    effective: share of the time that went into training, which this course calls goodput
    recovery: what they say of checkpoints, restarts and spares
    source: paper and section
    """

    name: str
    gpus: str
    lasted: str
    unexpected: str
    effective: str
    recovery: str
    source: str


def runs() -> list[Run]:
    """Reads the published runs."""
    return [Run(*row.values()) for row in published.rows("failure_runs")]


def _llama3_gpu_mtbf() -> float:
    run = runs()[0]
    return int(run.gpus) * int(run.lasted.removesuffix(" days")) * DAY / int(run.unexpected)


LLAMA3_GPU_MTBF = _llama3_gpu_mtbf()  # seconds between unexpected interruptions per GPU: 16,384 · 54 days ÷ 419


class TimeToFailure(NamedTuple):
    """Mean seconds until a job of so many GPUs fails, as printed. projected: by the authors' model; else measured."""

    gpus: int
    seconds: float
    projected: bool


def times_to_failure() -> list[TimeToFailure]:
    """Reads how long jobs ran until they failed, on Meta's research clusters of 8-GPU nodes.

    The measured times follow 1 ÷ GPUs. The projected ones don't continue that line. They're RSC-1's rate of node failures
    times the number of nodes, 24 h ÷ (2,048 · 6.50 ÷ 1,000) = 1.8 h: hardware only, where jobs fail for other reasons, too.
    Source: arXiv 2410.21680.
    """
    rows = [row for row in published.rows("rsc_failures") if row["unit"] == "hours"]
    return [TimeToFailure(int(row["gpus"]), HOUR * float(row["value"]), row["what"].startswith("projected")) for row in rows]


def node_mtbf(cluster: str) -> float:
    """Looks up the mean seconds between failures of one node of "RSC-1" or "RSC-2". Raises ValueError for another cluster."""
    rates = {row["what"].split()[0]: float(row["value"]) for row in published.rows("rsc_failures") if not row["gpus"]}
    if cluster not in rates:
        raise ValueError(f"cluster={cluster!r}: choose from {', '.join(rates)}")
    return 1000 * DAY / rates[cluster]
