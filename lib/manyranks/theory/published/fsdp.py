"""Runs of FSDP: torchtitan's and llm-foundry's benchmarks, as configurations."""

import re
from collections.abc import Iterator
from dataclasses import replace

from manyranks.theory import published
from manyranks.theory.cluster import clusters
from manyranks.theory.plan import Plan
from manyranks.theory.published.runs import FOUNDRY, TORCHTITAN, Row
from manyranks.theory.shapes import models


def torchtitan() -> Iterator[Row]:
    """FSDP2 beside tensor, context and pipeline parallelism. Gradients are reduced in 32 bits; parallel layers are sharded over
    sequences (SP); stages keep what they have gathered. A pipeline has as many micro-batches as ranks, torchtitan's default.
    Two rows say neither batch nor sequence, and are left out. The source names neither the split of the layers over stages nor
    who gathers keys and values when.
    """
    for row in published.rows("fsdp_torchtitan"):
        if row["seq"]:
            peak = 2**30 * float(row["memory_GiB"] or 0)
            yield Row(TORCHTITAN, _name(row), *_torchtitan(row), float(row["tok_per_s_per_gpu"]), "tokens/s", memory=peak)


def _name(row: dict[str, str]) -> str:
    return f"{row['model'].removeprefix('Llama3.1-')} {row['parallelism']}, {int(row['seq']):,} tokens, {row['options']}"


def _torchtitan(row: dict[str, str]) -> tuple:
    degrees = {axis: int(size) for axis, size in re.findall(r"([A-Z]+)(\d+)", row["parallelism"])}
    options, local, pp = row["options"], int(row["local_batch"]), degrees.get("PP", 1)
    compiled = "compile" in options or "async" in row["source"]
    plan = Plan(
        dp=degrees["FSDP"],
        tp=degrees.get("TP", 1),
        cp=degrees.get("CP", 1),
        pp=pp,
        seq=int(row["seq"]),
        batch=degrees["FSDP"] * local,
        microbatch=local // pp,
        virtual=2 if "interleaved" in options else 1,
        zero=3,
        reshard_after_forward=pp == 1,
        recompute="full" if "full AC" in options else "selective",
        precision="fp8" if "fp8" in options else "bf16-fp32-gradients",
        overlap_tensor="AsyncTP" in options,
        stack="torchtitan-rowwise" if "rowwise" in options else "torchtitan" if compiled else "torchtitan-eager",
    )
    return models[f"llama3-{row['model'].split('-')[1].lower()}"], plan, clusters["grand-teton"]


def foundry() -> Iterator[Row]:
    """MPT under FSDP1, everything in 16 bits ("PURE"); where activation_ckpt is True every layer is recomputed."""
    for row in published.rows("fsdp_llm_foundry_h100"):
        seq, gpus = int(row["seq"]), int(row["gpus"])
        plan = Plan(
            dp=gpus,
            seq=seq,
            batch=int(row["global_batch"]),
            microbatch=int(row["micro_batch"]),
            zero=3,
            reshard_after_forward=row["sharding"] == "FULL_SHARD",
            recompute="full" if row["activation_ckpt"] == "True" else "none",
            sequence_parallel=False,
            stack="fsdp1",
        )
        shape = replace(models[f"mpt-{row['model']}"], positions=seq)
        name = f"{row['model']}, {gpus} GPUs, {seq:,} tokens, {plan.recompute} recomputed"
        yield Row(FOUNDRY, name, shape, plan, clusters["h100-dgx"], float(row["tok_per_s_per_gpu"]), "tokens/s")
