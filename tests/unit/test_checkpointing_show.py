"""Chapter 04's pictures show the theory's plans, their bytes and FLOPs, and every setting is shown or refused in words."""

import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes

from manyranks.show import bars
from manyranks.show.checkpointing import ATTENTION, STRATEGIES, Strategy, Tradeoff, again, explorer, kept_by, peaks
from manyranks.show.checkpointing import plan as picture
from manyranks.show.checkpointing import step as through_a_step
from manyranks.theory import Plan, checkpointing, clusters, flops, memory, models, optimal_checkpoints, step
from manyranks.theory.checkpointing import Action, Layer, run
from manyranks.theory.equal_checkpoints import everything, from_input, front, segments
from tests.drawn import named, widths, words

PAPER = {"model": "megatron-22b", "seq": 2048, "microbatch": 4, "dp": 1, "tp": 8, "sequence_parallel": True, "pp": 1}
PAPER |= {"attention": "core kept", "strategy": "C segments", "count": 8, "budget": 32e9}
OPENS = PAPER | {"model": "llama3-8b", "seq": 8192, "microbatch": 2, "dp": 64, "tp": 1, "sequence_parallel": False}
LAYER = Layer(1, 2, 2, 34)
SBH = 2048 * 4 * 6144  # of the paper's model


def setting(**change) -> Strategy:
    return Strategy(**PAPER | change)


def drawn(**change) -> list[Axes]:
    """Both panels: memory against compute, and what is held."""
    plot = Tradeoff()
    plot.update(**PAPER | change)
    return plot.figure.axes


# What strategies hold, and what they compute again


@pytest.mark.parametrize("layer", [Layer(1, 2, 1, 1), LAYER, Layer(1, 2, 100, 655)])
def test_a_strategy_holds_and_computes_what_its_plan_does(layer):
    for n in (2, 7, 30):
        points = [(everything(n), checkpointing.keep_all(n)), (from_input(n), checkpointing.from_input(n))][: 2 * (n > 2)]
        points += [(segments(n, count, layer), checkpointing.segments(n, count)) for count in range(1, n + 1)]
        for point, plan in points:
            outcome = run([layer] * n, plan)
            assert (point.bytes(layer), point.forwards) == (outcome.peak, outcome.extra)


def last_kept(n: int, whole: int, longest: int) -> list[Action]:
    """Keeps the last layers, and has the others in segments of this length."""
    cut, plan = n - whole, []
    for k in range(1, cut + 1):
        plan += [Action("forward", k)] + [Action("store", k)] * (k < n and (cut - k) % longest == 0)
    plan += [Action("keep", k) for k in range(cut + 1, n + 1)] + [Action("backward", k) for k in range(n, cut, -1)]
    for end in range(cut, 0, -longest):
        segment = range(max(0, end - longest) + 1, end + 1)
        plan += [Action("keep", k) for k in segment] + [Action("backward", k) for k in reversed(segment)]
    return plan


@pytest.mark.parametrize("layer", [Layer(1, 2, 1, 3), LAYER])
def test_with_several_in_flight_the_others_hold_what_forward_left(layer):
    for n, flying in ((2, 2), (3, 2), (7, 4), (8, 8)):
        each = [(run([layer] * n, checkpointing.keep_all(n)).peak + (flying - 1) * n * layer.saved, 0)]
        for whole, longest in itertools.product(range(n), range(1, n + 1)):
            outcome = run([layer] * n, plan := last_kept(n, whole, min(longest, n - whole)))
            stored = sum(action.kind == "store" for action in plan)  # a_n, in what the last layer saves, doesn't wait, but a_0
            waits = (stored + (whole == 0)) * layer.output + whole * layer.saved
            each.append((outcome.peak + (flying - 1) * waits, outcome.extra))
        best = [(size, min(again for held, again in each if held <= size)) for size, _ in sorted(each)]
        fronts = {point.bytes(layer, flying): point.forwards for point in front(n, layer, flying)}
        assert fronts == dict(pair for at, pair in enumerate(best) if at == 0 or pair[1] < best[at - 1][1])


SIZES = [*itertools.product((2, 5, 12), (1, 3, 17, 40), (1,)), (48, 1, 1), (24, 3, 1), (24, 17, 1), (24, 4, 3), (48, 27, 4)]


@pytest.mark.parametrize(("n", "saved", "output"), SIZES)
def test_the_front_is_the_theory_s_optimum_at_every_budget_and_a_forward_off_at_most_where_sizes_are_rounded(n, saved, output):
    layer = Layer(1, 2, output, saved)
    most = run([layer] * n, (checkpointing.keep_all if output == 1 else checkpointing.every_layer)(n)).peak
    schedules, plans = optimal_checkpoints.Schedules([layer] * n, most, slots=most), front(n, layer)
    off = []
    for budget in range(schedules.least, most + 1):
        fewest = min(point.forwards for point in plans if point.bytes(layer) <= budget)
        off.append(fewest - schedules.extra(budget))
    assert set(off) <= ({0} if output == 1 else {0, 1})
    assert sum(off) <= 5
    assert plans[0].bytes(layer) == schedules.least
    for point in plans if (n, output) == (24, 1) else ():
        before = itertools.takewhile(lambda action: action.kind != "backward", schedules.plan(point.bytes(layer)))
        kinds = [action.kind for action in before]
        assert (point.stored, point.kept) == (kinds.count("store"), kinds.count("keep"))


def test_the_parts_of_a_bar_are_its_bytes_and_scores_are_5as_squared_b():
    for attention, point in itertools.product(ATTENTION, setting().points.values()):
        now = setting(attention=attention)
        parts = now.parts(point)
        assert sum(parts.values()) == pytest.approx(point.bytes(now.layer))
        expected = point.kept * 5 * 64 * 2048**2 * 4 / 8 if attention == "core kept" else 0
        assert parts["attention scores"] == pytest.approx(expected, rel=1e-3)
        assert parts["checkpoints"] == point.stored * 2 * SBH / 8
    tight = setting(count=128, budget=1e5)  # more segments than layers; less than any plan needs
    assert tight.points["C segments"] == tight.points["every layer"]
    assert tight.points["optimal"] == front(48, tight.layer)[0]


def test_flops_computed_again_are_the_theory_s_shares():
    shape, forwards = models["megatron-22b"], np.array([0, 48])
    ways, trained = ("selective", "full"), flops.per_token(shape, 2048, "full")
    core = flops.forward(shape, 2048).core / trained
    selective, every = (flops.hardware_per_token(shape, 2048, way, "full") / trained - 1 for way in ways)
    assert setting().extra(forwards) == pytest.approx([0, 100 * every])
    assert setting(attention="selective").extra(forwards) == pytest.approx([100 * core, 100 * (core + every)])
    assert setting(attention="selective").extra(0) == pytest.approx(100 * selective)
    assert setting(attention="flash").extra(0) == pytest.approx(50 * core)  # five products in backward instead of four


# The explorer


@pytest.fixture(scope="module")
def opened():
    return explorer()


def test_it_opens_on_a_model_of_today_and_what_does_nothing_is_switched_off(opened):
    assert opened.values == OPENS | {"attention": "flash"}
    for change, idle in (({"strategy": "optimal", "tp": 1}, {"count", "sequence_parallel"}), ({}, set())):
        controls = opened.set(**PAPER | change).controls
        assert {name for name, control in controls.items() if control.disabled} == idle


def test_the_strip_is_a_step_s_with_what_is_computed_again():
    every, kept = (setting(strategy=name).scenario.cost for name in ("every layer", "keep everything"))
    shape, cluster = models["megatron-22b"], clusters["h100-dgx"]
    for cost, recompute in ((every, "full"), (kept, "none")):
        plan = Plan(tp=8, seq=2048, microbatch=4, flash=False, recompute=recompute)
        time = step.estimate(shape, plan, cluster)
        assert (cost.seconds, cost.mfu) == pytest.approx((time.seconds, time.mfu))
        assert cost.exposed == pytest.approx(time.tensor / time.seconds)
        # The strategies' peak doesn't know that the loss gives its memory back before layers run again.
        assert cost.held == pytest.approx(memory.peak(shape, plan).total, rel=0.01)
    optimal = setting(strategy="optimal").scenario.cost
    assert optimal.seconds == pytest.approx(kept.seconds + 12 / 48 * (every.seconds - kept.seconds))
    assert kept.held - optimal.held == pytest.approx(42.5e9 - 31.9e9, rel=0.01)


def test_points_are_where_their_memory_and_flops_are_and_the_chosen_one_is_ringed():
    plot, now = Tradeoff(), setting(strategy="every layer")
    plot.update(**PAPER | {"strategy": "every layer"})
    (both, held), found = plot.figure.axes, now.points
    whole = found["keep everything"].bytes(now.layer)
    for name, point in found.items():
        ((x, y),) = named(both, name).get_xydata()
        assert (x, y) == pytest.approx((100 * point.bytes(now.layer) / whole, now.extra(point.forwards)))
    assert named(both, "ring").get_xydata() == pytest.approx(named(both, "every layer").get_xydata())
    assert named(both, "activation budget").get_xdata() == pytest.approx([100 * 32e9 / whole] * 2)
    assert len({named(both, name).get_marker() for name in STRATEGIES}) == len(STRATEGIES)
    said = {part.says for part in plot.parts()}
    assert "every layer: 3.53% of the memory, 32.9% of a step's FLOPs recomputed" in said
    assert "keep everything, attention scores: 32.2 GB" in said
    assert words(held)[:4] == ["42.5 GB", "+0%", "1.5 GB", "+32.9%"]


@pytest.mark.parametrize("budget", [1e9, 8e9, 192e9])
def test_bars_are_as_long_as_their_bytes_to_four_times_the_room_and_the_chosen_one_is_never_cut(budget):
    (_, held), now = drawn(budget=budget), setting(budget=budget)
    lengths, sizes = [sum(row) for row in widths(held)], [now.bytes(point) for point in now.points.values()]
    longest = min(max(sizes), max(4 * budget, now.bytes(now.point)))
    full = bars.LONGEST if budget < 192e9 else bars.LONGEST / 4
    assert lengths == pytest.approx([min(size, longest) / longest * full for size in sizes], rel=1e-6)
    if line := named(held, "limit").get_visible():
        assert named(held, "limit").get_xdata() == pytest.approx([budget / longest * full] * 2)
    assert line == (budget < 192e9)


WHOLE, FLASH = {"strategy": "keep everything"}, {"attention": "flash"}
WIDE = {"seq": 32768, "tp": 1, "sequence_parallel": False, "budget": 1e9} | FLASH
SAID = [
    (WHOLE, "megatron-22b, keep everything: activations 42.5 of 32 GB;"),
    (WHOLE, "Does not fit. Limit: budget, mainly attention scores: flash attention fits, with 0.865%"),
    ({"strategy": "optimal"}, "recomputed 8.22% of FLOPs; optimal plan 8.22% of FLOPs. Limit: budget: no plan within it"),
    ({"strategy": "optimal", "count": 128}, "8.22%"),
    (WHOLE | FLASH, "Limit: none: every layer fits, so no layer"),
    (WHOLE | FLASH | {"budget": 8e9}, ": the optimal plan fits, with"),
    ({"strategy": "every layer", "sequence_parallel": False, "budget": 4e9}, ": sequence parallelism fits, with 32.9%"),
    ({"seq": 65536, "microbatch": 1, "tp": 4, "strategy": "optimal", "budget": 4e9} | FLASH, ": TP 8 fits, with"),
    (WIDE, ": no single control helps; change several, or split each sequence over more ranks (chapter 07)."),
    ({"seq": 4096, "microbatch": 32, "budget": 1e9} | FLASH, ": a micro-batch of 1 fits, with"),
    ({"count": 64}, "Not possible: C = 64 segments of 48 layers of megatron-22b: choose C up to 48"),
    ({"pp": 32, "count": 1}, "Not possible: 32 stages of the 48 layers of megatron-22b: choose a p that divides them"),
    ({"model": "gpt2-xl"}, "Not possible: t = 8 does not divide the 25 heads of gpt2-xl: choose a divisor of 25"),
]


@pytest.mark.parametrize(("change", "said"), SAID)
def test_the_sentence_names_the_limit_and_a_way_out(opened, change, said):
    assert said in opened.set(**PAPER | change).status


def test_no_strategy_is_below_the_line_of_the_optimal_plans_which_ends_where_everything_is_kept(opened):
    plot, controls = Tradeoff(), opened.controls
    lines = [named(plot.figure.axes[0], name) for name in ("all optimal plans", *STRATEGIES)]
    options = [value for _, value in controls["model"].options], controls["attention"].options, controls["strategy"].options
    for values in itertools.product(*options):
        change = dict(zip(("model", "attention", "strategy"), values, strict=True)) | {"tp": 1 if values[0] == "gpt2-xl" else 8}
        plot.update(**PAPER | change | {"seq": 8192})
        best, *dots = (line.get_xydata() for line in lines)
        for ((x, y),) in dots:
            assert best[best[:, 0] <= x * (1 + 1e-9), 1].min() <= y * (1 + 1e-9)
        assert best[-1] == pytest.approx(dots[0][0])


# A step, a plan and a layer as pictures


def test_a_step_s_picture_says_what_is_held_and_when_layers_run():
    shape, plan = models["gpt2-xl"], Plan(seq=1024, recompute="none")
    panels = through_a_step(shape, {"keep": plan, "again": Plan(seq=1024, recompute="full")}).axes
    full, whole = (memory.layer_activations(shape, Plan(seq=1024, recompute=how)) for how in ("full", "none"))
    for axes, kept, waits in zip(panels, (whole, full), (0, whole - full), strict=True):
        held = {label: steps.get_data() for steps, label in zip(axes.patches, axes.get_legend_handles_labels()[1], strict=True)}
        heights = held["activations"].values - held["activations"].baseline
        assert heights[:48] == pytest.approx([kept * k for k in range(1, 49)])
        assert heights[49:] == pytest.approx([kept * k + waits for k in range(48, 0, -1)])
        assert held["activations"].baseline == pytest.approx(sum(memory.model_states(shape, plan)))
    shown = [[text.get_text() for text in axes.texts] for axes in again(2).axes]
    assert shown == [["f0", "f1", "b1", "b0"], ["f0", "f1", "r1", "b1", "r0", "b0"]]
    spans = [[(box.get_x(), box.get_width()) for c in axes.containers[1:] for box in c] for axes in again(2).axes]
    assert spans[1] == [(0, 1), (1, 1), (2, 1), (3, 2), (5, 1), (6, 2)]


def test_a_layer_s_picture_has_a_bar_for_each_module():
    (axes,) = kept_by({"norm": 2, "attention": 11.0}, "sbh").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["norm", "attention"]
    assert [bar.get_width() for bar in axes.containers[0]] == [2, 11]
    assert ([text.get_text() for text in axes.texts], axes.get_xlabel()) == (["2", "11"], "kept, in sbh")


def test_a_plan_is_letters_from_left_to_right_what_is_kept_and_stored_until_its_backward_and_what_is_held():
    plan, chain = checkpointing.segments(4, 2), [Layer(1, 2, 2 * 10**6, 34 * 10**6)] * 4
    figure, outcome = picture(plan, chain), run(chain, plan)
    axes, below = figure.axes
    texts = sorted(axes.texts, key=lambda text: text.get_position()[0])
    assert "".join(text.get_text() for text in texts) == "FFFFRRBBRRBB"
    assert [text.get_position() for text in texts] == [(k + 0.5, i) for k, i in enumerate([1, 2, 3, 4, 3, 4, 4, 3, 1, 2, 2, 1])]
    assert axes.get_xlim() == below.get_xlim() == (0, 12)
    kept = [box for container in axes.containers if container.get_label() == "kept" for box in container]
    spans = {(box.get_x(), box.get_x() + box.get_width(), round(box.get_y() + box.get_height() / 2, 6)) for box in kept}
    assert spans == {(4, 8, 3), (5, 7, 4), (8, 12, 1), (9, 11, 2)}
    (stored,) = axes.lines
    assert stored.get_xydata().tolist() == [[2, 2.5], [8, 2.5]]  # a_2, until layer 3 went backward
    named = {text.get_text() for text in figure.legends[0].get_texts()}
    assert named == {"forward", "forward again", "backward", "kept", "checkpoint"}
    held = [size for action, size in zip(plan, outcome.held, strict=True) if action.kind != "store"]
    assert below.patches[0].get_data().values.tolist() == held
    assert below.get_title(loc="left") == "held: at most 74 MB"
    assert picture(plan).axes[1].get_title(loc="left") == f"held: at most {run([Layer(1, 2, 1, 1)] * 4, plan).peak} activations"
    assert not picture(checkpointing.from_input(16)).axes[0].texts  # too small for letters


# Peaks over the layers


def test_measured_rings_are_on_their_places_and_theory_s_curves_on_theirs():
    expected = {"keep everything": [40, 80, 160], "from the input": [50, 50, 50]}
    (axes,) = peaks([2, 4, 8], expected, {"keep everything": [41, 82, 161]}, "peak memory").axes
    *lines, rings = axes.lines
    assert {line.get_label(): line.get_ydata().tolist() for line in lines} == expected
    assert rings.get_xydata().tolist() == [[2, 41], [4, 82], [8, 161]]
    assert (rings.get_linestyle(), rings.get_label()) == ("None", "measured")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*expected, "measured"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]
    assert axes.get_ylabel() == "peak memory"


REFUSED = [
    (lambda: drawn(tp=3), "3"),
    (lambda: picture(checkpointing.keep_all(0)), "a plan for 0 layers: give one for 1 to 16"),
    (lambda: picture(checkpointing.keep_all(17)), "a plan for 17 layers"),
    (lambda: peaks([2, 4], {"a": [1]}, {}, "peak memory"), "'a' has 1 values for 2 places"),
]


@pytest.mark.parametrize(("draw", "said"), REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()
