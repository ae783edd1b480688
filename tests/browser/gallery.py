"""`make gallery`: pictures of every explorer and of a deadlock as they stand in JupyterLab, for the README and chapter 00.

Two of them move: a ring round by round, and four ranks that wait for each other until the report comes.
"""

import contextlib
import io
import tempfile
from pathlib import Path

from nbformat.v4 import new_code_cell
from PIL import Image
from playwright.sync_api import Locator

from tests.browser import lab
from tests.conftest import ROOT

GALLERY, IMAGES = ROOT / "docs" / "gallery", ROOT / "notebooks" / "images"
_COLORS = 96  # as many as the pictures need: a third of the bytes
_ROUNDS = 3  # of a reduce-scatter by a ring of four
_CELL = 14  # where lesson 00 has the careless ring, so that its picture and its report say the same


_WATCHED = """import os

os.environ.pop("MANYRANKS_SETTINGS", None)  # with "off" there is no strip
import torch
import torch.distributed as dist

import manyranks as mr

world = mr.World(4)"""
_CARELESS = """def careless_ring(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    dist.send(x, dst=(rank + 1) % n)
    dist.recv(y, src=(rank - 1) % n)
    return y


world.run(careless_ring, torch.ones(1))"""


def main() -> None:
    """Writes docs/gallery/<name>.png for each of lab.EXPLORERS, ring.gif, deadlock.gif, and notebooks/images."""
    GALLERY.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(lab.start(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        notebook = stack.enter_context(browser.open("gallery", lab.explorers()))
        notebook.run_all()
        assert notebook.errors() == []
        for k, name in enumerate(lab.EXPLORERS):
            explorer = notebook.explorer(k)
            explorer.picture()  # it is drawn when it can be read
            _save(explorer.box, GALLERY / f"{name}.png")
            if name == "chapter_01_stepper":
                (step,) = explorer.controls()
                explorer.move(step, -1)
                explorer.picture()
                rounds = [_shot(explorer.box)]
                for _ in range(_ROUNDS):
                    explorer.move(step)
                    explorer.picture()
                    rounds.append(_shot(explorer.box))
                _save_moving(rounds, 1000, GALLERY / "ring.gif")
        before = [new_code_cell(_WATCHED)] + [new_code_cell("pass") for _ in range(_CELL - 2)]
        cells = [*before, new_code_cell(_CARELESS, metadata={"tags": ["raises-exception"]})]
        watched = stack.enter_context(browser.open("watched", cells))
        watched.run_all()
        hung = watched.page.locator(".jp-CodeCell").nth(_CELL - 1)
        _save(hung.locator(".manyranks-run"), IMAGES / "strip.png")
        again = stack.enter_context(browser.open("again", cells))
        hangs = again.page.locator(".jp-CodeCell").nth(_CELL - 1)
        again.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")  # and doesn't wait
        frames = []
        while not hangs.locator(".jp-OutputArea-output").filter(has_text="RankHung").count():
            frames.append(_shot(hangs))
            again.page.wait_for_timeout(200)
        again.page.wait_for_timeout(500)
        _save_moving([*frames, _shot(hangs)], 300, GALLERY / "deadlock.gif")


def _shot(element: Locator) -> Image.Image:
    return Image.open(io.BytesIO(element.screenshot())).convert("RGB")


def _save(element: Locator, path: Path) -> None:
    _shot(element).quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def _save_moving(frames: list[Image.Image], milliseconds: int, path: Path) -> None:
    """One after the other, each different one once and for a second at most; the last one stays for four."""
    size = tuple(max(each.size[k] for each in frames) for k in (0, 1))
    shown, times = [], []
    for frame in frames:
        page = Image.new("RGB", size, "white")
        page.paste(frame)
        page = page.quantize(_COLORS, dither=Image.Dither.NONE)
        if shown and shown[-1].tobytes() == page.tobytes():
            times[-1] = min(times[-1] + milliseconds, 1000)
        else:
            shown.append(page)
            times.append(milliseconds)
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=[*times[:-1], 4000], loop=0, optimize=True)


if __name__ == "__main__":
    main()
