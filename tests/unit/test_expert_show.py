"""Chapter 08's figures and explorer show the numbers that they are given or theory has, and what cannot be shown is refused."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch

from manyranks.show import expert, units
from manyranks.show.bars import LONGEST
from manyranks.show.expert import CHOICES, WAYS, Degrees, Experts
from manyranks.show.style import LOOKS
from manyranks.theory import flops, models, published
from manyranks.theory.expert import two_hops_copies
from manyranks.theory.published import steps
from tests.drawn import marked, texts, widths, words
from tests.unit.figures_drawn import assert_readable

DEFAULT_VALUES = {"model": "deepseek-v3", "cluster": "h800", "pp": 16, "ep": 64, "tp": 1, "etp": 1}
DEFAULT_VALUES |= {"limit": 4, "imbalance": 1, "schedule": "dualpipe"}
SHAPES = [models[name] for name in ("mixtral-8x7b", "deepseek-v3", "llama3-405b")]
CHOSEN = [[0, 2], [0, 1], [0, 3], [1, 0]]
KEPT = [[0, 2], [0, 1], [-1, 3], [1, -1]]  # capacity 2
SENT = [[5, 1, 2, 3], [4, 6, 7, 8], [9, 10, 11, 12], [13, 0, 15, 16]]
RUNS = {"no balancing": [3.0, 2.9, 3.1], "auxiliary loss": [3.0, 1.5, 1.15], "bias": [3.0, 2.0, 1.125]}
LOADS = {"bias": [[6, 1, 1, 0], [4, 2, 1, 1], [2, 2, 2, 2]]}
COPIES = {"one hop": {"free": 1520, "node-limited": 1490}, "two hops": {"free": 1010, "node-limited": 505}}
EXPECTED = {"one hop": {"free": 1536, "node-limited": 1536}, "two hops": {"free": 1003, "node-limited": 512}}
WAITING = [1, 1.1, 2, 4], [2, 2.1, 3, 9], [1.5, 1.5, 1, 0], [0.5, 0.6, 1, 4], {1: 2, 2: 3}, "step time"
FIGURES = {
    "parameters": lambda: expert.parameters(*SHAPES),
    "routing": lambda: expert.routing(CHOSEN, 4),
    "routing with all": lambda: expert.routing(CHOSEN * 4, 8, 4, KEPT * 4, 2),
    "routing of many": lambda: expert.routing(np.argsort(np.cos(np.outer(range(32), range(32))), 1)[:, :4], 32, 8),
    "balancing": lambda: expert.balancing(RUNS, LOADS),
    "waiting": lambda: expert.waiting(*WAITING),
    "copies": lambda: expert.copies(COPIES, EXPECTED, "copies", "{:,.0f}".format),
    "travels": lambda: expert.travels(SENT),
    "hops": lambda: expert.hops(),
    "hops to eight experts": lambda: expert.hops((3, 4, 8, 9, 10, 11, 12, 15)),
}


def vertices(area) -> np.ndarray:
    return area.get_paths()[0].vertices


@pytest.fixture(scope="module")
def explorer():
    return expert.explorer()


def now(**change) -> Degrees:
    return Degrees(**DEFAULT_VALUES | change)


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_meet_and_a_figure_is_no_wider_than_a_laptop_s(name):
    assert_readable(FIGURES[name]())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: expert.routing(KEPT, 4), "chosen_TK has -1 to 3, ranks=1: give experts from 0 to 3, and 1 to 8 ranks"),
        (lambda: expert.routing(CHOSEN, 3), "chosen_TK has 0 to 3, ranks=1: give experts from 0 to 2"),
        (lambda: expert.routing(CHOSEN, 4, ranks=3), "chosen_TK has 0 to 3, ranks=3: "),
        (lambda: expert.routing(CHOSEN, 4, kept_TK=CHOSEN[::-1]), "kept_TK is not chosen_TK with −1"),
        (lambda: expert.hops((1, 16)), "chosen=[1, 16]: 1 to 8 different experts of 0 to 15"),
        (lambda: expert.hops((1, 1)), "chosen=[1, 1]: 1 to 8 different experts"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        draw()


# Pictures and charts


def test_held_and_used_are_the_shapes_parameters_and_flops():
    held, used = expert.parameters(*SHAPES).axes
    lengths = [[bar.get_width() for bar in bars] for axes in (held, used) for bars in axes.containers]
    assert lengths[0] == [shape.parameters for shape in SHAPES]
    assert lengths[1] == [shape.active_parameters for shape in SHAPES]
    assert lengths[2] == [flops.per_token(shape, 4096, "causal") for shape in SHAPES]
    assert texts(held) == ["46.7 B, used: 12.9 B", "671 B, used: 37.6 B", "406 B: all"]


def test_a_copy_is_in_its_token_s_column_in_the_look_of_its_expert_s_rank_or_crossed_out_and_loads_are_counted():
    cells, loads = expert.routing(CHOSEN, 4, ranks=2, kept_TK=KEPT, capacity=2).axes
    drawn = {patch.get_xy(): patch.get_facecolor() for patch in cells.patches if patch.get_facecolor()[3]}
    kept = [(token, one) for token, experts in enumerate(KEPT) for one in experts if one >= 0]
    assert drawn == {(token - 0.5, one - 0.5): to_rgba(LOOKS[one // 2][0]) for token, one in kept}
    numbers = {tuple(np.round(text.get_position(), 3)): text.get_text() for text in cells.texts}
    assert numbers == {(token, one): str(nth + 1) for token, experts in enumerate(CHOSEN) for nth, one in enumerate(experts)}
    crossed = [tuple(np.round(line.get_xydata().mean(axis=0), 3)) for line in cells.lines]
    assert crossed == [(2, 0), (3, 0)]  # token 2's first choice and token 3's second one, both expert 0
    assert cells.get_xlabel().endswith("crossed out: dropped")
    assert [label.get_text() for label in cells.get_yticklabels()] == ["rank 0, expert 0", "1", "rank 1, expert 2", "3"]
    assert texts(loads) == ["2, 2 dropped", "2", "1", "1"]
    assert loads.get_xlabel() == "dashed, the mean: 2\nthick line, the capacity: 2\nlargest ÷ mean: 2.00"
    assert [line.get_xdata()[0] for line in loads.lines] == [2, 2]
    assert [bars[0].get_width() for bars in loads.containers[::2]] == [2, 2, 1, 1]


def test_bands_lead_from_who_sends_to_who_gets_as_wide_as_the_rows_that_travel():
    (axes,) = expert.travels(SENT).axes
    sides = [
        [(y.min(), y.max()) for y in (path[path[:, 0] == x, 1] for x in (0, 1))] for path in map(vertices, axes.collections)
    ]
    ends = np.reshape(sides, (4, 4, 2, 2))  # from, to, side, edge
    np.testing.assert_allclose(np.diff(ends)[..., 0], np.stack([SENT, SENT], -1))
    said = {text.get_text(): text.get_position()[1] for text in axes.texts}
    for rank in range(4):
        sends, gets = ends[rank, :, 0], ends[:, rank, 1]
        assert said[f"rank {rank}\nsends {sum(SENT[rank])}"] == pytest.approx((sends.min() + sends.max()) / 2)
        assert said[f"rank {rank}\ngets {sum(row[rank] for row in SENT)}"] == pytest.approx((gets.min() + gets.max()) / 2)


def test_runs_are_lines_and_loads_multiples_of_the_mean():
    lines, heat, colors = expert.balancing(RUNS, LOADS).axes
    assert [list(line.get_ydata()) for line in lines.lines] == [*RUNS.values()]
    assert [text.get_text() for text in lines.get_legend().texts][1] == "auxiliary loss: 1.15 at the end"
    np.testing.assert_allclose(heat.images[0].get_array(), np.transpose(LOADS["bias"]) / 2)
    assert [text.get_text() for text in colors.get_yticklabels()] == ["0", "1", "2", "3 or more"]


def test_waiting_shows_points_in_order_over_what_another_rank_does():
    (axes,) = expert.waiting([2, 1], [9, 2], [1, 1.5], [3, 0.25], {2: 8, 1: 2}, "time").axes
    lines = {line.get_label(): list(line.get_xydata().ravel()) for line in axes.lines}
    assert (lines["theory"], lines["replayed"]) == ([1, 2, 2, 8], [1, 2, 2, 9])
    areas = {area.get_label(): vertices(area) for area in axes.collections}
    ends = {name: [(y.min(), y.max()) for y in (path[path[:, 0] == x, 1] for x in (1, 2))] for name, path in areas.items()}
    assert ends == {
        "rank 1 computes": [(0, 1.5), (0, 1)],
        "its messages are on the way": [(1.5, 1.75), (1, 4)],
        "it waits for rank 0's products": [(1.75, 2), (4, 9)],
    }
    assert len({area.get_hatch() for area in axes.collections}) == 3
    assert texts(axes) == ["2 s", "1.5 s", "9 s", "1 s"]


def test_copies_have_their_numbers_on_their_bars():
    (axes,) = expert.copies(COPIES, EXPECTED, "copies", "{:,.0f}".format).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1520, 1010], [1490, 505]]
    assert list(axes.lines[0].get_ydata()) == [1536, 1003, 1536, 512]
    assert texts(axes)[-1] == "505\ntheory 512"
    assert axes.lines[0].get_label() == "theory"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((1, 9, 10, 14), ["one hop: 3 copies cross", "two hops: 1 copy crosses"]),
        ((0, 3, 4, 7), ["one hop: 0 copies cross", "two hops: 0 copies cross"]),
    ],
)
def test_a_copy_for_each_choice_or_for_each_node_crosses(chosen, said):
    axes = expert.hops(chosen).axes[0]
    assert [text for text in texts(axes) if "cross" in text] == said
    arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    crossing = sum(int(text.split(": ")[1].split()[0]) for text in said)
    assert len([arrow for arrow in arrows if arrow.get_gid() == "crosses"]) == crossing + 1  # one is the legend's
    assert len([arrow for arrow in arrows if arrow.get_gid() == "inside"]) == 2 * len(chosen) - int(said[0][9]) + 1


# What the explorer shows of a setting


def test_it_opens_on_the_published_run_and_its_time_is_the_prediction_s():
    (row,) = steps.deepseek()
    here = now().scenario
    assert expert.explorer().values == DEFAULT_VALUES
    assert (here.shape, here.plan, here.time.seconds, here.fits) == (row.shape, row.plan, row.predict(), True)
    assert str(here.plan.gpus) in [line["value"] for line in published.rows("deepseek_v3_config") if line["key"] == "gpus"]


def test_a_limit_of_nodes_halves_what_two_hops_send_between_nodes_and_changes_nothing_with_one():
    free, limited = ({hops: now(limit=limit).way(hops) for hops in (1, 2)} for limit in (0, 4))
    assert free[1] == limited[1]
    assert limited[2][0] == free[2][0]
    assert limited[2][1] == pytest.approx(free[2][1] * 3.5 / two_hops_copies(256, 8, 64, 8).between)
    assert limited[2][1] == pytest.approx(limited[1][1] / 2)


def test_an_unequal_load_is_a_part_of_its_own():
    even, uneven = now().parts(), now(imbalance=2).parts()
    assert sum(uneven.values()) == pytest.approx(now(imbalance=2).cost)
    assert even["waits"] == 0 < uneven.pop("waits")
    assert uneven == {name: seconds for name, seconds in even.items() if name != "waits"}


# The explorer


def test_bars_are_each_tp_s_time_and_each_way_s_bytes_with_those_of_the_setting_marked():
    plot, here = Experts(), {"tp": 8, "limit": 2}
    assert plot.update(**DEFAULT_VALUES | here).scenario == now(**here).scenario
    time, traffic = plot.figure.axes
    assert [marked(panel) for panel in (time, traffic)] == [CHOICES["tp"].index(8), list(WAYS).index("2 nodes at most")]
    times = [now(tp=tp, limit=2).cost for tp in CHOICES["tp"]]
    ways = [now(tp=8, limit=limit).way(hops) for hops, limit in WAYS.values()]
    assert words(time) == [f"{seconds:.3g} s" for seconds in times]
    assert words(traffic) == [f"{units.size(sum(way[:2]))}, {units.duration(way[2])}" for way in ways]
    for panel, found in ((time, times), (traffic, [sum(way[:2]) for way in ways])):
        assert [sum(row) for row in widths(panel)] == pytest.approx([LONGEST * one / max(found) for one in found], rel=1e-3)
    said = [part.says for part in plot.parts()]
    assert f"TP 2, TP messages: {now(tp=2, limit=2).parts()['tensor']:.3g} s" in said
    assert f"4 nodes at most, between nodes: {units.size(now(tp=8).way()[1])}" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "1f1b"}, "Limit: tokens to experts, 18% of the step; with dualpipe: 19.6 s."),
        ({"ep": 1}, "sent inside a node 0 B; sent between nodes 0 B. Does not fit. Limit: memory; EP 32 fits."),
        ({"pp": 4}, "Does not fit. Limit: memory; PP 16 fits."),
        ({"pp": 1}, "Not possible: PP 1 × TP 1 leaves 2,048 DP ranks, which don't evenly divide the batch of 15,360 sequences"),
        ({"model": "deepseek-v2"}, "Not possible: e = 64 does not divide the 160 routed experts of deepseek-v2"),
        ({"ep": 1, "imbalance": 2}, "Not possible: imbalance = 2: with e = 1 the fullest rank has the mean load: give 1"),
    ],
)
def test_the_sentence_names_the_limit_and_a_way_out_or_what_cannot_be(explorer, change, said):
    assert said in explorer.set(**DEFAULT_VALUES | change).status


def test_controls_without_effect_are_switched_off(explorer):
    disabled = [name for name in explorer.presets if explorer.preset(name).controls["limit"].disabled]
    assert disabled == ["8 expert ranks", "NVL72", "Mixtral 8x7B"]
    assert explorer.set(**DEFAULT_VALUES | {"ep": 1}).controls["imbalance"].disabled
