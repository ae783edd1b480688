"""How long a chapter takes to read: its open sections, and all of it. `python -m tests.notebooks.reading` lists the sections.

An estimate: 150 words of prose, 9 lines of code or one picture a minute.
"""

import re
from typing import NamedTuple

import nbformat

from tests.conftest import ROOT

FOLDED, MARK = "jp-MarkdownHeadingCollapsed", " (further)"
_WORDS, _LINES = 150, 9  # a minute


class Section(NamedTuple):
    """A heading with what follows it, up to the next heading."""

    heading: str
    minutes: float
    open: bool


def sections(chapter) -> list[Section]:
    """The chapter's sections in order; a folded heading hides those below it."""
    found, hidden_from = [("", 0.0, True)], 7
    for cell in chapter.cells:
        if cell.cell_type == "markdown" and (level := _level(cell.source)):
            hidden_from = 7 if level <= hidden_from else hidden_from
            if cell.metadata.get(FOLDED):
                hidden_from = min(hidden_from, level)
            found.append((cell.source.partition("\n")[0], 0.0, hidden_from == 7))
        heading, minutes, visible = found[-1]
        found[-1] = heading, minutes + _minutes(cell), visible
    return [Section(*one) for one in found]


def minutes(chapter) -> tuple[int, int]:
    """Of the open sections, to 5 minutes, and of the whole chapter, to 10."""
    found = sections(chapter)
    return _rounded(sum(s.minutes for s in found if s.open), 5), _rounded(sum(s.minutes for s in found), 10)


def _level(source: str) -> int:
    return len(match[1]) if (match := re.match(r"(#{2,4}) ", source)) else 0


def _minutes(cell) -> float:
    if cell.cell_type == "markdown":
        return len(re.sub(r"\]\([^)]*\)", "", cell.source).split()) / _WORDS
    pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return sum(bool(line.strip()) for line in cell.source.splitlines()) / _LINES + pictures


def _rounded(value: float, step: int) -> int:
    return step * round(value / step)


if __name__ == "__main__":
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        chapter = nbformat.read(path, 4)
        print(path.stem, *minutes(chapter))
        for section in sections(chapter):
            print(f"{section.minutes:7.1f}  {' ' if section.open else '…'} {section.heading}")
