"""Published runs and their failures: causes, rates, the share of useful time, and how fast they recovered."""

from typing import NamedTuple

from manyranks.theory import tables

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
        for row in tables.rows("llama3_interruptions")
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
    return [Run(*row.values()) for row in tables.rows("failure_runs")]


_LLAMA3 = runs()[0]
# Seconds between unexpected interruptions per GPU: 16,384 · 54 days ÷ 419.
LLAMA3_GPU_MTBF = int(_LLAMA3.gpus) * int(_LLAMA3.lasted.removesuffix(" days")) * DAY / int(_LLAMA3.unexpected)
