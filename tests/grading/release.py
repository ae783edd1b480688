"""Generates exercises/ from solutions/, as `make exercises` does: nbgrader's release version of every notebook."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from nbgrader.apps import NbGraderAPI
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]


def assignments(root: Path) -> list[str]:
    """The folders of solutions/ that hold a notebook."""
    return sorted(path.parent.name for path in (root / "solutions").glob("*/*.ipynb"))


def release(root: Path, target: Path) -> list[str]:
    """Writes the release version of every assignment below `target`; returns their names."""
    names = assignments(root)
    scripts = str(Path(sys.executable).parent)  # nbgrader calls alembic by its name
    os.environ["PATH"] = scripts + os.pathsep + os.environ["PATH"]
    with tempfile.TemporaryDirectory() as scratch:
        api = NbGraderAPI(config=_config(root, target, Path(scratch)))
        for name in names:
            if not (result := api.generate_assignment(name, force=True, create=True))["success"]:
                raise RuntimeError(f"{name} could not be released:\n{result['log']}")
    return names


def _config(root: Path, target: Path, scratch: Path) -> Config:
    config = Config()
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.source_directory = "solutions"
    config.CourseDirectory.release_directory = str(target.resolve())
    config.CourseDirectory.db_url = f"sqlite:///{scratch / 'gradebook.db'}"
    config.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "mistakes.py"]
    config.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your code here"}
    return config


def main() -> None:
    target = ROOT / "exercises"
    for old in target.glob("*/"):
        shutil.rmtree(old)
    names = release(ROOT, target)
    print(f"{len(names)} exercises generated" + "".join(f"\n  exercises/{name}" for name in names))


if __name__ == "__main__":
    sys.exit(main())
