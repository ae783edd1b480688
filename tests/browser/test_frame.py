"""Explorers beside their controls, in a real browser: buttons, numbers under the mouse, measuring, a memory."""

import pytest
from nbformat.v4 import new_code_cell
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

TWO = "from manyranks import few_ranks, show\nshow.data_parallel.explorer(measure=few_ranks.data_parallel)"
REMEMBERS = "import os; os.environ['MANYRANKS_SETTINGS'] = ''"


@pytest.fixture(scope="module")
def notebook(lab):
    with lab.open("frame", [new_code_cell(TWO)]) as opened:
        opened.run_all()
        assert opened.errors() == []
        yield opened


def test_a_preset_moves_the_controls_and_the_tiles_compare_with_before(notebook):
    explorer = notebook.explorer()
    explorer.press_button("after backward")
    assert "of the step is spent waiting for gradients" in explorer.status()
    tiles = " | ".join(explorer.tiles()).replace("\n", " ")
    assert "memory per GPU 27.8 of 80 GB (was 48.1)" in tiles
    assert "MFU 13% (was 38%)" in tiles
    explorer.press_button("Reset")
    assert explorer.status() == "Limit: compute."


def test_a_part_says_its_number_under_the_mouse_and_stays_selected(notebook):
    explorer = notebook.explorer()
    part = explorer.box.locator(".manyranks-picture s").first
    says = "part => getComputedStyle(part, '::after').content"
    assert part.evaluate(says) == "none"
    part.hover()
    assert part.evaluate(says) == '"overlapped, compute: 194 ms"'
    part.click()
    explorer.box.locator("select").first.hover()
    assert part.evaluate(says) == '"overlapped, compute: 194 ms"'
    picture, box = explorer.box.locator(".widget-image").bounding_box(), part.bounding_box()
    assert picture["x"] < box["x"] < box["x"] + box["width"] < picture["x"] + picture["width"]
    assert picture["y"] < box["y"] < box["y"] + box["height"] < picture["y"] + picture["height"]


def test_the_code_is_copied(notebook):
    notebook.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    explorer = notebook.explorer()
    explorer.press_button("Copy as code")
    expect(explorer.box.get_by_role("button", name="Copied")).to_be_visible()
    copied = notebook.page.evaluate("navigator.clipboard.readText()")
    assert "step.estimate(shape, plan, cluster)" in copied
    assert 'models["gpt2-xl"]' in copied


def test_measure_it_counts_on_real_ranks_and_stops_when_told_and_the_picture_stays(notebook):
    before = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": 1280, "height": 800})
    explorer = notebook.explorer()
    button, stop = (explorer.box.get_by_role("button", name=name, exact=True) for name in ("Measure it", "Stop"))
    picture = explorer.box.locator(".widget-image")
    tiles = explorer.box.locator(".manyranks-tiles").first
    place, below = picture.bounding_box(), tiles.bounding_box()
    button.click()
    expect(explorer.box.locator(".progress")).to_be_visible()
    assert (picture.bounding_box(), tiles.bounding_box()) == (place, below)
    stop.click()
    expect(button).to_be_visible(timeout=30_000)
    expect(explorer.box.get_by_text("stopped", exact=True)).to_be_visible()
    button.click()
    expect(stop).to_be_visible()
    expect(button).to_be_visible(timeout=90_000)
    counted = explorer.box.locator(".manyranks-tiles").first
    expect(counted).to_contain_text("sent per rank per step")
    expect(counted).to_be_in_viewport(ratio=1)
    assert picture.bounding_box() == place
    tiles = " | ".join(explorer.tiles()).replace("\n", " ")
    assert "sent per rank per step 5.87 MB theory 5.86 MB, +0.1%" in tiles
    assert "parameters and gradients of a rank 6.69 MB theory 6.69 MB, equal" in tiles
    assert notebook.errors() == []
    notebook.page.set_viewport_size(before)


def test_what_was_set_opens_the_next_explorer_and_reset_takes_it_back(lab):
    first = f"{REMEMBERS}\n{TWO}"
    with lab.open("carried", [new_code_cell(first)]) as opened:
        opened.run_all()
        explorer = opened.explorer()
        explorer.move(explorer.controls()[2])
        assert explorer.said().startswith("gpt2-xl on 128 GPUs")
        assert opened.errors() == []
    with lab.open(
        "carried_on", [new_code_cell(f"{REMEMBERS}\nfrom manyranks import show\nshow.data_parallel.explorer()")]
    ) as opened:
        opened.run_all()
        explorer = opened.explorer()
        assert explorer.said().startswith("gpt2-xl on 128 GPUs")
        expect(explorer.box.get_by_text("From your last explorer: data ranks d = 128.")).to_be_visible()
        explorer.press_button("Reset")
        assert explorer.said().startswith("gpt2-xl on 64 GPUs")
        expect(explorer.box.get_by_text("From your last explorer")).to_have_count(0)
