"""Rules for all notebooks, and for chapters of the first edition; test_lessons.py has the second edition's.

nbval compares what the cells print, in the same test run.
"""

import ast
import re

import nbformat
import pytest

from tests.notebooks import form, reading
from tests.notebooks.execute import clean
from tests.notebooks.pages import CHAPTERS, FIRST_EDITION, LABS, code, label, opening, python

PARTS = [
    "The problem",
    "Build it",
    "Predict, measure, reconcile",
    "Turn the knobs",
    "At scale",
    "What PyTorch does",
    "Check yourself",
]


@pytest.fixture(params=[*CHAPTERS, *LABS], ids=label)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, 4)


@pytest.fixture(params=FIRST_EDITION, ids=label)
def chapter(request):
    return nbformat.read(request.param, 4)


def test_it_is_stored_executed_from_top_to_bottom(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))


def test_errors_are_stored_only_where_the_chapter_means_them(notebook):
    for cell in code(notebook):
        fails = any(output.output_type == "error" for output in cell.outputs)
        assert fails == ("raises-exception" in cell.metadata.get("tags", []))


def test_nothing_is_stored_that_was_a_warning(notebook):
    streams = [output for cell in code(notebook) for output in cell.outputs if output.output_type == "stream"]
    assert {output.name for output in streams} <= {"stdout"}


def test_no_cell_is_longer_than_a_screen(notebook):
    assert max(len(cell.source.splitlines()) for cell in code(notebook)) <= 25


def test_it_is_not_large(notebook):
    assert len(nbformat.writes(notebook).encode()) < 2e6


def test_volatile_metadata_is_removed(notebook):
    assert clean(nbformat.from_dict(dict(notebook))) == notebook


def test_it_has_the_parts_of_a_chapter_in_their_order(chapter):
    headings = re.findall(r"^## \d+\. (.+)$", "\n".join(c.source for c in chapter.cells if c.cell_type == "markdown"), re.M)
    found = [part for heading in headings for part in PARTS if heading.lower().startswith(part.lower())]
    assert found == PARTS


def test_it_opens_with_what_why_and_how_long(chapter):
    assert all(word in opening(chapter) for word in ("**You will**", "**Before this:**", "**Time:**"))


def test_its_open_sections_are_read_in_25_to_45_minutes_and_it_says_so(chapter):
    core, whole = reading.minutes(chapter)
    assert 25 <= core <= 45
    (line,) = re.findall(r"\*\*Time:\*\* .*", opening(chapter))
    said = f"{core} minutes to read and run"
    if any(not section.open for section in reading.sections(chapter)):
        said += f"; {whole} with the sections marked *(further)*, which are folded. Run all cells first, then read; "
        said += "a click on *cells hidden* opens a section"
    assert line.startswith(f"**Time:** {said}. ")


def test_what_is_folded_says_that_it_goes_further_and_nothing_else_does(chapter):
    for cell in chapter.cells:
        first, _, rest = cell.source.partition("\n")
        assert not (cell.metadata.get(reading.FOLDED) and rest), "what stands in the heading's own cell is not folded"
        assert cell.metadata.get(reading.FOLDED, False) == (cell.cell_type == "markdown" and first.endswith(reading.MARK))
        if cell.cell_type == "markdown":  # JupyterLab folds from a cell that begins with a heading to the next
            assert not re.search(r"^#{1,4} ", re.sub(r"```.*?```", "", rest, flags=re.S), re.M)


def test_no_answer_stands_in_sight_behind_its_question(chapter):
    assert form.its_answers_hide(chapter) == []


def never_shown(source: str) -> list[str]:
    """Calls of show.… at the top of a cell whose result nobody sees: statements of their own before the cell's last one."""
    alone = [node.value for node in ast.parse(python(source)).body[:-1] if isinstance(node, ast.Expr)]
    return [text for text in map(ast.unparse, alone) if text.startswith("show.")]


def test_no_two_chapters_define_the_same_helper():
    found: dict[str, set[str]] = {}
    for path in FIRST_EDITION:
        sources = [cell.source for cell in code(nbformat.read(path, 4))]
        for source in sources:
            for node in ast.walk(ast.parse(python(source))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(ast.unparse(node).splitlines()) > 3:
                    found.setdefault(ast.dump(ast.Module(node.body, [])), set()).add(f"{path.stem}: {node.name}")
    assert [names for names in found.values() if len(names) > 1] == []


def test_what_it_would_show_is_the_last_thing_of_its_cell(notebook):
    lost = [text for cell in code(notebook) for text in never_shown(cell.source)]
    assert lost == [], "Jupyter shows only what a cell's last line returns: split the cell there, or put the call last"


def test_a_figure_before_the_last_line_of_a_cell_is_found():
    assert never_shown("%%time\nshow.table(head, rows)\nshow.expert.hops()") == ["show.table(head, rows)"]
    seen = "figure = show.table(head, rows)\ndisplay(show.source(f))\nif rows:\n    show.x()\nshow.y().set(a=1)"
    assert never_shown(seen) == []


@pytest.mark.parametrize("kind", ["<Figure", "Explorer("])
def test_what_it_draws_can_be_seen_without_a_kernel(path, notebook, kind):
    data = [output.get("data", {}) for cell in code(notebook) for output in cell.outputs]
    drawn = [bundle for bundle in data if bundle.get("text/plain", "").startswith(kind)]
    assert drawn or path not in FIRST_EDITION
    assert all({"image/png", "image/svg+xml"} & bundle.keys() for bundle in drawn)


def test_it_links_to_nothing_that_is_not_there(path, notebook):
    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown"))
    assert all(link.startswith("https://") or (path.parent / link).exists() for link in links)
