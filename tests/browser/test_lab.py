"""Every chapter in JupyterLab in a real browser: Run All, no unexpected error, and the explorer follows its controls."""

import re
import shutil
import time

import pytest

from tests.browser import lab
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(lab.CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.timeout(300),
]
ARTIFACTS = ROOT / "artifacts"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    for chapter in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(chapter, folder)
    with lab.server(folder) as address:
        yield address


def test_chapter_00_runs_and_its_explorer_follows(address):
    ARTIFACTS.mkdir(exist_ok=True)
    with lab.notebook(address, "00_start_here.ipynb") as page:
        lab.run_all(page)
        errors = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr'] >> text=/^Rank/")
        assert {re.split("[: ]", text)[0] for text in errors.all_inner_texts()} <= {"RankHung", "RankFailed"}
        figure, status = page.locator(".widget-image").last, page.locator(".widget-html b").last
        figure.scroll_into_view_if_needed()
        before, said = figure.get_attribute("src"), status.inner_text()
        handle = page.locator(".noUi-handle").last
        box = handle.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + 120, box["y"], steps=12)
        page.mouse.up()
        deadline = time.monotonic() + 10
        while figure.get_attribute("src") == before and time.monotonic() < deadline:
            time.sleep(0.1)
        page.screenshot(path=ARTIFACTS / "chapter_00_explorer.png")
        assert figure.get_attribute("src") != before
        assert status.inner_text() != said
        assert "InfiniBand 400G" in status.inner_text()
