"""Plays the explorers of a site that docs/build.py made: `make site-test`, or python -m tests.browser.explorers FOLDER.

Of each pack a few states are set by keyboard. The sentence, the tiles and the picture must be what the Python explorer draws of
them now, afresh and in another order; and the picture must look like the Python explorer's PNG.
"""

import gzip
import importlib
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Locator, Page

from tests.browser.pages import opened
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
packs = importlib.import_module("packs")

EACH, NEAR = 3, 1.2  # states of each kind; levels of gray, of 255: without its texts a picture is 1.4 or more away
_SAME = """(found, html) => {
    const wanted = document.createElement("div")
    wanted.innerHTML = html
    return found.innerHTML === wanted.innerHTML
}"""


def wrong(folder: Path) -> Iterator[str]:
    """What is wrong with the explorers, one by one."""
    pages = {name: page for page in sorted(folder.rglob("*.html")) for name in _names(page)}
    yield from (f"{name}: no page has it" for name in packs.NAMES if name not in pages)
    with opened(folder) as (page, address, said):
        page.set_viewport_size({"width": 1280, "height": 900})
        for name, path in pages.items():
            page.goto(address + path.relative_to(folder).as_posix())
            yield from (f"{name}: {each}" for each in (*_played(page, name, folder), *said))
            said.clear()
        browser = page.context.browser
        for where, script in ((address, False), (f"{folder.as_uri()}/", True)):
            still = browser.new_page(java_script_enabled=script)
            still.goto(where + pages["zero"].relative_to(folder).as_posix())
            cell = still.locator(".cell_output", has=still.locator(".explorer"))
            cell.scroll_into_view_if_needed()
            cell.locator(".still").wait_for()
            if not cell.locator("img").is_visible() or cell.locator("fieldset, .plays").first.is_visible():
                yield f"zero isn't a plain picture at {where}{'' if script else ' without JavaScript'}"


def _names(page: Path) -> list[str]:
    return [part.partition('"')[0] for part in page.read_text(encoding="utf-8").split('class="explorer" data-pack="')[1:]]


def _played(page: Page, name: str, folder: Path) -> Iterator[str]:
    cell = page.locator(".cell_output", has=page.locator(f'[data-pack="{name}"]'))
    before = page.evaluate("document.documentElement.scrollHeight")
    cell.scroll_into_view_if_needed()
    cell.locator(".picture svg").wait_for()
    if abs(page.evaluate("document.documentElement.scrollHeight") - before) > 2:
        yield "the page jumps when it comes alive"
    again, plain = packs.States(name), packs.explorer(name)
    controls = {each.get_attribute("name"): each for each in cell.locator("select, input").all()}
    buttons = cell.locator("button").all()
    pack = json.loads(gzip.decompress((folder / "_static" / "packs" / f"{name}.pack").read_bytes()))
    starts = [json.loads(each.get_attribute("data-start")) for each in buttons]
    apart = int(cell.locator(".explorer").get_attribute("data-apart"))
    for start, key in _sampled(pack, starts, apart, [*controls], name):
        values = {each: _value(again, each, control, k) for (each, control), k in zip(controls.items(), key, strict=True)}
        buttons[start].focus()
        page.keyboard.press("Enter")
        for control, to in 2 * [*zip(controls.values(), key, strict=True)]:  # the first time some may be off
            if control.is_enabled():
                _move(page, control, to)
        line, status, idle, *more = again.state(values)
        if [int(each.input_value()) for each in controls.values()] != key:
            yield f"{values}: the keyboard doesn't lead there"
        if not cell.locator(".explorer > [role=status]").evaluate(_SAME, line):
            yield f"{values}: the sentence isn't {line}"
        if cell.locator(".picture").get_attribute("aria-label") != status:
            yield f"{values}: the picture isn't called {status}"
        if [each for each, control in controls.items() if control.is_disabled()] != idle.split():
            yield f"{values}: {idle or 'nothing'} should be off"
        if bool(cell.locator(".faded").count()) == bool(more):
            yield f"{values}: the picture is dimmed where it shouldn't be, or not where it should"
        if more and not cell.locator(".tiles").evaluate(_SAME, more[0]):
            yield f"{values}: the tiles aren't {more[0]}"
        if more and not cell.locator(".picture").evaluate(_SAME, "\n".join(more[1:])):
            yield f"{values}: the picture isn't Python's"
        if more:
            plain.set(**values)
            if (far := _apart(cell.locator(".picture svg"), plain.png)) > NEAR:
                yield f"{values}: the picture is {far:.1f} levels from Python's PNG"


def _sampled(pack: dict, starts: list[list[int]], apart: int, names: list[str], name: str) -> Iterator[tuple[int, list[int]]]:
    """States to go to, each with the button to begin at: two buttons' own, some beside them, and some that are refused."""
    yield from ((button, start) for button, start in enumerate(starts[:2]))
    chance, near = random.Random(name), ([], [])
    for key, found in pack["states"].items():
        places, idle = [int(place) for place in key.split(",")], pack["lines"][found[2]].split()
        for button, start in enumerate(starts):
            moved = [control for control, one, other in zip(names, places, start, strict=True) if one != other]
            if 0 < len(moved) <= (apart if button == len(starts) - 1 else 1) and not {*moved} & {*idle}:
                near[len(found) == 3].append((button, places))
    for among in near:
        yield from chance.sample(among, min(EACH, len(among)))


def _value(states, name: str, control: Locator, place: int):
    """The value of a control that the page shows with this text."""
    if control.evaluate("each => each.tagName") == "SELECT":
        text = control.locator("option").nth(place).text_content()
    else:
        text = json.loads(control.get_attribute("data-texts"))[place]
    return next(value for said, value in states.options[name] if said == text)


def _move(page: Page, control: Locator, to: int) -> None:
    if steps := to - int(control.input_value()):
        control.focus()
        for _ in range(abs(steps)):
            page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


def _apart(picture: Locator, png: bytes) -> float:
    """The mean difference of two pictures, blurred: their lines are sharp at different places."""
    shown, wanted = (Image.open(io.BytesIO(each)).convert("RGBA") for each in (picture.screenshot(), png))
    both = [Image.alpha_composite(Image.new("RGBA", each.size, "white"), each).convert("L") for each in (shown, wanted)]
    size = (wanted.width // 80, wanted.height // 80)
    one, other = (np.asarray(each.resize(size, Image.Resampling.BOX), float) for each in both)
    return float(np.abs(one - other).mean())


if __name__ == "__main__":
    found = list(wrong(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()))
    print("\n".join(found) or "every explorer is as Python draws it")
    sys.exit(bool(found))
