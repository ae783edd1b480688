"""Published step times as configurations: what each row ran, on what, and what its authors measured."""

from collections.abc import Iterator

from manyranks.theory import published
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import clusters
from manyranks.theory.plan import Plan
from manyranks.theory.published import fsdp
from manyranks.theory.published.runs import DEEPSEEK, FOUNDRY, KORTHIKANTI, LLAMA3, SC21, TORCHTITAN, Row
from manyranks.theory.shapes import models

PRETRAINING = (SC21, KORTHIKANTI, LLAMA3, DEEPSEEK)  # by the frameworks of those who trained
TABLES = (*PRETRAINING, TORCHTITAN, FOUNDRY)

# Megatron-LM in 2021: nothing fused into flash attention, no communication under compute.
_MEGATRON = {"seq": 2048, "precision": "fp16", "flash": False, "zero": 0}


def rows() -> list[Row]:
    return [*sc21(), *korthikanti(), *llama3(), *deepseek(), *fsdp.torchtitan(), *fsdp.foundry()]


def sc21() -> Iterator[Row]:
    """arXiv 2104.04473, Table 1: full recomputation, counted; gradients after backward."""
    for row in published.rows("megatron_sc21_table1"):
        plan = Plan(
            dp=int(row["data_parallel"]),
            pp=int(row["pp"]),
            tp=int(row["tp"]),
            batch=int(row["batch"]),
            microbatch=int(row["micro_batch"]),
            virtual=int(row["virtual_stages"] or 1),
            sequence_parallel=False,
            recompute="full",
            overlap=False,
            **_MEGATRON,
        )
        shape, measured = models[f"megatron-{float(row['params_B']):g}b"], float(row["tflops_per_gpu"])
        yield Row(SC21, shape.name, shape, plan, clusters["a100-dgx"], measured, "TFLOP/s", "megatron-sc21", "full")


def korthikanti() -> Iterator[Row]:
    """arXiv 2205.05198, Tables 3 and 5: full recomputation without sequence parallelism, and the present work with it."""
    times = {row["model"]: row for row in published.rows("korthikanti_iteration_times")}
    for row in published.rows("korthikanti_configs"):
        size = row["model"].split()[0]
        shape, degrees = models[f"megatron-{size.lower()}"], _korthikanti_degrees(row)
        full = Plan(**degrees, sequence_parallel=False, recompute="full", **_MEGATRON)
        yield _seconds(KORTHIKANTI, f"{size}, full", shape, full, "a100-dgx", times[size]["full_recompute_s"])
        present = Plan(**degrees, **_MEGATRON)
        yield _seconds(KORTHIKANTI, f"{size}, present", shape, present, "a100-dgx", times[size]["present_work_s"])
        if size == "530B":
            eight = Plan(**degrees | {"dp": 8, "batch": 8 * degrees["batch"]}, **_MEGATRON)
            with_dp = times["530B with DP8 (2240 GPUs)"]["present_work_s"]
            yield _seconds(KORTHIKANTI, "530B, present, DP 8", shape, eight, "a100-dgx", with_dp)


def _korthikanti_degrees(row: dict[str, str]) -> dict[str, int]:
    names = {"tp": "tp", "pp": "pp", "batch": "global_batch", "microbatch": "micro_batch", "virtual": "interleave_m"}
    return {field: int(row[column]) for field, column in names.items()}


def _seconds(table: str, name: str, shape: ModelShape, plan: Plan, cluster: str, measured: str) -> Row:
    return Row(table, name, shape, plan, clusters[cluster], float(measured), "s")


def llama3() -> Iterator[Row]:
    """arXiv 2407.21783, Table 4, with section 3.3.2: stages of one layer, embedding and head in the place of one each; keys and
    values all-gathered; gradients accumulated in 32 bits. The paper names no overlap of tensor parallelism, and not what its
    FLOP count takes for attention: the causal half, for with the whole matrix the last row would be out of line.
    """
    shape = models["llama3-405b"]
    for row in published.rows("llama3_table4"):
        dp, seq = int(row["dp"]), int(row["seq"])
        plan = Plan(
            dp=dp,
            pp=int(row["pp"]),
            cp=int(row["cp"]),
            tp=int(row["tp"]),
            seq=seq,
            batch=dp * int(row["batch_per_dp"]),
            virtual=8,
            embedding_slots=True,
            precision="bf16-fp32-gradients",
            overlap_tensor=False,
            context="all-gather",
        )
        name = f"{int(row['gpus']):,} GPUs, {seq:,} tokens"
        yield Row(LLAMA3, name, shape, plan, clusters["h100-dgx"], float(row["tflops_per_gpu"]), "TFLOP/s", "causal")


def deepseek() -> Iterator[Row]:
    """arXiv 2412.19437, sections 3 and 4.2, and the step time of "Insights into DeepSeek-V3", Table 4."""
    config = {row["key"]: row["value"] for row in published.rows("deepseek_v3_config")}
    pp, ep, gpus = (int(config[key]) for key in ("pp", "ep", "gpus"))
    plan = Plan(
        dp=gpus // pp,
        pp=pp,
        tp=int(config["tp"]),
        ep=ep,
        seq=int(config["seq"]),
        batch=int(config["batch_final"]),
        schedule="dualpipe",
        zero=int(config["zero_stage"]),
        precision="fp8",
    )
    measured = next(row for row in published.rows("deepseek_isca_step_breakdown") if row["metric"] == "time/step (s)")
    yield _seconds(DEEPSEEK, f"{gpus:,} H800", models["deepseek-v3"], plan, "h800", measured["MPFT"])
