"""Published utilizations, each from its paper's own numbers under its paper's own convention, next to what is printed.

Shares of the peak, not percent. A paper's number depends on what it counts: theory.flops.CONVENTIONS. Beside that
stands the same run in this course's own convention, "causal".
"""

from collections.abc import Iterator
from typing import NamedTuple

from manyranks.theory import flops, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.hardware import accelerators
from manyranks.theory.published import steps
from manyranks.theory.shapes import models

PALM, DEEPSEEK = "PaLM Table 3", "DeepSeek-V3 (ISCA'25)"
# Printed, and not what follows from the rest of the table: (run, "MFU" or "HFU") -> what follows.
UNEXPLAINED = {(row["run"], row["quantity"]): row["why"] for row in tables.rows("mfu_unexplained")}
# What code bases count, as conventions of flops.CONVENTIONS, and where that is seen.
COUNTED_AS = {row["code"]: (row["convention"], row["source"]) for row in tables.rows("mfu_counted_as")}


class PrintedRun(NamedTuple):
    """A printed run.

    tokens_per_second: of the whole job, None where the paper does not say enough
    convention: None where the paper does not say what it counts
    mfu, hfu: what follows
    printed, printed_hfu: what the paper has, None where it has none
    causal: the MFU as this course counts, None where that doesn't follow
    """

    paper: str
    run: str
    chips: int | None
    chip: str
    tokens_per_second: float | None
    convention: str | None
    mfu: float | None
    printed: float | None
    hfu: float | None = None
    printed_hfu: float | None = None
    source: str = ""
    causal: float | None = None


def rows() -> list[PrintedRun]:
    return [*palm(), *korthikanti(), *sc21(), *llama3(), *deepseek()]


def under_every_convention(shape: ModelShape, seq: int, tokens_per_second: float, gpus: int, peak: float) -> dict[str, float]:
    """The MFU of one run under each of flops.CONVENTIONS. Arguments and errors as flops.mfu's."""
    return {name: flops.mfu(shape, seq, tokens_per_second, gpus, peak, name) for name in flops.CONVENTIONS}


def palm() -> Iterator[PrintedRun]:
    """arXiv 2204.02311, Table 3, with and without attention.

    Gopher: 6N + 12LHQT with L = 80, H = 128 and Q = 128 (arXiv 2112.11446, Table 1); its relative positions have weights that
    ModelShape does not know. As this course counts: the same with half of the scores.
    """
    table = {row["model"]: row for row in tables.rows("palm_mfu")}
    yield from _palm(table["PaLM"], "palm-540b", "TPU v4")
    yield from _palm(table["MT-NLG"], "megatron-530b", "A100-80GB SXM")
    yield _gopher(table["Gopher"])
    row, each = table["GPT-3"], float(table["GPT-3"]["tflops_per_chip"]) * 1e12
    mfu, printed = each / accelerators["V100 SXM2"].flops, _share(row["MFU_pct"])
    yield PrintedRun(PALM, "GPT-3", None, row["chip_type"], None, "parameters", mfu, printed, source=row["source"])


def _palm(row: dict[str, str], model: str, chip: str) -> Iterator[PrintedRun]:
    speed, chips = float(row["tok_per_s"]), int(row["chips"])
    run = models[model], 2048, speed, chips, accelerators[chip].flops
    about = PALM, row["model"], chips, row["chip_type"], speed
    hfu = _share(row["HFU_pct"])
    more = {"source": row["source"], "causal": flops.mfu(*run)}
    yield PrintedRun(*about, "palm", flops.mfu(*run, "palm"), _share(row["MFU_pct"]), None, hfu, **more)
    yield PrintedRun(*about, "parameters", flops.mfu(*run, "parameters"), _share(row["MFU_without_attention_pct"]), **more)


def _gopher(row: dict[str, str]) -> PrintedRun:
    weights, scores = 6 * float(row["params_B"]) * 1e9, 12 * 80 * 128 * 128 * 2048
    speed, chips = float(row["steps_per_s"]) * int(row["tokens_per_step"]), int(row["chips"])
    mfu, causal = (each * speed / (chips * accelerators["TPU v3"].flops) for each in (weights + scores, weights + scores / 2))
    about = PALM, "Gopher", chips, row["chip_type"], speed, "palm"
    return PrintedRun(*about, mfu, _share(row["MFU_pct"]), source=row["source"], causal=causal)


def korthikanti() -> Iterator[PrintedRun]:
    """arXiv 2205.05198, Tables 3 and 5: MFU and HFU from its own times of a step, with selective recomputation."""
    # "530B with DP8 (2240 GPUs)" is "530B, DP 8" in steps.
    rows = tables.rows("korthikanti_iteration_times")
    table = {row["model"].split(" (")[0].replace(" with DP", ", DP "): row for row in rows}
    for run in steps.korthikanti():
        if run.plan.recompute == "selective":
            name = run.name.replace(", present", "")
            speed, row = run.plan.tokens / run.measured, table[name]
            given = run.shape, run.plan.seq, speed, run.plan.gpus, _peak(run)
            mfu, hfu = flops.mfu(*given, "korthikanti"), flops.hfu(*given, "selective", "korthikanti")
            both, causal = (mfu, _share(row["MFU_pct"]), hfu, _share(row["HFU_pct"])), flops.mfu(*given)
            yield PrintedRun(steps.KORTHIKANTI, name, run.plan.gpus, "A100", speed, "korthikanti", *both, row["source"], causal)


def sc21() -> Iterator[PrintedRun]:
    """arXiv 2104.04473, Table 1: printed are FLOP/s with full recomputation, so a hardware utilization; tokens/s
    follow from its equation 3, and from these the MFU that it does not print.
    """
    for run, row in zip(steps.sc21(), tables.rows("megatron_sc21_table1"), strict=True):
        seq, chips, each = run.plan.seq, run.plan.gpus, run.measured * 1e12
        speed = each * chips / flops.hardware_per_token(run.shape, seq, run.recompute, run.counting)
        given, hfu = (run.shape, seq, speed, chips, _peak(run)), (each / _peak(run), _share(row["pct_peak_312"]))
        mfu, causal = flops.mfu(*given, run.counting), flops.mfu(*given)
        yield PrintedRun(run.table, run.name, chips, "A100", speed, run.counting, mfu, None, *hfu, row["source"], causal)


def llama3() -> Iterator[PrintedRun]:
    """arXiv 2407.21783, Table 4: FLOP/s, in whole TFLOP/s, and MFU. The paper has no tokens/s and does not say what it
    counts of attention; what tokens/s would be under a convention: implied_speed.
    """
    for run, row in zip(steps.llama3(), tables.rows("llama3_table4"), strict=True):
        mfu, printed = run.measured * 1e12 / _peak(run), _share(row["MFU_pct"])
        yield PrintedRun(run.table, run.name, run.plan.gpus, "H100", None, None, mfu, printed, source=row["source"])


def implied_speed(shape: ModelShape, seq: int, mfu: float, gpus: int, peak: float) -> dict[str, float]:
    """Tokens/s of the whole job that a utilization stands for, under each of flops.CONVENTIONS: what they disagree on where
    only the utilization is published.
    """
    return {name: mfu * gpus * peak / flops.per_token(shape, seq, name) for name in flops.CONVENTIONS}


def deepseek() -> Iterator[PrintedRun]:
    """ "Insights into DeepSeek-V3" (arXiv 2505.09343), Table 4: with the whole score matrix, and with its causal half.

    Products run in 8 bits, but the peak is for 16.
    """
    table = {row["metric"]: row for row in tables.rows("deepseek_isca_step_breakdown")}
    (run,) = steps.deepseek()
    speed, chips = run.plan.tokens / run.measured, run.plan.gpus
    given = run.shape, run.plan.seq, speed, chips, _peak(run)
    for kind, convention in (("non-causal", "full"), ("causal", "causal")):
        mfu, row = flops.mfu(*given, convention), table[f"MFU {kind} %"]
        more = {"source": row["source"], "causal": flops.mfu(*given)}
        yield PrintedRun(DEEPSEEK, kind, chips, "H800", speed, convention, mfu, _share(row["MPFT"]), **more)


def _peak(run: steps.PublishedRun) -> float:
    return run.cluster.accelerator.flops


def _share(percent: str) -> float | None:
    return round(float(percent) / 100, 6) if percent else None
