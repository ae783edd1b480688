"""`make gallery`: a picture of every explorer as it stands in JupyterLab, for the README."""

import contextlib
import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import lab
from tests.conftest import ROOT

GALLERY = ROOT / "docs" / "gallery"
_COLOURS = 96  # as many as the pictures need: a third of the bytes


def main() -> None:
    """Writes docs/gallery/<name>.png for each of lab.EXPLORERS."""
    GALLERY.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(lab.start(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        notebook = stack.enter_context(browser.open("gallery", lab.explorers()))
        notebook.run_all()
        assert notebook.errors() == []
        for k, name in enumerate(lab.EXPLORERS):
            explorer = notebook.explorer(k)
            explorer.picture()  # it is drawn when it can be read
            shot = Image.open(io.BytesIO(explorer.box.screenshot())).convert("RGB")
            shot.quantize(_COLOURS, dither=Image.Dither.NONE).save(GALLERY / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
