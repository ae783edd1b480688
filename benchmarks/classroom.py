"""A class's submissions, five of them hostile: seconds for each of the others, as a teacher's command checks them."""

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.compare import Row
from manyranks.grade import apart, classroom
from tests.conftest import ROOT
from tests.grading import synthetic

HONEST = 25
HOSTILE = {
    "ends its process": "import os\nos._exit(0)\n",
    "fills the memory": "x = []\nwhile True: x.append(torch.ones(10_000_000))\n",
    "sends what is no data": "from manyranks.world import rank\nrank.messages.send = lambda sock, _: sock.sendall(bytes(99))\n",
    "never ends": "while True: pass\n",
}


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, apart.Judge(fewer_fences=True) as judge:
        submitted = Path(folder)
        synthetic.write(submitted, HONEST)
        synthetic.write_hostile(submitted, HOSTILE)
        os.symlink("/dev/zero", submitted / "zz_link.ipynb")
        each, tasks, started = {}, [], time.perf_counter()
        for student, own in groupby(classroom.graded(submitted, ROOT / "exercises", judge), key=lambda row: row.student):
            tasks += own
            each[student], started = time.perf_counter() - started, time.perf_counter()
    honest = [seconds for student, seconds in each.items() if not student.startswith("zz")]
    right = {row.student: row.points for row in tasks if row.task == "tree_broadcast"}
    assert len(honest) == HONEST, "each of them has a row"
    assert all(points == 3 for student, points in right.items() if student.endswith("right"))
    what = f"{HONEST} submissions of exercise {synthetic.NAME}, beside {len(each) - HONEST} hostile ones"
    yield Row(f"{what}: seconds of one", tuple(honest), at_most=4.0)
    for kind in ("right", "empty", "wrong"):
        yield Row(f"    of these, {kind}", tuple(each[student] for student in each if student.endswith(kind)))
    yield Row("    a hostile one", tuple(each[student] for student in each if student.startswith("zz")))
