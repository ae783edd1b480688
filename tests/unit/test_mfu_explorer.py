"""Chapter 09's explorer shows what theory says of a setting, names what limits, and refuses in words what cannot be."""

import random
import re
from itertools import accumulate

import pytest
from matplotlib.axes import Axes

from manyranks.show import mfu, units
from manyranks.show.bars import LONGEST
from manyranks.show.mfu import BUDGET, Used, Utilisation
from manyranks.theory import clusters, flops, memory, models, roofline, step
from tests.drawn import boxes, marked, named, widths, words

DEFAULT = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 8192, "microbatch": 1, "recompute": "none", "flash": True}
DEFAULT |= {"tp": 1, "dp": 64, "precision": "bf16", "convention": "causal"}


def now(**change) -> Used:
    return Used(**DEFAULT | change)


@pytest.fixture(scope="module")
def explorer():
    return mfu.explorer()


# What the explorer shows of a setting


def test_a_setting_is_what_theory_says_of_its_plan():
    one = now(tp=8, dp=8, recompute="full")
    here, time = one.scenario, step.estimate(models["llama3-8b"], one.scenario.plan, clusters["h100-dgx"])
    assert (here.time, here.peak) == (time, memory.peak(models["llama3-8b"], here.plan))
    assert one.cost == pytest.approx(64 / time.tokens_per_second)
    run = models["llama3-8b"], 8192, time.tokens_per_second, 64, 989e12
    expected = {"MFU": flops.mfu(*run), "HFU": flops.hfu(*run, "full", flash=True)}
    assert one.uses == pytest.approx(expected)
    assert one._replace(convention="full").uses["MFU"] == pytest.approx(flops.mfu(*run, "full"))


def test_utilisation_is_of_the_peak_in_the_precision_chosen():
    bf16, fp8 = now(), now(precision="fp8")
    assert fp8.roof.peak == 2 * bf16.roof.peak
    assert fp8.cost < bf16.cost
    assert fp8.uses["MFU"] / bf16.uses["MFU"] == pytest.approx(bf16.cost / fp8.cost / 2)


def test_flash_attention_has_no_scores_to_recompute_selectively():
    def more(one):
        return one.uses["HFU"] / one.uses["MFU"]

    assert more(now(recompute="selective")) == pytest.approx(more(now()))
    assert more(now(recompute="selective", flash=False)) > more(now(flash=False)) == 1


# The explorer


def test_it_opens_on_llama_3_8b_on_64_h100s():
    opened = mfu.explorer()
    assert opened.values == DEFAULT


@pytest.mark.parametrize(
    "change",
    [{}, {"tp": 8}, {"model": "deepseek-v3", "dp": 512, "seq": 4096}, {"cluster": "tpu-v4"}, {"model": "gpt2", "seq": 128}],
    ids=str,
)
def test_the_rows_are_all_that_a_step_spends_time_on(change):
    *_, last = drawn(**change)
    assert f"together {units.duration(now(**change).scenario.time.seconds)}" in words(last)


def plot(**change) -> Utilisation:
    plot = Utilisation()
    plot.update(**DEFAULT | change)
    return plot


def drawn(**change) -> list[Axes]:
    """Both panels: the roofline, and the shares of the step."""
    return plot(**change).figure.axes


def test_bars_points_and_numbers_are_the_settings():
    one = now(tp=8, dp=8)
    roofs, share = drawn(**one._asdict())
    here, step = one.scenario, one.scenario.time.seconds
    spent = roofline.time_budget(here.shape, here.plan, here.cluster)
    rows = [f"{units.duration(spent[part])}, {spent[part] / step:.1%}" if spent[part] else "none" for part in BUDGET]
    uses = list(one.uses.values())
    assert words(share) == [*(f"{use:.1%}" for use in uses), *rows, f"together {units.duration(step)}"]
    shares = [spent[part] / step for part in BUDGET if spent[part]]
    assert widths(share) == [pytest.approx([LONGEST * each], rel=1e-3) for each in (*uses, *shares)]
    labels = ["matmul", "other operators", "kernel launches", "TP messages", "DP messages", "optimizer"]
    begun = [left for label in labels for left, *_ in boxes(share, label)]
    assert begun == pytest.approx([LONGEST * each for each in accumulate([0.0, *shares[:-1]])], rel=1e-3)
    found = {part.name: part for part in roofline.parts(here.shape, here.plan, here.cluster)}
    for name in ("attention projections", "attention core", "MLP", "head", "router"):
        line = named(roofs, name)
        if name in found:
            at = found[name].intensity, 100 * found[name].flops_per_second / 989e12
            assert (*line.get_xdata(), *line.get_ydata()) == pytest.approx(at)
        else:
            assert len(line.get_xdata()) == 0
    assert named(roofs, "_ridge").get_xdata()[0] == one.roof.ridge
    assert marked(share) == 2 + BUDGET.index("tensor")


def test_points_and_bars_say_their_numbers():
    said = [part.says for part in plot(tp=8).parts()]
    assert "head: 2,131 FLOPs per byte, 64.2% of the peak" in said
    assert any(each.startswith("TP messages: ") for each in said)
    assert len(said) == len(set(said)) == 4 + 2 + 6


def test_a_rate_below_the_axes_is_drawn_at_their_edge():
    roofline, _ = drawn(model="small GPT", seq=128, dp=1, cluster="gb200-nvl72", precision="fp8")
    assert named(roofline, "attention core").get_ydata()[0] == roofline.get_ylim()[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq": 128}, "Limit: DP messages, 74% of the step; with micro-batch 64: 12,500 tokens/s per GPU."),
        ({"seq": 128, "dp": 1}, "Does not fit. Limit: memory; DP 2 fits."),
        ({"flash": False}, "Does not fit. Limit: memory; flash attention fits."),
        (
            {"flash": False, "tp": 4},
            "the attention core does 124 FLOPs per byte, below the ridge at 295; with flash attention: 8,620 ",
        ),
        (
            {"flash": False, "tp": 8},
            "Limit: memory bandwidth: operators that only move data, 17% of the step; "
            "with flash attention: 6,010 tokens/s per GPU.",
        ),
        (
            {"model": "small GPT", "seq": 256, "microbatch": 16, "cluster": "v100-dgx"},
            "the MLP does 99.7 FLOPs per byte, below the ridge at 139; with micro-batch 128: 2,600,000 tokens/s per GPU.",
        ),
        (
            {"seq": 131072, "cluster": "tpu-v5p", "recompute": "full", "tp": 2, "convention": "full"},
            "; HFU is above 100% because it counts scores that flash attention skips",
        ),
        ({"tp": 8}, "Limit: TP messages, 22% of the step; with TP 1: 10,700 tokens/s per GPU."),
        (
            {"model": "small GPT", "seq": 128, "dp": 1},
            "Limit: overhead: kernel launches, 98% of the step; with micro-batch 128: 6,000,000 tokens/s per GPU.",
        ),
        ({"tp": 2, "recompute": "full"}, "the MLP at 64% of the peak; with micro-batch 16: 7,970 tokens/s per GPU."),
        ({"microbatch": 4}, "Does not fit. Limit: memory; recompute = full fits."),
        ({"model": "deepseek-v3", "dp": 256, "seq": 4096}, "TP 1 × DP 256, EP 64, 1 × 4,096 tokens per DP rank"),
    ],
)
def test_the_sentence_names_the_limit_and_a_way_out(explorer, change, said):
    assert said in explorer.set(**DEFAULT | change).status


ONE_GPU, LONG = {"model": "llama3.2-1b", "dp": 1}, {"tp": 2, "recompute": "full"}
TASKS = [
    (ONE_GPU | {"seq": 128}, "this convention 3.9%", "MLP: 91 FLOPs per byte"),
    (
        ONE_GPU | {"seq": 128, "microbatch": 4},
        "this convention 13.3%",
        "the optimizer's memory traffic, 49% of the step",
        "MLP: 315 ",
    ),
    (ONE_GPU | {"seq": 128, "microbatch": 64}, "this convention 42.1%"),
    (LONG, "this convention 39.0%", "7,500 tokens/s"),
    (LONG | {"seq": 131072}, "this convention 38.7%", "2,590 tokens/s"),
    (LONG | {"convention": "full"}, "this convention 43.9%"),
    (LONG | {"convention": "full", "seq": 131072}, "this convention 65.7%"),
    (LONG | {"convention": "parameters"}, "this convention 36.5%"),
    (LONG | {"convention": "parameters", "seq": 131072}, "this convention 12.6%"),
    (LONG | {"flash": False, "seq": 131072}, "499 tokens/s", "577 of 80 GB", "attention core: 128 FLOPs per byte"),
    (ONE_GPU | {"seq": 256, "cluster": "v100-dgx"}, "this convention 15.9%", "2,660 tokens/s", "MLP: 173 ", "ridge: 139"),
    (ONE_GPU | {"seq": 256}, "this convention 7.6%", "10,000 tokens/s", "MLP: 173 ", "ridge: 295"),
    (ONE_GPU | {"seq": 256, "cluster": "h200-dgx"}, "this convention 9.7%", "12,800 tokens/s", "MLP: 173 ", "ridge: 206"),
    ({"microbatch": 2}, "Does not fit"),
    ({"microbatch": 2, "recompute": "selective"}, "this convention 56.1%", "HFU 57.3%", "10,800 tokens/s", "61.6 of 80 GB"),
    ({"microbatch": 2, "recompute": "full"}, "this convention 43.7%", "HFU 58.3%", "8,390 tokens/s", "16.5 of 80 GB"),
]


@pytest.mark.parametrize(("change", "found"), [(change, found) for change, *found in TASKS])
def test_the_answers_to_the_chapter_s_tasks_hold(explorer, change, found):
    plot = Utilisation()
    said, shown = plot.update(**DEFAULT | change), explorer.set(**DEFAULT | change)
    seen = [str(said), shown.tiles.value, *(part.says for part in plot.parts()), *words(plot.figure.axes[0])]
    assert [each for each in found if each not in " | ".join(seen)] == []


def test_presets_are_the_chapter_s_tasks(explorer):
    said = {
        "few tokens": "optimizer",
        "long sequences": "compute",
        "an old chip": "v100-dgx",
        "two sequences": "Does not fit",
    }
    assert all(text in explorer.preset(name).status for name, text in said.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": "a100-dgx", "precision": "fp8"}, "precision = 'fp8' on A100-80GB SXM, which has no products in 8 bits"),
        (
            {"cluster": "v100-dgx", "precision": "fp32"},
            "fp32 matmuls run in TF32 here, and V100 SXM2 has no confirmed TF32 peak: choose bf16",
        ),
        ({"model": "gpt2", "seq": 2048}, "gpt2 has learned positions for 1,024 tokens, not for 2,048: lower s"),
        ({"model": "gpt2", "seq": 128, "tp": 8}, "t = 8 does not divide the 12 heads of gpt2"),
    ],
)
def test_what_cannot_be_is_refused_in_words(explorer, change, said):
    assert explorer.set(**DEFAULT | change).status.startswith(f"Not possible: {said}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "gpt5"), ("cluster", "abacus"), ("precision", "fp4"), ("recompute", "some"), ("convention", "my")],
)
def test_unknown_names_are_refused_in_words(name, value):
    with pytest.raises(ValueError, match=f"'{value}'.*choose from "):
        Utilisation().update(**DEFAULT | {name: value})


def test_every_choice_gives_a_limit_or_a_reason(explorer):
    plot, chosen = Utilisation(), random.Random(9)
    options = {
        name: [each[1] if isinstance(each, tuple) else each for each in control.options]
        for name, control in explorer.controls.items()
    }
    settings = [{name: chosen.choice(values) for name, values in options.items()} for _ in range(150)]
    settings += [DEFAULT | {name: value} for name, values in options.items() for value in values]
    said, reasons = [], []
    for setting in settings:
        try:
            said.append(plot.update(**setting))
        except ValueError as error:
            reasons.append(str(error))
    assert all(each.limit and "nan" not in str(each) for each in said)
    assert all(re.search(r"learned positions|does not divide|fp8|TF32|has only", each) for each in reasons), reasons
    assert len(said) > len(reasons) > 0
