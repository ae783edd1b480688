"""Builds the site with Sphinx: lessons and labs as they were executed, exercises, guides and the library's reference.

python docs/build.py [FOLDER] writes static pages that need no server (folder: site). conf.py says how they look. This file
does what Sphinx doesn't: it makes what Sphinx reads, in build/pages, and finds the links that lead nowhere. Pages keep the
places of their sources, so links keep their form: notebooks/03_zero.ipynb becomes notebooks/03_zero.html.
"""

import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import address
import packs
import play

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("notebooks/*.ipynb", "notebooks/lab/*.ipynb", "exercises/*/*.ipynb")
COPIED = ("*.md", "LICENSE", "docs/gallery/*", "docs/train.sbatch", "notebooks/images/*", "notebooks/train/*.py")
PYODIDE = ROOT / os.environ.get("VENV", ".venv") / "node_modules" / "pyodide"  # where `make pyodide` puts it
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
LIBRARY = ("__init__.py*", "lazy.py", "progress_bar.py")  # beside theory and timeline
LIBRARY += tuple(f"{floor}/**/*.{kind}" for floor in ("theory", "timeline") for kind in ("py", "pyi", "csv"))
_NO_PLANNER = "This copy of the site was built without the planner: `make pyodide site` builds it with it.\n"
_LINK = re.compile(r"(\]\((?!\w+:)[^)#\s]*#)([^)\s]+)\)")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NOTE = "manyranks-note"  # "run this cell to get the controls"
_EXPLORER = re.compile(r"show\.(?:(\w+)\.explorer|collectives\.(stepper))\(")


def build(folder: Path) -> None:
    """Builds the whole site, and removes what an earlier one left in the folder."""
    from sphinx.cmd.build import main as sphinx

    if folder.exists() and any(folder.iterdir()) and not (folder / "api" / "manyranks.html").exists():
        sys.exit(f"{folder} has something else than an earlier site: give another folder")
    made = ROOT / "build"
    for stale in (folder, made / "pages", made / "doctrees"):
        shutil.rmtree(stale, ignore_errors=True)
    prepare(made / "pages")
    strict = ["-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(made / "doctrees")]
    if code := sphinx([*strict, str(made / "pages"), str(folder)]):
        sys.exit(code)
    if packs.PACKS.exists():
        shutil.copytree(packs.PACKS, folder / "_static" / "packs", ignore=shutil.ignore_patterns("*.json"))
    if PYODIDE.exists():
        planner(folder / "_static" / "planner")
    shutil.rmtree(folder.parent / "jupyter_execute", ignore_errors=True)  # myst-nb's own
    for spare in [folder / ".buildinfo", *folder.rglob("*.map"), *folder.glob("_static/*macros.html")]:
        spare.unlink()
    if public := address.repository():
        for path in _files(ROOT, NOTEBOOKS[:2]):
            page = path.relative_to(ROOT).as_posix()
            copy = address.for_colab(json.loads(path.read_text(encoding="utf-8")), public, page)
            _copy(path, folder / "colab" / page).write_text(json.dumps(copy, ensure_ascii=False), encoding="utf-8")


def prepare(folder: Path) -> None:
    """Copies what Sphinx reads. docs/pages are at the top: the index, and pages that only the site has."""
    import reference

    for path in _files(ROOT, COPIED):
        _copy(path, folder / path.relative_to(ROOT))
    readme = folder / "README.md"  # its badges would be asked for elsewhere, and pages have buttons of their own
    readme.write_text(address.BADGES.sub("", readme.read_text(encoding="utf-8")), encoding="utf-8")
    for path in _files(ROOT, NOTEBOOKS):
        text = json.dumps(notebook(json.loads(path.read_text(encoding="utf-8"))), ensure_ascii=False)
        _copy(path, folder / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
    for path in _files(ROOT / "docs" / "pages", ["*.md"]):
        _copy(path, folder / path.name)
    _copy(ROOT / "docs" / "pages" / "plan.md", folder / "plan.md").write_text(plan_page(PYODIDE.exists()), encoding="utf-8")
    reference.write(folder / "api")
    play.write(folder)


def plan_page(runs: bool) -> str:
    """ "Plan your run", with what the library has in the form's lists; without the form where Pyodide isn't there to run it."""
    sys.path.insert(0, str(ROOT / "lib"))
    from planner import lists

    text, form, rest = (ROOT / "docs" / "pages" / "plan.md").read_text(encoding="utf-8").partition("```{raw} html")
    for name, options in lists().items():
        rest = rest.replace(f"{{{name}}}", options)
    return text + (form + rest if runs else _NO_PLANNER)


def planner(folder: Path) -> None:
    """Copies Pyodide for that page, and packs the part of the library that it runs there."""
    for name in RUNTIME:
        _copy(PYODIDE / name, folder / name)
    pack(folder / "manyranks.zip")


def pack(target: Path) -> None:
    """Zips theory and timeline with docs/planner.py. The zip is the same whenever it's made."""
    library = ROOT / "lib"
    files = {str(path.relative_to(library)): path for path in _files(library / "manyranks", LIBRARY)}
    with ZipFile(target, "w") as packed:
        for name, path in (files | {"planner.py": ROOT / "docs" / "planner.py"}).items():
            packed.writestr(ZipInfo(name), path.read_bytes(), ZIP_DEFLATED)


def notebook(content: dict) -> dict:
    """A notebook as Sphinx shows it: what JupyterLab hides opens on a click, and what needs a kernel is gone."""
    content["cells"] = [cell for cell in content["cells"] if not cell.get("id", "").startswith("navigation-")]
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = with_slugs("".join(cell["source"]))
        else:
            _fold(cell["metadata"])
            cell["outputs"] = [output for output in cell["outputs"] if _stays(output.get("data", {}))]
            if explorer := _EXPLORER.search("".join(cell["source"])):
                _make_live(cell["outputs"], explorer[1] or explorer[2])
    return content


def _make_live(outputs: list[dict], name: str) -> None:
    """Puts the controls above an explorer's picture, and its tiles below, if packs.py has drawn what the picture shows."""
    made = packs.made(name)
    stored = "".join("".join(output.get("data", {}).get("text/plain", [])) for output in outputs)
    if made is None or made["repr"] != stored:
        return print(f"the {name} explorer is a picture:", "its pack is of another setting" if made else "run make packs first")
    above, below = ({"output_type": "display_data", "metadata": {}, "data": {"text/html": made[k]}} for k in ("above", "below"))
    outputs[:] = [above, *outputs, below]


def with_slugs(text: str) -> str:
    """Links to a section have JupyterLab's form, #Spot-the-error; the site's is GitHub's, #spot-the-error."""
    return _LINK.sub(lambda link: link[1] + re.sub(r"[^-_\w]", "", unquote(link[2]).lower()) + ")", text)


def broken(folder: Path) -> list[str]:
    """The links between the site's own pages that lead nowhere: "page: link"."""
    paths = [page for page in folder.rglob("*.html") if page.name != "404.html"]  # its links begin at the site's address
    pages = {page: page.read_text(encoding="utf-8") for page in paths}
    there = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    return [f"{page.relative_to(folder)}: {link}" for page, text in pages.items() for link in _wrong(page, text, there)]


def _wrong(page: Path, text: str, there: dict[Path, set[str]]) -> Iterable[str]:
    for link in dict.fromkeys(re.findall(r'<[a-z][^>]*?\s(?:href|src)="([^"]+)"', text)):
        target, _, anchor = html.unescape(link).partition("#")
        if re.match(r"[a-z]+:|//", target):
            continue
        found = (page.parent / unquote(target.partition("?")[0])).resolve() if target else page
        if not found.exists() or (anchor and found in there and unquote(anchor) not in there[found]):
            yield link


def _fold(metadata: dict) -> None:
    """Hides the code, or what it printed, and names it in the line that opens it."""
    hidden, tags = metadata.get("jupyter", {}), metadata.setdefault("tags", [])
    what = "answer" if "answer" in tags else "code"
    closed = {"hide-input": what} if hidden.get("source_hidden") else {}
    closed |= {"hide-output": "output"} if hidden.get("outputs_hidden") else {}
    if closed:
        what = "{type}" if len(closed) > 1 else what if "hide-input" in closed else "output"  # myst-nb fills {type} in
        tags += closed
        metadata["mystnb"] = {"code_prompt_show": f"Show the {what}", "code_prompt_hide": f"Hide the {what}"}


def _stays(data: dict) -> bool:
    return _WIDGET not in data and _NOTE not in "".join(data.get("text/html", []))


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, target))


if __name__ == "__main__":
    there = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    build(there)
    if wrong := broken(there):
        sys.exit("links that lead nowhere:\n" + "\n".join(wrong))
    print(f"{there}/index.html")
