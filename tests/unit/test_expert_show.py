"""Chapter 08's figures and explorer show the numbers that they are given or theory has, and what cannot be shown is refused."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from manyranks.show import expert, expert_explorer, units
from manyranks.show.bars import LONGEST
from manyranks.show.expert_explorer import Degrees
from manyranks.show.expert_setting import CLUSTERS, EXPERT, IMBALANCE, LIMITS, MODELS, PIPELINE, SCHEDULES, TENSOR, Setting
from manyranks.show.looks import LOOKS
from manyranks.theory import flops, memory, models, published, traffic
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.published import steps
from tests.drawn import marked, widths, words
from tests.unit.figures_drawn import assert_readable

DEFAULT_VALUES = {"model": "deepseek-v3", "cluster": "h800", "pp": 16, "ep": 64, "tp": 1}
DEFAULT_VALUES |= {"limit": 4, "imbalance": 1, "schedule": "dualpipe"}
SHAPES = [models[name] for name in ("mixtral-8x7b", "deepseek-v3", "llama3-405b")]
CHOSEN = [[0, 2], [0, 1], [0, 3], [1, 0]]
KEPT = [[0, 2], [0, 1], [-1, 3], [1, -1]]  # capacity 2
SENT = [[5, 1, 2, 3], [4, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 1600]]
RUNS = {"no balancing": [3.0, 2.9, 3.1], "auxiliary loss": [3.0, 1.5, 1.15], "bias": [3.0, 2.0, 1.125]}
LOADS = {"bias": [[6, 1, 1, 0], [4, 2, 1, 1], [2, 2, 2, 2]]}
STEP = {"1F": 1.13, "bubble": 2.06, "opt": 0.29}
COPIES = {"one hop": {"free": 1520, "node-limited": 1490}, "two hops": {"free": 1010, "node-limited": 505}}
EXPECTED = {"one hop": {"free": 1536, "node-limited": 1536}, "two hops": {"free": 1003, "node-limited": 512}}
FIGURES = {
    "parameters": lambda: expert.parameters(*SHAPES),
    "routing": lambda: expert.routing(CHOSEN, 4),
    "routing with all": lambda: expert.routing(CHOSEN * 4, 8, 4, KEPT * 4, 2, sources=2),
    "routing of many": lambda: expert.routing(np.argsort(np.cos(np.outer(range(32), range(32))), 1)[:, :4], 32, 8),
    "one hop": lambda: expert.dispatch({"dispatch": SENT}),
    "two hops": lambda: expert.dispatch(
        {"one hop": np.full((8, 8), 4096), "two hops: to the node": np.eye(8), "two hops: inside it": np.ones((8, 8))}, node=4
    ),
    "balancing": lambda: expert.balancing(RUNS),
    "balancing with loads": lambda: expert.balancing(RUNS, loads=LOADS),
    "waiting": lambda: expert.waiting([1, 1.1, 2, 4], [2, 2.1, 3, 9], [1.5, 1.5, 1, 0], [0.5, 0.6, 1, 4], {1: 2, 2: 3}),
    "phases": lambda: expert.phases({"published": STEP, "ours": STEP}),
    "phases of four": lambda: expert.phases({name: STEP | {"1F1B": 13.95, "1B": 2, "1W": 0.48} for name in "abcd"}),
    "copies": lambda: expert.copies(COPIES, EXPECTED),
    "hops": lambda: expert.hops(),
    "hops to three nodes": lambda: expert.hops((0, 5, 7, 11, 13, 16, 17), 18, 3, 2),
    "hops to eight ranks": lambda: expert.hops((3, 4, 12, 13, 15, 20, 23), 24, 2, 4),
}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.fixture(scope="module")
def explorer():
    return expert.explorer()


def now(**change) -> Setting:
    return Setting(**DEFAULT_VALUES | change)


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_meet_and_a_figure_is_no_wider_than_a_laptop_s(name):
    assert_readable(FIGURES[name]())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: expert.parameters(), "0 models: "),
        (lambda: expert.routing([[0]] * 33, 4), "chosen_TK of shape (33, 1), 4 experts: a picture shows 1 to 32 tokens"),
        (lambda: expert.routing([0, 1], 4), "chosen_TK of shape (2,), "),
        (lambda: expert.routing(KEPT, 4), "chosen_TK has -1 to 3: experts are 0 to 3; what was dropped is −1 in kept_TK"),
        (lambda: expert.routing(CHOSEN, 3), "chosen_TK has 0 to 3: experts are 0 to 2"),
        (lambda: expert.routing(CHOSEN, 4, ranks=3), "ranks=3 of 4 experts: "),
        (lambda: expert.routing(CHOSEN, 4, kept_TK=CHOSEN[::-1]), "kept_TK is not chosen_TK with −1"),
        (lambda: expert.routing(CHOSEN, 4, sources=3), "sources=3 do not share 4 tokens evenly"),
        (lambda: expert.dispatch({}), "0 matrices: "),
        (lambda: expert.dispatch({"a": SENT, "b": [[1, 2], [3, 4]]}), "'b' has the shape (2, 2): give n × n numbers"),
        (lambda: expert.dispatch({"a": SENT}, node=3), "node=3 of 4 ranks: give a divisor"),
        (lambda: expert.balancing({}), "0 runs: "),
        (lambda: expert.balancing({"bias": []}), "'bias' has no steps"),
        (lambda: expert.balancing(RUNS, loads={"other": [[1]]}), "loads of 'other': there are the runs 'no balancing', "),
        (lambda: expert.waiting([1, 2], [3], [0], [1], {}), "imbalance, replayed, computes, messages have 2, 1, 1, 1 numbers"),
        (lambda: expert.waiting([1], [3], [2], [2], {}), "computes and messages are parts of replayed"),
        (lambda: expert.waiting([1], [3], [2], [-1], {}), "computes and messages are parts of replayed"),
        (lambda: expert.hops(experts=15), "experts=15, nodes=2, inside=2: nodes · inside ranks must share the experts evenly"),
        (lambda: expert.hops((1,), 32), "experts=32, nodes=2, inside=2: a picture shows 2 to 3 nodes, "),
        (lambda: expert.hops((1, 16)), "chosen=[1, 16]: 1 to 8 different experts of 0 to 15"),
        (lambda: expert.hops((1, 1)), "chosen=[1, 1]: 1 to 8 different experts"),
        (lambda: expert.phases({"published": STEP, "ours": {"1F": 1}}), "'ours' has the phases ['1F']: give ['1F', 'bubble', "),
        (lambda: expert.phases({}), "0 sources: "),
        (lambda: expert.copies({}, {}), "0 routings: "),
        (lambda: expert.copies(COPIES, {"one hop": EXPECTED["one hop"]}), "predicted has one hop: free, "),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        draw()


# Pictures and charts


def test_held_and_used_are_the_shapes_parameters_and_flops():
    held, used = expert.parameters(*SHAPES, seq=2048).axes
    lengths = [[bar.get_width() for bar in bars] for axes in (held, used) for bars in axes.containers]
    assert lengths[0] == [shape.parameters for shape in SHAPES]
    assert lengths[1] == [shape.active_parameters for shape in SHAPES]
    assert lengths[2] == [flops.per_token(shape, 2048) for shape in SHAPES]
    assert texts(held) == ["46.7 B, used: 12.9 B", "671 B, used: 37.6 B", "406 B: all"]


def boxes(axes, colour) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_facecolor() == to_rgba(colour)]


def columns_and_rows(axes) -> tuple[dict[int, float], dict[int, float]]:
    """Where each token's column and each expert's row has its middle."""
    columns = {int(text.get_text()): round(text.get_position()[0], 3) for text in axes.texts if text.get_fontsize() == 7.5}
    names = [text for text in axes.texts if text.get_ha() == "right" and text.get_text() in "0123"]
    return columns, {int(text.get_text()): round(text.get_position()[1], 3) for text in names}


def test_a_dropped_copy_has_its_choice_s_number_crossed_out():
    axes = expert.routing(CHOSEN, 4, kept_TK=KEPT).axes[0]
    columns, rows = columns_and_rows(axes)
    numbers = {tuple(np.round(text.get_position(), 3)): text.get_text() for text in axes.texts if text.get_ha() == "center"}
    crossed = [tuple(np.round(line.get_xydata().mean(axis=0), 3)) for line in axes.lines]
    # Token 2's first choice and token 3's second one, both expert 0.
    assert crossed == [(columns[2], rows[0]), (columns[3], rows[0])]
    assert [numbers[place] for place in crossed] == ["1", "2"]
    assert "1: first choice, 2: second, …\ncrossed out: dropped" in texts(axes)


def test_a_copy_is_in_its_expert_s_row_and_its_token_s_column_in_the_look_of_the_rank():
    axes = expert.routing(CHOSEN, 4, ranks=2, kept_TK=KEPT, capacity=2).axes[0]
    places, rows = columns_and_rows(axes)
    for rank, (colour, _) in enumerate(LOOKS[:2]):
        middles = {
            (round(box.get_x() + box.get_width() / 2, 3), round(box.get_y() + box.get_height() / 2, 3))
            for box in boxes(axes, colour)
        }
        for token, experts in enumerate(KEPT):
            for one in experts:
                if one // 2 == rank:
                    assert (places[token], rows[one]) in middles
    said = texts(axes)
    assert [text for text in said if text in ("2", "2, 2 dropped", "1")][-4:] == ["2, 2 dropped", "2", "1", "1"]
    assert "dashed, the mean: 2\nthick line, the capacity: 2\nlargest ÷ mean: 2.00" in said


def test_the_capacity_line_is_where_full_experts_end():
    axes = expert.routing(CHOSEN, 4, kept_TK=[[0, 2], [0, 1], [0, 3], [1, -1]], capacity=3).axes[0]
    (line,) = (each for each in axes.collections if (each.get_color() == to_rgba("#D55E00")).all())
    bars = [box for box in boxes(axes, LOOKS[0][0]) if box.get_x() > 1.05 + 4 * 0.4]
    assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(line.get_segments()[0][0][0])


def test_a_dispatch_says_what_stays_in_the_rank_in_the_node_and_what_leaves_it():
    axes = expert.dispatch({"one hop": SENT}, node=2).axes[0]
    cells = [text.get_text() for text in axes.texts if text.get_bbox_patch() is not None]
    assert cells == [f"{number:,}" for row in SENT for number in row]
    assert texts(axes)[-1] == "between nodes (hatched): 66 rows\ninside a node: 32\nstay (grey): 1,622"
    assert len([patch for patch in axes.patches if patch.get_hatch()]) == 8
    assert texts(expert.dispatch({"one hop": SENT}).axes[0])[-1] == "sent: 98 rows\nstay (grey): 1,622"


def test_runs_are_lines_and_loads_multiples_of_the_mean():
    lines, heat, colours = expert.balancing(RUNS, loads=LOADS).axes
    assert [list(line.get_ydata()) for line in lines.lines] == [*RUNS.values(), [1.2, 1.2]]
    assert [text.get_text() for text in lines.get_legend().texts][1] == "auxiliary loss: 1.15 at the end"
    np.testing.assert_allclose(heat.images[0].get_array(), np.transpose(LOADS["bias"]) / 2)
    assert [text.get_text() for text in colours.get_yticklabels()] == ["0", "1", "2", "3 or more"]


def test_waiting_shows_points_in_order_over_what_another_rank_does():
    (axes,) = expert.waiting([2, 1], [9, 2], [1, 1.5], [3, 0.25], {2: 8, 1: 2}).axes
    lines = {line.get_label(): list(line.get_xydata().ravel()) for line in axes.lines}
    assert (lines["theory"], lines["replayed"]) == ([1, 2, 2, 8], [1, 2, 2, 9])
    areas = {
        area.get_label(): [area.get_paths()[0].vertices[:, 1][area.get_paths()[0].vertices[:, 0] == x] for x in (1, 2)]
        for area in axes.collections
    }
    ends = {name: [(min(found), max(found)) for found in each] for name, each in areas.items()}
    assert ends == {
        "rank 1 computes": [(0, 1.5), (0, 1)],
        "its messages are on the way": [(1.5, 1.75), (1, 4)],
        "it waits for rank 0's products": [(1.75, 2), (4, 9)],
    }
    assert len({area.get_hatch() for area in axes.collections}) == 3
    assert texts(axes) == ["2 s", "1.5 s", "9 s", "1 s"]


def test_parts_that_add_up_to_the_step_but_for_rounding_are_drawn():
    assert expert.waiting([1], [0.3], [0.1], [0.2], {})


def test_phases_and_copies_have_their_numbers_on_their_bars():
    (axes,) = expert.phases({"published": STEP, "ours": {name: 2 * seconds for name, seconds in STEP.items()}}).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1.13, 2.06, 0.29], [2.26, 4.12, 0.58]]
    assert texts(axes) == ["1.13", "2.06", "0.29", "2.26", "4.12", "0.58"]
    (axes,) = expert.copies(COPIES, EXPECTED).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1520, 1010], [1490, 505]]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1536, 1003], [1536, 512]]
    assert texts(axes)[-1] == "505\ntheory 512"
    assert axes.lines[0].get_label() == "theory"


def crossings(axes) -> list[list[tuple[int, int]]]:
    """For each panel, where its thick arrows end; the legend's is not one."""
    middle = axes.get_xlim()[1] / 2
    arrows = [text for text in axes.texts if isinstance(text, Annotation) and text.xy[1] > 0.3]
    thick = [arrow for arrow in arrows if arrow.arrow_patch.get_linewidth() > 2]
    return [[text.xy for text in thick if (text.xy[0] > middle) == right] for right in (False, True)]


@pytest.mark.parametrize(
    ("drawing", "said"),
    [
        (((1, 9, 10, 14),), ["one hop: 3 copies cross", "two hops: 1 copy crosses"]),
        (((0, 3, 4, 7),), ["one hop: 0 copies cross", "two hops: 0 copies cross"]),
        (((0, 5, 7, 11, 13, 16, 17), 18, 3), ["one hop: 5 copies cross", "two hops: 2 copies cross"]),
    ],
)
def test_a_copy_for_each_choice_or_for_each_node_crosses(drawing, said):
    axes = expert.hops(*drawing).axes[0]
    assert [text for text in texts(axes) if "cross" in text] == said
    assert [len(each) for each in crossings(axes)] == [int(text.split(": ")[1].split()[0]) for text in said]


def test_hops_end_at_chosen_experts_and_at_the_rank_with_the_same_place():
    axes = expert.hops((1, 9, 14)).axes[0]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts if text.get_va() == "center_baseline"}
    one, two = crossings(axes)
    assert [y for _, y in one] == pytest.approx([heights["9"], heights["14"]])
    (token, _), (copy,) = (
        [text.get_position() for text in axes.texts if text.get_text() == name] for name in ("token", "copy")
    )
    assert two[0][1] == copy[1] == token[1]
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold" and text.get_text().isdigit()]
    assert bold == ["1", "9", "14"] * 2


# What the explorer shows of a setting


def test_the_preset_is_the_published_run_and_its_time_the_prediction_s():
    (row,) = steps.deepseek()
    assert now().shape == models["deepseek-v3"]
    assert now().plan == row.plan
    assert now().step().seconds == row.predict()
    assert now().peak() == memory.peak(row.shape, row.plan)
    assert now().fits
    gpus = {line["key"]: line["value"] for line in published.rows("deepseek_v3_config")}["gpus"]
    assert now().run.gpus == int(gpus)


def test_tensor_parallelism_loses_on_it():
    assert now().step().seconds == pytest.approx(19.7, abs=0.05)
    assert now(tp=8).step().seconds == pytest.approx(91.1, abs=0.05)


@pytest.mark.parametrize(
    "change", [{}, {"tp": 2}, {"limit": 0}, {"limit": 2}, {"imbalance": 2}, {"model": "mixtral-8x7b"}], ids=str
)
def test_the_way_to_the_experts_takes_as_long_as_the_step_is_charged(change):
    one = now(**change)
    assert one.way().seconds == pytest.approx(traffic.expert(one.shape, one.plan, one.on, DEFAULT, one.imbalance)[0])


def test_a_limit_of_nodes_halves_what_two_hops_send_between_nodes_and_changes_nothing_with_one():
    free, limited = ({hops: now(limit=limit).way(hops) for hops in (1, 2)} for limit in (0, 4))
    assert free[1] == limited[1]
    assert limited[2].inside == free[2].inside
    assert limited[2].between == pytest.approx(free[2].between * 3.5 / traffic.other_nodes(now(limit=0).shape, 8))
    assert limited[2].between == pytest.approx(limited[1].between / 2)


def test_an_unequal_load_is_a_part_of_its_own():
    even, uneven = now().parts(), now(imbalance=2).parts()
    assert sum(uneven.values()) == pytest.approx(now(imbalance=2).step().seconds)
    assert even["waits"] == 0 < uneven.pop("waits")
    assert uneven == {name: seconds for name, seconds in even.items() if name != "waits"}


# The explorer


def test_it_opens_on_deepseek_v3_s_layout():
    opened = expert.explorer()
    assert opened.values == DEFAULT_VALUES
    assert opened.status == (
        "deepseek-v3 on 2,048 GPUs, h800, PP 16 × EP 64, TP 1, DP 128, dualpipe: 19.7 s a step, MFU 44%; 66.2 GB of 80 GB; "
        "a GPU sends 617 MB inside its node and 308 MB beyond to the experts of a layer and back. Limit: computing."
    )


def test_bars_and_numbers_are_the_settings():
    plot = Degrees()
    plot.update(**DEFAULT_VALUES)
    memory, time, traffic = plot.figure.axes
    peaks, times = [now(ep=ep).peak() for ep in EXPERT], [now(tp=tp).step().seconds for tp in TENSOR]
    assert [text.removeprefix("» ") for text in words(memory)] == [*(units.size(peak.total) for peak in peaks), "80 GB"]
    assert words(time) == ["19.7 s", "24.4 s", "45.7 s, EP 32", "» 91.1 s, EP 16"]
    assert "»: longer than the axis" in [axes.get_xlabel() for axes in plot.figure.axes]
    ways = [now(limit=limit).way(hops) for hops, limit in expert_explorer.WAYS.values()]
    assert words(traffic) == [f"{units.size(way.inside + way.between)}, {units.duration(way.seconds)}" for way in ways]
    memory_widths, time_widths, traffic_widths = ([sum(row) for row in widths(panel)] for panel in plot.figure.axes)
    assert memory_widths == pytest.approx([LONGEST * min(1, peak.total / 160e9) for peak in peaks], rel=1e-3)
    assert time_widths == pytest.approx([LONGEST * min(1, seconds / times[0] / 3) for seconds in times], rel=1e-3)
    most = max(way.inside + way.between for way in ways)
    assert traffic_widths == pytest.approx([LONGEST * (way.inside + way.between) / most for way in ways], rel=1e-3)


def test_each_panel_marks_what_the_setting_has():
    plot = Degrees()
    plot.update(**DEFAULT_VALUES | {"tp": 8, "limit": 2})
    rows = [EXPERT.index(16), TENSOR.index(8), list(expert_explorer.WAYS).index("2 nodes at most")]
    assert [marked(panel) for panel in plot.figure.axes] == rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": 8}, "PP 16 × EP 16 (asked: 64, but there are 16 DP ranks), TP 8, DP 16"),
        ({"tp": 8}, "Limit: tensor-parallel messages, 63% of the time; TP 1 takes 19.7 s."),
        ({"imbalance": 2}, "Limit: all wait for the fullest rank, 15% of the time; balanced it takes 19.7 s."),
        ({"schedule": "1f1b"}, "Limit: tokens on their way to experts, 21% of the time; dualpipe takes 19.7 s."),
        (
            {"ep": 1},
            "a GPU sends nothing to the experts of a layer and back. Limit: memory; EP 32 fits. Of the time: computing.",
        ),
        ({"ep": 1}, "Does not fit: deepseek-v3 on 2,048 GPUs"),
        ({"pp": 4}, "Limit: memory; PP 16 fits. "),
        ({"model": "mixtral-8x7b"}, "EP 8 (asked: 64, but there are 8 experts)"),
    ],
)
def test_the_status_line_names_the_limit_and_a_way_out(explorer, change, said):
    assert said in explorer.set(**DEFAULT_VALUES | change).status


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pp": 1}, "batch=15360 is not a multiple of dp·microbatch = 2048·1 = 2048"),
        ({"model": "deepseek-v2"}, "ep=64 does not divide the 160 routed experts of deepseek-v2"),
        ({"ep": 1, "imbalance": 2}, "imbalance=2: with ep=1 the fullest rank has 1 to 1 times the mean load"),
    ],
)
def test_what_cannot_be_is_refused_in_words(explorer, change, said):
    assert explorer.set(**DEFAULT_VALUES | change).status.startswith(f"Not possible: {said}")


@pytest.mark.parametrize(("name", "value"), [("model", "gpt5"), ("cluster", "abacus"), ("schedule", "later")])
def test_unknown_names_are_refused_in_words(name, value):
    with pytest.raises(ValueError, match=value):
        Degrees().update(**DEFAULT_VALUES | {name: value})


def test_every_choice_gives_a_status_line_or_a_reason():
    plot, options = Degrees(), {"model": list(MODELS), "cluster": CLUSTERS, "pp": PIPELINE, "ep": EXPERT, "tp": TENSOR}
    options |= {"limit": LIMITS, "imbalance": IMBALANCE, "schedule": SCHEDULES}
    settings = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())][::40009]
    settings += [DEFAULT_VALUES | {name: value} for name, values in options.items() for value in values]
    said, reasons = [], []
    for setting in settings:
        try:
            said.append(plot.update(**setting))
        except ValueError as error:
            reasons.append(str(error))
    assert all("Limit: " in each for each in said)
    assert all(re.match(r"batch=|ep=|imbalance=|\d of \d+ nodes |PP |\d+ layers|m=|p=", each) for each in reasons), reasons
    assert len(said) > len(reasons)
