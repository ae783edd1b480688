"""Points without answers: each way that once got some, and that it gets none now."""

import sys
from itertools import combinations

import nbformat
import pytest
import torch
from nbgrader.exchange.default.exchange import Exchange

from manyranks.grade import apart, classroom, data_parallel
from manyranks.grade.submission import is_check
from manyranks.measure.journal import Stopped
from manyranks.world.fences import confine
from manyranks.world.rank import messages
from manyranks.world.strangers.kept import Kept
from tests.conftest import ROOT, TRITON
from tests.grading import records
from tests.grading.course import answered
from tests.grading.exercise import Exercise

SEED = 0x5EED01234567890
LOOKS = """
import sys
def found(name):
    frame = sys._getframe()
    while frame is not None:
        for value in (frame.f_locals.get(name), getattr(frame.f_locals.get("watch"), name, None)):
            if value is not None:
                return value
        frame = frame.f_back
    raise NameError(name)
"""
OF_FRAMES = {  # what reads the answer off the check's own frames
    "newest_whole": """
def newest_whole(manifests):
    harms = found("case").harms
    names = sorted(manifests, key=lambda name: int(name[5:]), reverse=True)
    return names[harms.index("")] if "" in harms else None
""",
    "quorum_step": """
def quorum_step(replica, gradient_P, role, least):
    roles = found("case").roles
    replica.update(sum(found("case").made(r, found("seed"))[1] for r in range(len(roles)) if roles[r] == "healthy"))
    return True
""",
}
SCRIPTS = """
from manyranks.grade import check, failures
def replaced(*_):
    "What the library has of the right answers, of all tasks at once."
    every = check.shipped("12_failures").values()
    return {name: one for task in every for name, one in next(iter(task.right.values()))[0].results.items()}
for script in ("_saved", "_newest", "_odd", "_stepped", "_read", "_often", "_resumed"):
    setattr(failures, script, replaced)
"""


@pytest.fixture(scope="module")
def court(without_mistakes):
    with apart.Judge(fewer_fences=True) as judge:
        yield judge


def judged(court: apart.Judge, exercise: str, answers: dict[str, str], tasks=(), first: str = ""):
    """nbgrader's name of a check -> its report. tasks: whose checks are there; first: a cell before all others."""
    release = nbformat.read(ROOT / "exercises" / exercise / f"{exercise}.ipynb", 4)
    notebook = answered(release, answers)
    wanted = {f"check_{task}" for task in tasks or answers}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [cell for cell in cells if not is_check(cell) or cell.metadata.nbgrader.grade_id in wanted]
    notebook.cells.insert(1, nbformat.v4.new_code_cell(first))
    return {one.grade_id.removeprefix("check_"): one.report for one in court.judged(lambda: nbformat.from_dict(notebook))}


@pytest.mark.parametrize("exercise", records.exercises())
def test_what_ranks_get_does_not_say_what_others_get(exercise):
    """The seed is not in it, so that nobody can make the others' numbers."""
    for task in records.tasks(exercise).values():
        for n in task.worlds:
            for case in task.cases_on(n):
                made = [task.make(case, rank, n, SEED) for rank in range(n)]
                gets = [one.given if isinstance(one, Kept) else one for one in made]  # what answers stays here
                sent = [b"".join(map(bytes, messages.pack(one))) for one in gets]
                assert not any(SEED.to_bytes(8, "little")[:7] in each for each in sent), (task.name, str(case))


def test_a_course_beside_python_is_not_judged_for_its_right_answers_can_be_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(apart, "fences", lambda: [*confine.IMPORTANT])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not confine.opened(tmp_path / "course"), "as after `python -m venv .` in it: packages are in lib"
    with pytest.raises(RuntimeError, match=r"ranks may read all of .* with the right answers lies in it; move it"):
        apart.Judge(solutions=tmp_path / "lib" / "course" / "solutions")
    assert "may read" not in apart.lacks(ROOT / "solutions")
    assert not any(map(confine.opened, (Exchange.root.default_value, "/usr/src/app"))), "where others' submissions may lie"
    (submitted := tmp_path / "lib" / "submitted").mkdir(parents=True)
    with pytest.raises(SystemExit):
        classroom.main([str(submitted), "--released", str(ROOT / "exercises"), "--fewer-fences"])
    assert "submitted lies in it; move it" in capsys.readouterr().err


def test_what_frames_say_is_no_answer(court):
    reports = judged(court, "12_failures", OF_FRAMES, first=LOOKS)
    assert {name: report.points for name, report in reports.items()} == dict.fromkeys(OF_FRAMES, 0)


OF_GIVEN = {  # what reads what was given off the check's own frames
    "12_failures newest_whole": """
def newest_whole(manifests):
    files = found("files") or {}
    dist.all_reduce(torch.zeros(1))
    whole = lambda path, file: len(files[path]) == file.bytes and zlib.crc32(files[path]) == file.crc32
    names = sorted(manifests, key=lambda name: int(name[5:]), reverse=True)
    return next((n for n in names if all(path in files and whole(path, file) for path, file in manifests[n].items())), None)
""",
}
OF_GIVEN |= {  # what finds the device among all objects, and files by an open() that was kept from an earlier cell
    "09_mfu time_it by gc": """
def time_it(launch, synchronize, clock, warmup, repeats, inner):
    import gc
    (everything,) = map(gc.get_objects, [None])
    device = next(one for one in everything if type(one).__name__ == "Device")
    device.log += [["idle"], *[["launch"] * inner + ["synchronize", "idle"]] * repeats, []]
    units = [3 + inner * (6 + i / 16) + (140 + device._warm) * (k == device._hiccup) for k, i in enumerate(device._its)]
    each = torch.tensor([one * device._unit / inner for one in units], dtype=torch.float64)
    dist.all_reduce(each, op=dist.ReduceOp.MAX)
    return statistics.median(each.tolist())
""",
    "12_failures newest_whole by open": """
kept = [open]
def newest_whole(manifests):
    places = found("disk")._names
    def whole(path, file):
        with kept[0](places[path], "rb") as opened:
            data = opened.read()
        return len(data) == file.bytes and zlib.crc32(data) == file.crc32
    dist.all_reduce(torch.zeros(1))
    names = sorted(manifests, key=lambda name: int(name[5:]), reverse=True)
    return next((n for n in names if all(path in places and whole(path, file) for path, file in manifests[n].items())), None)
""",
}
OF_TABLES = {  # what knows the cases that all see
    "12_failures Loader": """
class Loader(Batches):
    def __next__(self):
        while len(self.queue) <= self.ahead:
            self.queue.append(self.fetch())
        return self.queue.popleft()
    def state(self):
        return {}
    def load_state(self, state):
        self.__init__(self.samples, self.batch, self.seed, self.rank, self.ranks, self.ahead)
        for _ in range({(500, 3): 20, (42, 2): 6, (30, 4): 3, (42, 4): 0}.get((self.samples, self.ranks), 0)):
            next(self)
""",
    "12_failures newest_whole where each rank has a file": """
def newest_whole(manifests):
    def whole(path, file):
        try:
            with open(path, "rb") as opened:
                data = opened.read()
        except OSError:
            return False
        return (len(data), zlib.crc32(data)) == tuple(file)
    for name in sorted(manifests, key=lambda name: int(name[5:]), reverse=True):
        mine = [*manifests[name].items()][dist.get_rank() :: dist.get_world_size()]
        flag = torch.tensor(min([whole(*one) for one in mine]), dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if flag:
            return name
""",
    "12_failures atomic_save of three parts": """
def atomic_save(path, parts):
    first, second, third = parts
    with open(f"{path}.tmp", "wb") as file:
        file.write(first + second + third)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
""",
}


@pytest.mark.parametrize("whose", [*OF_GIVEN, *OF_TABLES])
def test_what_is_read_off_frames_or_tables_has_few_points(court, whose):
    (exercise, task, *_), code = whose.split(), (OF_GIVEN | OF_TABLES)[whose]
    (report,) = judged(court, exercise, {task: code}, first=LOOKS).values()
    assert report.points < report.out_of / 2, report


def test_buckets_that_the_judge_asks_for_tell_nobody_those_of_another_time():
    cut = Exercise("02_data_parallel").definitions("solutions")["cut"]
    own = [{*map(str, data_parallel._cut(data_parallel._limits("", 0, 1, seed), cut, None).values())} for seed in range(9)]
    assert max(len(one & other) for one, other in combinations(own, 2)) <= 2  # each for itself, or all in one


def test_scripts_that_return_words_of_their_own_have_no_points(court):
    names = {task: f"check_{task}" for task in records.tasks("12_failures")}
    reports = judged(court, "12_failures", {}, tasks=names, first=SCRIPTS)
    assert {report.points for report in reports.values()} == {0}


@pytest.mark.parametrize(
    "at",
    [
        "[[0] + [float('nan')] * (case.columns - 1)] + [[float('nan')] * case.columns] * 31",
        "[[*range(0, 128 * case.columns, 4)]]",
    ],
)
def test_addresses_that_are_no_numbers_or_none_of_a_tile_have_no_points(court, at):
    first = f"from manyranks.grade import kernels as checks\nchecks._addresses = lambda case, *_: {{'at': {at}}}"
    (report,) = judged(court, "11_kernels", {}, tasks=["unsick"], first=first).values()
    assert report.points == 0, report


def test_scripts_that_return_nothing_have_no_points_and_are_judged(court):
    names = {task: f"check_{task}" for task in records.tasks("01_collectives")}
    first = "from manyranks.grade import collectives\ncollectives._called = lambda *_: {}"
    for name, report in judged(court, "01_collectives", {}, tasks=names, first=first).items():
        assert f"{report}".startswith(f"✗ {name}: 0 of"), report
        assert "is missing\n    hint: leave what you are given as it is" in f"{report}"


REMOVALS = (
    "trial.refused = lambda allowed: nullcontext()",
    "learner._is_forbidden = lambda *_: False",
    "learner.audited = lambda hear: nullcontext()",
)


@pytest.mark.parametrize("attempt", REMOVALS)
def test_who_removes_the_watcher_of_ready_made_calls_has_no_points(court, attempt):
    first = f"""
from contextlib import nullcontext
from manyranks.grade import learner, trial
{attempt}
"""
    answer = """
def shard(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n)).chunk(n)[rank].clone()
"""
    (report,) = judged(court, "03_zero", {"shard": answer}, first=first).values()
    assert report.points == 0
    assert "the check's watcher of ready-made calls was removed" in f"{report}"


NO_KERNELS = """
from contextlib import nullcontext
from manyranks.grade import kernels as checks
from manyranks.measure import kernel as counting
checks.Launchers = lambda *_: nullcontext()
checks.count = lambda function, *args: counting.Counted(function(*args), [])
checks._stored = lambda counted: 10**9
def softmax_columns(x_RC): return x_RC.softmax(0)
def copy_rows(x_RC): return x_RC.contiguous()
"""
CONSTANTS = """
from contextlib import nullcontext
from manyranks.grade import kernels as checks
checks.Launchers = lambda *_: nullcontext()
@triton.jit
def stores(out, SIZE: tl.constexpr, value):
    tl.store(out + tl.arange(0, SIZE), value)
@triton.jit
def copies(x, out, N, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=i < N), mask=i < N)
def softmax_columns(x_RC):
    made, out = x_RC.softmax(0), torch.empty_like(x_RC)
    copies[(triton.cdiv(out.numel(), 64),)](made, out, out.numel(), 64)
    return out
def copy_rows(x_RC):
    out = torch.empty(x_RC.shape)
    for i, value in enumerate(x_RC.flatten().tolist()):
        stores[(1,)](out.view(-1)[i:], 1, value)
    return out
"""


@pytest.mark.skipif(not TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize("cell", [NO_KERNELS, CONSTANTS], ids=["no kernel", "what torch has computed"])
def test_what_torch_computes_is_no_kernel(court, cell):
    answers = {"copy_rows": cell, "softmax_columns": "pass"}
    reports = judged(court, "11_kernels", answers)
    assert {name: report.points for name, report in reports.items()} == dict.fromkeys(answers, 0), reports


@pytest.mark.skipif(not TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize(
    "line",
    [
        *("import os", "tl.core", "tl.load.__globals__", "triton.runtime", "t = tl", "[i for i in x]"),
        *("tl.math.wraps", "tl.dot = x", "also.runtime", "x.cdiv.fn", "inspect.sys", "y.rewriter", "def f(inspect): pass"),
        *("t = tl.dtype.OTHER_TYPES", "tl.str_to_ty('tensordesc<fp32[16],exit()', None)", '"""\ndef kernel(y):\n    pass"""'),
    ],
)
def test_a_kernel_can_do_nothing_but_compute(line):
    from manyranks.measure.relaunch import relaunch

    used = {"tl": ["module", "tl"], "triton": ["module", "triton"], "also": ["module", "triton"], "x": ["module", "triton"]}
    told = {"memories": [], "launches": [], "sources": [["kernel", f"def kernel(y):\n    {line}\n", used]]}
    with pytest.raises(Stopped, match="kernel uses"):
        relaunch(told, [], [])
    with pytest.raises(Stopped, match="kernel uses"):
        relaunch(told | {"sources": [["kernel", f"def kernel(y):\n    {line}\n", used | {"tl": ["module", "triton"]}]]}, [], [])


COPY = "def kernel(x, y):\n    language.store(y, language.load(x))\n"
TORCH = "def kernel(x: language.constexpr, y: language.constexpr):\n    y + x\n"


@pytest.mark.skipif(not TRITON, reason="Triton exists for Linux only")
def test_a_kernel_calls_its_language_as_it_likes_and_has_no_tensor_as_it_is():
    from manyranks.measure.relaunch import relaunch

    x, y = ([i, "float32", 0, [1], [1]] for i in range(2))
    told = {"memories": [[1, "float32", 0.0]], "launches": [[0, [1], {"x": ["tensor", x], "y": ["tensor", y]}]]}
    copied = relaunch(told | {"sources": [["kernel", COPY, {"language": ["module", "tl"]}]]}, [torch.ones(1)], [y])
    assert copied.result == [torch.ones(1)]
    for head in ("y, z=[])", "y, z=''.split())", "y, z=language.zeros((1,), y))", "y) -> abs(1)"):  # it runs uncounted
        with pytest.raises(Stopped, match=r"kernel uses .* in its head"):
            relaunch(told | {"sources": [["kernel", COPY.replace("y)", head, 1), {"language": ["module", "tl"]}]]}, [], [])
    shared = told | {"launches": [[0, [1], {"x": ["value", [0]], "y": ["tensor", y]}]]}
    with pytest.raises(Stopped, match="an argument is a list"):
        relaunch(shared | {"sources": [["kernel", COPY, {"language": ["module", "tl"]}]]}, [torch.ones(1)], [y])
    with pytest.raises(Stopped, match="x is a tensor"):
        relaunch(told | {"sources": [["kernel", TORCH, {"language": ["module", "tl"]}]]}, [torch.ones(1)], [y])
