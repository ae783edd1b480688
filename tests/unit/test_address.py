"""docs/address.py: what stands in the repository's files and pages with a public address, and without one."""

import contextlib
import json
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.conftest import ROOT

NAME = "someone/many-ranks"
ADDRESS = f"https://github.com/{NAME}"
NOTEBOOK = "notebooks/lab/03_zero.ipynb"


@pytest.fixture(scope="module")
def address():
    sys.path.insert(0, str(ROOT / "docs"))
    yield import_module("address")
    sys.path.remove(str(ROOT / "docs"))


def test_files_are_as_make_address_writes_them(address):
    for name, written in address.WRITTEN.items():
        text = (ROOT / name).read_text()
        assert written(text, address.repository()) == text, f"{name}: run make address"


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff"])
def test_an_address_comes_and_goes(address, name):
    before, written = address.WRITTEN[name]((ROOT / name).read_text(), ""), address.WRITTEN[name]
    assert "github.com" not in before
    there = written(before, ADDRESS)
    assert ADDRESS in there
    assert written(written(there, f"{ADDRESS}-2"), ADDRESS) == there
    assert written(there, "") == before


def test_the_readme_gets_the_line_that_clones_and_badges_that_its_page_leaves_out(address):
    text = address.readme((ROOT / "README.md").read_text(), ADDRESS)
    assert f"\ngit clone {ADDRESS} many-ranks\n" in text
    title, badges, rest = text.split("\n\n", 2)
    assert title == "# Many Ranks"
    assert all(f"]({link})" in badges for link in address.launches(ADDRESS).values())
    assert f"]({ADDRESS}/actions/workflows/test.yml/badge.svg)" in badges
    assert address.BADGES.sub("", text) == f"{title}\n\n{rest}"


def test_services_open_this_notebook(address):
    assert address.launches(ADDRESS, NOTEBOOK) == {
        "Binder": f"https://mybinder.org/v2/gh/{NAME}/main?urlpath=lab/tree/{NOTEBOOK}",
        "Codespaces": f"https://codespaces.new/{NAME}",
        "Colab": f"https://colab.research.google.com/github/{NAME}/blob/gh-pages/colab/{NOTEBOOK}",
    }
    assert "Colab" not in address.launches(ADDRESS, "exercises/03_zero/03_zero.ipynb")  # no copy is made for it
    assert address.launches(ADDRESS, "CLUSTERS.md") == address.launches("", NOTEBOOK) == {}


@pytest.mark.parametrize(("repository", "public"), [("", ""), (ADDRESS, "https://someone.github.io/many-ranks/")])
def test_pages_have_buttons_and_previews_where_there_is_an_address(address, monkeypatch, repository, public):
    monkeypatch.setattr(address, "repository", lambda: repository)
    monkeypatch.delenv("SITE_ADDRESS", raising=False)
    for module in ("docutils", "docutils.nodes", "latex2mathml", "latex2mathml.converter", "sphinx", "sphinx.addnodes"):
        monkeypatch.setitem(sys.modules, module, MagicMock())  # not in the environment of the tests
    conf = {"__file__": str(ROOT / "docs" / "conf.py")}
    exec((ROOT / "docs" / "conf.py").read_text(), conf)
    assert conf["html_baseurl"] == conf["ogp_site_url"] == public
    assert conf["html_theme_options"]["repository_url"] == repository
    assert ("sphinxext.opengraph" in conf["extensions"]) == ("sphinx_sitemap" in conf["extensions"]) == bool(repository)
    assert conf["notfound_urls_prefix"] == ("/many-ranks/" if repository else "/")
    context = {"page_source_suffix": ".ipynb", "header_buttons": []}
    conf["_launch"](None, NOTEBOOK.removesuffix(".ipynb"), "", context, None)
    links = {button["text"]: button["url"] for group in context["header_buttons"] for button in group["buttons"]}
    assert links == address.launches(repository, NOTEBOOK)


def test_the_first_cell_on_colab_installs_and_does_nothing_elsewhere(address, monkeypatch):
    before = json.loads((ROOT / NOTEBOOK).read_text())
    after = address.for_colab(before, ADDRESS, NOTEBOOK)
    first, *rest = after["cells"]
    assert rest == before["cells"]
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    monkeypatch.setattr(os, "chdir", ran.append)
    exec(first["source"], {})
    assert ran == []
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    exec(first["source"], {})
    clone, install, folder = ran
    assert clone[:3] + clone[-2:] == ["git", "clone", "--depth=1", ADDRESS, "/content/many-ranks"]
    assert install[1:3] + install[-1:] == ["-m", "pip", "/content/many-ranks"]
    assert folder == "/content/many-ranks/notebooks/lab"


@pytest.mark.parametrize("line", ["https://github.com/OWNER", f"{ADDRESS}/", "https://example.com/a/b", None])
def test_another_address_is_refused(address, line):
    project = "[project]\n" + (f'[project.urls]\nRepository = "{line}"' if line else "")
    with pytest.raises(ValueError, match=r"give https://github\.com/OWNER/NAME") if line else contextlib.nullcontext():
        assert address.repository(project) == ""
