"""Navigation lines: up to date in every notebook, and right among lessons, labs and chapters."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebooks import pages
from tests.notebooks.navigation import lines, with_line

LINES = lines()


def test_every_notebook_has_a_line():
    assert LINES.keys() == {pages.GLOSSARY, pages.OWN, *pages.LESSONS, *pages.LABS}


@pytest.mark.parametrize("path", LINES, ids=pages.label)
def test_a_notebook_s_lines_are_up_to_date(path):
    notebook = nbformat.read(path, 4)
    assert with_line(notebook, LINES[path]) == notebook, "run python -m tests.notebooks.navigation"


@pytest.fixture
def course(tmp_path):
    """Three chapters, two with a lab."""
    (tmp_path / "lab").mkdir()
    for name, title in (("00_a", "00 A: first"), ("01_b", "01 B"), ("02_c", "02 C")):
        nbformat.write(new_notebook(cells=[new_markdown_cell(f"# {title}\n\nMore.")]), tmp_path / f"{name}.ipynb")
    for name in ("01_b", "02_c"):
        (tmp_path / "lab" / f"{name}.ipynb").touch()
    return tmp_path


def test_lines_lead_to_neighbors_contents_and_lab(course):
    assert {path.relative_to(course).as_posix(): line for path, line in lines(course).items()} == {
        "glossary.ipynb": "**Contents** · [00 A](00_a.ipynb) →",
        "00_a.ipynb": "[Contents](glossary.ipynb) · [01 B](01_b.ipynb) →",
        "01_b.ipynb": "← [00 A](00_a.ipynb) · [Contents](glossary.ipynb) · [Lab](lab/01_b.ipynb) · [02 C](02_c.ipynb) →",
        "lab/01_b.ipynb": "← [00 A](../00_a.ipynb) · [Contents](../glossary.ipynb) · [Lesson](../01_b.ipynb) · "
        "[Lab 02 C](02_c.ipynb) →",
        "02_c.ipynb": "← [01 B](01_b.ipynb) · [Contents](glossary.ipynb) · [Lab](lab/02_c.ipynb)",
        "lab/02_c.ipynb": "← [Lab 01 B](01_b.ipynb) · [Contents](../glossary.ipynb) · [Lesson](../02_c.ipynb)",
    }


def test_a_line_takes_the_place_of_an_older_one(course):
    older, newer = list(lines(course).values())[1:3]
    notebook = new_notebook(cells=[new_markdown_cell("# 01 B"), new_code_cell("x")])
    written = with_line(with_line(notebook, older), newer)
    assert [cell.source for cell in written.cells] == [newer, "# 01 B", "x", newer]
    assert pages.opening(written) == "# 01 B"


def test_every_line_is_known_for_what_it_is(course):
    assert all(pages.is_navigation(new_markdown_cell(line)) for line in lines(course).values())
    assert not pages.is_navigation(new_markdown_cell("See the [Contents](glossary.ipynb) first."))
