"""Opens every page of a site that docs/build.py made, in Chromium: `make site-test`, or python -m tests.browser.pages FOLDER.

Each page is seen on a phone and on a laptop, in both themes. It may ask for nothing outside, report no error, and be no wider
than the screen; nor may a picture be, outside of what scrolls by itself.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.lab import CHROMIUM, SECONDS
from tests.conftest import ROOT

WIDTHS, THEMES = (390, 1280), ("light", "dark")
_WIDER = """() => {
    const wide = document.documentElement.clientWidth
    const wrong = [...document.querySelectorAll("main img, main math, main pre, main table, main dt")].filter(each => {
        const box = each.getBoundingClientRect()
        if (!box.width || box.right <= wide + 1) return false
        for (let up = each.parentElement; up; up = up.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return false
        return true
    })
    const page = document.documentElement.scrollWidth
    return [...(page > wide ? [`is ${page} pixels wide`] : []), ...wrong.map(each => `cuts off ${each.outerHTML.slice(0, 90)}`)]
}"""
_CARDS = """() => [...document.querySelectorAll("main img")].filter(each => {
    const style = getComputedStyle(each)
    return style.backgroundColor !== "rgba(0, 0, 0, 0)" || style.filter !== "none"
}).map(each => `puts a card below ${each.outerHTML.slice(0, 90)}`)"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Page, str, list[str]]]:
    """A tab, the site's address, and a list of what the browser complains about."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(1000 * SECONDS)
        said: list[str] = []
        page.route("**/*", lambda route: _only(address, route, said))
        page.on("console", lambda message: said.append(f"says {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(f"raises {error}"))
        yield page, address, said
        browser.close()
    server.shutdown()
    server.server_close()


def wrong(folder: Path) -> Iterator[str]:
    """What is wrong with the pages, one by one."""
    with opened(folder) as (page, address, said):
        for path in sorted(folder.rglob("*.html")):
            name = path.relative_to(folder).as_posix()
            page.goto(address + name)
            yield from (f"{name} {each}" for each in (*seen(page), *said))
            said.clear()


def _only(address: str, route, said: list[str]) -> None:
    if route.request.url.startswith((address, "data:")):
        return route.continue_()
    said.append(f"asks for {route.request.url}")
    route.abort()


def seen(page: Page) -> Iterator[str]:
    """What is too wide or has a card, on a phone and on a laptop, in both themes."""
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        page.wait_for_function("theme => document.documentElement.dataset.theme === theme", arg=theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            yield from (f"({width} pixels, {theme}) {each}" for each in page.evaluate(_WIDER))
        yield from page.evaluate(_CARDS)


if __name__ == "__main__":
    found = list(wrong(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()))
    print("\n".join(found) or "every page is as it should be")
    sys.exit(bool(found))
