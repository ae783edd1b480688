"""The plan board shows what theory says of a setting, names what limits, and has the planner search only when it is asked."""

import random
import re

import pytest

from manyranks.parallel.mesh import Mesh
from manyranks.show import nd, nd_explorer, units
from manyranks.show.bars import LONGEST
from manyranks.show.nd_explorer import HIDDEN, SHOWN, TAKEN, Board
from manyranks.show.nd_plans import PARTS
from manyranks.show.nd_setting import Setting, Task, setting_of
from manyranks.show.nd_status import status
from manyranks.theory import clusters, memory, models, planner, step
from tests.drawn import widths, words

TASK = {"model": "llama3-70b", "cluster": "h100-dgx", "gpus": 1024, "batch": 1024, "seq": 8192}
PLAN = {"tp": 8, "cp": 1, "pp": 4, "ep": 1, "dp_shard": 0, "microbatch": 1, "schedule": "1f1b", "virtual": 1, "zero": 1}
PLAN |= {"recompute": "selective"}
DEFAULT_VALUES = TASK | PLAN | {"best": HIDDEN}
SMALL = {"model": "small GPT", "cluster": "laptop", "gpus": 16, "batch": 64, "seq": 128, "tp": 1, "pp": 2}
V3 = {"model": "deepseek-v3", "cluster": "h800", "gpus": 2048, "batch": 16384, "seq": 4096, "tp": 1, "pp": 16, "ep": 64}
V3 |= {"schedule": "dualpipe"}


def now(**change) -> Setting:
    values = DEFAULT_VALUES | change
    return Setting(Task(*(values[name] for name in TASK)), **{name: values[name] for name in PLAN})


@pytest.fixture(scope="module")
def board():
    return nd.explorer()


@pytest.fixture
def searches(monkeypatch):
    """The tasks that the planner was asked for, in their order."""
    asked = []
    search = planner.search

    def noted(shape, *args, **kwargs):
        asked.append(shape.name)
        return search(shape, *args, **kwargs)

    monkeypatch.setattr(planner, "search", noted)
    return asked


# What the board shows of a setting


def test_a_setting_is_what_theory_says_of_its_plan():
    one, shape, cluster = now(zero=3, microbatch=2), models["llama3-70b"], clusters["h100-dgx"]
    assert one.plan.gpus == 1024
    assert one.step().seconds == step.estimate(shape, one.plan, cluster, gpus=1024).seconds
    assert one.peak() == memory.peak(shape, one.plan)
    assert sum(one.memory().values()) == one.peak().total


@pytest.mark.parametrize("change", [{}, V3, {"pp": 8, "zero": 0}, {"pp": 1, "tp": 2, "zero": 3, "dp_shard": 8}], ids=str)
def test_the_parts_of_the_memory_are_those_of_the_fullest_gpu(change):
    one = now(**change)
    assert sum(one.memory().values()) == one.peak().total
    assert min(one.memory().values()) >= 0


@pytest.mark.parametrize("change", [{"cp": 2}, V3, {"pp": 1, "tp": 2, "zero": 3, "dp_shard": 8}], ids=str)
def test_axes_lie_where_the_mesh_has_them(change):
    one = now(**change)
    plan = one.plan
    mesh = Mesh(dp=plan.dp, pp=plan.pp, cp=plan.cp, tp=plan.tp, ep=plan.ep, dp_shard=plan.dp_shard)
    for reach in one.reaches():
        group = mesh.group(reach.axis, 0)
        assert len(group) == reach.size
        assert reach.size == 1 or group[1] - group[0] == reach.stride
        assert reach.size == 1 or reach.span == group[-1] + reach.stride
        links = {True: "NVLink", False: "InfiniBand"}
        assert one.link(reach) == (links[group[-1] < 8] if reach.size > 1 else "")


def test_a_model_is_trained_as_it_was():
    assert now(**V3).plan.precision == "fp8"
    assert now(**V3 | {"cluster": "a100-dgx"}).plan.precision == "bf16"
    assert now().plan.precision == "bf16"
    assert now(model="llama3-405b", gpus=16384, batch=2048).plan.embedding_slots


def test_a_plan_s_setting_has_this_plan():
    for change in ({}, V3, {"pp": 1, "tp": 2, "zero": 3, "dp_shard": 8}):
        one = now(**change)
        assert setting_of(one.task, one.plan) == one


# The board


def test_it_opens_on_llama_3_70b_split_as_a_rule_of_thumb_has_it():
    opened = nd.explorer()
    assert opened.values == DEFAULT_VALUES
    assert opened.status == (
        "llama3-70b on 1,024 GPUs, h100-dgx, 8,192 tokens a GPU; TP 8, PP 4, DP 32; 1F1B, ZeRO-1, b 1, recompute selective: "
        "8.9 s a step, MFU 44.8%; 25.1 GB of 80 GB. Limit: tensor-parallel messages, 16% of the time on NVLink; TP 4 takes "
        "8.36 s."
    )


def test_bars_and_texts_are_the_settings():
    plot, one = Board(), now(cp=2)
    plot.update(**DEFAULT_VALUES | {"cp": 2})
    mesh, memory, time = plot.figure.axes
    links = words(mesh)
    far = [f"{ranks}: InfiniBand, every {nth}" for ranks, nth in ((2, "8th"), (16, "16th"), (4, "256th"), (32, "8th"))]
    assert links[:6] == ["8: NVLink", *far[:3], "1", far[3]]
    memory_of = one.memory()
    assert words(memory)[:5] == [units.size(size) for size in memory_of.values()]
    assert words(time, "texts") == [f"{units.duration(one.step().seconds)}, {one.step().mfu:.1%}", units.size(one.peak().total)]
    assert words(time, "own") == ["this plan: TP 8, CP 2, PP 4, DP 16", "1F1B, ZeRO-1, b 1, recompute selective"]
    assert widths(mesh) == [[pytest.approx(LONGEST * k / 10)] for k in (3, 1, 4, 2, 5)]
    (row,) = widths(time)
    parts = [one.step().parts[part] for part in PARTS if one.step().parts[part]]
    assert row == pytest.approx([LONGEST * each / one.step().seconds for each in parts], abs=1e-6)
    rows = widths(memory)
    room = 1.2 * 80e9
    assert [row for (row,) in rows[:5]] == pytest.approx([LONGEST * size / room for size in memory_of.values()], rel=1e-3)
    assert rows[5] == pytest.approx([LONGEST * size / room for size in memory_of.values()], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": 16}, "Limit: tensor-parallel messages, 35% of the time on InfiniBand; TP 4 takes 8.36 s."),
        ({"tp": 1}, "Limit: memory; TP 4 fits."),
        ({"pp": 64}, "Limit: uneven stages: with 80 layers on 64 the fullest has 60% more than the mean."),
        ({"tp": 2}, "Limit: memory; ZeRO-3 fits."),
        ({"tp": 4}, "Limit: bubble, 15% of the time; v = 8 takes 7.26 s."),
        ({"tp": 2, "pp": 1, "zero": 3, "microbatch": 2}, "Limit: memory; recompute full fits."),
        ({"tp": 1, "pp": 1, "cp": 2, "zero": 3}, "Limit: computing, 99% of the time."),
        ({"tp": 1, "pp": 1, "cp": 2, "zero": 3, "dp_shard": 8}, "Limit: memory; dp_shard all fits."),
        ({"model": "llama3-405b", "gpus": 64, "batch": 64}, "Limit: memory; no single control helps: move two of them"),
        (V3 | {"schedule": "1f1b"}, "Limit: tokens to experts, 21% of the time on InfiniBand; dualpipe takes 20.9 s."),
        (V3 | {"tp": 8, "ep": 16}, "Limit: tensor-parallel messages, 63% of the time on NVLink; TP 2 takes 26.7 s."),
    ],
)
def test_the_status_line_names_the_limit_and_a_way_out(change, said):
    assert said in status(now(**change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 8}, "TP 8 × CP 1 × PP 4 = 32 on 8 GPUs: lower one of the three, or take 32 GPUs or more"),
        (
            {"batch": 16},
            "a batch of 16 sequences for 32 DP ranks: some would get none; take a larger batch, fewer GPUs, or more",
        ),
        ({"batch": 32, "microbatch": 2}, "a batch of 32 sequences for 32 DP ranks × 2: some would get none; take a smaller"),
        ({"tp": 16, "model": "yi-34b"}, "tp=16 does not divide the 56 heads of yi-34b: choose a divisor of them"),
        ({"pp": 16, "virtual": 8}, "80 layers of llama3-70b on 128 stages: lower pp=16 or virtual=8"),
        ({"pp": 64, "schedule": "zb-v"}, "80 layers of llama3-70b on 128 stages: lower pp=64"),
        (
            {"batch": 128, "schedule": "zb-v"},
            "4 micro-batches for zb-v on PP 4, which needs 8 or more: raise the batch, or lower",
        ),
        (
            {"batch": 64, "virtual": 2},
            "2 micro-batches on PP 4 with v = 2, which takes multiples of 4: raise the batch, or lower",
        ),
        ({"virtual": 2, "schedule": "zb-h1"}, "virtual=2 with schedule='zb-h1': only 1f1b is interleaved; say virtual=1"),
        ({"dp_shard": 64}, "dp_shard=64 does not divide dp=32: replicas × shards = dp, so choose a divisor of 32"),
        ({"ep": 8}, "ep=8: llama3-70b has no experts; say ep=1"),
        ({"ep": 64}, "ep=64 does not divide dp·cp = 32·1 = 32: choose a divisor of 32"),
        ({"cluster": "tpu-v6e"}, "1,024 GPUs: tpu-v6e ends at 256; take no more than these"),
        ({"model": "gpt3-175b"}, "gpt3-175b has learned positions for 2,048 tokens: lower the sequence"),
        ({"model": "gpt5"}, "model 'gpt5': did you mean 'gpt3-175b'? known are "),
        ({"cluster": "abacus"}, "cluster 'abacus': known are "),
    ],
)
def test_what_cannot_be_is_refused_in_words(change, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Board.update(None, **DEFAULT_VALUES | change)  # before anything is drawn


def test_every_choice_gives_a_status_line_or_a_reason(board):
    chosen = random.Random(10)
    options = {name: [value for _, value in _pairs(control)] for name, control in board.controls.items() if name != "best"}
    settings = [{name: chosen.choice(values) for name, values in options.items()} for _ in range(150)]
    settings += [{name: value} for name, values in options.items() for value in values]
    said, reasons = [], []
    for setting in settings:
        try:
            said.append(status(now(**setting)))
        except ValueError as error:
            reasons.append(str(error))
    assert all("Limit: " in each for each in said)
    assert len(said) > 50
    assert all(re.search(r"lower|choose|take|say|give", each) for each in reasons), reasons


def _pairs(control) -> list[tuple]:
    return [option if isinstance(option, tuple) else (option, option) for option in control.options]


# The planner


def test_the_planner_s_plans_are_the_fastest_that_the_controls_can_show():
    task = now(**SMALL).task
    best = task.best()
    kept = {name: [value for _, value in _pairs(control)] for name, control in nd.explorer().controls.items()}
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert len({(each.plan.tp, each.plan.pp, each.plan.ep) for each in best}) == len(best) == 4
    for each in best:
        values = setting_of(task, each.plan)._asdict()
        assert all(values[name] in kept[name] for name in PLAN)
        assert setting_of(task, each.plan).step().seconds == each.seconds
    others = (now(**SMALL | {"tp": tp, "pp": pp, "virtual": v}) for tp in (1, 2, 4) for pp in (1, 2, 4) for v in (1, 2))
    assert best[0].seconds <= min(other.step().seconds for other in others if other.possible and other.fits)


def test_the_planner_searches_only_when_it_is_asked(searches):
    explorer = nd.explorer().set(**SMALL | {"batch": 32})  # a task of this test alone: what was found once is remembered
    explorer.set(pp=4).set(zero=2)
    assert searches == []
    explorer.set(best=SHOWN)
    assert searches == ["small GPT"]
    explorer.set(pp=2).set(recompute="full").set(best=TAKEN[0]).set(best=TAKEN[2])
    assert searches == ["small GPT"]
    explorer.set(batch=128)
    assert explorer.values["best"] == HIDDEN
    assert searches == ["small GPT"]


def test_a_plan_that_is_taken_is_put_into_the_controls():
    explorer = nd.explorer().set(**SMALL)
    best = Task(*(SMALL[name] for name in TASK)).best()
    for k, taken in enumerate(TAKEN):
        values = explorer.set(best=taken).values
        assert values["best"] == taken
        assert now(**values).plan == best[k].plan
        assert explorer.status.endswith("As fast as the planner's best.") == (best[k].seconds < 1.005 * best[0].seconds)


def test_a_degree_that_is_moved_afterwards_is_a_plan_by_hand_beside_the_planner_s():
    explorer = nd.explorer().set(**SMALL).set(best=TAKEN[0])
    explorer.set(pp=4)
    assert explorer.values["best"] == SHOWN
    assert "The planner's best takes 74.8 ms; here " in explorer.status


def test_of_a_setting_that_cannot_be_the_planner_s_best_is_said():
    explorer = nd.explorer().set(**SMALL).set(tp=16, best=SHOWN)
    best = "DP 16; ZeRO-3, b 4, recompute nothing: 74.8 ms; “take the 1st” has it"
    assert explorer.status.startswith("Not possible: TP 16 × CP 1 × PP 2 = 32 on 16 GPUs: ")
    assert explorer.status.endswith(f". The planner's best: {best}")


def test_where_nothing_fits_the_planner_says_so():
    explorer = nd.explorer().set(model="llama3-405b", cluster="h100-dgx", gpus=8, batch=8, pp=1)
    assert explorer.set(best=TAKEN[0]).status == (
        "Not possible: the planner finds no plan that fits in 80 GB a GPU: take more GPUs, or another model or cluster"
    )
    assert explorer.set(gpus=1024, batch=1024, best=HIDDEN).status.startswith("Does not fit: ")


def test_plans_of_the_planner_are_drawn_below_this_one():
    plot = Board()
    *_, panel = plot.figure.axes
    plot.update(**DEFAULT_VALUES | SMALL | {"best": SHOWN})
    times = words(panel, "texts")
    best = now(**SMALL).task.best()
    assert times[2:4] == [f"{units.duration(best[0].seconds)}, {best[0].time.mfu:.1%}", units.size(best[0].peak.total)]
    heads, beside = ["time, MFU", "memory"], [text.get_text() for text in panel.texts]
    assert beside[:4] == [*heads, "1: DP 16", "ZeRO-3, b 4, recompute nothing"]
    assert all(beside)
    assert len(widths(panel)) == 5
    plot.update(**DEFAULT_VALUES | SMALL)
    beside = [text.get_text() for text in panel.texts]
    assert [text for text in beside if text] == [*heads, "for the planner's plans, choose “show them”"]


# The chapter's tasks

L3 = {"model": "llama3-405b", "gpus": 16384, "batch": 2048, "pp": 16}
ALONE = {"tp": 1, "pp": 1, "zero": 3}
TASKS = [
    ({}, "8.9 s a step", "tensor-parallel messages, 16% of the time on NVLink"),
    ({"tp": 4}, "8.36 s a step", "Limit: bubble, 15%"),
    ({"tp": 2}, "98 GB of 80 GB"),
    ({"tp": 16}, "12 s a step", "35% of the time on InfiniBand"),
    ({"tp": 32}, "21.2 s a step", "58% of the time on InfiniBand"),
    (ALONE, "6.06 s a step", "133 GB of 80 GB"),
    (ALONE | {"cp": 2}, "6.32 s a step", "MFU 63.1%", "69.5 GB"),
    (ALONE | {"tp": 2}, "6.33 s a step", "MFU 63.0%", "66.8 GB"),
    ({"batch": 128}, "1,024 tokens a GPU", "1.77 s a step", "Limit: bubble, 41% of the time"),
    (ALONE | {"cp": 8, "batch": 128}, "1.37 s a step", "Limit: gradients, parameters, 30% of the time on InfiniBand"),
    (
        {"batch": 128, "tp": 4, "cp": 2, "pp": 2, "virtual": 8, "recompute": "none"},
        "1.02 s a step",
        "MFU 48.8%",
        "58.6 GB",
    ),
    (L3, "9.22 s a step", "MFU 29.5%", "Limit: bubble, 48% of the time; v = 8 takes 5.38 s"),
    (L3 | {"virtual": 8}, "5.38 s a step", "MFU 50.5%", "58.9 GB", "Limit: bubble, 10%"),
    (L3 | {"tp": 4, "cp": 2, "virtual": 8}, "5.15 s a step", "MFU 52.8%", "71.7 GB"),
    (V3, "20.9 s a step", "MFU 44.6%", "66.2 GB"),
    (V3 | {"schedule": "1f1b"}, "38.7 s a step", "tokens to experts, 21%"),
    (V3 | {"ep": 8}, "125 GB of 80 GB"),
    (V3 | {"tp": 8, "ep": 16}, "1.62 min a step", "tensor-parallel messages, 63%"),
]


@pytest.mark.parametrize(("change", "found"), [(change, found) for change, *found in TASKS])
def test_the_answers_to_the_chapter_s_tasks_hold(change, found):
    said = status(now(**change))
    assert [each for each in found if each not in said] == []


def test_with_fewer_tokens_a_gpu_the_planner_chooses_another_regime():
    few = now(batch=128).task.best()[0]
    assert (few.plan.tp, few.plan.cp, few.plan.pp, few.plan.zero) == (4, 2, 2, 1)
    assert f"{few.seconds:.3g}" == "1.02"
    assert nd_explorer.degrees(few.plan) == "TP 4, CP 2, PP 2, DP 64"
