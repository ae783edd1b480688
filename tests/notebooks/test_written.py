"""Every lesson, run by readers who write the right code and by readers who make the common mistake.

nbval runs the third kind: readers who write nothing.
"""

import copy
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import fakes, names, pages
from tests.notebooks.execute import Kernel, clean
from tests.notebooks.mistakes import MISTAKES
from tests.notebooks.tasks import Task, answer_of, is_guess, tasks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def kernel():
    """One for all lessons: to start one, and what forks its ranks, takes half as long as a lesson."""
    with Kernel() as kernel:
        yield kernel


@pytest.mark.parametrize("path", pages.LESSONS, ids=pages.label)
def test_right_code_is_right(path, kernel):
    check_right(nbformat.read(path, 4), path.parent, kernel)


@pytest.mark.parametrize("path", pages.LESSONS, ids=pages.label)
@pytest.mark.whole
def test_the_common_mistake_is_told_and_the_answer_steps_in(path, kernel):
    check_mistaken(nbformat.read(path, 4), MISTAKES[path.stem], path.parent, kernel)


def test_mistakes_are_of_lessons_that_are_there():
    assert MISTAKES.keys() == {path.stem for path in pages.LESSONS}


def test_the_fake_lesson_s_checks_do_their_work(tmp_path, kernel):
    check_right(fakes.lesson(), tmp_path, kernel)
    check_mistaken(fakes.lesson(), fakes.MISTAKES, tmp_path, kernel)


@pytest.mark.whole
def test_a_check_that_takes_a_wrong_answer_is_found(tmp_path, kernel):
    lesson = fakes.lesson()
    right = {task.name: (answer_of(lesson.cells[task.answer]), "") for task in tasks(lesson)[0]}
    with pytest.raises(AssertionError, match="Right"):
        check_mistaken(lesson, right, tmp_path, kernel)


def check_right(lesson: nbformat.NotebookNode, folder: Path, kernel: Kernel) -> None:
    """Writes each answer into its stub; every check must print "Right.", and nothing else.

    Cells that no check needs are left out: nbval runs them, with the same answers.
    """
    found, _ = tasks(lesson)
    sources = {task.name: answer_of(lesson.cells[task.answer]) for task in found}
    keep_needed(lesson, found)
    assert said_by_checks(lesson, found, sources, folder, kernel, guess="2.5") == {task.name: "Right.\n" for task in found}


PRINTED = re.compile(r'print\("You guessed", guess\)|\{guess\}')  # as it is, whatever it is
ON_RANKS = re.compile(r"^%%|\.set\(|\.close\(")  # runs there, and leaves something


def keep_needed(lesson: nbformat.NotebookNode, found: list[Task]) -> None:
    """Empties the cells that define nothing for a task or for what computes with a guess, and leave nothing on ranks."""
    of_tasks, needed = {k for task in found for k in (task.stub, task.check, task.answer)}, set()
    for k, cell in reversed([*enumerate(lesson.cells)]):
        if cell.cell_type == "code":
            computes = re.search(r"\bguess\b", PRINTED.sub("", cell.source))
            if k in of_tasks or computes or ON_RANKS.search(cell.source) or needed & names.defined(cell.source):
                needed.update(names.undefined([cell.source]))
            else:
                cell.source = ""


def check_mistaken(lesson: nbformat.NotebookNode, mistakes: dict[str, tuple[str, str]], folder: Path, kernel: Kernel) -> None:
    """Writes the common mistake into each stub; its check must say the words, and all cells must run."""
    found, _ = tasks(lesson)
    assert mistakes.keys() == {task.name for task in found}
    sources = {name: source for name, (source, _) in mistakes.items()}
    said = said_by_checks(lesson, found, sources, folder, kernel, guess='"a lot"')
    assert {name: text for name, text in said.items() if mistakes[name][1] not in text or text.startswith("Right.")} == {}


def said_by_checks(
    lesson, found: list[Task], sources: dict[str, str], folder: Path, kernel: Kernel, guess: str
) -> dict[str, str]:
    """Runs the lesson without its explorers, with these sources in its stubs and a guess; returns what each check printed."""
    written = copy.deepcopy(lesson)
    for task in found:
        written.cells[task.stub].source = sources[task.name]
    for cell in filter(pages.is_explorer, written.cells):
        cell.source = ""
    for cell in filter(is_guess, written.cells):
        cell.source = f"guess = {guess}"
    kernel.run(written, folder)
    cells = clean(written).cells
    return {task.name: "".join(output.get("text", "") for output in cells[task.check].outputs) for task in found}
