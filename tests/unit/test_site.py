"""The site: links keep their form, and one that leads nowhere is found. `make site` builds all of it and checks the same."""

import importlib.util

import pytest

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


def test_every_page_of_the_repository_is_on_the_site(build):
    assert {path.name for path in ROOT.glob("*.md")} == set(build.PAGES)
