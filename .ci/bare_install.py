"""Checks that pip finds all the README installs in the public package index alone, without local wheels or configuration.

    python .ci/bare_install.py [interpreter ...]     without names, all on the PATH, in /usr/bin and among pyenv's

Nothing is installed: pip resolves all extras at once, with constraints.txt, for each interpreter, and for the last one
also with the other PyTorches that pyproject.toml allows. Then it compares the size of the download with what install.sh says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
OTHERS = ("2.14.1", "2.15.0")  # PyTorch
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_")) or name == "PIP_CERT"}
BARE |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
WHICH = "import sys; print(*sys.version_info[:3], sep='.')"


def version_of(interpreter: Path) -> str:
    """Returns its version, such as "3.12.1", or "" if it doesn't run."""
    ran = subprocess.run([interpreter, "-c", WHICH], capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def interpreters(named: list[str]) -> dict[str, Path]:
    """Returns the interpreters by their versions."""
    if named:
        return {version_of(Path(name)): Path(name) for name in named}
    folders = [*map(Path, os.get_exec_path()), Path("/usr/bin"), *Path.home().glob(".pyenv/versions/*/bin")]
    found = [path for folder in folders for path in sorted(folder.glob("python3.1[1-4]")) if os.access(path, os.X_OK)]
    return {version: path for path in found if (version := version_of(path))}


def resolve(python: Path, extras: list[str], constraints: Path) -> list[dict]:
    """Returns what pip would install. Raises CalledProcessError with pip's words where it finds no solution."""
    command = [python, "-m", "pip", "--quiet", "install", "--dry-run", "--report", "-", "--constraint", constraints]
    ran = subprocess.run(
        [*command, "--editable", f"{ROOT}[{','.join(extras)}]"], env=BARE, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)["install"]


def gigabytes(found: list[dict]) -> float:
    """Asks how large the files are."""
    addresses = [one["download_info"]["url"] for one in found if "archive_info" in one["download_info"]]
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda address: urlopen(Request(address, method="HEAD"), timeout=60), addresses)
        return sum(int(answer.headers["Content-Length"]) for answer in answers) / 1e9


def with_torch(version: str, folder: Path) -> Path:
    """Writes the constraints that `make TORCH=version` uses."""
    lines = re.sub(r"(?m)^(torch|triton)==.*\n", "", (ROOT / "constraints.txt").read_text())
    (path := folder / version).write_text(f"{lines}torch=={version}\n")
    return path


def main(named: list[str]) -> int:
    failed = False
    pythons = interpreters(named)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [(version, path, "", ROOT / "constraints.txt") for version, path in pythons.items()]
        cases += [(*list(pythons.items())[-1], f", PyTorch {torch}", with_torch(torch, folder)) for torch in OTHERS]
        for version, interpreter, what, constraints in cases:
            python = folder / f"v{version}" / "bin" / "python"
            if not python.exists():
                subprocess.run([interpreter, "-m", "venv", python.parents[1]], check=True)
            try:
                found = resolve(python, EXTRAS, constraints)
                print(f"Python {version}{what}: resolves, {len(found)} packages", flush=True)
            except subprocess.CalledProcessError as error:
                failed = True
                print(f"Python {version}{what}: FAILS\n{error.stderr or error.stdout}", flush=True)
        if sys.platform == "linux" and not failed:
            said = float(re.search(r"about ([\d.]+) GB, because PyTorch", (ROOT / "install.sh").read_text())[1])
            size = gigabytes(resolve(python, ["grade"], ROOT / "constraints.txt"))
            failed = abs(size - said) > 0.1 * said
            print(f"`make lab` downloads {size:.2f} GB; install.sh says {said:g}: {'change it' if failed else 'right'}")
    return int(failed or not pythons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
