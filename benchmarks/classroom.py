"""A class, as the command checks it: seconds of one submission, and what sleepers and hostile ones cost the others."""

import copy
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat

from benchmarks.compare import Row
from manyranks.grade import apart, classroom

ROOT = Path(__file__).parents[1]
NAME, STUDENTS, FEW = "11_kernels", 30, 5
HOSTILE = [
    "import os\nos._exit(0)\n",
    "x = []\nwhile True: x.append(torch.ones(10_000_000))\n",
    "from manyranks.world.rank import process\nprocess.messages.send = lambda sock, _: sock.sendall(bytes(99))\n",
    "while True: pass\n",
    "for i in range(40): open(f'{i}', 'wb').write(bytes(15_000_000))\n",
]
Notebooks = list[nbformat.NotebookNode]


def rows() -> Iterator[Row]:
    solution, release = (nbformat.read(ROOT / kind / NAME / f"{NAME}.ipynb", 4) for kind in ("solutions", "exercises"))
    asleep = nbformat.from_dict(release)
    for cell in asleep.cells:
        cell.source = re.sub("raise NotImplementedError.*", "import time; time.sleep(600)", cell.source)
    stub = next(cell.metadata.nbgrader.grade_id for cell in release.cells if "raise NotImplementedError" in cell.source)
    hostile = [_answered(release, stub, source) for source in HOSTILE]
    with apart.Judge(fewer_fences=True, solutions=ROOT / "solutions") as judge:
        _seconds(judge, [solution, asleep])  # from now on it knows what is right, and the mistakes
        honest = _seconds(judge, [solution] * STUDENTS)
        some_asleep = _seconds(judge, [solution] * (STUDENTS - FEW) + [asleep] * FEW)
        some_hostile = _seconds(judge, [solution] * (STUDENTS - 2 * FEW) + [asleep] * FEW + hostile)
    what = f"{STUDENTS} submissions of exercise {NAME}"
    yield Row(f"{what}, all right: seconds of one", (honest / STUDENTS,), at_most=4.0)
    yield Row(f"    {FEW} of them sleep in each task; all right", (some_asleep,), (honest,), ratio_at_most=2.0)
    yield Row(f"    and {FEW} are hostile; all right", (some_hostile,), (honest,))


def _answered(release: nbformat.NotebookNode, name: str, source: str) -> nbformat.NotebookNode:
    notebook = copy.deepcopy(release)
    for cell in notebook.cells:
        if cell.metadata.nbgrader.grade_id == name:
            cell.source = source
    return notebook


def _seconds(judge: apart.Judge, notebooks: Notebooks) -> float:
    """Times the command in seconds, and asserts that right answers get all points."""
    with tempfile.TemporaryDirectory() as folder:
        for k, notebook in enumerate(notebooks):
            (path := Path(folder) / f"{k:02}" / NAME).mkdir(parents=True)
            nbformat.write(notebook, path / f"{NAME}.ipynb")
        started = time.perf_counter()
        found = list(classroom.graded(Path(folder), ROOT / "exercises", judge))
        seconds = time.perf_counter() - started
    for k, notebook in enumerate(notebooks):
        own = [row for row in found if row.student == f"{k:02}"]
        right = [row.points for row in own] == [row.out_of for row in own]
        assert right == (notebook is notebooks[0]), own
    return seconds
