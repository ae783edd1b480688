"""The page "Step by step": a new recording is equal to the one that is drawn, and each step shows what was recorded.

In Chromium play.js steps, plays and stops; without JavaScript a step of each picture stays. (This isn't in tests/browser, where
another playwright may be running.)
"""

import json
import os
import re
import sys
from importlib import import_module

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import CHROMIUM
from tests.conftest import ROOT

PARTS = "() => [...document.querySelectorAll('[data-from]')].map(part => getComputedStyle(part).display !== 'none')"


@pytest.fixture(scope="module")
def docs():
    sys.path.insert(0, str(ROOT / "docs"))
    yield lambda name: import_module(name)
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def recorded(docs):
    return json.loads(docs("play").FILE.read_text())


def there(picture, step: int) -> str:
    """The parts that are there in a step."""
    parts = re.findall(r'<g data-from="(\d+)" data-to="(\d+)"[^>]*>(.*)</g>', picture.html())
    return "\n".join(part for first, end, part in parts if int(first) <= step < int(end))


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


def test_a_new_recording_is_equal(docs, recorded):
    assert docs("record").record() == recorded


def test_the_ring_shows_what_ranks_held_and_what_they_send_next(docs, recorded):
    picture, (held, rounds) = docs("play").ring(recorded["ring"]), (recorded["ring"][name] for name in ("held", "rounds"))
    assert len(picture.says) == len(rounds) + 1 == 7
    for step, messages in enumerate([*rounds, []]):
        shown = [float(text) for text in texts(there(picture, step))]
        assert sorted(shown[len(messages) :]) == sorted(number for rank in held for number in rank[step])
        for (source, to, _), number in zip(messages, shown, strict=False):
            assert number in held[source][step]
            ((before, after),) = [pair for pair in zip(*held[to][step : step + 2], strict=True) if len(set(pair)) > 1]
            assert after in (number, number + before)
    assert set(texts(there(picture, 6))) == {"1111", "2222", "3333", "4444"}


def test_the_pipeline_shows_each_action_once_and_not_before_what_it_needs(docs, recorded):
    play, actions = docs("play"), recorded["pipeline"]
    found = play.slots(actions)
    assert [[list(action) for rank, action, *_ in found if rank == k] for k in range(4)] == actions
    spans = {(rank, *action): (start, end) for rank, action, start, end in found}
    for (rank, kind, mb), (start, end) in spans.items():
        assert end - start == {"F": 1, "B": 2}[kind]
        assert start >= spans.get((rank - 1 if kind == "F" else rank + 1, kind, mb), (0, 0))[1]
    picture = play.pipeline(actions)
    assert len(picture.says) - 1 == (6 + 4 - 1) * 3  # m + p − 1 times a forward and a backward
    assert "in 36 of 108 slots" in picture.says[-1]  # (p − 1) / (m + p − 1) of them
    assert sorted(texts(there(picture, 27))) == sorted(f"{mb}" for own in actions for _, mb in own)
    assert max(int(kept) for says in picture.says for kept in re.findall(r"rank 0: [\w ]+, keeps (\d+)", says)) == 4


def test_fsdp_shows_the_bytes_that_ranks_held(docs, recorded):
    picture = docs("play").fsdp(recorded["fsdp"])
    assert len(picture.says) == len(recorded["fsdp"])
    for step, now in enumerate(recorded["fsdp"]):
        large, small, dashed = 0, 0, 0
        for whole, coming, grads, leaving, mean in now["units"]:
            large += 4 * (4 if whole and not coming else 1)
            small += 4 * (4 if grads else 1 if mean else 0)
            dashed += 4 * (3 * bool(whole and coming) + 4 * leaving)
        svg = there(picture, step)
        assert svg.count('height="20" fill="#') == large
        assert svg.count('height="9" fill="#') == small
        assert svg.count('class="dashed"') == dashed
    whole = [sum(bool(unit[0]) for unit in now["units"]) for now in recorded["fsdp"]]
    assert max(whole) == 2  # of three layers: the one that computes, and the next


@pytest.fixture
def picture(docs, recorded):
    return docs("play").ring(recorded["ring"])


@pytest.fixture
def opened(picture):
    """Opens a page with the picture, with JavaScript or without."""
    if CHROMIUM is None:
        why = "there is no chromium, chromium-browser or google-chrome on the PATH"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
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


@pytest.mark.browser
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


@pytest.mark.browser
def test_without_javascript_one_step_stays(opened, picture):
    page = opened(False)
    assert page.locator("figcaption").inner_text() == picture.says[3]
    assert page.get_by_role("button").count() == 0
    shown = [group.is_visible() for group in page.locator("[data-from]").all()]
    assert any(shown)
    assert not all(shown)
