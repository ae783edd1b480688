"""`make gallery`: a picture of every explorer as it stands in JupyterLab, and of a deadlock, for the README and chapter 00."""

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
_COLOURS = 96  # as many as the pictures need: a third of the bytes
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
    """Writes docs/gallery/<name>.png for each of lab.EXPLORERS, notebooks/images/deadlock.png, and strip.png beside it."""
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
        before = [new_code_cell(_WATCHED)] + [new_code_cell("pass") for _ in range(_CELL - 2)]
        cells = [*before, new_code_cell(_CARELESS, metadata={"tags": ["raises-exception"]})]
        watched = stack.enter_context(browser.open("watched", cells))
        watched.run_all()
        hung = watched.page.locator(".jp-CodeCell").nth(_CELL - 1)
        _save(hung.locator(".manyranks-run"), IMAGES / "strip.png")
        _save(hung, IMAGES / "deadlock.png")


def _save(element: Locator, path: Path) -> None:
    shot = Image.open(io.BytesIO(element.screenshot())).convert("RGB")
    shot.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
