"""How long a lesson takes to read. `python -m tests.notebooks.reading` lists all lessons with their sections."""

from typing import NamedTuple

import nbformat

from tests.notebooks import pages
from tests.notebooks.tasks import is_guess, tasks


class Section(NamedTuple):
    """A heading with what follows it, up to the next heading."""

    heading: str
    minutes: float


def sections(lesson) -> list[Section]:
    """Returns the opening and the `## ` sections with their minutes.

    A minute is 110 words of markdown or 8 visible lines of code. Added to that: half a minute per picture, one per guess,
    five per explorer, and for each task two plus half a minute per line to write.
    """
    found = [Section("", 0.0)]
    writing = {task.stub: 2 + task.lines / 2 for task in tasks(lesson)[0]}
    for k, cell in enumerate(lesson.cells):
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found.append(Section(cell.source.partition("\n")[0], 0.0))
        found[-1] = found[-1]._replace(minutes=found[-1].minutes + _minutes(cell) + writing.get(k, 0))
    return found


def minutes(lesson) -> float:
    """Returns the minutes of all sections."""
    return sum(section.minutes for section in sections(lesson))


def _minutes(cell) -> float:
    """Returns the minutes of one cell without those for writing."""
    if cell.cell_type == "markdown":
        return 0 if pages.is_navigation(cell) else pages.words(cell.source) / 110
    return pages.lines(cell) / 8 + pages.pictures(cell) / 2 + is_guess(cell) + 5 * pages.is_explorer(cell)


def main() -> None:
    for path in pages.LESSONS:
        lesson = nbformat.read(path, 4)
        print(f"{path.stem} {minutes(lesson):.0f} minutes")
        for section in sections(lesson):
            print(f"{section.minutes:7.1f}  {section.heading}")


if __name__ == "__main__":
    main()
