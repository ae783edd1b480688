"""Published step times: what each run was, on what, what its authors measured, and what theory says of it.

Each run is a row of a table. step_tables.csv says of each table what all its runs have in common, what we assume, and where
it's from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

from manyranks.theory import flops, step, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, clusters
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.plan import Plan
from manyranks.theory.shapes import models

SC21, KORTHIKANTI = "SC21 Table 1", "Korthikanti Table 5"
LLAMA3, DEEPSEEK = "Llama 3 Table 4", "DeepSeek-V3 (ISCA'25 Table 4)"
TORCHTITAN, FOUNDRY = "torchtitan", "llm-foundry, H100"
BRIDGE, SMALL, LAYOUTS = "Megatron-Bridge", "vTrain, one node", "Aleph Alpha, 13B"
MEGASCALE = "MegaScale Table 2"  # nothing was chosen with it in sight, and no bar is made of it
PRETRAINING = (SC21, KORTHIKANTI, LLAMA3, DEEPSEEK)  # by the frameworks of those who trained
TABLES = (*PRETRAINING, TORCHTITAN, FOUNDRY, BRIDGE, SMALL, LAYOUTS)
# Columns of a table whose runs have other sizes than their shape.
_SIZES = {"layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocab", "mtp_depth", "parallel_layers"}
_SIZES |= {"norms_per_layer"}


@dataclass(frozen=True)
class PublishedRun:
    """A run. measured: seconds a step; tokens/s of an accelerator; or its FLOP/s under `counting`.

    It holds nothing that was measured but this; predict() is given the configuration alone.
    """

    table: str
    name: str
    shape: ModelShape
    plan: Plan
    cluster: Cluster
    measured: float
    unit: str  # "s", "tokens/s" or "TFLOP/s"
    counting: str = "full"
    recompute: str = "none"  # counted a second time in FLOP/s
    memory: float = 0.0  # bytes of the allocator's peak on the fullest accelerator, if they're printed

    def predict(self, constants: Constants = DEFAULT) -> float:
        time = step.estimate(self.shape, self.plan, self.cluster, constants)
        if self.unit == "s":
            return time.seconds
        if self.unit == "tokens/s":
            return time.tokens_per_second / self.plan.gpus
        each = flops.hardware_per_token(self.shape, self.plan.seq, self.recompute, self.counting)
        return each * time.tokens_per_second / self.plan.gpus / 1e12

    def error(self, constants: Constants = DEFAULT) -> float:
        """Predicted ÷ measured − 1, of what is printed."""
        return self.predict(constants) / self.measured - 1

    def time_error(self, constants: Constants = DEFAULT) -> float:
        """The same of the step's time, which is the inverse of a rate."""
        return self.error(constants) if self.unit == "s" else self.measured / self.predict(constants) - 1


def rows() -> list[PublishedRun]:
    return [row for table in TABLES for row in of(table)]


def of(table: str, fitted: bool = True) -> Iterator[PublishedRun]:
    """Reads the runs of one table, in its order: those that fitted, or those that ended out of memory."""
    about, found = lines(table)
    for line in found:
        if (about["measured"] in line) == fitted:
            yield _row(table, about, line)


def _row(table: str, about: dict[str, str], line: dict[str, str]) -> PublishedRun:
    plan, shape = plan_of(line), models[line["shape"]]
    shape = replace(shape, **{name: tables.value(text) for name, text in line.items() if name in _SIZES})
    if shape.positions:  # learned, as many as a sequence has tokens
        shape = replace(shape, positions=plan.seq)
    return PublishedRun(
        table,
        line.get("name", shape.name),
        shape,
        plan,
        clusters[line["cluster"]],
        float(line.get(about["measured"], "nan")),
        about["unit"],
        about["counting"] or "full",
        about["recomputed"] or "none",
        2**30 * float(line.get("memory_GiB", 0)),
    )


sc21, korthikanti, llama3, deepseek, megascale = (partial(of, table) for table in (*PRETRAINING, MEGASCALE))


def lines(table: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Reads what step_tables.csv says of a table; and its runs, each with what all have in common, without empty cells."""
    about = next(row for row in tables.rows("step_tables") if row["table"] == table)
    common, found = tables.pairs(about["common"]), tables.rows(about["rows"])
    if "key" in found[0]:  # one run, a line for each of its numbers
        found = [{line["key"]: line["value"] for line in found}]
    return about, [common | {name: text for name, text in line.items() if text} for line in found]


def plan_of(line: dict[str, str]) -> Plan:
    """Makes the plan that a row describes: its columns are named after the plan's fields."""
    return Plan(**{field.name: tables.value(line[field.name]) for field in fields(Plan) if line.get(field.name)})
