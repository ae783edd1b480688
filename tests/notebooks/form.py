"""The form of a lesson and of a lab. Each rule returns what is wrong, in words that say where."""

import re
import sys
from collections.abc import Callable

from tests.notebooks import names, pages, reading
from tests.notebooks.tasks import guesses, tasks

_PACKAGES = {"torch", "triton", "manyranks", "numpy", "matplotlib"} | sys.stdlib_module_names
_COLLAPSED = "jp-MarkdownHeadingCollapsed"
_QUESTION = re.compile(r"[^.?!\n]*\?")
_TOLD = re.compile(r"[^.?!\n]*\?[*_\"”]*\s+\(.*")
_WORDS, _LINES, _PICTURES, _SECTIONS, _TASKS, _MINUTES = 2_000, 180, (6, 10), 7, 3, 70


def it_is_short(lesson) -> list[str]:
    """At most 2,000 words in all markdown, the navigation's included, 180 lines of code and 7 sections; 6 to 10 pictures."""
    words = sum(pages.words(cell.source) for cell in lesson.cells if cell.cell_type == "markdown")
    lines = sum(map(pages.lines, pages.code(lesson)))
    drawn = sum(map(pages.pictures, pages.code(lesson)))
    few, many = _PICTURES
    rules = {
        f"{words} words of markdown, more than {_WORDS}": words <= _WORDS,
        f"{lines} visible lines of code, more than {_LINES}": lines <= _LINES,
        f"{len(_headings(lesson))} sections, more than {_SECTIONS}": len(_headings(lesson)) <= _SECTIONS,
        f"{drawn} pictures, not {few} to {many}": few <= drawn <= many,
    }
    return [problem for problem, holds in rules.items() if not holds]


def only_answers_are_folded(notebook) -> list[str]:
    """No collapsed heading, and no <details> but a question with its answer."""
    cells = [(cell.metadata.get(_COLLAPSED), pages.unasked(cell.source)) for cell in pages.markdown(notebook)]
    return [f"folded: {source.splitlines()[0]}" for collapsed, source in cells if collapsed or "<details" in source]


def its_answers_hide(notebook) -> list[str]:
    """No parentheses right behind a question, where they answered it; an explorer's questions open their answers."""
    told = [each for cell in pages.markdown(notebook) for each in _TOLD.findall(pages.prose(cell.source))]
    around = [pages.prose(pages.unasked(cell.source)) for cell in pages.beside_explorers(notebook)]
    bare = [each for text in around for each in _QUESTION.findall(text)]
    return [f"answered in sight: {each}" for each in told] + [f"a question without a folded answer: {each}" for each in bare]


def the_reader_writes(lesson) -> list[str]:
    """At least three well-formed tasks, and guesses whose answer is out of sight."""
    found, wrong = tasks(lesson)
    few = [f"{len(found)} tasks, fewer than {_TASKS}"] if len(found) < _TASKS else []
    return few + wrong + guesses(lesson)[1]


def it_stands_alone(lesson) -> list[str]:
    """Every name is defined on the page, and imports are PyTorch, Triton, Python and manyranks, numpy and matplotlib."""
    sources = [cell.source for cell in pages.code(lesson)]
    foreign = set().union(*map(names.imports, sources)) - _PACKAGES
    return [f"imports {name}" for name in sorted(foreign)] + [f"{name} isn't defined" for name in names.undefined(sources)]


def it_says_its_minutes(lesson) -> list[str]:
    """The stated time is within 10 % of the computed one, and at most 70 minutes."""
    said = re.findall(r"\*\*Time:\*\* about (\d+) minutes", pages.opening(lesson))
    if len(said) != 1:
        return ['the opening must say "**Time:** about NN minutes"']
    computed = reading.minutes(lesson)
    rules = {
        f"it says {said[0]} minutes, and the estimate is {computed:.0f}": abs(int(said[0]) - computed) <= computed / 10,
        f"{said[0]} minutes are more than {_MINUTES}": int(said[0]) <= _MINUTES,
    }
    return [problem for problem, holds in rules.items() if not holds]


def it_ends_on_real_gpus(lesson) -> list[str]:
    """A section "On real GPUs" is the last or the one before."""
    last = _headings(lesson)[-2:]
    return [] if any("On real GPUs" in heading for heading in last) else [f'no "On real GPUs" among the last sections: {last}']


def its_setup_imports(lab) -> list[str]:
    """All imports stand in the setup."""
    setup, sections = _setup(lab)
    late = [source.splitlines()[0] for _, sources in sections for source in sources if _late(source)]
    missing = ["no imports"] * (not any(map(names.imports, setup)))
    return [f"an import below the setup: {line}" for line in late] + missing


def its_sections_stand_alone(lab) -> list[str]:
    """Every name that a section's cells use is defined in that section or in the setup."""
    setup, sections = _setup(lab)
    known = set().union(*map(names.defined, setup))
    found = [f"{heading}: {name} isn't defined" for heading, each in sections for name in names.undefined(each, known)]
    return found + [f"{name} isn't defined" for name in names.undefined(setup)]


def _late(source: str) -> bool:
    return names.imports_at_the_top(source) and not source.startswith("%%ranks")  # the ranks' own


def _setup(lab) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the code of the setup, and of each section below it: the first code cell, and the rest of its section."""
    setup: list[str] = []
    sections: list[tuple[str, list[str]]] = []
    for cell in lab.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## ") and setup:
            sections.append((cell.source.partition("\n")[0], []))
        elif cell.cell_type == "code":
            (sections[-1][1] if sections else setup).append(cell.source)
    return setup, sections


def _headings(notebook) -> list[str]:
    text = "\n".join(cell.source for cell in pages.markdown(notebook))
    return re.findall(r"^## .+", re.sub(r"```.*?```", "", text, flags=re.S), re.M)


LESSON: tuple[Callable, ...] = (
    it_is_short,
    only_answers_are_folded,
    its_answers_hide,
    the_reader_writes,
    it_stands_alone,
    it_says_its_minutes,
    it_ends_on_real_gpus,
)
LAB: tuple[Callable, ...] = (only_answers_are_folded, its_answers_hide, its_setup_imports, its_sections_stand_alone)
