"""Chapter 10's figures and tables show what they are given, and what cannot be shown is refused."""

import re
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from manyranks.parallel.mesh import Mesh
from manyranks.show import nd
from manyranks.show.bars import LONGEST
from manyranks.theory import Plan, clusters, memory, models, step
from manyranks.theory.nd.rules import Comparison
from manyranks.theory.nd.tokens import Balance, Check
from manyranks.theory.planner import Found
from manyranks.theory.published.error_bars import confidence, peak_confidence
from manyranks.theory.published.layouts import Neighbor
from tests.drawn import named, texts, widths, words
from tests.unit.figures_drawn import assert_inside

ALL, H100 = Mesh(dp=2, pp=2, cp=2, tp=2), clusters["h100-dgx"]
LARGE = Mesh(dp=128, tp=8, pp=16, dp_shard=32)
TOKENS = [2**k for k in range(6, 17)]


def found(shape: str, **plan) -> Found:
    one = Plan(**plan)
    time = step.estimate(models[shape], one, H100, gpus=one.gpus)
    return Found(one, time, memory.peak(models[shape], one), time)


PLANS = [
    found("llama3-405b", dp=256, tp=4, cp=2, pp=8, virtual=8, zero=2, seq=8192, batch=2048),
    found("llama3-405b", dp=128, tp=8, pp=16, seq=8192, batch=2048, schedule="gpipe", recompute="full"),
    found("llama3-405b", dp=512, dp_shard=64, tp=8, pp=4, zero=3, seq=8192, batch=2048),
]
SPLIT = Plan(tp=8, pp=4, dp=32, seq=8192, batch=1024)
V3 = Plan(pp=16, dp=128, ep=64, seq=4096, batch=16384, schedule="dualpipe", precision="fp8", stack="hai-llm")
CHECKS = {
    "TP 8": Check("tp", 8, 0, 0, 854, 80, 1),
    "TP 16": Check("tp", 16, 1, 1, 49109, inf, 1),
    "PP 8": Check("pp", 8, 8, 0, 8, 0, 1),
}
CURVES = {name: [Balance("tp", 8, T, 1.0, k * 500 / T + 0.1 * k) for T in TOKENS] for k, name in enumerate(CHECKS, 1)}


def neighbor(name: str, plan: Found, fits: bool = True) -> Neighbor:
    return Neighbor(name, plan.plan, fits, plan.peak, plan.time, plan.seconds / PLANS[0].seconds - 1)


NEIGHBORS = [
    neighbor("as published", PLANS[0]),
    neighbor("TP 8", PLANS[1], fits=False)._replace(slower=0.3),
    Neighbor("no TP", impossible="batch=2048 is not a multiple of dp·microbatch = 8192·1 = 8192: give 8192"),
    neighbor("ZeRO-3", PLANS[2])._replace(slower=1.5),
    neighbor("ZeRO-1", PLANS[0])._replace(slower=-0.2),
]
FIGURES = {
    "tp of 16": lambda: nd.mesh(ALL),
    "cp of 16": lambda: nd.mesh(ALL, axis="cp"),
    "dp of 16": lambda: nd.mesh(ALL, axis="dp"),
    "pp of 16": lambda: nd.mesh(ALL, axis="pp"),
    "data of 16": lambda: nd.mesh(ALL, axis="data"),
    "an axis of 16": lambda: nd.mesh(Mesh(dp=16), axis="dp"),
    "four nodes": lambda: nd.mesh(Mesh(dp=4, tp=4, pp=2), axis="dp"),
    "pipeline innermost": lambda: nd.mesh(Mesh(dp=4, tp=2, pp=2, order=("tp", "dp", "cp", "pp")), axis="tp"),
    "a rest of a node": lambda: nd.mesh(Mesh(dp=3, tp=4), axis="dp"),
    "one rank": lambda: nd.mesh(Mesh()),
    "groups": lambda: nd.groups(ALL, 13),
    "groups of 64": lambda: nd.groups(Mesh(dp=8, tp=4, pp=2, ep=4, dp_shard=4), 13),
    "groups of 16,384": lambda: nd.groups(LARGE, 5000),
    "tokens": lambda: nd.tokens(CURVES, CHECKS),
    "tokens, eight curves": lambda: nd.tokens(
        {f"TP {k}": CURVES["TP 8"] for k in range(8)}, {f"TP {k}": CHECKS["TP 8"] for k in range(8)}
    ),
    "plans": lambda: nd.plans(PLANS),
    "named plans": lambda: nd.plans({"rule": PLANS[1], "planner": PLANS[0]}, title="405B on 16,384"),
    "over degrees": lambda: nd.over_degrees(models["llama3-70b"], SPLIT, H100),
    "over degrees, experts": lambda: nd.over_degrees(models["deepseek-v3"], V3, clusters["h800"]),
    "layouts": lambda: nd.layouts({"Llama 3 405B": NEIGHBORS, "others": NEIGHBORS * 3}),
    "one layout": lambda: nd.layouts({"Llama 3 405B": NEIGHBORS[:1]}),
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.few(10)
def test_texts_do_not_meet_and_all_of_a_figure_is_inside_it(name):
    assert_inside(FIGURES[name]())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: nd.mesh(ALL, axis="xp"), "axis='xp': choose one of "),
        (lambda: nd.mesh(ALL, node=0), "node=0: a node has a whole number of accelerators, 1 to 8"),
        (lambda: nd.mesh(ALL, node=2), "16 ranks in nodes of 2: a picture shows 4 nodes; groups() shows any mesh"),
        (lambda: nd.groups(ALL, 16), "rank=16: this mesh has 16"),
        (lambda: nd.groups(ALL, node=0.5), "node=0.5: "),
        (lambda: nd.groups(Mesh()), "a mesh of one rank has no groups: "),
        (lambda: nd.tokens({}), "0 curves: a picture shows 1 to 8"),
        (lambda: nd.tokens({"TP 8": []}), "'TP 8' has no points: "),
        (lambda: nd.tokens({"TP 8": CURVES["TP 8"]}, CHECKS), "a check of 'TP 16': the curves are TP 8"),
        (lambda: nd.plans([]), "no plans: give those of theory.planner.search"),
        (lambda: nd.over_degrees(models["llama3-70b"], SPLIT, clusters["tpu-v6e"]), "1,024 GPUs: tpu-v6e has only 256"),
        (lambda: nd.layouts({}), "give 1 layout or more"),
        (lambda: nd.layouts({"x": NEIGHBORS[2:]}), "give 1 layout or more, and of each what why_not returns: "),
        (lambda: nd.twin([], []), "0 ranks in theory, 0 measured: give as many of each, 1 or more"),
        (lambda: nd.twin([{"tp": 1}], [{"tp": 1}], [{}, {}]), "1 ranks in theory, 1 measured, 2 places: "),
        (
            lambda: nd.twin([{"tp": 1}], [{"pp": 1}]),
            "1 ranks in theory, 1 measured: give as many of each, 1 or more, with the same",
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        draw()


# Meshes


@pytest.mark.parametrize(
    ("axis", "title"),
    [
        ("tp", "TP, tensor: 8 groups of 2, inside a node"),
        ("pp", "PP, pipeline: 8 groups of 2, each on 2 nodes"),
        ("data", "DP × CP, same parameters: 4 groups of 4, inside a node"),
    ],
)
def test_a_mesh_s_title_counts_groups_and_says_where_they_lie(axis, title):
    assert texts(nd.mesh(ALL, axis=axis).axes[0])[0] == title


def test_every_rank_has_its_coordinates_and_its_group_s_look():
    axes = nd.mesh(ALL, axis="cp").axes[0]
    said = [text for text in texts(axes) if text.startswith("rank ")]
    assert said[13] == "rank 13\npp1 dp1\ncp0 tp1"
    assert len(said) == 16
    looks = [(box.get_facecolor(), box.get_hatch()) for box in axes.patches if box.get_linewidth() == 0]
    for group in ALL.groups("cp"):
        assert len({looks[rank] for rank in group}) == 1
    assert len(set(looks)) == 8


@pytest.mark.parametrize(("axis", "near", "far"), [("tp", 8, 0), ("dp", 8, 0), ("data", 4, 0), ("pp", 0, 8)])
def test_links_inside_nodes_are_solid_and_those_between_them_dashed(axis, near, far):
    axes = nd.mesh(ALL, axis=axis).axes[0]
    styles = [line.get_linestyle() for line in axes.lines]
    assert (styles.count("-"), styles.count("--")) == (near + 1, far + 1)  # and the legend's


def test_lines_of_groups_that_would_meet_have_lanes_of_their_own():
    axes = nd.mesh(Mesh(dp=4, tp=4, pp=2), axis="dp").axes[0]
    *lines, _ = [line for line in axes.lines if line.get_linestyle() == "-"]  # the last one is the legend's
    lanes = sorted((line.get_ydata()[0], *line.get_xdata()) for line in lines)
    assert len(lanes) == 16
    assert all(y != other or end < start for (y, _, end), (other, start, _) in pairwise(lanes))


def test_groups_of_a_rank_are_its_rows_with_itself_black():
    axes = nd.groups(ALL, 13).axes[0]
    assert texts(axes) == [
        "12, 13; in node 1",
        "13, 15; in node 1",
        "9, 13; in node 1",
        "5, 13; on 2 nodes",
        "9, 11, 13, 15; in node 1",
    ]
    for row, axis in enumerate(("tp", "cp", "dp", "pp", "data")):
        own = {round(b.get_x() + b.get_width() / 2) for b in axes.patches if round(b.get_y() + b.get_height() / 2) == row}
        assert own == set(ALL.group(axis, 13))
    (axes,) = nd.groups(Mesh(dp=4, ep=4)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DP, data, EP"]


# Tokens per GPU


def test_a_curve_is_its_ratios_and_crossings_are_marked_where_they_are():
    figure = nd.tokens(CURVES, CHECKS)
    (axes,), (legend,) = figure.axes, figure.legends
    first = axes.lines[0]
    assert dict(zip(*first.get_data(), strict=True)) == pytest.approx({each.tokens: each.ratio for each in CURVES["TP 8"]})
    marks = [
        (line.get_marker(), *line.get_xdata())
        for line in axes.lines
        if list(line.get_ydata()) == [1] and line.get_marker() in "o|"
    ]
    assert marks == [("o", 80), ("|", 854), ("|", 49109)]  # TP 16's estimate has no crossing, PP 8's are below the axis
    assert [text.get_text() for text in legend.get_texts()] == [  # from above, as the lines end
        "PP 8: below 64 tokens",
        "TP 16: always above 1\n(closed form: 49,109 tokens)",
        "TP 8: 80 tokens\n(closed form: 854 tokens)",
    ]


def test_a_curve_may_have_fewer_points_and_eight_differ_in_their_looks():
    lines = nd.tokens({f"TP {k}": CURVES["TP 8"][k:] for k in range(8)}).axes[0].lines[:8]
    assert [len(line.get_xdata()) for line in lines] == [len(TOKENS) - k for k in range(8)]
    assert len({(line.get_linestyle(), line.get_color()) for line in lines}) == 8


# Plans


def rows_of(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def assert_bars_are(axes, plans: list[Found], cut: float = 1e9):
    longest = min(cut, max(each.seconds for each in plans))
    for drawn, each in zip(widths(axes), plans, strict=True):
        whole = [LONGEST * seconds / longest for seconds in each.time.parts.values() if seconds]
        assert sum(drawn) == pytest.approx(min(LONGEST, sum(whole)), rel=1e-4)
        assert drawn[:2] == pytest.approx(whole[:2], rel=1e-4)


def test_a_plan_s_bar_is_its_time_by_parts():
    (axes,) = nd.plans(PLANS).axes
    assert_bars_are(axes, PLANS)
    assert rows_of(axes) == [
        "TP 4, CP 2, PP 8, DP 256\n1F1B v 8, ZeRO-2, b 1, recompute selective",
        "TP 8, PP 16, DP 128\nGPipe, ZeRO-1, b 1, recompute full",
        "TP 8, PP 4, DP 8 × 64\n1F1B, ZeRO-3, b 1, recompute selective",
    ]
    said = ["5.39 s, MFU 48.5%", "73.3 GB", "12.5 s, MFU 20.9%", "25.7 GB", "11.4 s, MFU 23.0%", "50 GB"]
    assert [text for text in words(axes, "texts") if re.search("MFU|GB", text)] == said


def test_a_plan_beyond_the_memory_says_so():
    large = found("llama3-405b", dp=1024, pp=8, seq=8192, batch=2048)
    (axes,) = nd.plans({"rule": large, "planner": PLANS[0]}).axes
    assert [text for text in words(axes, "texts") if "GB" in text] == [f"{large.peak.total / 1e9:.0f} GB of 80 GB!", "73.3 GB"]
    assert rows_of(axes)[0].startswith("rule: PP 8, DP 1024")


def test_a_plan_that_nobody_has_checked_has_a_frame_and_each_says_its_error_bar():
    row = PLANS[0]
    other = found("llama3-405b", dp=128, cp=2, tp=8, pp=8, seq=8192, batch=2048, zero=3)
    (axes,) = nd.plans({"best": row, "best checked": None, "last": other}).axes
    checked = [not confidence(each.time).missing for each in (row, other)]
    assert sorted(checked) == [False, True]  # one of each
    framed = [round(path.vertices[:, 1].mean()) for path in named(axes, "not checked").get_paths()]
    assert framed == [checked.index(False)]
    each = [line for line in words(axes, "texts") if line == "not checked" or re.fullmatch(r"[−±+].*%", line)]
    said, peaks = each[::2], each[1::2]
    short, long = (share - 1 for share in confidence((row, other)[checked.index(True)].time).ends(1.0))
    assert said[checked.index(False)] == "not checked"
    assert said[checked.index(True)] == f"{short:+.0%} to {long:+.0%}".replace("-", "−")
    assert peaks == ["not checked"] * 2


def test_a_peak_has_its_error_bar_and_a_question_mark_where_the_gpu_s_memory_lies_in_it():
    fsdp = {"zero": 3, "seq": 8192, "stack": "torchtitan-2025"}
    close, clear = (found("llama3-70b", dp=16, tp=4, batch=512, recompute=way, **fsdp) for way in ("none", "full"))
    (axes,) = nd.plans([close, clear]).axes
    bars = [str(peak_confidence(one.time.shape, one.plan)).split(" (")[0] for one in (close, clear)]
    said = [text for text in words(axes, "texts") if "GB" in text or text in bars]
    assert said == [f"{close.peak.total / 1e9:.1f} GB of 80 GB?", bars[0], f"{clear.peak.total / 1e9:.1f} GB", bars[1]]
    assert (close.tight, clear.tight) == ("fits by less than the error bar", "")


def test_no_more_than_six_plans_are_drawn():
    assert len(rows_of(nd.plans(PLANS * 3).axes[0])) == 6


def test_neighbors_bars_are_their_times_and_texts_what_they_take_more():
    (axes,) = nd.layouts({"Llama 3 405B": NEIGHBORS}).axes
    assert rows_of(axes) == ["as published", "TP 8", "no TP", "ZeRO-3", "ZeRO-1"]
    assert_bars_are(axes, [PLANS[k] for k in (0, 1, 2, 0)], 2 * PLANS[0].seconds)
    said = ["5.39 s", "73.3 GB", "» 12.5 s (+30%)", "25.7 GB, recompute full"]
    said += ["not possible: batch=2048 is not a multiple of …", "» 11.4 s (+150%)", "50 GB", "5.39 s (−20%)", "73.3 GB"]
    assert words(axes, "texts") == said


# Over degrees


def panels(figure) -> dict[str, tuple]:
    """Each panel's label -> its values, what its curve shows, where it's ringed, and what's crossed."""
    found = {}
    for axes in figure.axes:
        lines = {line.get_gid(): line for line in axes.lines}
        ticks = [label.get_text() for label in axes.get_xticklabels()]
        top = float(words(axes, "numbers")[2].removesuffix("%")) / 100
        of = [list(lines[name].get_xdata()) for name in ("ring", "does not fit")]
        found[axes.get_xlabel()] = ticks, [top * y for y in lines["curve"].get_ydata()], *of
    return found


def test_over_each_degree_stands_what_the_step_is_with_it_on_as_many_gpus():
    shown = panels(nd.over_degrees(models["llama3-70b"], SPLIT, H100))
    assert list(shown) == ["TP", "CP", "PP", "ZeRO stage", "micro-batch b"]
    for name, field, values in (("TP", "tp", [1, 2, 4, 8, 16, 32, 64]), ("ZeRO stage", "zero", [0, 1, 2, 3])):
        plans = [replace(SPLIT, **{field: value}, dp=256 // value if field == "tp" else 32) for value in values]
        here = [step.estimate(models["llama3-70b"], plan, H100) for plan in plans]
        assert all(plan.gpus == 1024 for plan in plans)
        assert shown[name][1] == pytest.approx([time.mfu for time in here])
        large = [k for k, plan in enumerate(plans) if memory.peak(models["llama3-70b"], plan).total > 80e9]
        assert shown[name][2:] == ([values.index(getattr(SPLIT, field))], large)
    assert shown["TP"][3] == [0, 1]


def test_what_cannot_be_has_no_place_over_a_degree():
    shown = panels(nd.over_degrees(models["deepseek-v3"], V3, clusters["h800"]))
    assert list(shown) == ["TP", "CP", "PP", "EP", "ZeRO stage", "micro-batch b"]
    assert shown["PP"][0] == ["1", "2", "4", "8", "16", "32"]  # 61 layers
    assert shown["micro-batch b"][0] == ["1", "2", "4"]  # DualPipe needs 2 for each rank
    sharded = nd.over_degrees(models["llama3-70b"], Plan(dp=64, zero=3, batch=64), H100)
    assert panels(sharded)["shards of HSDP"][0][-1] == "64"


# Tables


def test_regimes_stand_side_by_side_with_what_the_rule_loses():
    rule, best = PLANS[1], PLANS[0]
    row = Comparison("405B", 1024.0, rule, best, "TP in the node + PP + DP", {"TP + CP + PP + DP": best})
    table = nd.regimes([row, row._replace(rule=best, rule_regime="TP + CP + PP + DP")])
    assert table.rows[0] == [
        "405B",
        "1,024",
        "TP in the node + PP + DP",
        f"{rule.seconds:.3g} s",
        "TP + CP + PP + DP",
        f"{best.seconds:.3g} s",
        f"{rule.seconds / best.seconds - 1:.0%}",
        f"{rule.seconds / best.seconds - 1:.0%}",
    ]
    assert table.rows[1][4:] == ["the same", f"{best.seconds:.3g} s", "–", "–"]


def test_a_twin_s_table_shows_where_measurement_and_theory_differ():
    theory = [{"tp": 100, "cp": 0, "pp": 4096} for _ in range(2)]
    table = nd.twin(theory, [theory[0], {"tp": 100, "cp": 0, "pp": 4100}], [{"tp": 0}, {"tp": 1}])
    assert table.header == ["rank", "at", "tp", "pp"]
    assert table.rows == [
        ["0", "tp0", "100", "4,096"],
        ["1", "tp1", "100", "4,100 ≠ 4,096"],
        ["all, theory", "", "200", "8,192"],
        ["all, measured", "", "200", "8,196"],
        ["difference", "", "0", "4"],
    ]
    assert nd.twin(theory, theory).rows[-1] == ["difference", "0", "0"]


def test_deviations_of_opposite_sign_do_not_cancel():
    theory = [{"tp": 100}, {"tp": 100}]
    assert nd.twin(theory, [{"tp": 90}, {"tp": 110}]).rows[-1] == ["difference", "20"]
