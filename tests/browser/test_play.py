"""docs/static/play.js in Chromium: it steps, plays and stops; without JavaScript a step of the picture stays."""

import json
import sys
from importlib import import_module

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import CHROMIUM
from tests.conftest import ROOT

pytestmark = pytest.mark.browser
PARTS = "() => [...document.querySelectorAll('[data-from]')].map(part => getComputedStyle(part).display !== 'none')"


@pytest.fixture(scope="module")
def picture():
    sys.path.insert(0, str(ROOT / "docs"))
    play = import_module("play")
    sys.path.remove(str(ROOT / "docs"))
    return play.ring(json.loads(play.FILE.read_text())["ring"])


@pytest.fixture
def opened(picture):
    """Opens a page with the picture, with JavaScript or without."""
    static = ROOT / "docs" / "static"
    parts = (
        f"<style>{(static / 'site.css').read_text()}</style>{picture.html()}<script>{(static / 'play.js').read_text()}</script>"
    )
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"]) as browser,
    ):

        def page(scripts: bool):
            page = browser.new_page(java_script_enabled=scripts)
            if scripts:
                page.clock.install()
            page.set_content(parts)
            return page

        yield page


def test_buttons_keys_and_play_lead_to_the_same_steps(opened, picture):
    page, last = opened(True), len(picture.says) - 1
    caption, slider, play = page.locator("figcaption"), page.get_by_role("slider"), page.get_by_role("button").first

    def at(step: int) -> list[bool]:
        assert caption.inner_text() == f"{step} of {last}. {picture.says[step]}"
        assert slider.get_attribute("aria-valuetext") == picture.says[step]
        return page.evaluate(PARTS)

    first = at(0)
    page.get_by_label("one step on").click()
    second = at(1)
    assert first != second
    slider.press("End")
    at(last)
    page.get_by_label("one step on").click()
    at(last)
    slider.press("Home")
    assert at(0) == first
    play.click()
    assert play.inner_text() == "Pause"
    page.clock.run_for(1300)
    assert at(1) == second
    play.click()
    page.clock.run_for(5000)
    at(1)
    play.click()
    page.clock.run_for(1200 * last)
    at(last)
    assert play.inner_text() == "Play"
    page.get_by_label("one step back").click()
    at(last - 1)


def test_without_javascript_one_step_stays(opened, picture):
    page = opened(False)
    assert page.locator("figcaption").inner_text() == picture.says[3]
    assert page.get_by_role("button").count() == 0
    shown = [group.is_visible() for group in page.locator("[data-from]").all()]
    assert any(shown)
    assert not all(shown)
