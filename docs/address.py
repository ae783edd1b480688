"""Launch buttons, badges, the line that clones and the citation, made from the repository's public address.

The address stands in pyproject.toml: [project.urls], Repository. `make address` writes what follows from it into README.md and
CITATION.cff; docs/build.py puts it on the site's pages. As long as there's no address, all of this is left out.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "notebooks/00_start_here.ipynb"
BADGES = re.compile(r"^\[!\[.*\n\n", re.M)
_UNKNOWN = "<this repository>"
_PICTURES = {
    "Binder": "https://mybinder.org/badge_logo.svg",
    "Codespaces": "https://github.com/codespaces/badge.svg",
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
}
_COLAB = """import os
import subprocess
import sys

if "google.colab" in sys.modules:  # on Colab, this cell installs the course; elsewhere it does nothing
    if not os.path.exists("/content/many-ranks"):
        subprocess.run(["git", "clone", "--depth=1", "{address}", "/content/many-ranks"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "/content/many-ranks"], check=True)
    os.chdir("/content/many-ranks/{folder}")
"""


def repository(project: str = "") -> str:
    """The address in pyproject.toml, or "". Raises ValueError where it isn't a repository on GitHub."""
    text = project or (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = tomllib.loads(text)["project"].get("urls", {}).get("Repository", "")
    if address and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(f"pyproject.toml: Repository is {address!r}; give https://github.com/OWNER/NAME, or leave it out")
    return address


def site(address: str) -> str:
    """Where GitHub shows the branch gh-pages."""
    return re.sub(r"https://github\.com/(.+)/(.+)", r"https://\1.github.io/\2/", address)


def launches(address: str, page: str = FIRST) -> dict[str, str]:
    """Services that run a notebook for a reader, each with its link.

    Colab gets copies of lessons and labs, which docs/build.py makes.
    """
    if not address or not page.endswith(".ipynb"):
        return {}
    name = address.removeprefix("https://github.com/")
    links = {
        "Binder": f"https://mybinder.org/v2/gh/{name}/main?urlpath=lab/tree/{page}",
        "Codespaces": f"https://codespaces.new/{name}",
    }
    if page.startswith("notebooks/"):
        links["Colab"] = f"https://colab.research.google.com/github/{name}/blob/gh-pages/colab/{page}"
    return links


def for_colab(notebook: dict, address: str, page: str) -> dict:
    """The notebook with a first cell that installs the course on Colab."""
    source = _COLAB.format(address=address, folder=page.rpartition("/")[0])
    cell = {"cell_type": "code", "id": "colab", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
    return notebook | {"cells": [cell, *notebook["cells"]]}


def readme(text: str, address: str) -> str:
    """README.md with this address: its badges below the title, and the line that clones."""
    badges = [f"[![{name}]({_PICTURES[name]})]({link})" for name, link in launches(address).items()]
    badges += [f"[![tests]({address}/actions/workflows/test.yml/badge.svg)]({address}/actions)"] if address else []
    text = re.sub(r"^git clone .+ many-ranks$", f"git clone {address or _UNKNOWN} many-ranks", BADGES.sub("", text), flags=re.M)
    return text.replace("\n\n", f"\n\n{' '.join(badges)}\n\n", 1) if badges else text


def citation(text: str, address: str) -> str:
    """CITATION.cff with this address."""
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.M)
    return f"{text}repository-code: {address}\n" if address else text


WRITTEN = {"README.md": readme, "CITATION.cff": citation}


def main() -> None:
    for name, written in WRITTEN.items():
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8"), repository()), encoding="utf-8")


if __name__ == "__main__":
    main()
