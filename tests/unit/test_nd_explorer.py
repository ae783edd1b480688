"""The plan board shows what theory says of a setting, names what limits, and has the planner search only when it is asked."""

import re
from math import log2

import pytest

from manyranks.parallel.mesh import Mesh
from manyranks.show import nd, units
from manyranks.show.bars import LONGEST
from manyranks.show.nd.explorer import ALL, HIDDEN, SHOWN, TAKEN, Layout, Plans
from manyranks.show.setting import Said
from manyranks.show.style import STEP
from manyranks.theory import clusters, memory, models, planner, step
from manyranks.theory.published import confidence
from tests.drawn import boxes, named, widths, words

DEFAULT = {"model": "llama3-70b", "cluster": "h100-dgx", "gpus": 1024, "batch": 1024, "seq": 8192, "microbatch": 1}
DEFAULT |= {"tp": 8, "cp": 1, "pp": 4, "ep": 1, "zero": 1, "dp_shard": ALL, "schedule": "1f1b", "virtual": 1}
DEFAULT |= {"recompute": "selective"}
SMALL = {"model": "small GPT", "cluster": "laptop", "gpus": 16, "batch": 64, "seq": 128, "tp": 1, "pp": 2}
V3 = {"model": "deepseek-v3", "cluster": "h800", "gpus": 2048, "batch": 16384, "seq": 4096, "tp": 1, "pp": 16, "ep": 64}
V3 |= {"schedule": "dualpipe"}
HSDP = {"pp": 1, "tp": 2, "zero": 3, "dp_shard": 8}


def now(**change) -> Layout:
    return Layout(**DEFAULT | change)


@pytest.fixture(scope="module")
def board():
    return Plans()


@pytest.fixture
def searches(monkeypatch):
    """The models that the planner was asked for, in their order."""
    asked = []
    search = planner.search

    def noted(shape, *args, **kwargs):
        asked.append(shape.name)
        return search(shape, *args, **kwargs)

    monkeypatch.setattr(planner, "search", noted)
    return asked


# What the board shows of a setting


def test_a_setting_is_what_theory_says_of_its_plan():
    here, shape, cluster = now(zero=3, microbatch=2).scenario, models["llama3-70b"], clusters["h100-dgx"]
    assert here.plan.gpus == 1024
    assert here.time.seconds == step.estimate(shape, here.plan, cluster, gpus=1024).seconds
    assert here.peak == memory.peak(shape, here.plan)


@pytest.mark.parametrize("change", [{}, V3, {"pp": 8, "zero": 0}, HSDP], ids=str)
def test_the_parts_of_the_memory_are_those_of_the_fullest_gpu(change):
    one = now(**change)
    assert sum(one.scenario.held.values()) == one.scenario.peak.total
    assert min(one.scenario.held.values()) >= 0


@pytest.mark.parametrize("change", [{"cp": 2}, V3, HSDP], ids=str)
def test_axes_lie_where_the_mesh_has_them(change):
    one = now(**change)
    plan = one.scenario.plan
    mesh = Mesh(dp=plan.dp, pp=plan.pp, cp=plan.cp, tp=plan.tp, ep=plan.ep, dp_shard=plan.dp_shard)
    for axis, (size, stride) in one.reaches.items():
        group = mesh.group(axis, 0)
        assert len(group) == size
        assert size == 1 or group[1] - group[0] == stride
        assert one.link(axis) == ({True: "NVLink", False: "InfiniBand"}[group[-1] < 8] if size > 1 else "")


def test_a_model_is_trained_as_it_was():
    assert now(**V3).scenario.plan.precision == "fp8"
    assert now(**V3 | {"cluster": "a100-dgx"}).scenario.plan.precision == "bf16"
    assert now().scenario.plan.precision == "bf16"
    assert now(model="llama3-405b", gpus=16384, batch=2048).scenario.plan.embedding_slots


@pytest.mark.parametrize("change", [{}, V3, HSDP], ids=str)
def test_a_plan_s_setting_has_this_plan(change):
    assert now().taking(now(**change).scenario.plan)[5:] == now(**change)[5:]


# The board


def test_it_opens_on_llama_3_70b_split_as_a_rule_of_thumb_has_it():
    opened = nd.explorer()
    assert opened.values == DEFAULT | {"best": HIDDEN}
    assert "Plan(dp=32, pp=4, tp=8, seq=8192, batch=1024)" in opened.code()


def test_bars_and_texts_are_the_settings(board):
    one = now(cp=2)
    board.update(HIDDEN, **DEFAULT | {"cp": 2})
    mesh, held, time = board.figure.axes
    far = [f"{ranks}: InfiniBand, {stride} apart" for ranks, stride in ((2, 8), (16, 16), (4, 256), (32, 8))]
    assert words(mesh)[:6] == ["8: NVLink", *far[:3], "1", far[3]]
    assert widths(mesh) == [[pytest.approx(LONGEST * k / 10)] for k in (3, 1, 4, 2, 5)]
    assert words(held)[:5] == [units.size(size) for size in one.scenario.held.values()]
    rows = [LONGEST * size / 80e9 for size in one.scenario.held.values()]  # the memory's end is the bars'
    assert [row for (row,) in widths(held)[:5]] == pytest.approx(rows, rel=1e-3)
    assert widths(held)[5] == pytest.approx(rows, rel=1e-3)
    here = one.scenario
    said = [f"{units.duration(here.time.seconds)}, {here.time.mfu:.0%}", units.size(here.peak.total)]
    assert words(time, "texts")[:2] == said
    assert words(time, "names")[:2] == ["this plan: TP 8, CP 2, PP 4, DP 16", "1F1B, ZeRO-1, b 1, recompute selective"]
    parts = [here.time.parts[part] for part in STEP if here.time.parts[part]]
    own = widths(time)[0]
    assert [each / sum(own) for each in own] == pytest.approx([each / here.time.seconds for each in parts], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ({}, ["with TP 4", "with TP 16", "with TP 32", "with TP 64"]),
        ({"pp": 16, "tp": 4}, ["with PP 2", "with DualPipe", "with v = 5", "with micro-batch 2"]),
        (
            {"tp": 1, "pp": 1, "zero": 3},
            ["with TP 2", "with TP 4", "with recompute = full", "with TP 8"],
        ),  # it does not fit
    ],
)
def test_until_the_planner_searches_the_rows_are_plans_that_differ_in_one_control(board, change, near):
    board.update(HIDDEN, **DEFAULT | change)
    time = board.figure.axes[2]
    names = words(time, "names")[2:]
    seconds = [sum(row) for row in widths(time)[1:]]
    assert (names, seconds) == (near, sorted(seconds))


def test_controls_that_do_nothing_are_switched_off():
    explorer = nd.explorer().set(pp=1)
    off = {name for name, control in explorer.controls.items() if control.disabled}
    assert off == {"schedule", "virtual", "ep"}
    explorer.set(model="mixtral-8x7b", pp=4, zero=0)
    assert {name for name, control in explorer.controls.items() if control.disabled} == {"dp_shard"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": 16}, "Limit: TP messages on InfiniBand, 34% of the step; with TP 4: 8.39 s."),
        ({"tp": 1}, "Does not fit. Limit: memory; TP 4 fits."),
        ({"pp": 64}, "Limit: uneven stages: with 80 layers on 64 stages, the fullest has 60% more layers than the mean."),
        ({"tp": 2}, "Limit: memory; ZeRO-3 fits."),
        ({"tp": 4}, "Limit: bubble, 15% of the step; with v = 8: 7.28 s."),
        ({"tp": 2, "pp": 1, "zero": 3, "microbatch": 2}, "Limit: memory; recompute = full fits."),
        ({"tp": 1, "pp": 1, "cp": 2, "zero": 3}, "Limit: compute, 99% of the step."),
        ({"tp": 1, "pp": 1, "cp": 2, "zero": 3, "dp_shard": 8}, "Limit: memory; HSDP over all ranks fits."),
        ({"model": "llama3-405b", "gpus": 64, "batch": 64}, "Limit: memory; no single control helps: change two of them"),
        (V3 | {"schedule": "1f1b"}, "Limit: tokens to experts on InfiniBand, 18% of the step; with DualPipe: 20.8 s."),
        (V3 | {"tp": 8, "ep": 16}, "Limit: TP messages on NVLink, 65% of the step; with TP 2: 27.7 s."),
    ],
)
def test_the_sentence_names_the_limit_and_a_way_out(board, change, said):
    assert said in board.update(HIDDEN, **DEFAULT | change).sentence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 8}, "TP 8 × CP 1 × PP 4 = 32 ranks on 8 GPUs: lower TP, CP or PP, or use at least 32 GPUs"),
        ({"batch": 16}, "batch 16 isn't a multiple of DP 32 × b 1 = 32: raise it, or TP, CP or PP, or lower b"),
        ({"tp": 16, "model": "yi-34b"}, "tp=16 does not divide the 56 heads of yi-34b: choose a divisor of 56"),
        ({"pp": 16, "virtual": 8}, "80 layers of llama3-70b on 128 stages: lower pp=16 or virtual=8"),
        ({"pp": 64, "schedule": "zb-v"}, "80 layers of llama3-70b on 128 stages: lower pp=64"),
        (
            {"batch": 128, "schedule": "zb-v"},
            "4 micro-batches on PP 4: ZB-V needs 8 or more. Raise the batch, TP or CP",
        ),
        (
            {"virtual": 2, "schedule": "zb-h1"},
            "virtual=2 with schedule='zb-h1': only '1f1b' and 'interleaved' take it; set virtual=1",
        ),
        ({"dp_shard": 64}, "dp_shard=64 does not divide dp=32: replicas × shards = dp, so choose a divisor of 32"),
        ({"ep": 8}, "ep=8: llama3-70b has no experts; say ep=1"),
        ({"ep": 64}, "ep=64 does not divide dp·cp = 32·1 = 32: choose a divisor of 32"),
        ({"cluster": "tpu-v6e"}, "1,024 GPUs: tpu-v6e has only 256; use fewer"),
        ({"model": "gpt3-175b"}, "gpt3-175b has learned positions for 2,048 tokens: lower s"),
        ({"model": "gpt5"}, "model 'gpt5': did you mean "),
    ],
)
def test_what_cannot_be_is_refused_in_words(board, change, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        board.update(HIDDEN, **DEFAULT | change)
    assert not now(**change).possible


def options() -> dict[str, list]:
    controls = nd.explorer().controls
    values = {name: [each[1] if isinstance(each, tuple) else each for each in one.options] for name, one in controls.items()}
    return {name: each for name, each in values.items() if name != "best"}


# The planner


def test_the_planner_s_plans_are_the_fastest_that_the_controls_can_show():
    task, choices = now(**SMALL), options()
    best = task.best()
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert len({(each.plan.tp, each.plan.pp, each.plan.ep) for each in best}) == len(best) == 4
    for each in best:
        assert all(value in choices[name] for name, value in task.taking(each.plan)._asdict().items())
        assert task.taking(each.plan).cost == each.seconds
    others = (now(**SMALL | {"tp": tp, "pp": pp, "virtual": v}) for tp in (1, 2, 4) for pp in (1, 2, 4) for v in (1, 2))
    assert best[0].seconds <= min(other.cost for other in others if other.possible and other.fits)


def test_the_planner_searches_only_when_it_is_asked_and_says_so(searches):
    explorer = nd.explorer().set(**SMALL | {"batch": 32})  # a task of this test alone: what was found once is remembered
    explorer.set(pp=4).set(zero=2)
    assert searches == []
    explorer.set(best=SHOWN)
    assert searches == ["small GPT"] * (asked := len(searches)) != []  # with the rule of thumb's
    explorer.set(pp=2).set(recompute="full").set(best=TAKEN[0]).set(best=TAKEN[2])
    explorer.set(batch=128)
    assert explorer.values["best"] == HIDDEN
    assert len(searches) == asked


def test_a_plan_that_is_taken_is_put_into_the_controls():
    explorer = nd.explorer().set(**SMALL)
    best = now(**SMALL).best()
    for k, taken in enumerate(TAKEN):
        values = explorer.set(best=taken).values
        assert values.pop("best") == taken
        assert Layout(**values).scenario.plan == best[k].plan
        assert explorer.status.endswith("As fast as the planner's best.") == (best[k].seconds < 1.005 * best[0].seconds)
    explorer.set(best=TAKEN[0]).set(pp=4)  # by hand again, beside the planner's
    assert explorer.values["best"] == SHOWN
    assert "planner's best 73.5 ms" in explorer.status
    assert ". The planner's best takes 73.5 ms. This plan loses most on bubble: +" in explorer.status


def test_of_a_setting_that_cannot_be_the_planner_s_best_can_be_taken():
    explorer = nd.explorer().set(**SMALL).set(tp=16, best=SHOWN)
    assert explorer.status.startswith("Not possible: TP 16 × CP 1 × PP 2 = 32 ranks on 16 GPUs: ")
    assert explorer.status.endswith("; “use the 1st” loads the planner's best")


def test_where_nothing_fits_the_planner_says_so():
    explorer = nd.explorer().set(model="llama3-405b", gpus=8, batch=8, pp=1)
    assert explorer.set(best=TAKEN[0]).status == (
        "Not possible: the planner finds no plan that fits in 80 GB per GPU: use more GPUs, or another model or chip"
    )
    assert explorer.set(cluster="tpu-v6e", gpus=1024).set(best=SHOWN).status.startswith("Not possible: 1,024 GPUs: tpu-v6e has")
    assert " Does not fit. " in explorer.set(cluster="h100-dgx", gpus=1024, batch=1024, best=HIDDEN).status


def test_plans_of_the_planner_are_drawn_below_this_one(board):
    board.update(SHOWN, **DEFAULT | SMALL)
    panel, best = board.figure.axes[2], now(**SMALL).best()
    said = [f"{units.duration(best[0].seconds)}, {best[0].time.mfu:.0%}", units.size(best[0].peak.total)]
    assert words(panel, "texts")[4:8] == [*said, *["not checked"] * 2]
    assert words(panel, "names")[2:4] == ["1: DP 16, ZeRO-3, b 4, recompute none", "2: TP 2, DP 8, b 4, recompute none"]
    assert len(widths(panel)) == 5
    assert len(named(panel, "not checked").get_paths()) == 5  # nobody has checked a laptop


def test_the_best_checked_plan_the_rule_of_thumb_and_what_is_too_close_to_call_are_said(board):
    said = board.update(SHOWN, **DEFAULT)
    panel, found, checked = (
        board.figure.axes[2],
        now().best(),
        planner.search(models["llama3-70b"], clusters["h100-dgx"], gpus=1024, batch=1024, seq=8192, etp=None).checked,
    )
    assert [each.plan for each in found].index(checked.plan) == 3
    assert confidence(found[0].time).missing
    names = words(panel, "names")
    assert any(name.startswith("4, best checked: TP 2, PP 4, DP 128") for name in names)
    each = [line.partition(", ")[::2] for line in words(panel, "texts") if line[0] in "−±n"]
    bars, peaks = each[::2], each[1::2]
    short, long = (f"{share - 1:+.0%}".replace("-", "−") for share in confidence(checked.time).ends(1.0))
    assert bars[1:] == [("not checked", "")] * 3 + [(f"{short} to {long}", "tied")]
    assert peaks == [("not checked", "")] * 5  # of Megatron
    assert said.numbers["best checked"] == f"{units.duration(checked.seconds)}, {short} to {long}"
    assert said.numbers["rule of thumb"] == f"{units.duration(now().rule().seconds)}, −15% to +16%"
    assert said.numbers["planner's best"].endswith(", not checked")


def test_the_pods_of_a_cluster_have_their_border_and_axes_that_cross_it_their_look(board):
    pods = {"model": "llama3-405b", "cluster": "llama3-cluster", "gpus": 24576, "batch": 3072, "pp": 16, "virtual": 8}
    board.update(HIDDEN, **DEFAULT | pods)
    one = now(**pods)
    assert (one.link("dp"), one.link("pp")) == ("RoCE", "RoCE between pods")
    mesh = board.figure.axes[0]
    node, pod = named(mesh, "limit").get_xdata()[[0, 3]]
    assert {"a node: 8", "a pod: 3,072"} <= {*words(mesh)}
    assert pod / node == pytest.approx(log2(3072) / 3)
    crossing = {round(top) for _, _, top, _ in boxes(mesh, "between pods")}
    assert crossing == {3}  # PP
    assert max(right for _, right, *_ in boxes(mesh, "between nodes")) == pytest.approx(pod)
    board.update(HIDDEN, **DEFAULT)
    assert len(named(mesh, "limit").get_xdata()) == 2
    assert not any(word.startswith("a pod") for word in words(mesh))


# The chapter's tasks

L3 = {"model": "llama3-405b", "gpus": 16384, "batch": 2048, "pp": 16}
ALONE = {"tp": 1, "pp": 1, "zero": 3}
PODS = L3 | {"virtual": 8, "cluster": "llama3-cluster", "gpus": 24576, "batch": 3072}
TASKS = [
    ({}, "8.95 s", "41.6%", "TP messages on NVLink, 16% of the step"),
    ({"tp": 4}, "8.39 s", "Limit: bubble, 15%"),
    ({"tp": 2}, "98 GB of 80 GB"),
    ({"tp": 16}, "12.1 s", "TP messages on InfiniBand, 34%"),
    ({"tp": 32}, "21.4 s", "TP messages on InfiniBand, 57%"),
    (ALONE, "6.03 s", "132 GB of 80 GB"),
    (ALONE | {"cp": 2}, "6.3 s", "59.1%", "69.1 GB"),
    (ALONE | {"tp": 2}, "6.33 s", "58.8%", "66.5 GB"),
    ({"batch": 64}, "1.27 s", "Limit: bubble, 58% of the step", "2 on 4 stages"),
    (ALONE | {"cp": 16, "batch": 64}, "1.37 s", "Limit: DP messages on InfiniBand, 38% of the step"),
    ({"batch": 64, "tp": 4, "cp": 4, "pp": 8, "virtual": 8, "recompute": "none"}, "667 ms", "34.9%"),
    (L3, "9.23 s", "28.3%", "56.1 GB", "Limit: bubble, 48% of the step; with v = 8: 5.36 s"),
    (L3 | {"virtual": 8}, "5.36 s", "48.8%", "58.9 GB"),
    (L3 | {"tp": 4, "cp": 2, "virtual": 8}, "5.1 s", "51.2%", "71.7 GB"),
    (PODS, "5.51 s", "47.4%", "Limit: compute, 76% of the step"),
    (PODS | {"zero": 3}, "8.66 s", "30.2%", "DP messages on RoCE, 37% of the step; with ZeRO-1"),
    (V3, "20.8 s", "40.0%", "66.2 GB"),
    (V3 | {"schedule": "1f1b"}, "32.7 s", "tokens to experts on InfiniBand, 18%"),
    (V3 | {"ep": 8}, "125 GB of 80 GB"),
    (V3 | {"tp": 8, "ep": 16}, "1.74 min", "TP messages on NVLink, 65%"),
]


@pytest.mark.parametrize(("change", "found"), [(change, found) for change, *found in TASKS])
def test_the_answers_to_the_chapter_s_tasks_hold(board, change, found):
    said = board.update(HIDDEN, **DEFAULT | change)
    cost = said.scenario.cost
    numbers = f"{units.duration(cost.seconds)}, {cost.mfu:.1%}, {units.size(cost.held)} of {units.size(cost.room)}; {said}"
    assert isinstance(said, Said)
    assert [each for each in found if each not in numbers] == []


def test_with_fewer_tokens_a_gpu_the_planner_takes_all_axes():
    few = now(batch=64).best()[0]
    assert (few.plan.tp, few.plan.cp, few.plan.pp, few.plan.dp, few.plan.zero, few.plan.virtual) == (4, 4, 8, 8, 1, 8)
    assert (units.duration(few.seconds), f"{few.time.mfu:.1%}") == ("667 ms", "34.9%")
