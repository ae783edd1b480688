"""Explorers in JupyterLab and Notebook 7, in a real browser: no error, and controls are followed.

Only the cells that an explorer needs are run: nbval shows that all others run.
"""

import itertools

import pytest
from nbformat.v4 import new_code_cell
from playwright.sync_api import expect

from tests.browser.lab import EXPLORERS, cells_of, explorers
from tests.said import SAID

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def chapters(lab):
    """All explorers in one notebook: to open one takes longer than what is tested in it."""
    with lab.open("chapters", explorers()) as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        yield notebook


NBGRADERS = """() => {
    const shown = document.querySelectorAll('.lm-MenuBar-itemLabel, .jp-Toolbar-item, .lm-TabBar-tab');
    const words = [...jupyterapp.commands.listCommands(), ...[...shown].flatMap(node => [node.innerText, node.title])];
    return words.filter(word => /nbgrader|assignment|formgrader|validate/i.test(word));
}"""


def explorer_in(chapters, name):
    return chapters.explorer(list(EXPLORERS).index(name))


def unchanged(pictures):
    """The acts that left the picture as it was, counted from 1."""
    return [k for k, (before, after) in enumerate(itertools.pairwise(pictures), 1) if before == after]


def test_learners_see_nothing_that_nbgrader_has_for_teachers(chapters):
    assert chapters.page.evaluate(NBGRADERS) == []


def test_the_explorer_of_chapter_00_follows(chapters):
    with chapters.pictured(name := "chapter_00_explorer"):
        explorer = explorer_in(chapters, name)
        link, size, n = explorer.controls()
        assert explorer.said() == SAID["hardware"][""]
        pictures, _ = explorer.seen(
            lambda: explorer.move(size), lambda: explorer.drag(size, 300), lambda: explorer.move(n), lambda: explorer.move(link)
        )
        assert len(set(pictures)) == 5
        assert "InfiniBand 200G" in explorer.said()


def test_the_stepper_of_chapter_01_follows(chapters):
    with chapters.pictured(name := "chapter_01_stepper"):
        stepper = explorer_in(chapters, name)
        (step,) = stepper.controls()
        rounds = [stepper.picture()]
        for _ in range(2):
            stepper.move(step)
            rounds.append(stepper.picture())
        assert len(set(rounds)) == 3
        assert stepper.said() == "messages 4 of 8 B; sent so far, per rank 24 B; the whole tensor 32 B."


def test_the_explorer_of_chapter_01_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured("chapter_01_not_possible"):
        explorer = explorer_in(chapters, "chapter_01_explorer")
        operation, algorithm, ranks, size, topology, step = explorer.controls()
        assert explorer.said() == SAID["collectives"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.drag(size, -300),
            lambda: explorer.move(ranks),
            lambda: explorer.move(algorithm),
            lambda: explorer.move(topology),
            lambda: explorer.move(topology, -1),
            lambda: explorer.move(operation),
            lambda: explorer.move(algorithm, -1),
            lambda: explorer.move(step),
        )
        chapters.screenshot("chapter_01_explorer")
        assert unchanged(pictures) == []
        assert pictures[3] == pictures[5]  # to another topology and back
        assert "the fastest here is " in lines[3]
        assert lines[6].startswith("Not possible: reduce_scatter has no tree algorithm: choose ring, ")
        assert lines[7] == lines[8]  # another round of the same
        assert explorer.said().startswith("reduce_scatter by ring, 12 ranks")
        ranks.press("Home")
        explorer.move(ranks, -1)  # there is nothing below
        assert explorer.status().startswith("Not possible: N = 0: a group has a whole number of ranks, at least 1")


def test_the_explorer_of_chapter_02_follows(chapters):
    with chapters.pictured(name := "chapter_02_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, ranks, sequences, overlap, critical = explorer.controls()
        assert explorer.said() == SAID["data_parallel"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(overlap),
            lambda: explorer.move(overlap, -1),
            lambda: explorer.drag(ranks, 300),
            lambda: explorer.move(sequences, -1),
            lambda: explorer.drag(critical, -300),
            lambda: explorer.move(cluster),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # reduced after backward, and back
        assert "waiting for gradients" in lines[1]
        assert explorer.said().startswith("llama3.2-1b on ")


def test_the_explorer_of_chapter_03_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_03_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, ranks, stage, shards, precision = explorer.controls()
        assert explorer.said() == SAID["zero"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(stage),
            lambda: explorer.move(stage, -1),
            lambda: explorer.drag(ranks, 300),
            lambda: explorer.move(precision),
            lambda: explorer.move(cluster),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to another stage and back
        assert lines[1] == "Limit: compute; messages take 65% as long."
        explorer.move(stage, 2)
        explorer.move(shards)  # it's switched off where no stage has it
        ranks.press("Home")
        explorer.move(ranks, -1)  # there is nothing below
        assert explorer.status().startswith("Not possible: HSDP needs K ≤ d (replicas × shards = d), but K = 32 and d = 1: ")


def test_the_explorer_of_chapter_04_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_04_explorer"):
        explorer = explorer_in(chapters, name)
        model, length, sequences, data, tensor, split, pipeline, attention, strategy, segments, room = explorer.controls()
        assert explorer.said() == SAID["checkpointing"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(segments),
            lambda: explorer.move(segments, -1),
            lambda: explorer.move(strategy, -2),
            lambda: explorer.move(attention, -1),
            lambda: explorer.move(strategy, 4),
            lambda: explorer.drag(room, -300),
            lambda: explorer.move(sequences),
            lambda: explorer.move(length),
            lambda: explorer.move(tensor),
            lambda: explorer.move(split, -1),
            lambda: explorer.move(data),
            lambda: explorer.move(pipeline),
            lambda: explorer.move(pipeline, -1),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to more segments and back
        assert lines[0] == lines[1]
        assert lines[3].startswith("Does not fit. Limit: budget, mainly other activations: the optimal plan fits")
        assert lines[5] == "Limit: budget: no plan within it recomputes less."
        tensor.press("End")
        explorer.move(strategy, -2)
        segments.press("End")
        explorer.move(segments)  # there is nothing above
        assert explorer.status().startswith("Not possible: C = 128 segments of 48 layers of megatron-22b")


def test_the_explorer_of_chapter_05_follows(chapters):
    with chapters.pictured(name := "chapter_05_explorer"):
        explorer = explorer_in(chapters, name)
        above, below, _, _, _, _, ranks, microbatches, stages, *times = explorer.controls()
        forward, inputs, weights, message = times
        pictures, lines = explorer.seen(
            lambda: explorer.move(microbatches),
            lambda: explorer.move(microbatches, -1),
            lambda: explorer.move(below, 2),
            lambda: explorer.move(above),
            lambda: explorer.move(stages),
            lambda: explorer.move(message, 1),
            lambda: explorer.move(forward),
            lambda: explorer.move(inputs, -1),
            lambda: explorer.move(weights),
            lambda: explorer.drag(microbatches, 200),
            lambda: explorer.drag(ranks, 200),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to another micro-batch and back
        assert all(line.startswith("Limit: ") for line in lines if "fit" not in line)
        assert "bubble" in " ".join(explorer.tiles())
        explorer.press_button("Reset")
        assert lines[0] == explorer.status()
        assert stages.evaluate("node => node.closest('.noUi-target').hasAttribute('disabled')")  # nothing is interleaved


def test_the_explorer_of_chapter_06_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_06_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, data, ranks, split, stages, recompute, overlap = explorer.controls()
        assert explorer.said() == SAID["tensor"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(ranks),
            lambda: explorer.move(ranks, -1),
            lambda: explorer.move(overlap),
            lambda: explorer.move(split),
            lambda: explorer.move(recompute),
            lambda: explorer.move(stages, -1),
            lambda: explorer.drag(ranks, -300),
            lambda: explorer.move(cluster, 2),
            lambda: explorer.move(data, -1),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to more ranks and back
        assert lines[1].startswith("Limit: communication: only rings of chunks would hide its other 5.23 ms")
        assert lines[4] == "Does not fit. Limit: memory; sequence parallelism fits."
        explorer.press_button("Reset")
        explorer.move(model)
        assert explorer.status() == "Not possible: t = 8 does not divide the 4 heads of small GPT: choose a divisor of 4"


def test_the_explorer_of_chapter_07_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_07_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, length, ranks, tensor, mask, layout, variant, exchange = explorer.controls()
        assert explorer.said() == SAID["context"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(layout, 2),
            lambda: explorer.move(layout, -2),
            lambda: explorer.move(ranks),
            lambda: explorer.move(variant, 3),
            lambda: explorer.move(exchange),
            lambda: explorer.move(mask),
            lambda: explorer.drag(length, -300),
            lambda: explorer.move(cluster),
            lambda: explorer.move(tensor),
            lambda: explorer.move(tensor, -1),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to zigzag and back
        assert lines[1] == "Limit: compute."
        assert lines[6] == "Limit: compute."  # without a mask
        explorer.move(model, 2)
        explorer.move(variant, -1)
        assert explorer.status().startswith("Not possible: small GPT: Ulysses needs c = 16 to divide heads = 4")


def test_the_explorer_of_chapter_08_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_08_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, stages, experts, tensor, _, nodes, imbalance, schedule = explorer.controls()
        assert explorer.said() == SAID["expert"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.drag(tensor, 300),
            lambda: explorer.drag(tensor, -300),
            lambda: explorer.drag(imbalance, 300),
            lambda: explorer.move(schedule, 2),
            lambda: explorer.move(nodes, -1),
            lambda: explorer.move(experts, -1),
            lambda: explorer.move(stages),
            lambda: explorer.move(cluster),
            lambda: explorer.move(model),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to TP 8 and back
        assert lines[1] == "Limit: TP messages, 30% of the step; with TP 1: 19.6 s."
        assert lines[3] == "Limit: waiting for the fullest rank, 50% of the step; with a balanced load: 19.6 s."
        assert lines[4].endswith("with a balanced load: 30.9 s.")  # 1f1b
        assert lines[7].endswith("with a balanced load: 36.6 s.")  # PP 32 × EP 32
        assert lines[8].endswith("with a balanced load: 33.3 s.")  # h100-dgx
        assert lines[9].endswith("with a balanced load: 22.7 s.")  # deepseek-v2
        explorer.move(model, -1)
        explorer.drag(stages, -300)
        assert explorer.status().startswith(
            "Not possible: PP 1 × TP 1 leaves 2,048 DP ranks, which don't evenly divide the batch of 15,360 sequences"
        )


def test_the_explorer_of_chapter_09_follows_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_09_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, precision, length, sequences, _, _, recompute, flash, tensor, _, _, data, convention = (
            explorer.controls()
        )
        assert explorer.said() == SAID["mfu"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(convention),
            lambda: explorer.move(convention, -1),
            lambda: explorer.move(flash),
            lambda: explorer.move(recompute, 2),
            lambda: explorer.move(tensor),
            lambda: explorer.drag(data, -300),
            lambda: explorer.move(sequences),
            lambda: explorer.drag(length, -300),
            lambda: explorer.move(cluster),
            lambda: explorer.move(model, 2),
        )
        assert unchanged(pictures) == [1, 2]  # the picture is causal under any convention
        assert pictures[0] == pictures[2]  # to another convention and back
        assert lines[3] == "Does not fit. Limit: memory; flash attention fits."
        explorer.move(cluster, -4)
        explorer.move(precision)
        assert explorer.status().startswith("Not possible: precision = 'fp8' on one core, which has no products in 8 bits")


def test_the_plan_board_of_chapter_10_follows_searches_and_says_what_is_not_possible(chapters):
    with chapters.pictured(name := "chapter_10_explorer"):
        explorer = explorer_in(chapters, name)
        model, cluster, gpus, batch, seq, microbatch, tensor, context, stages, experts, *others = explorer.controls()
        zero, shards, _, virtual, recompute, best = others
        assert explorer.said() == SAID["nd"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(tensor, -1),
            lambda: explorer.move(tensor),
            lambda: explorer.move(best),
            lambda: explorer.move(zero),
            lambda: explorer.move(microbatch),
            lambda: explorer.move(best),
            lambda: explorer.move(stages),
            lambda: explorer.move(recompute),
            lambda: explorer.move(virtual),
            lambda: explorer.move(shards),
            lambda: explorer.move(gpus, -1),
            lambda: explorer.move(seq, -1),
            lambda: explorer.move(batch),
            lambda: explorer.move(context),
            lambda: explorer.move(cluster),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to fewer tensor ranks and back
        assert lines[1].startswith("Limit: bubble, 15% of the step")
        assert "The planner's best takes 6.3 s. This plan loses most on TP messages: +1.4 s (" in lines[3]
        assert lines[6].endswith("As fast as the planner's best.")
        assert best.evaluate("list => list.value") == "off"  # since the number of GPUs was moved
        explorer.move(model, 3)
        explorer.move(experts)
        explorer.move(model, -3)
        assert explorer.status().startswith("Not possible: e = 2: llama3-70b has no experts; say e = 1")


def test_the_explorer_of_chapter_11_follows_and_says_what_does_not_fit(chapters):
    with chapters.pictured(name := "chapter_11_explorer"):
        explorer = explorer_in(chapters, name)
        chip, stride, itemsize, tile, *_ = explorer.controls()
        assert explorer.said() == SAID["kernels"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(stride),
            lambda: explorer.move(stride, -1),
            lambda: explorer.move(tile),
            lambda: explorer.move(tile, -1),
            lambda: explorer.move(chip),
            lambda: explorer.move(itemsize),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to another stride and back
        assert "the stride wastes most of what moves" in lines[1]
        explorer.move(tile)
        assert explorer.status().startswith("Not possible: registers = 296")


def test_the_explorer_of_chapter_12_follows_and_says_what_costs_most(chapters):
    with chapters.pictured(name := "chapter_12_explorer"):
        explorer = explorer_in(chapters, name)
        gpus, hours, stall, write, restart, interval, mfu, repair = explorer.controls()
        assert explorer.said() == SAID["failures"][""]
        pictures, lines = explorer.seen(
            lambda: explorer.move(gpus),
            lambda: explorer.move(gpus, -1),
            lambda: explorer.move(hours),
            lambda: explorer.move(stall),
            lambda: explorer.move(write),
            lambda: explorer.move(restart),
            lambda: explorer.move(interval),
        )
        assert unchanged(pictures) == []
        assert pictures[0] == pictures[2]  # to twice the GPUs and back
        assert "; Young's interval of " in lines[7]  # a save every 10 s
        said = [explorer.said()]
        for control in (mfu, repair):
            explorer.move(control)
            said.append(explorer.said())
        assert len(set(said)) == 3  # only numbers follow
        for _ in range(3):
            explorer.move(write)
        assert explorer.status().startswith("Not possible: write = 30, interval = 10")


# Both take keys for themselves: arrows move from cell to cell, and D D deletes one.
@pytest.mark.parametrize("program", ["jupyterlab", "notebook_7"])
def test_an_explorer_is_moved_by_the_keyboard_alone(lab, program):
    with lab.open(f"explorer_{program}", cells_of(*EXPLORERS["chapter_00_explorer"]), program == "notebook_7") as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        explorer = notebook.explorer()
        seen = [(explorer.picture(), explorer.said())]
        link, size, _ = explorer.controls()
        for control, keys in ((link, "↓"), (size, "→"), (size, "↑"), (size, "DD⇞"), (link, "↑")):
            explorer.tab_to(control)
            explorer.press(*(KEYS.get(key, key) for key in keys))
            seen.append((explorer.picture(), explorer.said()))
        pictures, lines = zip(*seen, strict=True)
        assert len(set(pictures)) == len(set(lines)) == 6
        assert [line.partition("G,")[0] for line in lines] == [f"{n} MB over InfiniBand {g}" for n, g in MOVED]
        message = explorer.box.get_by_role("slider", name="size n")
        expect(message).to_have_attribute("aria-valuetext", explorer.box.locator(".widget-readout").first.inner_text())
        expect(explorer.box.get_by_role("img", name=lines[-1])).to_have_count(1)
        expect(explorer.box.locator("[aria-live=polite]")).to_have_text(explorer.status())


# Texts that are cut or touch another one, and how wide the narrowest slider is.
TROUBLE = """box => {
    const texts = '.widget-label, .widget-readout, .manyranks-tiles b, .manyranks-tiles small, button';
    const nodes = [...box.querySelectorAll(texts)].filter(node => node.innerText.trim());
    const seen = nodes.map(node => [node, node.getBoundingClientRect()]);
    const found = seen.filter(([node]) => node.scrollWidth > node.clientWidth + 1 && node.clientWidth);
    const wide = document.createElement('canvas').getContext('2d');
    for (const list of box.querySelectorAll('select')) {
        wide.font = getComputedStyle(list).font;
        const text = list.selectedOptions[0].text;
        if (wide.measureText(text).width > list.clientWidth - 20) found.push([{innerText: text}]);
    }
    seen.forEach(([node, one], k) => seen.slice(k + 1).forEach(([other, two]) => {
        const apart = one.right <= two.left + 1 || two.right <= one.left + 1;
        const above = one.bottom <= two.top + 2 || two.bottom <= one.top + 2;
        if (!apart && !above && !node.contains(other)) found.push([{innerText: `${node.innerText} | ${other.innerText}`}]);
    }));
    return found.map(([node]) => node.innerText);
}"""
TRACK = "box => Math.min(999, ...[...box.querySelectorAll('.noUi-target')].map(node => node.getBoundingClientRect().width))"


def test_an_explorer_fits_on_a_laptops_screen_and_its_controls_can_be_read(chapters):
    before = chapters.page.viewport_size
    try:
        for wide, high, shown in ((1280, 800, 650), (1024, 768, 700)):
            chapters.page.set_viewport_size({"width": wide, "height": high})
            for name in EXPLORERS:
                box = explorer_in(chapters, name).box
                assert box.bounding_box()["height"] <= shown, f"{name} at {wide}"
                assert box.evaluate("box => box.scrollWidth <= box.clientWidth + 4"), f"{name} at {wide}"  # margins
                assert box.evaluate(TROUBLE) == [], f"{name} at {wide}"
                assert box.evaluate(TRACK) >= 140, f"{name} at {wide}"
    finally:
        chapters.page.set_viewport_size(before)


KEYS = {"↓": "ArrowDown", "↑": "ArrowUp", "→": "ArrowRight", "⇞": "PageUp"}
MOVED = [(1.05, 400), (1.05, 200), (2.1, 200), (4.19, 200), (134, 200), (134, 400)]
ENDS_EARLY = [
    ("1 / 0", ["raises-exception"]),
    ("import sys; print('careful', file=sys.stderr)", []),
    ("import ipywidgets; out = ipywidgets.Output(); out.append_stderr('inside'); out", []),
    ("display({'application/vnd.jupyter.widget-view+json': {'model_id': 'gone', 'version_major': 2}}, raw=True)", []),
    ("undefined", []),
    ("'never'", []),
]


def test_what_goes_wrong_in_a_notebook_is_seen(lab):
    wrong = [new_code_cell(source, metadata={"tags": tags}) for source, tags in ENDS_EARLY]
    with lab.open("wrong", wrong) as notebook:
        with pytest.raises(AssertionError, match=r"code cells \[6\] did not run"):
            notebook.run_all()
        kinds = [error.partition(":")[0] for error in notebook.errors()]
        assert kinds == ["ZeroDivisionError", "NameError", "stderr", "output widget", "view"]


def test_a_reopened_explorer_shows_its_picture_and_how_to_bring_it_to_life(lab):
    cells = [new_code_cell("from manyranks import show"), new_code_cell("show.zero.explorer()")]
    with lab.open("reopened", cells) as notebook:
        notebook.run_all()
        note, picture = (notebook.page.locator(f".jp-OutputArea {what}") for what in (".manyranks-note", ".jp-RenderedImage"))
        notebook.explorer()
        expect(note).to_be_hidden()
        expect(picture).to_be_hidden()
        notebook.reopen()
        expect(note).to_have_text("Run this cell to get the controls.")
        expect(picture).to_be_visible()
        expect(notebook.page.get_by_text("model not found")).to_be_hidden()
        notebook.run_all()
        notebook.explorer()
        expect(picture).to_be_hidden()
