"""Builds the site: lessons and labs as they were executed, exercises, pages, and the library's reference from its docstrings.

python docs/build.py [FOLDER] writes static pages that need no server (folder: site). The places of the pages are those of
their sources, so that links keep their form: notebooks/03_zero.ipynb becomes notebooks/03_zero.html.
"""

import html
import re
import shutil
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CLASSROOM.md", "CLUSTERS.md", "CONTRIBUTING.md", "CHANGELOG.md")
PACKAGES = ("timeline", "theory", "measure", "world", "parallel", "training", "given", "show", "grade")
_LINK = re.compile(r'(href=")(?!https?:|mailto:|data:|#)([^"#]*)((?:#[^"]*)?")')
_ANCHOR = re.compile(r'(?:id="|href="#)[^"]+"')  # GitHub writes them in lower case, and so do our links
_SCRIPT = re.compile(r"<script.*?</script>", re.S)
# What a notebook hides opens on a click; nbconvert alone would show all of it.
_TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block input_group %}{% if cell.metadata.get('jupyter', {}).get('source_hidden') %}
<details><summary>Show the {{ 'answer' if 'answer' in cell.metadata.get('tags', []) else 'code' }}</summary>
{{ super() }}</details>{% else %}{{ super() }}{% endif %}{% endblock %}
{% block output_group %}{% if cell.metadata.get('jupyter', {}).get('outputs_hidden') %}
<details><summary>Show the output</summary>{{ super() }}</details>{% else %}{{ super() }}{% endif %}{% endblock %}
"""


def build(folder: Path) -> None:
    """The whole site. What the folder has of an earlier one is removed."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "api" / "manyranks.html").exists():
        sys.exit(f"{folder} has something else than an earlier site: give another folder")
    shutil.rmtree(folder, ignore_errors=True)
    patterns = ("notebooks/*.ipynb", "notebooks/lab/*.ipynb", "exercises/*/*.ipynb")
    notebooks = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    for source in notebooks:
        _write(folder, source, _notebook(source))
    for name in PAGES:
        _write(folder, ROOT / name, _page(name))
    shutil.copytree(ROOT / "notebooks" / "images", folder / "notebooks" / "images")
    shutil.copytree(ROOT / "docs" / "gallery", folder / "docs" / "gallery")
    for name in ("LICENSE", "docs/train.sbatch"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "index.html").write_text(_index(notebooks), encoding="utf-8")
    reference(folder / "api")


def reference(folder: Path) -> None:
    """The public names of the library, each with its docstring."""
    import pdoc

    pdoc.render.configure(docformat="markdown", show_source=True)
    packages = ["manyranks", *(f"manyranks.{package}" for package in PACKAGES)]
    for package in map(import_module, packages):  # names that load when they are used: pdoc looks at those that are there
        vars(package).update({name: getattr(package, name) for name in package.__all__})
    pdoc.pdoc(*packages, output_directory=folder)


def broken(folder: Path) -> list[str]:
    """The links between the site's own pages that lead nowhere: "page: link"."""
    pages = {page: _SCRIPT.sub("", page.read_text(encoding="utf-8")) for page in folder.rglob("*.html")}
    return [f"{page.relative_to(folder)}: {link}" for page, text in pages.items() for link in _wrong(page, text, pages)]


def _wrong(page: Path, text: str, pages: dict[Path, str]) -> Iterable[str]:
    for link in dict.fromkeys(re.findall(r'(?:href|src)="([^"]+)"', text)):
        target, _, anchor = html.unescape(link).partition("#")
        if re.match(r"[a-z]+:|//", target) or anchor.startswith("_"):  # names that are not public have no place
            continue
        there = (page.parent / target).resolve() if target else page
        known = pages.get(there, "")
        if not there.exists() or (anchor and there.suffix == ".html" and f'id="{anchor}"' not in known):
            yield link


def _notebook(source: Path) -> str:
    prompts = {"exclude_input_prompt": True, "exclude_output_prompt": True}
    exporter = HTMLExporter(raw_template=_TEMPLATE, embed_images=False, **prompts)
    exporter.require_js_url = ""  # no widget works without a kernel
    text, _ = exporter.from_notebook_node(nbformat.read(source, 4))
    return _local(text)


def _page(name: str) -> str:
    title = name.removesuffix(".md").capitalize()
    text = markdown2html((ROOT / name).read_text(encoding="utf-8"))
    return _framed(title, _local(_ANCHOR.sub(lambda found: found[0].lower(), text)))


def _local(text: str) -> str:
    """Links to sources lead to their pages."""
    return _LINK.sub(lambda link: link[1] + re.sub(r"\.(ipynb|md)$", ".html", link[2]) + link[3], text)


def _index(notebooks: list[Path]) -> str:
    items = "".join(_item(path, notebooks) for path in notebooks if path.parent.name != "lab")
    links = "".join(
        f'<li><a href="{Path(name).with_suffix(".html")}">{name.removesuffix(".md").capitalize()}</a></li>' for name in PAGES
    )
    api = '<li><a href="api/manyranks.html">Reference of the library</a></li>'
    return _framed("Many Ranks", f"<h1>Many Ranks</h1><ul>{items}</ul><ul>{links}{api}</ul>")


def _item(path: Path, notebooks: list[Path]) -> str:
    """Lists a notebook, and its lab below it."""
    lab = path.parent / "lab" / path.name
    below = f"<ul>{_item(lab, notebooks)}</ul>" if lab in notebooks else ""
    return f'<li><a href="{_place(path)}">{html.escape(_title(path))}</a>{below}</li>'


def _title(path: Path) -> str:
    sources = (cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
    return next(source for source in sources if source.startswith("# ")).splitlines()[0].removeprefix("# ")


def _place(source: Path) -> str:
    return source.relative_to(ROOT).with_suffix(".html").as_posix()


def _write(folder: Path, source: Path, text: str) -> None:
    page = folder / _place(source)
    page.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * (len(page.relative_to(folder).parts) - 1)
    back = f'<nav style="padding:4px 12px"><a href="{up}index.html">Many Ranks</a></nav>'
    page.write_text(re.sub(r"(<body[^>]*>)", lambda body: body[1] + back, text, count=1), encoding="utf-8")


def _framed(title: str, body: str) -> str:
    style = "body{max-width:52em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif}img{max-width:100%}"
    style += "table{border-collapse:collapse}td,th{border-top:1px solid #ccc;padding:3px 8px;text-align:left}"
    head = f'<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style></head>'
    return f"<!DOCTYPE html><html lang='en'>{head}<body>{body}</body></html>"


if __name__ == "__main__":
    there = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    build(there)
    if wrong := broken(there):
        sys.exit("links that lead nowhere:\n" + "\n".join(wrong))
    print(f"{there}/index.html")
