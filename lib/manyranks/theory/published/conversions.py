"""Published numbers that follow from a formula and other published numbers: memory, utilization, parameters.

Each check gives rows of (what, computed, published, tolerance), the tolerance as a share of the published number.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from manyranks.theory import flops, memory, tables
from manyranks.theory.plan import Plan
from manyranks.theory.published import context, mfu, steps
from manyranks.theory.shapes import models

STAGES = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}


class Check(NamedTuple):
    """A number, computed and published in the same unit; tolerance: largest difference, as a share of `published`."""

    table: str
    what: str
    computed: float
    published: float
    tolerance: float

    @property
    def error(self) -> float:
        return self.computed / self.published - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.tolerance


def checks() -> list[Check]:
    return [check for table in TABLES for check in table()]


def zero_table1() -> Iterator[Check]:
    """arXiv 1910.02054, Table 1: gigabytes a device of 10⁹ bytes. 0.12 is printed for 0.117."""
    for row in tables.rows("zero_table1"):
        phi, ranks, printed = float(row["params_B"]) * 1e9, int(row["dp_degree"]), float(row["GB_per_device"])
        states = memory.model_states(phi, Plan(dp=ranks, zero=STAGES[row["stage"]]))
        tolerance = 0.03 if printed == 0.12 else 0.01
        yield Check("ZeRO Table 1", f"{row['params_B']}B {row['stage']} {ranks}", states.total / 1e9, printed, tolerance)


def bytes_per_parameter() -> Iterator[Check]:
    """Megatron-LM's three recipes, whole and with its distributed optimizer on 64 ranks."""
    recipes = {"fp16": "fp16-fp32-gradients", "bf16": "bf16-fp32-gradients", "fp32": "fp32"}
    for row in tables.rows("megatron_bytes_per_param"):
        for zero, column in ((0, "replicated_bytes"), (1, "distributed_optimizer_bytes")):
            plan = Plan(dp=64, zero=zero, precision=recipes[row["param_dtype"]])
            own, _, shared = row[column].partition("+")
            printed = float(own) + (float(shared.removesuffix("/d")) / 64 if shared else 0)
            each = memory.model_states(1e9, plan).total / 1e9
            yield Check("Megatron-LM bytes a parameter", f"{row['param_dtype']}, ZeRO-{zero}", each, printed, 1e-6)


# Largest difference of a printed utilization, as a share of it. Whole percents: half a one, and 41 is printed for 40.4.
_NEAR = {steps.KORTHIKANTI: 0.005, mfu.PALM: 0.002, mfu.DEEPSEEK: 0.005}
_POINTS = {steps.SC21: 0.5, steps.LLAMA3: 0.6}


def utilizations() -> Iterator[Check]:
    """The MFU and HFU of published.mfu that papers print, but for those that nothing explains."""
    for row in mfu.rows():
        for name, share, printed in (("MFU", row.mfu, row.printed), ("HFU", row.hfu, row.printed_hfu)):
            if printed and (row.run, name) not in mfu.UNEXPLAINED:
                tolerance = _NEAR.get(row.paper) or _POINTS[row.paper] / (100 * printed)
                what = f"{row.run}, {row.convention}" if row.convention else row.run
                yield Check(row.paper, f"{what}: {name} %", 100 * share, 100 * printed, tolerance)


def llama3() -> Iterator[Check]:
    """arXiv 2407.21783, Tables 3 and 4: parameters, GPUs of each layout, tokens of a batch."""
    for row in tables.rows("llama3_architecture"):
        size, parameters = row["model"], int(row["parameters"])
        yield Check("Llama 3 Table 3", f"{size}, parameters", models[f"llama3-{size.lower()}"].parameters, parameters, 0.0)
    for run, row in zip(steps.llama3(), tables.rows("llama3_table4"), strict=True):
        name = f"{row['gpus']} GPUs, {row['seq']} tokens"
        yield Check("Llama 3 Table 4", f"{name}: GPUs", run.plan.gpus, float(row["gpus"]), 0.0)
        yield Check("Llama 3 Table 4", f"{name}: tokens", run.plan.tokens, 2**24, 0.0)


def deepseek() -> Iterator[Check]:
    """ "Insights into DeepSeek-V3", Table 4: FLOP/s with the whole score matrix and with its causal half; parameters."""
    table = {row["metric"]: float(row["MPFT"]) for row in tables.rows("deepseek_isca_step_breakdown")}
    shape = models["deepseek-v3"]
    for row in mfu.deepseek():
        each = flops.per_token(shape, 4096, row.convention) * row.tokens_per_second / row.chips
        yield Check(mfu.DEEPSEEK, f"TFLOP/s, {row.run}", each / 1e12, table[f"TFLOPS {row.run}"], 0.005)
    yield Check("DeepSeek-V3 Table 1", "parameters, B", shape.parameters / 1e9, 671, 0.005)
    yield Check("DeepSeek-V3 Table 1", "active parameters, B", shape.active_parameters / 1e9, 37.55, 0.0005)
    without = (shape.active_parameters - shape.embedding_parameters) / 1e9
    yield Check("DeepSeek-V3 Table 1", "active without the input embedding, B", without, 36.63, 0.0005)


def ring_attention() -> Iterator[Check]:
    """arXiv 2310.01889, Tables 2 and 3: thousands of tokens, in one digit after the point; of Table 3 the rows with GPUs."""
    for row in context.blocks():
        for what, found, printed in (("block", row.block, row.printed_block), ("shard", row.shard, row.printed_shard)):
            yield Check("Ring Attention Table 2", f"{row.device}, least {what}", found, printed, max(0.02, 0.05 / printed))
    for row in context.longest():
        if "A100" in row.devices:
            yield Check("Ring Attention Table 3", f"{row.devices}, {row.model}", row.context, row.printed, 0.0)


TABLES: tuple[Callable[[], Iterator[Check]], ...] = (
    zero_table1,
    bytes_per_parameter,
    utilizations,
    llama3,
    deepseek,
    ring_attention,
)
