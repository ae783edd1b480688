"""Chapter 09's explorer shows what theory says of a setting, names what limits, and refuses in words what cannot be."""

import random
import re
from itertools import accumulate

import pytest
from matplotlib.axes import Axes

from manyranks.show import mfu, units
from manyranks.show.bars import LONGEST
from manyranks.show.mfu_explorer import BUDGET, Utilisation
from manyranks.show.mfu_setting import (
    CLUSTERS,
    CONVENTIONS,
    DATA,
    FLASH,
    LENGTHS,
    MODELS,
    PRECISIONS,
    RECOMPUTE,
    SEQUENCES,
    TENSOR,
    Setting,
)
from manyranks.show.mfu_status import speed, status
from manyranks.theory import clusters, flops, memory, models, roofline, step
from tests.drawn import boxes, marked, named, widths, words

DEFAULT_VALUES = {"model": "llama3-8b", "cluster": "h100-dgx", "precision": "bf16", "b": 1, "s": 8192}
DEFAULT_VALUES |= {"recompute": "none", "flash": "on", "tp": 1, "dp": 64, "convention": "full"}
OPTIONS = {"model": list(MODELS), "cluster": CLUSTERS, "precision": PRECISIONS, "b": SEQUENCES, "s": LENGTHS}
OPTIONS |= {"recompute": RECOMPUTE, "flash": list(FLASH), "tp": TENSOR, "dp": DATA, "convention": CONVENTIONS}


def now(**change) -> Setting:
    return Setting(**DEFAULT_VALUES | change)


@pytest.fixture(scope="module")
def explorer():
    return mfu.explorer()


# What the explorer shows of a setting


def test_a_setting_is_what_theory_says_of_its_plan():
    one = now(tp=8, dp=8, recompute="full")
    shape, cluster = models["llama3-8b"], clusters["h100-dgx"]
    assert one.step().seconds == step.estimate(shape, one.plan, cluster).seconds
    assert one.budget() == roofline.time_budget(shape, one.plan, cluster)
    assert one.parts() == roofline.parts(shape, one.plan, cluster)
    assert one.peak() == memory.peak(shape, one.plan)
    run = shape, 8192, one.step().tokens_per_second, 64, 989e12
    assert one.mfu == flops.mfu(*run)
    assert one.hfu == flops.hfu(*run, "full", flash=True)
    assert one._replace(convention="causal").mfu == flops.mfu(*run, "causal")


def test_utilisation_is_of_the_peak_in_the_precision_chosen():
    bf16, fp8 = now(), now(precision="fp8")
    assert fp8.roof.peak == 2 * bf16.roof.peak
    assert speed(fp8) > speed(bf16)
    assert fp8.mfu / bf16.mfu == pytest.approx(speed(fp8) / speed(bf16) / 2)


def test_flash_attention_has_no_scores_to_recompute_selectively():
    one = now(recompute="selective")
    assert one.hfu / one.mfu == pytest.approx(now().hfu / now().mfu)
    stored = now(recompute="selective", flash="off")
    assert stored.hfu / stored.mfu > now(flash="off").hfu / now(flash="off").mfu == 1


@pytest.mark.parametrize(
    "change", [{}, {"tp": 8}, {"model": "deepseek-v3", "dp": 512, "s": 4096}, {"cluster": "tpu-v4"}], ids=str
)
def test_the_budget_s_rows_are_all_that_a_step_spends_time_on(change):
    one = now(**change)
    budget = one.budget()
    assert sum(budget[part] for part in BUDGET) == pytest.approx(one.step().seconds)


# The explorer


def test_it_opens_on_llama_3_8b_on_64_h100s():
    opened = mfu.explorer()
    assert opened.values == DEFAULT_VALUES
    assert opened.status == (
        "llama3-8b, h100-dgx, TP 1 × DP 64, 1 × 8,192 tokens a DP rank: MFU 62.6% (full), HFU 64.9% of 989 TFLOP/s; 766 ms a "
        "step, 10,700 tokens/s a GPU; 44.4 GB of 80 GB. Limit: computing: products take 91% of the time, the MLP at 65% of the "
        "peak."
    )


def drawn(**change) -> list[Axes]:
    """Both panels: the roofline, and the shares of the step."""
    plot = Utilisation()
    plot.update(**DEFAULT_VALUES | change)
    return plot.figure.axes


def test_bars_points_and_numbers_are_the_settings():
    one = now(tp=8, dp=8)
    roofline, share = drawn(**one._asdict())
    time, budget = one.step().seconds, one.budget()
    rows = [f"{units.duration(budget[part])}, {budget[part] / time:.1%}" if budget[part] else "none" for part in BUDGET]
    assert words(share) == [f"{one.mfu:.1%}", f"{one.hfu:.1%}", *rows, "the step"]
    expected = [[LONGEST * share] for share in (one.mfu, one.hfu, *(budget[part] / time for part in BUDGET)) if share]
    assert widths(share) == [pytest.approx(row, rel=1e-3) for row in expected]
    begun = [left for part in BUDGET for left, *_ in boxes(share, part)]
    spent = [budget[part] / time for part in BUDGET if budget[part]]
    assert begun == pytest.approx([LONGEST * share for share in accumulate([0.0, *spent[:-1]])], rel=1e-3)
    found = {part.name: part for part in one.parts()}
    for name in ("attention projections", "attention core", "MLP", "head", "router"):
        line = named(roofline, name)
        if name in found:
            at = found[name].intensity, 100 * found[name].flops_per_second / 989e12
            assert (*line.get_xdata(), *line.get_ydata()) == pytest.approx(at)
        else:
            assert len(line.get_xdata()) == 0
    assert named(roofline, "ridge").get_xdata()[0] == one.roof.ridge
    assert marked(share) == 2 + BUDGET.index("tensor")


def test_a_rate_below_the_axes_is_drawn_at_their_edge():
    roofline, _ = drawn(model="small GPT", s=128, dp=1, cluster="gb200-nvl72", precision="fp8")
    assert named(roofline, "attention core").get_ydata()[0] == roofline.get_ylim()[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"s": 128}, "Limit: gradients and parameters, 76% of the time; a micro-batch of 64 gives 12,500 tokens/s."),
        ({"s": 128, "dp": 1}, "Limit: memory; DP 2 fits. Of the time: "),
        ({"flash": "off"}, "Limit: memory; flash attention on fits. Of the time: memory: the attention core does 124 FLOPs"),
        ({"flash": "off", "tp": 8}, "the ridge is at 295; flash attention on gives "),
        (
            {"model": "small GPT", "s": 256, "b": 16, "cluster": "v100-dgx"},
            "the MLP does 99.7 FLOPs a byte, the ridge is at 139; a micro-batch of 128 gives 3.54 million",
        ),
        ({"s": 131072, "cluster": "tpu-v5p", "recompute": "full"}, "above 100%: full counts scores that the causal mask hides"),
        ({"tp": 8}, "Limit: tensor-parallel messages, "),
        (
            {"model": "small GPT", "s": 128, "dp": 1},
            "Limit: overhead: starting kernels, 97% of the time; a micro-batch of 128 gives ",
        ),
        ({"model": "gpt2", "s": 128, "b": 2, "dp": 1}, "Limit: overhead"),
        ({"b": 4}, "Does not fit: llama3-8b, "),
        ({"b": 4}, "Limit: memory; recompute full fits. Of the time: computing: "),
        ({"model": "deepseek-v3", "dp": 256, "s": 4096}, "EP 64, 1 × 4,096 tokens a DP rank"),
    ],
)
def test_the_status_line_names_the_limit_and_a_way_out(explorer, change, said):
    assert said in explorer.set(**DEFAULT_VALUES | change).status


ONE_GPU, LONG = {"model": "llama3.2-1b", "dp": 1}, {"tp": 2, "recompute": "full"}
TASKS = [
    (ONE_GPU | {"s": 128}, "MFU 4.4%"),
    (ONE_GPU | {"s": 128, "b": 4}, "MFU 13.9%", "the optimizer's memory traffic, 50% of the time"),
    (ONE_GPU | {"s": 128, "b": 64}, "MFU 42.3%"),
    (LONG, "MFU 44.0%", "7,510 tokens/s"),
    (LONG | {"s": 131072}, "MFU 64.7%", "2,550 tokens/s"),
    (LONG | {"convention": "causal"}, "MFU 39.1%"),
    (LONG | {"convention": "causal", "s": 131072}, "MFU 38.2%"),
    (LONG | {"convention": "parameters"}, "MFU 36.6%"),
    (LONG | {"convention": "parameters", "s": 131072}, "MFU 12.4%"),
    (LONG | {"flash": "off", "s": 131072}, "497 tokens/s", "612 GB", "the attention core does 128 FLOPs a byte"),
    (ONE_GPU | {"s": 256, "cluster": "v100-dgx"}, "MFU 16.3%", "2,710 tokens/s"),
    (ONE_GPU | {"s": 256}, "MFU 8.2%", "10,700 tokens/s"),
    (ONE_GPU | {"s": 256, "cluster": "h200-dgx"}, "MFU 10.8%", "14,200 tokens/s"),
    ({"b": 2}, "Does not fit"),
    ({"b": 2, "recompute": "selective"}, "MFU 63.0%", "HFU 65.3%", "10,800 tokens/s", "62.4 GB"),
    ({"b": 2, "recompute": "full"}, "MFU 49.0%", "HFU 66.2%", "8,370 tokens/s", "18.6 GB"),
    ({"model": "small GPT", "dp": 1, "s": 128, "cluster": "laptop", "precision": "fp32"}, "MFU 76.1%", "3,280 tokens/s"),
    ({"model": "small GPT", "dp": 1, "s": 128}, "MFU 0.1%", "217,000 tokens/s", "starting kernels, 97%"),
    ({"model": "small GPT", "dp": 1, "s": 128, "b": 128}, "MFU 6.2%", "10.6 million tokens/s"),
]


@pytest.mark.parametrize(("change", "found"), [(change, found) for change, *found in TASKS])
def test_the_answers_to_the_chapter_s_tasks_hold(change, found):
    said = status(now(**change))
    assert [each for each in found if each not in said] == []


def test_the_mlp_of_the_tasks_crosses_the_ridge():
    mlp = {
        key: next(part for part in now(**ONE_GPU | dict(key)).parts() if part.name == "MLP")
        for key in (
            (("s", 128),),
            (("s", 128), ("b", 4)),
            (("s", 256),),
            (("s", 256), ("cluster", "v100-dgx")),
        )
    }
    assert [round(part.intensity) for part in mlp.values()] == [91, 315, 173, 173]
    assert [part.bound for part in mlp.values()] == ["memory", "compute", "memory", "compute"]
    ridges = [now(cluster=f"{chip}-dgx").roof.ridge for chip in ("v100", "h100", "h200")]
    assert [round(ridge) for ridge in ridges] == [139, 295, 206]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": "a100-dgx", "precision": "fp8"}, "A100-80GB SXM multiplies no faster in 8 bits: take bf16"),
        (
            {"cluster": "v100-dgx", "precision": "fp32"},
            "V100 SXM2 has no confirmed peak in TF32, in which fp32 is multiplied here: take bf16",
        ),
        ({"model": "gpt2", "s": 2048}, "gpt2 has learned positions for 1,024 tokens, not for 2,048: lower s"),
        ({"model": "gpt2", "s": 128, "tp": 8}, "tp=8 does not divide the 12 heads of gpt2"),
    ],
)
def test_what_cannot_be_is_refused_in_words(explorer, change, said):
    assert explorer.set(**DEFAULT_VALUES | change).status.startswith(f"Not possible: {said}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "gpt5"),
        ("cluster", "abacus"),
        ("precision", "fp4"),
        ("recompute", "some"),
        ("flash", "yes"),
        ("convention", "my"),
    ],
)
def test_unknown_names_are_refused_in_words(name, value):
    with pytest.raises(ValueError, match=f"'{value}'.*known are "):
        Utilisation().update(**DEFAULT_VALUES | {name: value})


def test_every_choice_gives_a_status_line_or_a_reason():
    plot = Utilisation()
    chosen = random.Random(9)
    settings = [{name: chosen.choice(list(values)) for name, values in OPTIONS.items()} for _ in range(150)]
    settings += [DEFAULT_VALUES | {name: value} for name, values in OPTIONS.items() for value in values]
    said, reasons = [], []
    for setting in settings:
        try:
            said.append(plot.update(**setting))
        except ValueError as error:
            reasons.append(str(error))
    assert all("Limit: " in each for each in said)
    assert all(re.search(r"learned positions|does not divide|8 bits|TF32|\bends at\b", each) for each in reasons), reasons
    assert len(said) > len(reasons) > 0
