"""Judging apart: what learners' code may try, and that none of it changes a score, stays behind, or is seen."""

import os
import time
from itertools import product
from pathlib import Path

import nbformat
import psutil
import pytest

from manyranks.grade import apart, trial
from manyranks.grade.absent import Known, Source, stand_in
from manyranks.grade.submission import checks, is_check
from manyranks.world import confine
from tests.conftest import ROOT, matrix
from tests.grading.course import answered

RELEASE = nbformat.read(ROOT / "exercises" / "03_zero" / "03_zero.ipynb", 4)
RIGHT = """
def shard(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n)).chunk(n)[rank].clone()
"""
WRONG = "def shard(tensor): pass\n"
SECRET = "the solution"


def submission(source: str):
    """The exercise, of which one task is there, with this cell as the answer."""
    notebook = answered(RELEASE, {"shard": source})
    kept = [cell for cell in notebook.cells if cell.cell_type == "code" and (not is_check(cell) or "shard(" in cell.source)]
    return notebook | {"cells": kept[: 1 + next(i for i, cell in enumerate(kept) if is_check(cell))]}


def judged(source: str):
    (one,) = apart.judge(nbformat.from_dict(submission(source)))
    return one


@pytest.fixture
def outside(tmp_path):
    """A course's folder: a solution, another submission, a gradebook."""
    for name in ("solution.ipynb", "other.ipynb", "gradebook.db"):
        (tmp_path / name).write_text(SECRET)
    return tmp_path


ATTEMPTS = {
    "changes the check": """
import builtins, manyranks.grade.trial
manyranks.grade.trial.rehearse = lambda *a: 1 / 0
builtins.AssertionError = int
""",
    "changes torch": """
dist.get_world_size = lambda *a: 1
torch.equal = torch.allclose = lambda *a, **k: True
""",
    "changes what is noted": """
from manyranks.measure.journal import Journal
Journal.__exit__ = lambda *a: True
""",
    "ends Python": "import sys\nsys.exit(0)\n",
    "raises": "1 / 0\n",
    "is no Python": "%matplotlib inline\n!ls\nthis is no Python\n",
    "prints without end": "for _ in range(200_000): print('x' * 1000)\n",
    "has its own atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_a_cell_does_before_a_wrong_answer_gives_it_no_points(attempt):
    assert judged(ATTEMPTS[attempt] + WRONG).report.points == 0


FATAL = {
    "os._exit": "import os\nos._exit(0)\n",
    "an endless loop": "while True: pass\n",
    "sleep": "import time\ntime.sleep(600)\n",
    "deaf": "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n",
    "all memory": "x = []\nwhile True: x.append(torch.ones(10_000_000))\n",
}


@pytest.mark.parametrize(
    ("kind", "where"),
    matrix(
        product(FATAL, ["cell", "answer"]),
        [("os._exit", "cell"), ("deaf", "cell"), ("sleep", "answer"), ("all memory", "answer")],
    ),
)
def test_what_never_ends_or_ends_the_process_has_no_points_and_takes_no_longer_than_a_check(kind, where, monkeypatch):
    monkeypatch.setattr(trial, "slowness", lambda: 1.0)  # else a busy machine gives it more time
    code = FATAL[kind]
    started = time.monotonic()
    inside = "def shard(tensor):\n" + "".join(f"    {line}\n" for line in code.splitlines())
    assert judged(code if where == "cell" else inside).report.points == 0
    assert time.monotonic() - started < 120  # 20 on a machine that does nothing else


@pytest.mark.skipif("files" not in confine.fences().split(", "), reason="Landlock is Linux's")
@pytest.mark.parametrize("name", ["solution.ipynb", "other.ipynb", "gradebook.db"])
def test_what_is_not_theirs_can_be_neither_read_nor_written(outside, name, monkeypatch):
    monkeypatch.syspath_prepend(outside)  # as `python -m` does with the folder that it is called in
    answer = f"""
def shard(tensor):
    try:
        found = open({str(outside / name)!r}).read()
    except OSError as error:
        found = type(error).__name__
    try:
        open({str(outside / name)!r}, "w").write("10 of 10")
        found += " and written"
    except OSError as error:
        pass
    print("found:", found)
"""
    report = judged(answer).report
    assert "found: PermissionError" in report.printed
    assert (outside / name).read_text() == SECRET


@pytest.mark.skipif("files" not in confine.fences().split(", "), reason="Landlock is Linux's")
def test_files_that_they_leave_are_gone(outside):
    answer = """
import os
def shard(tensor):
    open("mine.txt", "w").write("x")
    print("left in", os.getcwd())
    open("/tmp/manyranks-left-behind", "w")
"""
    report = judged(answer).report
    where = Path(report.printed.partition("left in ")[2].split("\n")[0].strip())
    assert "PermissionError" in f"{report}"
    assert where.name.startswith("manyranks-judge-")
    assert not where.exists()
    assert not Path("/tmp/manyranks-left-behind").exists()


@pytest.mark.skipif("processes" not in confine.fences().split(", "), reason="seccomp is Linux's")
@pytest.mark.parametrize("start", ["while True: os.fork()", "subprocess.Popen(['sleep', '600'])", "os.system('sleep 600 &')"])
def test_no_process_can_be_started_and_none_is_left(start):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    report = judged(f"import os, subprocess\ndef shard(tensor):\n    {start}\n").report
    assert report.points == 0
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert [process for process in left if "serve(" not in " ".join(process.cmdline())] == []


@pytest.mark.skipif("signals" not in confine.fences().split(", "), reason="Landlock from version 6 on")
def test_the_judge_cannot_be_killed():
    answer = f"import os\ndef shard(tensor):\n    os.kill({os.getpid()}, 9)\n"
    assert "PermissionError" in f"{judged(answer).report}"


PICKLES = {
    "an object that calls": """
import os, manyranks.world.rank
class Evil:
    def __reduce__(self):
        return os.system, ("touch FILE",)
manyranks.world.rank.record = lambda *a: (Evil(), None)
""",
    "a reply that calls": """
import manyranks.world.rank
manyranks.world.rank.pickle.dumps = lambda *a: b"cos\\nsystem\\n(S'touch FILE'\\ntR."
""",
    "a reply that is none": """
import manyranks.world.rank
manyranks.world.rank.pickle.dumps = lambda *a: b"I1\\n."
""",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_what_comes_back_is_only_data(kind, tmp_path):
    file = tmp_path / "called"
    assert judged(PICKLES[kind].replace("FILE", str(file)) + RIGHT).report.points == 0
    assert not file.exists()


def test_a_message_that_pretends_to_be_huge_is_not_read():
    answer = """
import gc, socket, struct
def shard(tensor):
    for one in gc.get_objects():
        if isinstance(one, socket.socket):
            one.sendall(struct.pack("<IQ", 1, 1 << 50))
"""
    assert judged(answer).report.points == 0


def test_the_right_answer_has_all_points_and_learners_code_ran_nowhere_else():
    one = judged("import os\nos.environ['RAN_HERE'] = '1'\n" + RIGHT)
    assert one.report.points == one.report.out_of
    assert "RAN_HERE" not in os.environ


EXERCISES = sorted(path.name for path in (ROOT / "solutions").glob("[0-9]*"))


@pytest.mark.parametrize("exercise", matrix(EXERCISES, ["01_collectives", "08_expert"]))
def test_every_solution_has_all_points(exercise):
    found = apart.judge(nbformat.read(ROOT / "solutions" / exercise / f"{exercise}.ipynb", 4))
    assert {one.check.grade_id: one.report.points for one in found} == {one.check.grade_id: one.check.points for one in found}
    assert len(found) >= 5


def test_a_check_sees_the_cells_before_it_only():
    late = nbformat.from_dict(submission(WRONG))
    late.cells.append(nbformat.v4.new_code_cell(RIGHT))
    (one,) = apart.judge(late)
    assert one.report.points == 0
    assert len(checks(late)) == 1


def test_an_answer_that_is_not_there_says_which_cell_raised():
    report = judged("shard = 1 / 0\n").report
    assert report.points == 0
    assert "cell 2 raised ZeroDivisionError" in f"{report}"


def test_a_class_with_names_that_python_takes_for_itself_can_be_judged():
    names = ("__slots__", "__init__", "__source__", "__new__", "step")
    stood_in = stand_in(Source(()), "Stage1", Known("class", names))
    assert {"__init__", "step"} <= vars(stood_in).keys()
    assert stood_in.__source__ == Source(())
