"""What docs/ makes for Sphinx, and its check of links. `make site-test` builds the whole site and opens every page."""

import json
import re
import subprocess
import sys
from importlib import import_module
from zipfile import ZipFile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "pages").glob("*.md"))


@pytest.fixture(scope="module")
def build():
    sys.path.insert(0, str(ROOT / "docs"))
    yield import_module("build")
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def reference(build):
    return import_module("reference")


LINKS = [
    ("[x](#Spot-the-error)", "[x](#spot-the-error)"),
    ("[x](lab/01.ipynb#PyTorch,-side-by-side)", "[x](lab/01.ipynb#pytorch-side-by-side)"),
    ("[x](a.ipynb#What's-57-%25?) [y](#B)", "[x](a.ipynb#whats-57-) [y](#b)"),
    ("[x](https://example.com/a#B) `f(#C)`", "[x](https://example.com/a#B) `f(#C)`"),
]


@pytest.mark.parametrize(("written", "wanted"), LINKS)
def test_a_link_to_a_section_has_the_site_s_form(build, written, wanted):
    assert build.with_slugs(written) == wanted


def text_of(path, build) -> str:
    """A page's Markdown without its code, with links in the site's form."""
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
        return build.with_slugs(re.sub(r"```.*?```", "", text, flags=re.S))
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.S)


def test_a_link_to_a_section_leads_there(build):
    paths = [path for pattern in ("*.md", *build.NOTEBOOKS) for path in ROOT.glob(pattern)]
    texts = {path.resolve(): text_of(path, build) for path in paths}
    sections = {
        path: {re.sub(r"[^-_\w]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^#+ (.+?) *$", text, re.M)}
        for path, text in texts.items()
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {page}#{section}"
        for path, text in texts.items()
        for page, section in re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)\s]+)\)", text)
        if section not in sections[(path.parent / page).resolve() if page else path]
    ]
    assert len(sections) > 40
    assert wrong == []


def test_a_link_that_leads_nowhere_is_found(build, tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="part"></h1><a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html">'
    )
    (tmp_path / "b.html").write_text(
        '<h1 id="there"></h1><a class="x" href="a.html?v=1#part"></a><img src="none.png"><p>href="x"</p>'
    )
    (tmp_path / "404.html").write_text('<a href="/a.html"></a>')
    assert sorted(build.broken(tmp_path)) == ["a.html: b.html#gone", "a.html: c.html", "b.html: none.png"]


HIDDEN = [
    ({}, [], None),
    ({"jupyter": {"source_hidden": True}, "tags": ["answer"]}, ["answer", "hide-input"], "Show the answer"),
    ({"jupyter": {"source_hidden": True}}, ["hide-input"], "Show the code"),
    ({"jupyter": {"outputs_hidden": True}}, ["hide-output"], "Show the output"),
    ({"jupyter": {"source_hidden": True, "outputs_hidden": True}}, ["hide-input", "hide-output"], "Show the {type}"),
]


@pytest.mark.parametrize(("metadata", "tags", "says"), HIDDEN, ids=[f"{says}" for *_, says in HIDDEN])
def test_what_a_notebook_hides_opens_on_a_click(build, metadata, tags, says):
    (cell,) = build.notebook(new_notebook(cells=[new_code_cell(metadata=metadata)]))["cells"]
    assert cell["metadata"]["tags"] == tags
    assert cell["metadata"].get("mystnb", {}).get("code_prompt_show") == says


def test_what_needs_a_kernel_or_the_site_has_itself_is_gone(build):
    outputs = [
        new_output("display_data", {"image/png": "…"}),
        new_output("display_data", {"text/html": '<p class="manyranks-note">Run this cell to get the controls.</p>'}),
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}}),
    ]
    cells = [new_markdown_cell("← Contents →", id="navigation-top"), new_code_cell(outputs=outputs)]
    (cell,) = build.notebook(new_notebook(cells=cells))["cells"]
    assert cell["outputs"] == outputs[:1]


MADE = {"repr": "Explorer(n=8)", "above": "<div>controls</div>", "below": "<div>tiles</div>"}


@pytest.mark.parametrize(
    ("made", "says"), [(MADE, ""), (None, "run make packs first"), (MADE | {"repr": "n=9"}, "another setting")]
)
def test_an_explorer_is_live_where_its_pack_shows_what_is_stored(build, monkeypatch, capsys, made, says):
    monkeypatch.setattr(build.packs, "made", {"zero": made}.get)
    picture = new_output("display_data", {"image/png": "…", "text/plain": "Explorer(n=8)"})
    cell = new_code_cell("show.zero.explorer(measure=few_ranks.zero)", outputs=[picture])
    shown = build.notebook(new_notebook(cells=[cell]))["cells"][0]["outputs"]
    live = [{"text/html": MADE["above"]}, picture["data"], {"text/html": MADE["below"]}]
    assert [output["data"] for output in shown] == ([picture["data"]] if says else live)
    assert says in (said := capsys.readouterr().out)
    assert bool(said) == bool(says)


def test_every_page_of_the_repository_is_in_the_index():
    listed = (ROOT / "docs" / "pages" / "index.md").read_text()
    pages = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "notebooks").glob("[a-z]*.ipynb")]
    assert {page.stem for page in pages if page.stem not in listed} == {"index"}


INCLUDED = [(path, part) for path in PAGES for part in path.read_text().split("{include} README.md")[1:]]


@pytest.mark.parametrize(("path", "part"), INCLUDED, ids=[path.stem for path, _ in INCLUDED])
def test_what_a_page_takes_from_the_readme_is_there(path, part):
    begins, ends = (re.search(rf':{word}: "(.+)"', part)[1] for word in ("start-after", "end-before"))
    _, there, rest = (ROOT / "README.md").read_text().partition(begins)
    assert there
    assert ends in rest


def test_every_public_name_is_in_the_reference(reference, tmp_path):
    reference.write(tmp_path)
    for package in reference.PACKAGES:
        page = (tmp_path / f"manyranks.{package}.md").read_text()
        names = [name for name, home in reference.exported(f"manyranks.{package}").items() if not home.endswith(f".{name}")]
        assert [name for name in names if not re.search(rf"\{{py:(class|function|data)}} {name}\b", page)] == []


def test_an_entry_has_the_signature_as_written_and_types_with_all_dots(reference):
    page = "\n".join(reference._page("manyranks.theory"))
    link = "{py:class} Link(name: str, latency: float, bandwidth: float"
    assert f"{link}" in page
    assert "(batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int, itemsize: int=2" in page
    assert "host: float = 32e9" in page
    assert "-> manyranks.theory.step.StepTime" in page


def test_an_argument_s_line_begins_an_item(reference):
    said = reference._text(
        "Adds.\n\na, **kwargs: as <torch>\n    takes them\nb: more\nRaises ValueError.\n\n    code: it stays"
    )
    assert (
        said
        == "Adds.\n\n\n- `a, **kwargs`: as \\<torch>\n  takes them\n- `b`: more\n\nRaises ValueError.\n\n    code: it stays"
    )


def test_the_planner_s_page_has_the_library_s_lists_or_says_how_to_get_the_planner(build):
    whole, without = build.plan_page(True), build.plan_page(False)
    assert re.findall(r"<option value='(\S+)' selected>", whole) == ["llama3-70b", "h100-dgx", "megatron-core"]
    assert "{model}" not in whole
    assert "<form" not in without
    assert without.endswith("built without the planner: `make pyodide site` builds it with it.\n")


def test_the_planner_s_zip_is_the_same_whenever_it_is_made_and_has_all_that_the_planner_needs(build, tmp_path):
    for name in ("one.zip", "two.zip"):
        build.pack(tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with ZipFile(tmp_path / "one.zip") as packed:
        assert {one.date_time for one in packed.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        packed.extractall(tmp_path)
    task = {"model": "llama3-8b", "config": "", "cluster": "h100-dgx", "gpus": 8, "seq": 8192, "batch": 64}
    code = f"import planner; print(planner.answer({json.dumps(task | {'stack': 'megatron-core'})!r}, lambda words: None))"
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    first, *others = json.loads(ran.stdout)["plans"]
    assert not first["why"]
    assert all(each["why"] for each in others)
