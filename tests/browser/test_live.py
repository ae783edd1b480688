"""A run in JupyterLab and Notebook 7: the strip, its tabs and its stop, and a rank's debugger."""

import pytest
from nbformat.v4 import new_code_cell
from playwright.sync_api import expect

CELLS = [
    "import os\nos.environ.pop('MANYRANKS_SETTINGS', None)\nimport manyranks as mr\n%load_ext manyranks\nworld = mr.World(2)",
    "%%ranks\nimport time\nfor i in range(400):\n    print('step', i, 'of rank', rank)\n    time.sleep(0.3)",
    "%%ranks\nx = torch.ones(2)\nif rank:\n    y = 5\n    breakpoint()\n    y += 1\ndist.all_reduce(x)\nx",
]
_LONG = 30_000  # milliseconds, on a busy machine
_RUN = """k => {
    jupyterapp.shell.currentWidget.content.activeCellIndex = k;
    jupyterapp.commands.execute('notebook:run-cell');
}"""


@pytest.mark.parametrize("notebook_7", [False, True], ids=["lab", "notebook 7"])
def test_a_run_can_be_watched_and_stopped_and_a_rank_debugged(lab, notebook_7):
    with lab.open("live", [new_code_cell(source) for source in CELLS], notebook_7) as notebook:
        page, cells = notebook.page, notebook.page.locator(".jp-CodeCell")
        for k in (0, 1):
            page.evaluate(_RUN, k)
        strip = cells.nth(1).locator(".manyranks-run")
        expect(strip.locator("> div")).to_have_count(2, timeout=60_000)
        expect(strip.locator("> div").first).to_contain_text("rank 0")
        cells.nth(1).get_by_role("tab", name="rank 1").click()
        shown = cells.nth(1).locator(".widget-html-content pre").filter(visible=True)
        expect(shown).to_contain_text("step 4 of rank 1", timeout=_LONG)
        expect(shown).not_to_contain_text("of rank 0")
        cells.nth(1).get_by_role("button", name="stop").click()
        expect(cells.nth(1)).to_contain_text("KeyboardInterrupt: the run was stopped; the next one works", timeout=_LONG)
        expect(strip).to_have_count(0)
        expect(cells.nth(1)).to_contain_text("── rank 0 ──")
        page.evaluate(_RUN, 2)
        expect(cells.nth(2)).to_contain_text("Meanwhile rank 0 waits in all_reduce", timeout=_LONG)
        expect(cells.nth(2)).to_contain_text("-> y += 1", timeout=_LONG)
        for line, said in (
            ("p y + 100", "105"),
            ("n", "-> dist.all_reduce(x)"),
            ("p y + 100", "106"),
            ("c", "tensor([2., 2.])"),
        ):
            box = cells.nth(2).locator(".jp-Stdin-input:enabled").last
            expect(cells.nth(2).locator(".jp-Stdin-prompt").last).to_have_text("(rank 1) ", timeout=_LONG)
            expect(box).to_have_value("", timeout=_LONG)  # not the box before, with the line that was typed there
            box.fill(line)
            box.press("Enter")
            expect(cells.nth(2)).to_contain_text(said, timeout=_LONG)
