"""Judging apart: what learners' code may try, and that none of it changes a score, stays behind, or is seen."""

import gc
import os
import re
import socket
import tempfile
import time
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from manyranks.grade import apart, trial
from manyranks.grade.absent import Known, Source, stand_in
from manyranks.grade.autograde import outputs
from manyranks.grade.submission import called, checks, is_check
from manyranks.world.errors import NotStarted
from manyranks.world.fences import confine, sandbox
from manyranks.world.processes import waiting
from tests.conftest import ROOT, matrix
from tests.fences import ACCIDENTS, ATTEMPTS, ATTEMPTS_ON_SOCKETS, BESIDE, COOKIE, FULL, OUTSIDE, PORTS, SOCKETS, TOOLS
from tests.grading.course import answered

RELEASE = nbformat.read(ROOT / "exercises" / "03_zero" / "03_zero.ipynb", 4)
RIGHT = """
def shard(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n)).chunk(n)[rank].clone()
"""
WRONG = "def shard(tensor): pass\n"
SECRET = "the solution"
OPEN: list[apart.Judge] = []
SANDBOXED: list[bool] = []


def submission(source: str):
    """The exercise with a single task, and this cell as the answer."""
    notebook = answered(RELEASE, {"shard": source})
    kept = [cell for cell in notebook.cells if cell.cell_type == "code" and (not is_check(cell) or "shard(" in cell.source)]
    return notebook | {"cells": kept[: 1 + next(i for i, cell in enumerate(kept) if is_check(cell))]}


def judges(**chosen) -> apart.Judge:
    return apart.Judge(fewer_fences=True, **{"sandboxed": SANDBOXED[-1]} | chosen)  # the tests may run as root


needs_a_sandbox = pytest.mark.skipif(not sandbox.works(), reason="needs bubblewrap, and a system that lets it")
LINES = {"fences": False, "sandbox": pytest.param(True, marks=[pytest.mark.whole, needs_a_sandbox])}


@pytest.fixture(scope="module", autouse=True, params=LINES.values(), ids=LINES)
def court(request, without_mistakes):
    """One for all: it knows what is right once it has been asked. All attempts are made behind either line."""
    SANDBOXED.append(request.param)
    with judges() as judge:
        OPEN.append(judge)
        yield judge
        OPEN.clear()


def judged(source: str, judge: apart.Judge | None = None):
    (one,) = (judge or OPEN[0]).judged(lambda: nbformat.from_dict(submission(source)))
    return one


@pytest.fixture
def outside(tmp_path):
    """A course's folder: a solution, another submission, a gradebook."""
    for name in ("solution.ipynb", "other.ipynb", "gradebook.db"):
        (tmp_path / name).write_text(SECRET)
    return tmp_path


@pytest.mark.parametrize("attempt", matrix(ATTEMPTS, ATTEMPTS.keys() - {"is no Python"}))
def test_what_a_cell_does_before_a_wrong_answer_gives_it_no_points(attempt):
    assert judged(ATTEMPTS[attempt] + WRONG).report.points == 0


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_what_goes_wrong_in_other_cells_costs_a_right_answer_nothing(accident):
    notebook = submission(RIGHT)
    notebook["cells"][1:1] = map(nbformat.v4.new_code_cell, ACCIDENTS[accident])
    assert next(OPEN[0].judged(lambda: nbformat.from_dict(notebook))).report.passed


def test_what_the_process_above_has_left_for_its_collector_does_not_end_in_the_one_that_judges(monkeypatch):
    """The end of an object may wait for a thread, which a forked process doesn't have."""
    mine, limit, left = os.getpid(), apart.confine.limit, type("Left", (), {})()
    weakref.finalize(left, lambda: os.getpid() == mine or os._exit(9))
    monkeypatch.setattr(apart.confine, "limit", lambda *limits: gc.collect() and limit(*limits))
    left.itself = left
    gc.collect()  # what has lived through this is not looked at again soon
    del left
    assert judged(RIGHT).report.passed


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
        [("os._exit", "cell"), ("deaf", "cell"), ("all memory", "answer")],
    ),
)
def test_what_never_ends_or_ends_the_process_has_no_points_and_takes_no_longer_than_a_check(kind, where, monkeypatch):
    monkeypatch.setattr(trial, "SLACK", 1.0)  # else a busy machine gives it more time
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
    assert "found: PermissionError" in report.printed or "found: FileNotFoundError" in report.printed
    assert (outside / name).read_text() == SECRET


def test_no_report_shows_a_line_of_a_file_that_an_answer_names(outside):
    answer = f"""
code = compile("def f(tensor): raise ValueError('mine')", {str(outside / "solution.ipynb")!r}, "exec")
exec(code)
shard = f
"""
    report = f"{judged(answer).report}"
    assert "ValueError: mine" in report
    assert SECRET not in report


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
    assert "PermissionError" in f"{report}" or "FileNotFoundError" in f"{report}"
    assert f"{where}" == sandbox.SCRATCH or where.name.startswith("manyranks-judge-")
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


@pytest.mark.skipif("processes" not in confine.fences().split(", "), reason="seccomp is Linux's")
def test_what_forks_ranks_stays_as_long_as_a_submission_is_judged(monkeypatch):
    monkeypatch.setattr(apart.local, "IDLE", 0.2)
    server = OPEN[0]._server()
    server.release()  # from now on it would leave soon
    apart._idle[SANDBOXED[-1]].append(server)
    monkeypatch.setattr(trial, "_RUN_SECONDS", 2.0)
    assert judged(f"import time\ntime.sleep(3)\n{RIGHT}").points == 2, "cells have seconds of their own"


LOOKS = """
import os
def shard(tensor):
    for path in ("/etc/passwd", "/home", "/root", "/work", "/tmp", "/var", os.path.expanduser("~root")):
        print(path, os.path.exists(path))
    print("host", os.uname().nodename, "pid", os.getpid() < 100)
"""


@needs_a_sandbox
def test_in_a_sandbox_right_answers_have_all_points_and_nothing_of_this_machine_is_there(tmp_path, monkeypatch):
    folder = tmp_path / "solutions"
    folder.mkdir()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with judges(sandboxed=True) as judge:
        assert judged(RIGHT, judge).report.passed
        looks = LOOKS.replace('"/var"', f'"/var", {str(folder)!r}')
        printed = judged(looks, judge).report.printed
    assert f"{folder} False" in printed
    assert "/home False" in printed
    assert "host rank pid True" in printed
    with_their_own = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    spare = [server.pid for server in apart._idle[True]]
    assert {p.pid for p in with_their_own if p.name() == "bwrap" and p.ppid() == os.getpid()} <= {*spare}


def test_the_judge_cannot_be_killed():
    answer = f"import os\ndef shard(tensor):\n    os.kill({os.getpid()}, 9)\n"
    assert "PermissionError" in f"{judged(answer).report}"


REPLIES = {
    "a pickle that calls": """
import os, pickle
class Evil:
    def __reduce__(self):
        return os.system, ("touch FILE",)
reply = pickle.dumps(Evil())
""",
    "a pickle that sets an attribute of a class of ours": """
import pickle
reply = (
    b"cmanyranks.grade.apart\\nJudged\\n(NN}(S'points'\\nI2\\nutt}b."
)
""",
    "tuples in tuples as a key": "reply = bytes([0x81]) + bytes([0x91]) * 3_000_000\n",
    "a list that says it is long": "reply = bytes([0xdd, 255, 255, 255, 255])\n",
    "a tensor without elements that says it has some": """
import struct
head = struct.pack("<BB", 0, 2) + struct.pack("<QQ", 1 << 40, 1 << 40)
reply = bytes([0xc7, len(head), 1]) + head
""",
    "nothing": "reply = b''\n",
}
SENDS = """
import manyranks.world.rank.process as rank
send = rank.messages.send
rank.messages.send = lambda connection, frames: send(connection, [reply] * len(frames))
"""


@pytest.mark.parametrize("kind", matrix(REPLIES, ["a pickle that calls", "tuples in tuples as a key"]))
def test_what_comes_back_is_only_data(kind, tmp_path):
    file = tmp_path / "called"
    attempt = REPLIES[kind].replace("FILE", str(file)) + SENDS
    inside = "".join(f"    {line}\n" for line in attempt.splitlines())
    assert judged(f"def shard(tensor):\n{inside}    return tensor\n").report.points == 0
    assert not file.exists()
    assert judged(RIGHT).points == 2, "whoever is judged afterwards has his own points"


@pytest.mark.parametrize("kind", matrix(ATTEMPTS_ON_SOCKETS, ["a flood of frames", list(ATTEMPTS_ON_SOCKETS)[-1]]))
def test_a_connection_that_is_misused_costs_this_task_its_points_and_little_time(kind, monkeypatch):
    monkeypatch.setattr(trial, "SLACK", 1.0)
    started = time.monotonic()
    assert judged(SOCKETS.replace("ATTEMPT", ATTEMPTS_ON_SOCKETS[kind])).report.points == 0
    assert time.monotonic() - started < 120  # 20 on a machine that does nothing else


def test_an_answer_to_who_did_not_live_to_hear_it_is_nobody_else_s():
    server = OPEN[0]._server()
    server.wait_until_ready()
    server._socket.send(apart.local.forkserver.BYTES)
    server.settle()
    server.renew_network()
    assert server.loopback_bytes() == 0
    server.close()


@pytest.mark.skipif("network" not in confine.fences().split(", "), reason="a network of their own needs namespaces")
def test_each_submission_has_a_network_of_its_own():
    """Else one of them could leave all ports taken for a minute."""
    inside = [judged(f"{COOKIE}\ndef shard(tensor):\n    print('in', cookie)\n").report.printed for _ in range(2)]
    exec(COOKIE, here := {})
    assert len({*(printed.partition("in ")[2].split()[0] for printed in inside), here["cookie"]}) == 3


@pytest.mark.skipif("network" not in confine.fences().split(", "), reason="a network of their own needs namespaces")
def test_a_submission_that_leaves_no_port_free_is_judged_all_the_same():
    """Its next ranks have another network: else this would be the machine's fault, and tried again for ever."""
    assert judged(PORTS).report.points == 0


@pytest.mark.skipif("network" not in confine.fences().split(", "), reason="a network of their own needs namespaces")
def test_what_ranks_send_beside_what_they_note_is_seen_by_the_kernel():
    report = judged(BESIDE).report
    assert report.points == 0
    assert "as the kernel counts it, and noted calls of" in f"{report}"


@pytest.mark.skipif("files" not in confine.fences().split(", "), reason="Landlock is Linux's")
@pytest.mark.parametrize("kind", matrix(FULL, ["folders in folders", "large files while what is sent is read"]))
def test_a_disk_is_not_filled_and_all_of_it_is_removed(kind, tmp_path, monkeypatch):
    assert judged(RIGHT).points == 2, "what is right is recorded by now"
    monkeypatch.setattr(apart, "_JUDGING", 5.0)
    monkeypatch.setattr(trial, "_seen", lambda *_: re.match("(a+)+b", 60 * "a"))  # which holds up all threads, as reading does
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(apart.Ended, match="wrote more than"):
        judged(f"import os, time\ndef shard(tensor):\n    {FULL[kind]}\n    time.sleep(5)\n")
    assert list(tmp_path.glob("manyranks-judge-*")) == []


@pytest.mark.skipif("processes" not in confine.fences().split(", "), reason="seccomp is Linux's")
def test_what_is_outside_is_neither_seen_nor_reached_nor_changed(outside):
    file = outside / "solution.ipynb"
    before = file.stat()
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as server, judges() as judge:
        listener.bind(str(outside / "socket"))
        listener.listen()
        attempts = "".join(
            f"    try:\n        found = ''\n        {code}\n        print({name!r}, 'WORKS', found)\n    except OSError: pass\n"
            for name, code in OUTSIDE.items()
        )
        port, unix = server.getsockname()[1], str(outside / "socket")
        for word, value in {"_FILE_": str(file), "_UNIX_": unix, "_PORT_": port, "_PID_": os.getpid()}.items():
            attempts = attempts.replace(word, repr(value))
        printed = judged(f"{TOOLS}\ndef shard(tensor):\n{attempts}    print('tried')", judge).report.printed
    assert "tried" in printed
    assert "WORKS" not in printed
    assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert not Path("/dev/shm/of-manyranks").exists()


def test_of_the_teacher_s_variables_they_see_those_that_every_program_needs():
    answer = """
import os
def shard(tensor):
    print("there:", *{line.partition("=")[0] for line in open("/proc/self/environ").read().split("\\0")}, *os.environ)
"""
    there = set(judged(answer).report.printed.partition("there: ")[2].split("\n")[0].split())
    of_ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MANYRANKS_RANK", "GLOO_SOCKET_IFNAME"}
    assert of_ranks < there
    known = {*confine.KEPT, *of_ranks, "HOME", "TMPDIR", "PWD", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert {name for name in there - known if not name.startswith(("OBJC_", "TORCH", "KINETO", "TRITON"))} == set()


def test_nobody_is_judged_as_root_or_without_the_important_fences(monkeypatch):
    monkeypatch.setattr(apart.sandbox, "works", lambda: False)
    monkeypatch.setattr(apart.confine, "fences", lambda: "time, memory, size of files, processes")
    with pytest.raises(RuntimeError, match="does not fence files and network: learners' code could do harm here"):
        apart.Judge()
    monkeypatch.setattr(apart.confine, "fences", lambda: "files, processes, network")
    monkeypatch.setattr(apart.os, "getuid", lambda: 0)
    with pytest.raises(RuntimeError, match="you're root"):
        apart.Judge()


BROKEN = {
    "metadata that is a word": lambda cell: cell.metadata.update(nbgrader="x"),
    "a name that is a list": lambda cell: cell.metadata.nbgrader.update(grade_id=["shard"]),
    "a cell without source": lambda cell: cell.pop("source"),
    "300,000 minus signs": lambda cell: cell.update(source="x = " + "-" * 300_000 + "1"),
    "400 magics": lambda cell: cell.update(source="%time x = (\n" * 400),
    "5,000 lines": lambda cell: cell.update(source="!a = [\n" * 5_000),
}


@pytest.mark.parametrize("kind", matrix(BROKEN, ["a cell without source", "300,000 minus signs"]))
def test_a_broken_notebook_ends_nobody_else_s(kind, monkeypatch):
    monkeypatch.setattr(apart, "_READING", 10.0)
    broken = nbformat.from_dict(submission(RIGHT))
    BROKEN[kind](next(cell for cell in broken.cells if cell.metadata.nbgrader.grade_id == "shard"))
    with judges() as judge:
        try:
            points = [one.points for one in judge.judged(lambda: broken)]
        except apart.Ended:
            points = []
        assert sum(points) in (0, 2), "its cell is there all the same, or not"
        assert judged(RIGHT, judge).points == 2


def test_the_right_answer_has_all_points_and_learners_code_ran_nowhere_else():
    one = judged("import os\nos.environ['RAN_HERE'] = '1'\n" + RIGHT)
    assert one.report.points == one.report.out_of
    assert "RAN_HERE" not in os.environ


def test_the_time_to_read_a_notebook_is_not_that_of_its_cells(monkeypatch):
    monkeypatch.setattr(apart, "_READING", 2.0)
    one = judged("import time\ntime.sleep(3)\n" + RIGHT)
    assert one.report.points == one.report.out_of


EXERCISES = sorted(path.name for path in (ROOT / "solutions").glob("[0-9]*"))


@pytest.mark.parametrize("exercise", matrix(EXERCISES, ["08_expert"]))
def test_every_solution_has_all_points(exercise, court):
    found = list(court.judged(lambda: nbformat.read(ROOT / "solutions" / exercise / f"{exercise}.ipynb", 4)))
    assert {one.grade_id: one.points for one in found} == {one.grade_id: one.worth for one in found}
    assert found


def test_a_check_sees_the_cells_before_it_only(court):
    late = nbformat.from_dict(submission(WRONG))
    late.cells.append(nbformat.v4.new_code_cell(RIGHT))
    (one,) = court.judged(lambda: late)
    assert one.report.points == 0
    assert len(checks(late)) == 1


@pytest.mark.parametrize(("others", "points"), [(0.0, 0), (3.0, 2)])
def test_cells_have_more_time_while_other_programs_have_the_processors(others, points, monkeypatch):
    monkeypatch.setattr(waiting.Clock, "seconds", lambda clock: time.monotonic() - clock._began - others)
    monkeypatch.setattr(trial, "CELLS", 2.0)
    found = judged("import time; time.sleep(2.5)\n" + RIGHT)
    assert (found.points, "took more than 2 s together" in found.report.lines[0].found) == (points, others == 0.0)


def test_cells_that_never_end_are_waited_for_once_and_named(court, monkeypatch):
    monkeypatch.setattr(trial, "CELLS", 1.0)
    monkeypatch.setattr(trial, "SLACK", 1.0)
    first, second = submission("import time\ntime.sleep(600)\n" + RIGHT), submission(RIGHT)
    second["cells"][-1].metadata.nbgrader.grade_id = "another"
    both = nbformat.from_dict(first | {"cells": [*first["cells"], *second["cells"]]})
    one, other = court.judged(lambda: both)
    assert one.points == other.points == 0
    assert "the last one was running cell 2, line 2" in one.report.lines[0].found
    assert other.report.lines[0].found == one.report.lines[0].found
    assert other.seconds < one.seconds / 2


def several(source: str, number: int):
    """A notebook with so many checks, each of this answer."""
    each = [submission(source) for _ in range(number)]
    for k, one in enumerate(each):
        one["cells"][-1].metadata.nbgrader.grade_id = f"check {k}"
    return nbformat.from_dict(each[0] | {"cells": [cell for one in each for cell in one["cells"]]})


def test_each_late_check_leaves_half_as_long_for_the_next_and_a_submission_has_a_time(court, monkeypatch):
    """The first three take 5.25 s, and a busy machine more to start their ranks and run their cells."""
    monkeypatch.setattr(trial, "_RUN_SECONDS", 3.0)
    monkeypatch.setattr(trial, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(apart, "_SUBMISSION", 7.0)
    asleep = several("import time\ndef shard(tensor): time.sleep(600)\n", 8)
    said = [one.report.lines[0].found for one in court.judged(lambda: asleep)]
    assert [line.partition("not over after ")[2].partition(" s")[0] for line in said[:3]] == ["3", "1.5", "0.8"]
    assert said[-1] == "the cells and checks above it took more than 7 s"


def test_who_sleeps_a_little_less_than_each_limit_has_no_more_time_than_others(court, monkeypatch):
    """Three of them, who would take five times as long."""
    monkeypatch.setattr(apart, "_SUBMISSION", 6.0)
    slow = "import time\nright = shard\ndef shard(tensor):\n    time.sleep(1)\n    return right(tensor)\n"
    asleep = several(f"{RIGHT}{slow}", 5)
    for one in court.all([lambda: asleep] * 3):
        *_, last = [each.report for each in one]
        assert last.lines[0].found == "the cells and checks above it took more than 6 s"
    monkeypatch.setattr(apart, "_SUBMISSION", 2.0)
    (one,) = court.judged(lambda: several(f"{RIGHT}{slow}", 1))
    assert one.points == 0, "one check alone has no more either"


def test_ranks_that_take_their_tasks_slowly_have_no_more_time_than_others(court, monkeypatch):
    """Each task is larger than what a socket holds, and the next rank gets its own when this one has been read."""
    monkeypatch.setattr(apart, "_SUBMISSION", 3.0)
    slowly = """
import select, time
import manyranks.world.rank.process as rank
receive = rank.messages.receive
def slowly(connection, *limits):
    select.select([connection], [], [])
    time.sleep(1)
    return receive(connection, *limits)
rank.messages.receive = slowly
"""
    *_, last = court.judged(lambda: several(f"{slowly}{RIGHT}{'#' * 400_000}", 2))
    assert last.report.lines[0].found == "the cells and checks above it took more than 3 s"


def test_cells_that_take_a_second_leave_later_checks_their_time(court, monkeypatch):
    """They run on new ranks twelve times, as imports of matplotlib do."""
    monkeypatch.setattr(apart, "_SUBMISSION", 8.0)
    imports = several(f"import time\ntime.sleep(1)\n{RIGHT}", 3)
    assert [one.points for one in court.judged(lambda: imports)] == [2, 2, 2]


@pytest.mark.parametrize(("used", "error"), [(1.0, apart.NotJudged), (100.0, apart.Ended)])
def test_a_check_that_takes_far_too_long_is_not_judged_unless_its_own_ranks_took_the_processors(used, error, monkeypatch):
    spent = iter((0.0, used))
    monkeypatch.setattr(apart, "computed", lambda *_, **__: next(spent))
    monkeypatch.setattr(apart, "_A_CHECK", 1.0)
    with judges() as judge, pytest.raises(error):
        judged("import time\ntime.sleep(30)\n" + RIGHT, judge)


def test_several_submissions_are_judged_at_once_and_told_in_their_order(court, monkeypatch):
    began = []
    monkeypatch.setattr(court, "_at_once", 2)
    begun = court._begun
    monkeypatch.setattr(court, "_begun", lambda number, read: [begun(number, read), began.append(number)][0])
    asleep = "import time\ntime.sleep(3)\n"
    first, second, third = court.all(
        [lambda source=source: nbformat.from_dict(submission(source)) for source in (asleep + RIGHT, WRONG, RIGHT)]
    )
    assert next(first).points == 2
    assert set(began) == {0, 1, 2}, "the others did not wait for it"
    assert [one.points for one in second] == [0]
    assert [one.points for one in third] == [2]
    assert not list(first)


def test_what_a_cell_prints_is_no_row_of_the_table(capfd):
    judged("print('FORGED 3 of 3')\n" + WRONG)
    assert "FORGED" not in "".join(capfd.readouterr())


MAGICS = {  # cell -> what a rank runs
    "%%time\n\nx = 1\n": "# %%time\n\nx = 1\n",
    "%%bash\nls": "",
    "%matplotlib inline\n!pip install x\nx = !ls 'a'\ny = (3\n% 2)\nz?\n": "None\nNone\nx = None\ny = (3\n% 2)\nNone\n",
    "this is no %Python": "this is no %Python\n",
}


def test_magics_and_cells_that_end_python_cost_no_points():
    cells = [nbformat.v4.new_code_cell(text) for text in MAGICS]
    (check,) = (cell for cell in submission(RIGHT)["cells"] if is_check(cell))
    (found,) = checks(nbformat.v4.new_notebook(cells=[*cells, check]))
    assert [text for _, text in found.source.cells] == list(MAGICS.values())
    nested = ["x" + ".y" * 90_000, "-" * 90_000 + "1"]  # which Python's parser gives up, each in its own way
    assert [called(text) for text in nested] == [None, None]
    late = submission("%%time\n%matplotlib inline\ndisplay('x', In, Out, _)\n" + RIGHT)
    ends = ("import sys\nsys.exit('stop here')", "raise KeyboardInterrupt", "1 / 0")
    late["cells"][:0] = [nbformat.v4.new_code_cell(text) for text in ends]
    (one,) = OPEN[0].judged(lambda: nbformat.from_dict(late))
    assert one.points == 2
    assert "<div class='tex2jax_ignore'>" in outputs(one)[0].data["text/html"]


def test_a_full_disk_ends_nobody_else_s_ranks():
    """The process above runs the right answer in the same forkserver."""
    with judges() as judge:
        with pytest.raises(apart.Ended, match="wrote more than"):
            judged("import os, time\nfor i in range(1510): os.mkdir(f'd{i}')\ntime.sleep(5)\n" + RIGHT, judge)
        assert judged(RIGHT, judge).points == 2


def test_a_disk_without_room_for_notes_is_nobody_s_fault(monkeypatch):
    def full(**where):
        raise OSError(28, "No space left on device")

    assert judged(RIGHT).points == 2
    monkeypatch.setattr(trial, "tempfile", SimpleNamespace(mkdtemp=full, TemporaryDirectory=full))
    with judges() as other:  # the process above runs the right answer first, or has done so
        one = judged(RIGHT, other)
        assert "the right answer in solutions did not run here: there is no room for notes" in one.missed
        assert repr(one.report).startswith("· shard: not judged\n· not judged: the right answer")
        with pytest.raises(apart.NotJudged, match=r"could not start its ranks: .*No space left on device"):
            judged(RIGHT)


def test_a_process_that_starts_ranks_and_is_late_ends_no_command(monkeypatch):
    def late(self):
        raise NotStarted("the process that starts ranks isn't ready")

    monkeypatch.setattr(apart.local.Forkserver, "wait_until_ready", late)
    with judges() as judge, pytest.raises(apart.NotJudged, match=r"could not start its ranks: .*isn't ready"):
        judged(RIGHT, judge)


def test_a_run_whose_notes_make_the_judge_err_takes_its_time_from_the_submission(court, monkeypatch):
    monkeypatch.setattr(apart, "_SUBMISSION", 3.0)
    monkeypatch.setattr(trial, "_unwaited", lambda measured: [][len(measured.ranks)])
    slow = "import time\ndef shard(tensor):\n    time.sleep(0.1)\n    return tensor\n"
    *_, last = court.judged(lambda: several(slow, 5))
    assert last.report.lines[0].found == "the cells and checks above it took more than 3 s"


def test_an_error_of_ours_costs_no_points_and_no_other_check_its_own(court, monkeypatch):
    monkeypatch.setattr(trial, "_unwaited", lambda measured: [][len(measured.ranks)])
    first, second = submission(RIGHT), submission("shard = 5")
    second["cells"][-1].metadata.nbgrader.grade_id = "another"
    both = nbformat.from_dict(first | {"cells": [*first["cells"], *second["cells"]]})
    one, other = court.judged(lambda: both)
    assert "an error of the judge, or a forged answer: IndexError" in one.missed
    assert (other.missed, other.points) == ("", 0)


@pytest.fixture
def without_namespaces(monkeypatch):
    """As in a container that allows none: ranks use this machine's loopback, as other programs do."""
    before = "from manyranks.world.processes.forkserver"
    fails = f"from manyranks.world.fences import confine; confine.leave_the_network = lambda: False; {before}"
    monkeypatch.setattr(apart.local, "_START", apart.local._START.replace(before, fails))
    monkeypatch.setattr(apart, "_idle", idle := {False: []})
    yield
    assert [server.loopback_bytes() for server in idle[False]] == [None]
    idle[False].pop().close()


def test_without_a_network_of_their_own_ranks_answer_for_their_own_sockets_only(without_namespaces, monkeypatch):
    """Another program sends 20 MB over the loopback whenever an answer is about to run."""

    def another_program_sends():
        server = socket.create_server(("127.0.0.1", 0))
        with server, socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            for _ in range(500):
                one.sendall(bytes(40_000))
                other.recv(40_000, socket.MSG_WAITALL)

    measure = trial.World.measure
    monkeypatch.setattr(trial.World, "measure", lambda *args: [another_program_sends(), measure(*args)][1])
    with judges(sandboxed=False) as judge:
        assert judged(RIGHT, judge).report.passed


NOTES_TOO_MUCH = f"""{RIGHT}
import sys
right = shard
def shard(tensor):
    frame = sys._getframe()
    while "watch" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["watch"].events.append(("mark", "failed: [" + "[]," * 100_000 + "[]]", 0))
    return right(tensor)
"""


def test_notes_that_are_far_too_long_are_not_read():
    report = judged(NOTES_TOO_MUCH).report
    assert report.points == 0
    assert "did not return what the check notes" in f"{report}"


def test_a_task_that_is_no_function_costs_no_other_task_its_points(court):
    """The numbers of checks are the judge's own again."""
    first, second = submission("shard = 5"), submission(RIGHT)
    first["cells"][-1].metadata.nbgrader.grade_id = "another"
    both = nbformat.from_dict(first | {"cells": [*first["cells"], *second["cells"]]})
    assert [one.points for one in court.judged(lambda: both)] == [0, 2]


def test_an_answer_that_is_not_there_says_which_cell_raised():
    report = judged("shard = 1 / 0\n").report
    assert report.points == 0
    assert "cell 2 raised ZeroDivisionError" in f"{report}"


def test_a_class_with_names_that_python_takes_for_itself_can_be_judged():
    names = ("__slots__", "__init__", "__source__", "__new__", "step")
    stood_in = stand_in(Source(()), "Stage1", Known("class", names))
    assert {"__init__", "step"} <= vars(stood_in).keys()
    assert stood_in.__source__ == Source(())


def test_a_missing_answer_is_named_after_its_task():
    """Two tasks of exercise 02 are about one class."""
    asked = [apart.Check("", 3.0, ("data_parallel", name), "Overlapped", Source(()), 0) for name in ("overlapped", "no_sync")]
    assert [apart._no_points(one, "Overlapped is there", "", "").task for one in asked] == ["Overlapped", "no_sync"]
