"""install.sh on machines that lack something. Nothing is installed: stand-ins for uv and Python note what they are asked."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What `python -m venv FOLDER`, `python -m pip ...` and `uv ...` would do.
PYTHON = f"""#!/bin/sh
case "$*" in
*sys.version_info*|*import?importlib.metadata*) exec "{sys.executable}" "$@" ;;
*ensurepip*) exit $WITHOUT_VENV ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
*) echo pip "$@" >>"$ASKED"; exit $FAILS ;;
esac
"""
UV = """#!/bin/sh
echo uv "$@" >>"$ASKED"
case "$1" in
venv) for folder in "$@"; do :; done; mkdir -p "$folder/bin"; cp "$MADE" "$folder/bin/python" ;;
*) exit $FAILS ;;
esac
"""
SHIM = "#!/bin/sh\necho 'python3.11: command not found' >&2\nexit 127\n"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A machine with a copy of the course in a folder with a space in its name, and only some tools on its PATH."""

    def __init__(self, folder: Path):
        self.course, self.bin, self.asked = folder / "my course", folder / "bin", folder / "asked"
        self.course.mkdir()
        for name in ("install.sh", "constraints.txt", "pyproject.toml", "Makefile"):
            shutil.copy(ROOT / name, self.course)
        for tool in ("sh", "dirname", "uname", "sed", "mkdir", "cp", "make", "touch", "id"):
            (self.bin / tool).parent.mkdir(exist_ok=True)
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.made = program(folder / "elsewhere" / "python", PYTHON)

    def install(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
        given = {"PATH": str(self.bin), "ASKED": str(self.asked), "MADE": str(self.made), "FAILS": "0", "WITHOUT_VENV": "0"}
        command = command or ("sh", "install.sh", "test")
        return subprocess.run(command, cwd=self.course, env=given | environment, capture_output=True, text=True, check=False)

    def requests(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


PIP = "pip -m pip --disable-pip-version-check install"


def test_a_shim_without_a_python_behind_it_is_passed_over(machine):
    program(machine.bin / "python3.11", SHIM)
    program(machine.bin / "python3", PYTHON)
    ran = machine.install("make", "venv")
    assert ran.returncode == 0, ran.stderr
    assert machine.requests() == [f"{PIP} --constraint constraints.txt --editable .[test]"]
    assert (machine.course / ".venv" / ".installed-test").exists()


def test_the_size_is_said_before_anything_is_downloaded_and_no_second_time(machine):
    program(
        machine.bin / "python3",
        PYTHON.replace("*import?importlib.metadata*", "never").replace("*) echo pip", "*importlib*) exit 1 ;;\n*) echo pip"),
    )
    ran = machine.install()
    assert "downloads about" in ran.stdout
    program(machine.course / ".venv" / "bin" / "python", PYTHON)  # has PyTorch: that of the tests
    assert "downloads" not in machine.install().stdout


def test_uv_does_the_work_where_it_is_there(machine):
    program(machine.bin / "python3", PYTHON)
    program(machine.bin / "uv", UV)
    assert machine.install(TORCH_INDEX="file:///an index").returncode == 0
    made, installed = machine.requests()
    assert made == f"uv venv --quiet --seed --allow-existing --python {machine.bin}/python3 .venv"
    options = "--index file:///an index --index-strategy unsafe-best-match"
    assert installed == f"uv pip install --python .venv/bin/python {options} --constraint constraints.txt --editable .[test]"


def test_uv_can_be_left_out_and_another_index_named(machine):
    program(machine.bin / "python3", PYTHON)
    program(machine.bin / "uv", UV)
    machine.install(UV="", TORCH_INDEX="file:///an index")
    assert machine.requests() == [f"{PIP} --extra-index-url file:///an index --constraint constraints.txt --editable .[test]"]


def test_triton_does_not_come_from_pytorch_s_own_builds(machine):
    """With this variable, uv looks for PyTorch and Triton there, and nowhere else."""
    program(machine.bin / "python3", PYTHON)
    program(machine.bin / "uv", UV.replace("*) exit", '*) echo "with $UV_TORCH_BACKEND" >>"$ASKED"; exit'))
    assert machine.install(UV_TORCH_BACKEND="cpu").returncode == 0
    install = "uv pip install --python .venv/bin/python --constraint constraints.txt"
    assert machine.requests()[1:] == [f"{install} torch", "with cpu", f"{install} --editable .[test]", "with "]


def test_another_pytorch_brings_its_own_triton(machine):
    program(machine.bin / "python3", PYTHON)
    machine.install(TORCH="2.15.0")
    assert machine.requests() == [f"{PIP} --constraint .venv/constraints.txt --editable .[test]"]
    lines = (machine.course / ".venv" / "constraints.txt").read_text().splitlines()
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(lines) - set(pinned) == {"torch==2.15.0"}
    assert {line.partition("==")[0] for line in set(pinned) - set(lines)} == {"torch", "triton"}


def test_the_site_s_packages_go_into_an_environment_of_their_own(machine):
    program(machine.bin / "python3", PYTHON)
    (machine.course / "docs").mkdir()
    (machine.course / "docs" / "requirements.txt").touch()
    ran = machine.install("make", ".venv-site/.installed")
    assert ran.returncode == 0, ran.stderr
    assert machine.requests() == [f"{PIP} --requirement docs/requirements.txt"]
    assert not (machine.course / ".venv").exists()
    assert "downloads" not in ran.stdout  # there's no PyTorch in it


CASES = {
    "no Python": ({}, {}, "found no Python 3.11 to 3.14 that runs"),
    "only a shim": ({"python3.11": SHIM}, {}, "found no Python 3.11 to 3.14 that runs"),
    "a Python that isn't there": ({"python3": PYTHON}, {"PYTHON": "python3.9"}, "PYTHON=python3.9 doesn't run"),
    "no venv": ({"python3": PYTHON}, {"WITHOUT_VENV": "1"}, "apt install python3-venv"),
    "no network": ({"python3": PYTHON}, {"FAILS": "1"}, "can't reach the package index"),
    "no network, with uv": ({"python3": PYTHON, "uv": UV}, {"FAILS": "1"}, "can't reach the package index"),
}


@pytest.mark.parametrize(("tools", "environment", "said"), CASES.values(), ids=CASES)
def test_what_is_missing_is_said_in_the_last_line(machine, tools, environment, said):
    for name, text in tools.items():
        program(machine.bin / name, text)
    ran = machine.install(**environment)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("install.sh: ")
    assert said in ran.stderr.splitlines()[-1]


def test_an_unknown_extra_is_refused_before_anything_is_made(machine):
    ran = machine.install("sh", "install.sh", "tset")
    assert ran.returncode == 1
    assert "no extra 'tset': use one of course, grade, test, " in ran.stderr
    assert not (machine.course / ".venv").exists()


def test_an_environment_whose_python_is_gone_is_named(machine):
    program(machine.bin / "python3", PYTHON)
    program(machine.course / ".venv" / "bin" / "python", SHIM)
    assert "make clean" in machine.install().stderr
    assert machine.requests() == []
