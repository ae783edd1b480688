"""The site: links keep their form, and one that leads nowhere is found. `make site` builds all of it and checks the same."""

import importlib.util
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.conftest import ROOT

SPEC = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")


@pytest.fixture(scope="module")
def build():
    SPEC.loader.exec_module(module := importlib.util.module_from_spec(SPEC))
    return module


def test_links_to_sources_lead_to_pages_and_others_stay(build):
    text = (
        '<a href="../a/b.ipynb#part">x</a> <a href="c.md">x</a> <a href="https://example.com/d.md">x</a> <a href="#e.md">x</a>'
    )
    wanted = (
        '<a href="../a/b.html#part">x</a> <a href="c.html">x</a> <a href="https://example.com/d.md">x</a> <a href="#e.md">x</a>'
    )
    assert build._local(text) == wanted


def test_a_link_that_leads_nowhere_is_found(build, tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="part"></h1><a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="a.html"></a><a href="#_private"></a><img src="none.png">')
    assert sorted(build.broken(tmp_path)) == ["a.html: b.html#gone", "a.html: c.html", "b.html: none.png"]


def test_a_chapter_s_page_is_made_and_its_links_are_pages(build):
    page = build._notebook(ROOT / "notebooks" / "glossary.ipynb")
    assert 'href="10_nd_parallel.html"' in page
    assert ".ipynb" not in page


HIDDEN = [
    ({}, None),
    ({"jupyter": {"source_hidden": True}, "tags": ["answer"]}, "Show the answer"),
    ({"jupyter": {"source_hidden": True}}, "Show the code"),
    ({"jupyter": {"outputs_hidden": True}}, "Show the output"),
]


@pytest.mark.parametrize(("metadata", "summary"), HIDDEN, ids=[f"{summary}" for _, summary in HIDDEN])
def test_what_a_notebook_hides_opens_on_a_click(build, tmp_path, metadata, summary):
    cell = new_code_cell("SOURCE", metadata=metadata, outputs=[new_output("stream", text="PRINTED")])
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    page = build._notebook(tmp_path / "a.ipynb").partition("<main>")[2]
    folded = re.findall(r"<details><summary>(.+?)</summary>(.+?)</details>", page, re.S)
    assert [title for title, _ in folded] == ([summary] if summary else [])
    assert [("SOURCE" in text, "PRINTED" in text) for _, text in folded] == (
        [(summary != "Show the output", summary == "Show the output")] if summary else []
    )
    assert page.count("SOURCE") == page.count("PRINTED") == 1


def test_a_lab_is_listed_under_its_lesson(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "notebooks" / "lab").mkdir(parents=True)
    paths = [tmp_path / "notebooks" / name for name in ("03_zero.ipynb", "04_more.ipynb", "lab/03_zero.ipynb")]
    for path in paths:
        cells = [new_markdown_cell("[Contents](glossary.ipynb)"), new_markdown_cell(f"# {path.parent.name} {path.stem}")]
        nbformat.write(new_notebook(cells=cells), path)
    assert (
        build._index(paths)
        .partition("<ul>")[2]
        .startswith(
            '<li><a href="notebooks/03_zero.html">notebooks 03_zero</a>'
            '<ul><li><a href="notebooks/lab/03_zero.html">lab 03_zero</a></li></ul></li>'
            '<li><a href="notebooks/04_more.html">notebooks 04_more</a></li></ul>'
        )
    )


def test_a_link_to_a_section_of_another_page_leads_there(build, tmp_path):
    for name in build.PAGES:
        build._write(tmp_path, ROOT / name, build._page(name))
    assert [link for link in build.broken(tmp_path) if "#" in link] == []


def test_every_page_of_the_repository_is_on_the_site(build):
    assert {path.name for path in ROOT.glob("*.md")} == set(build.PAGES)
