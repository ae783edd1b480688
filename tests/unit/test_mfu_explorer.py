"""Chapter 09's explorer shows what theory says of a setting, names what limits, and refuses in words what cannot be."""

import base64
from itertools import accumulate, combinations, pairwise
from math import hypot

import pytest
from matplotlib.axes import Axes

from manyranks.measure.compared import Compared, SmallRun
from manyranks.show import mfu, units
from manyranks.show.bars import LONGEST
from manyranks.show.mfu.explorer import FIVE, Used, Utilization
from manyranks.theory import clusters, flops, memory, models, roofline, step
from tests.drawn import boxes, marked, named, widths, words

DEFAULT = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 8192, "microbatch": 1, "recompute": "none", "flash": True}
DEFAULT |= {"tp": 1, "pp": 1, "cp": 1, "dp": 64, "m": 8, "stack": "megatron-core", "precision": "bf16", "convention": "causal"}


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


def test_utilization_is_of_the_peak_in_the_precision_chosen():
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


CHANGES = [{}, {"tp": 8, "pp": 4, "dp": 2}, {"model": "deepseek-v3", "dp": 512, "seq": 4096}, {"cluster": "tpu-v4"}]
CHANGES += [{"model": "gpt2", "seq": 128}, {"cp": 8, "recompute": "full"}, {"cluster": "b200-dgx", "precision": "nvfp4"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_five_parts_are_all_that_a_step_spends_time_on(change):
    one = now(**change)
    here, spent = one.scenario, one.spent
    budget = roofline.time_budget(here.shape, here.plan, here.cluster)
    assert sum(spent.values()) == pytest.approx(here.time.seconds)
    assert min(spent.values()) >= 0
    assert spent["peak"] / here.time.seconds == pytest.approx(one.uses["MFU"])
    assert spent["peak"] + spent["matmul"] == pytest.approx(budget["matmul"])
    *_, last = drawn(**change)
    assert f"together {units.duration(here.time.seconds)}" in words(last)


def plot(**change) -> Utilization:
    plot = Utilization()
    plot.update(**DEFAULT | change)
    return plot


def drawn(**change) -> list[Axes]:
    """Both panels: the roofline, and the shares of the step."""
    return plot(**change).figure.axes


def test_bars_and_texts_are_the_settings():
    one = now(tp=8, dp=8, pp=2)
    _, share = drawn(**one._asdict())
    seconds, spent = one.scenario.time.seconds, one.spent
    each = [[spent[part] for part in parts] for parts in FIVE.values()]
    assert widths(share) == [pytest.approx([LONGEST * x / seconds for x in row if x], rel=1e-3) for row in each]
    begun = [boxes(share, next(name for part, (name, _) in parts.items() if spent[part]))[0][0] for parts in FIVE.values()]
    assert begun == pytest.approx([LONGEST * x / seconds for x in accumulate([0.0, *map(sum, each[:-1])])], rel=1e-3)
    texts = words(share)
    assert [text.split("%")[0] for text in texts[:5]] == [
        f"{units.duration(sum(row))}, {100 * sum(row) / seconds:.1f}" for row in each
    ]
    assert [text.partition("%")[2] for text in texts[:5]] == [
        *("", ", matmuls below peak", ", TP messages", "", ", kernel launches")
    ]
    assert marked(share) == [*FIVE].index("waiting for messages")


OPERATORS = ("attention projections", "attention core", "MLP", "head", "router")


@pytest.mark.parametrize("change", [*CHANGES, {"model": "small GPT", "seq": 128, "dp": 1, "cluster": "gb200-nvl72"}], ids=str)
def test_points_lie_under_the_roof_where_their_numbers_say(change):
    one, roofs = now(**change), drawn(**change)[0]
    here = one.scenario
    found = {part.name: part for part in roofline.parts(here.shape, here.plan, here.cluster)}
    (x0, ridge, _), (y0, top, _) = named(roofs, "roof").get_data()
    assert named(roofs, "ridge").get_xdata()[0] == ridge
    for name in OPERATORS:
        x, y = (list(each)[:1] for each in named(roofs, name).get_data())
        assert bool(x) == (name in found)
        if x:
            assert 0 < x[0] < 1
            assert 0 < y[0] < min(top, y0 + (top - y0) / (ridge - x0) * (x[0] - x0))
            share = found[name].flops_per_second / one.roof.peak
            assert f"{name}: {share:.1%}" in words(roofs, "names")
    a, b = (found[name] for name in ("MLP", "attention core"))
    places = [[each[0] for each in named(roofs, name).get_data()] for name in ("MLP", "attention core")]
    right = a.intensity > b.intensity, a.flops_per_second > b.flops_per_second
    assert right == tuple(first > second for first, second in zip(*places, strict=True))


def test_points_are_not_crowded_into_one_spot():
    roofs = drawn()[0]
    places = [[each[0] for each in named(roofs, name).get_data()] for name in OPERATORS[:4]]
    assert max(hypot(a[0] - b[0], a[1] - b[1]) for a, b in combinations(places, 2)) > 0.25
    heights = [named(roofs, name).get_ydata()[1] for name in OPERATORS[:4]]
    assert min(a - b for a, b in pairwise(heights)) > 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq": 128}, "Limit: DP messages, 58% of the step; with micro-batch 64: 12,500 tokens/s per GPU."),
        ({"seq": 128, "dp": 1}, "Does not fit. Limit: memory; DP 2 fits."),
        ({"flash": False}, "Does not fit. Limit: memory; flash attention fits."),
        (
            {"flash": False, "tp": 4},
            "the attention core does 124 FLOPs per byte, below the ridge at 295; with flash attention: 8,640 ",
        ),
        (
            {"flash": False, "tp": 8},
            "Limit: memory bandwidth: operators that only move data, 17% of the step; "
            "with flash attention: 6,010 tokens/s per GPU.",
        ),
        (
            {"model": "small GPT", "seq": 256, "microbatch": 16, "cluster": "v100-dgx"},
            "Limit: overhead: kernel launches, 81% of the step; with micro-batch 128: 2,450,000 tokens/s per GPU.",
        ),
        (
            {"seq": 131072, "cluster": "tpu-v5p", "recompute": "full", "tp": 2, "convention": "full"},
            "; HFU is above 100% because it counts scores that flash attention skips",
        ),
        ({"tp": 8}, "Limit: TP messages, 22% of the step; with TP 1: 10,700 tokens/s per GPU."),
        (
            {"model": "small GPT", "seq": 128, "dp": 1},
            "Limit: overhead: kernel launches, 100% of the step; with micro-batch 128: 1,800,000 tokens/s per GPU.",
        ),
        ({"tp": 2, "recompute": "full"}, "the MLP at 64% of the peak; with micro-batch 16: 7,970 tokens/s per GPU."),
        ({"microbatch": 4}, "Does not fit. Limit: memory; recompute = full fits."),
        ({"model": "deepseek-v3", "dp": 256, "seq": 4096}, "EP 64, DP 256; 8 × 1 × 4,096 tokens per replica"),
        ({"pp": 4}, "Limit: waiting for other ranks: the bubble, 22% of the step; with m = 128: 8,740 tokens/s per GPU."),
        ({"cp": 16}, "Limit: CP messages, 59% of the step; with CP 1: 10,700 tokens/s per GPU."),
    ],
)
def test_the_sentence_names_the_limit_and_a_way_out(explorer, change, said):
    assert said in explorer.set(**DEFAULT | change).status


ONE_GPU, LONG = {"model": "llama3.2-1b", "dp": 1, "m": 1}, {"tp": 2, "recompute": "full"}
SEEN = [
    (ONE_GPU | {"seq": 128}, "this convention 2.0%", "kernel launches, 56% of the step", "MLP: 91 FLOPs per byte"),
    (ONE_GPU | {"seq": 128, "microbatch": 4}, "this convention 8.0%", "MLP: 315 "),
    (ONE_GPU | {"seq": 128, "microbatch": 64}, "this convention 42.1%"),
    (LONG | {"seq": 131072}, "this convention 38.7%", "2,590 tokens/s"),
    (LONG | {"convention": "full", "seq": 131072}, "this convention 65.7%"),
    (LONG | {"convention": "parameters", "seq": 131072}, "this convention 12.6%"),
    (LONG | {"flash": False, "seq": 131072}, "577 of 80 GB", "attention core: 128 FLOPs per byte"),
    (ONE_GPU | {"seq": 256, "cluster": "v100-dgx"}, "this convention 15.7%", "MLP: 173 ", "ridge (dotted): 139"),
    (ONE_GPU | {"seq": 256, "cluster": "h200-dgx"}, "this convention 4.4%", "MLP: 173 ", "ridge (dotted): 206"),
    ({"microbatch": 2, "recompute": "full"}, "this convention 43.7%", "HFU 58.3%", "8,400 tokens/s", "16.5 of 80 GB"),
    ({"cluster": "b200-dgx", "precision": "nvfp4"}, "peak: 9 PFLOP/s", "share of the bf16 peak"),
]


@pytest.mark.parametrize(("change", "found"), [(change, found) for change, *found in SEEN])
def test_a_setting_says_and_draws(explorer, change, found):
    plot = Utilization()
    said, shown = plot.update(**DEFAULT | change), explorer.set(**DEFAULT | change)
    seen = [str(said), shown.tiles.value, *(part.says for part in plot.parts()), *words(plot.figure.axes[0])]
    assert [each for each in found if each not in " | ".join(seen)] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": "a100-dgx", "precision": "fp8"}, "precision = 'fp8' on A100-80GB SXM, which has no products in 8 bits"),
        ({"cluster": "h100-dgx", "precision": "nvfp4"}, "precision = 'nvfp4' on H100 SXM, whose products read no scales"),
        ({"pp": 8, "model": "small GPT", "seq": 128}, "4 layers of small GPT on 8 stages"),
        ({"model": "gpt2", "seq": 2048}, "gpt2 has learned positions for 1,024 tokens, not for 2,048: lower s"),
        ({"model": "gpt2", "seq": 128, "tp": 8}, "t = 8 does not divide the 12 heads of gpt2"),
    ],
)
def test_what_cannot_be_is_refused_in_words(explorer, change, said):
    assert explorer.set(**DEFAULT | change).status.startswith(f"Not possible: {said}")


def test_what_was_measured_is_drawn_under_its_own_roof():
    small = SmallRun(
        "here", (Compared("step: FLOPs", 4e9, 4e9, "flops"),), (5e10, 1e10), (("product", 20.0, 4e10), ("step", 2.0, 1e10))
    )
    shown = mfu.explorer(measure=lambda values, say: small)
    assert shown.measured() == small
    assert "4 GFLOP" in shown.tiles.value
    picture = shown.plot.pictured(small)
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in shown.tiles.value
