"""The notebooks of the course, and the parts that their tests and tools look at."""

import re
from pathlib import Path

from tests.conftest import ROOT

NOTEBOOKS = ROOT / "notebooks"
GLOSSARY, OWN = NOTEBOOKS / "glossary.ipynb", NOTEBOOKS / "your_own_model.ipynb"
LESSONS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
LABS = sorted(NOTEBOOKS.glob("lab/[0-9]*.ipynb"))

# A question that opens its answer. Pages of GitHub, nbconvert and JupyterLab have this form, and a summary has HTML only.
_ASKED = re.compile(r"^<details>\n<summary><b>\d\.</b> ([^\n]+)</summary>\n\n(.+?)\n</details>$", re.M | re.S)
_NAVIGATION = re.compile(r"(← .+ · )?(\[Contents\]\((\.\./)?glossary\.ipynb\)|\*\*Contents\*\*)( · .+)?")


def label(path: Path) -> str:
    """Returns a name for test reports: "03_zero", or "lab/03_zero"."""
    return f"lab/{path.stem}" if path.parent.name == "lab" else path.stem


def code(notebook) -> list:
    """Returns the code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook) -> list:
    """Returns the markdown cells without the navigation lines."""
    return [cell for cell in notebook.cells if cell.cell_type == "markdown" and not is_navigation(cell)]


def opening(notebook) -> str:
    """Returns the source of the first markdown cell below the navigation line."""
    return markdown(notebook)[0].source


def is_navigation(cell) -> bool:
    """Whether the cell is nothing but the line that `tests.notebooks.navigation` writes."""
    return cell.cell_type == "markdown" and _NAVIGATION.fullmatch(cell.source) is not None


def prose(source: str) -> str:
    """Returns markdown without its code fences, headings and links' targets."""
    return re.sub(r"```.*?```|^#+ .*?$|\]\([^)]*\)", "", source, flags=re.S | re.M)


def unasked(source: str) -> str:
    """Returns markdown without its questions that open their answers."""
    return _ASKED.sub("", source)


def asked(notebook) -> list[tuple[str, str]]:
    """Returns the questions beside the notebook's explorers, each with its answer."""
    return [pair for cell in beside_explorers(notebook) for pair in _ASKED.findall(cell.source)]


def beside_explorers(notebook) -> list:
    """Returns the markdown cells right before an explorer and right after it, up to the next heading."""
    cells = notebook.cells
    places = [k for k, cell in enumerate(cells) if is_explorer(cell)]
    after = [cell for k in places for cell in cells[k + 1 : k + 2] if not cell.source.startswith("#")]
    return [cell for cell in [*(cells[k - 1] for k in places), *after] if cell.cell_type == "markdown"]


def python(source: str) -> str:
    """Returns a code cell's source without its magics."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines())


def words(source: str) -> int:
    """Counts the words of markdown, all of them: prose, tables, code fences, links' targets and HTML tags."""
    return len(source.split())


def lines(cell) -> int:
    """Counts a code cell's visible lines: those that aren't blank, or none if its source is hidden."""
    return 0 if is_hidden(cell) else sum(bool(line.strip()) for line in cell.source.splitlines())


def is_hidden(cell) -> bool:
    """Whether JupyterLab hides the cell's source until somebody opens it."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def is_explorer(cell) -> bool:
    """Whether the cell shows an explorer."""
    return any(_is_explorer(output) for output in cell.get("outputs", []))


def pictures(cell) -> int:
    """Counts the drawings among the cell's outputs; an explorer is none."""
    drawn = [output for output in cell.get("outputs", []) if not _is_explorer(output)]
    return sum(bool({"image/png", "image/svg+xml"} & output.get("data", {}).keys()) for output in drawn)


def _is_explorer(output) -> bool:
    return output.get("data", {}).get("text/plain", "").startswith("Explorer(")
