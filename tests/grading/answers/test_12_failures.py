"""Exercise 12."""

import os
import tempfile

import pytest
from IPython.core import interactiveshell

from manyranks.given import failures
from manyranks.given.disk import FOLDER, Disk
from manyranks.grade import failures as checks
from manyranks.theory import failures as theory
from tests.grading import answered
from tests.grading.answered import *  # noqa: F403
from tests.grading.exercise import Exercise

FILE = f"{FOLDER}/a"


@pytest.fixture(scope="module")
def solved():
    return answered.definitions("12_failures", "solutions")


def test_how_often_is_close_to_the_exact_formulas(solved):
    steps, goodput = solved["how_often"](2.0, 1.5, 20.0, 120.0, 4e8, 8192, True)
    mtbf = theory.job_mtbf(4e8, 8192)
    assert steps == round(theory.young(1.5, mtbf) / 2)
    assert goodput == pytest.approx(theory.goodput(steps * 2, 1.5, 120, mtbf, 20), abs=1e-4)


def test_logs_say_one_thing_only(solved):
    other = next(answer.code() for answer in of_task("12_failures", "autopsy") if answer.name == "BySilence")  # noqa: F405
    for seed in range(200):
        log = failures.log(seed)
        found, again = solved["autopsy"](log), other(log)
        assert found.pop("goodput") == pytest.approx(again.pop("goodput"), rel=1e-12)
        assert found.items() <= again.items()
        assert found["failed"] != found["straggler"]


@pytest.mark.parametrize("name", ["atomic_save", "newest_whole"])
def test_a_notebooks_open_reaches_the_disk(name, shared_ranks):
    notebook, names = Exercise("12_failures"), {"__name__": "__main__", "open": interactiveshell._modified_open}
    exec(notebook.source("solutions", "imports") + "\n" + notebook.source("solutions", name), names)
    report = getattr(checks, name)(names[name])
    assert report.points == report.out_of, report


def left(disk):
    """The files that a power cut leaves after the last step."""
    return checks._after_cuts(disk.steps, disk._contents, FILE)[-1]


def test_data_is_safe_after_fsync_and_names_after_fsync_of_the_folder(tmp_path):
    disk = Disk({FILE: b"old"}, [], f"{tmp_path / 'notes'}")
    with disk.mounted(None):
        with open(f"{FILE}.tmp", "wb") as file:
            file.write(b"new")
            assert disk.files[f"{FILE}.tmp"] == b""  # Python has it
            file.flush()
            os.replace(f"{FILE}.tmp", FILE)
            assert left(disk) == [b"", b"n", b"new", b"old"]
            os.fsync(file.fileno())
        assert left(disk) == [b"new", b"old"]
        folder = os.open(FOLDER, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        assert left(disk) == [b"new"]
    assert not os.path.exists(FOLDER)
    assert disk.halfway == {FILE: b"old", f"{FILE}.tmp": b"new"}


def test_a_file_that_is_written_in_place_can_be_anything(tmp_path):
    disk = Disk({FILE: b"old"}, [], f"{tmp_path / 'notes'}")
    with disk.mounted(None):
        with open(FILE, "r+b", buffering=0) as file:
            file.write(b"new")
        disk._note("")
        assert left(disk) == [b"n", b"new", b"old"]
        os.remove(FILE)
        assert left(disk)[0] is None
        (tmp_path / "b").write_bytes(b"1")  # the real disk is there, too
        with pytest.raises(OSError, match="cross-device"):
            os.replace(tmp_path / "b", FILE)


def test_a_full_disk_raises_and_what_is_opened_is_counted(tmp_path):
    disk = Disk({FILE: b"old"}, [], f"{tmp_path / 'notes'}", trouble="full")
    with disk.mounted(None):
        with open(f"{FILE}.tmp", "wb") as file, pytest.raises(OSError, match="No space left"):
            os.fsync(file)
        with open(FILE, "rb") as file:
            assert (file.read(), disk.opened) == (b"old", 3)
        with pytest.raises(FileNotFoundError, match=f"{FILE}.nothing"):
            open(f"{FILE}.nothing", "rb")


def test_a_rank_that_is_killed_leaves_no_file(tmp_path, monkeypatch, shared_ranks):
    def dies(path, parts):
        print("in", open(path, "wb").name, flush=True)
        os._exit(3)

    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    assert f"in {tmp_path}" in checks.atomic_save(dies).printed
    assert list(tmp_path.iterdir()) == []
