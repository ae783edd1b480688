"""The line at the top and the bottom of every notebook that leads to its neighbors and to the contents.

`python -m tests.notebooks.navigation` writes these lines in place; it changes nothing that is up to date.
"""

from functools import cache
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell

from tests.notebooks.pages import NOTEBOOKS, OWN, is_navigation, opening


def lines(folder: Path = NOTEBOOKS) -> dict[Path, str]:
    """Returns the line of every notebook in the folder: the glossary, the chapters and their labs."""
    chapters = sorted(folder.glob("[0-9]*.ipynb"))
    found = {folder / "glossary.ipynb": _joined("", "**Contents**", _link(chapters[0]))}
    if (page := folder / OWN.name).exists():
        found[page] = _joined(_link(chapters[-1]), "[Contents](glossary.ipynb)", "")
    for before, chapter, after in zip([None, *chapters], chapters, [*chapters[1:], None], strict=False):
        lab = _lab_of(chapter)
        contents = ["[Contents](glossary.ipynb)", *(["[Lab](lab/" + lab.name + ")"] if lab.exists() else [])]
        found[chapter] = _joined(_link(before), *contents, _link(after))
        if lab.exists():
            contents = ["[Contents](../glossary.ipynb)", f"[Lesson](../{chapter.name})"]
            found[lab] = _joined(_from_lab(before), *contents, _from_lab(after))
    return found


def with_line(notebook: nbformat.NotebookNode, line: str) -> nbformat.NotebookNode:
    """Returns the notebook with this line as its first and its last cell, in place of the lines that it had."""
    first, last = (new_markdown_cell(line, id=f"navigation-{place}") for place in ("top", "bottom"))
    cells = [cell for cell in notebook.cells if not is_navigation(cell)]
    return nbformat.from_dict(notebook | {"cells": [first, *cells, last]})


def main() -> None:
    for path, line in lines().items():
        notebook = nbformat.read(path, 4)
        if (written := with_line(notebook, line)) != notebook:
            nbformat.write(written, path)
            print(path.relative_to(NOTEBOOKS))


def _joined(before: str, *parts: str) -> str:
    *between, after = parts
    return " · ".join([f"← {before}"] * bool(before) + between + [f"{after} →"] * bool(after))


def _link(chapter: Path | None) -> str:
    return f"[{_title(chapter)}]({chapter.name})" if chapter else ""


def _from_lab(chapter: Path | None) -> str:
    """Returns a lab's link to a neighbor: its lab if it has one, else the chapter."""
    if chapter is None:
        return ""
    return (
        f"[Lab {_title(chapter)}]({chapter.name})" if _lab_of(chapter).exists() else f"[{_title(chapter)}](../{chapter.name})"
    )


def _lab_of(chapter: Path) -> Path:
    return chapter.parent / "lab" / chapter.name


@cache
def _title(chapter: Path) -> str:
    """Returns a chapter's heading up to a colon: "00 Start here"."""
    return opening(nbformat.read(chapter, 4)).partition("\n")[0].removeprefix("# ").partition(":")[0]


if __name__ == "__main__":
    main()
