"""How long a notebook takes to read. `python -m tests.notebooks.reading` lists all chapters with their sections.

A lesson has one estimate, computed by `lesson_sections`. A chapter of the first edition has two, one for its open sections
and one for everything: 150 words of prose, 9 lines of code or one picture per minute.
"""

import re
from typing import NamedTuple

import nbformat

from tests.notebooks import pages
from tests.notebooks.tasks import is_guess, tasks

FOLDED, MARK = "jp-MarkdownHeadingCollapsed", " (further)"
_WORDS, _LINES = 150, 9  # per minute, in the first edition


class Section(NamedTuple):
    """A heading with what follows it, up to the next heading."""

    heading: str
    minutes: float
    open: bool


def lesson_sections(lesson) -> list[Section]:
    """Returns the opening and the `## ` sections with their minutes.

    A minute is 110 words or 8 visible lines of code. Added to that: half a minute per picture, one per guess, five per
    explorer, and for each task two plus half a minute per line to write.
    """
    found = [Section("", 0.0, True)]
    writing = {task.stub: 2 + task.lines / 2 for task in tasks(lesson)[0]}
    for k, cell in enumerate(lesson.cells):
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found.append(Section(cell.source.partition("\n")[0], 0.0, True))
        found[-1] = found[-1]._replace(minutes=found[-1].minutes + _lesson_minutes(cell) + writing.get(k, 0))
    return found


def lesson_minutes(lesson) -> float:
    """Returns the minutes of all sections."""
    return sum(section.minutes for section in lesson_sections(lesson))


def _lesson_minutes(cell) -> float:
    """Returns the minutes of one cell without those for writing."""
    if cell.cell_type == "markdown":
        return 0 if pages.is_navigation(cell) else pages.words(cell.source) / 110
    return pages.lines(cell) / 8 + pages.pictures(cell) / 2 + is_guess(cell) + 5 * pages.is_explorer(cell)


def sections(chapter) -> list[Section]:
    """The sections of a chapter of the first edition in order; a folded heading hides those below it."""
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
    """Returns the minutes of the open sections, rounded to 5, and of a whole chapter of the first edition, rounded to 10."""
    found = sections(chapter)
    return _rounded(sum(s.minutes for s in found if s.open), 5), _rounded(sum(s.minutes for s in found), 10)


def _level(source: str) -> int:
    return len(match[1]) if (match := re.match(r"(#{2,4}) ", source)) else 0


def _minutes(cell) -> float:
    if cell.cell_type == "markdown":
        return 0 if pages.is_navigation(cell) else len(re.sub(r"\]\([^)]*\)", "", cell.source).split()) / _WORDS
    pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return sum(bool(line.strip()) for line in cell.source.splitlines()) / _LINES + pictures


def _rounded(value: float, step: int) -> int:
    return step * round(value / step)


def main() -> None:
    for path in pages.CHAPTERS:
        chapter, is_lesson = nbformat.read(path, 4), path in pages.LESSONS
        print(path.stem, *([f"{lesson_minutes(chapter):.0f} minutes, a lesson"] if is_lesson else minutes(chapter)))
        for section in lesson_sections(chapter) if is_lesson else sections(chapter):
            print(f"{section.minutes:7.1f}  {' ' if section.open else '…'} {section.heading}")


if __name__ == "__main__":
    main()
