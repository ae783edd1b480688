"""Rules for all notebooks; test_lessons.py has those for lessons and for labs.

nbval compares what the cells print, in the same test run.
"""

import ast
import re

import nbformat
import pytest

from tests.notebooks.execute import clean
from tests.notebooks.pages import LABS, LESSONS, code, label, python


@pytest.fixture(params=[*LESSONS, *LABS], ids=label)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, 4)


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


def never_shown(source: str) -> list[str]:
    """Calls of show.… at the top of a cell whose result nobody sees: whole statements before the cell's last one."""
    alone = [node.value for node in ast.parse(python(source)).body[:-1] if isinstance(node, ast.Expr)]
    return [text for text in map(ast.unparse, alone) if text.startswith("show.")]


def test_what_it_would_show_is_the_last_thing_of_its_cell(notebook):
    lost = [text for cell in code(notebook) for text in never_shown(cell.source)]
    assert lost == [], "Jupyter shows only what a cell's last line returns: split the cell there, or put the call last"


def test_a_figure_before_the_last_line_of_a_cell_is_found():
    assert never_shown("%%time\nshow.table(head, rows)\nshow.expert.hops()") == ["show.table(head, rows)"]
    seen = "figure = show.table(head, rows)\ndisplay(show.source(f))\nif rows:\n    show.x()\nshow.y().set(a=1)"
    assert never_shown(seen) == []


@pytest.mark.parametrize("kind", ["<Figure", "Explorer("])
def test_what_it_draws_can_be_seen_without_a_kernel(notebook, kind):
    data = [output.get("data", {}) for cell in code(notebook) for output in cell.outputs]
    drawn = [bundle for bundle in data if bundle.get("text/plain", "").startswith(kind)]
    assert all({"image/png", "image/svg+xml"} & bundle.keys() for bundle in drawn)


def test_it_links_to_nothing_that_is_not_there(path, notebook):
    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown"))
    assert all(link.startswith("https://") or (path.parent / link).exists() for link in links)
