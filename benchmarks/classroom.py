"""A class's submissions: seconds for each, as a teacher's command checks them."""

import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.compare import Row
from manyranks.grade import classroom
from tests.conftest import ROOT
from tests.grading import synthetic

SUBMISSIONS = 30


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write(Path(folder), SUBMISSIONS)
        tasks = list(classroom.graded(Path(folder), ROOT / "exercises"))
    each = [sum(task.seconds for task in own) for _, own in groupby(tasks, key=lambda task: task.student)]
    what = f"{SUBMISSIONS} submissions of exercise {synthetic.NAME}"
    yield Row(f"{what}: seconds of one", tuple(each), at_most=8.0)
    for k, kind in enumerate(("solutions", "releases", "wrong answers")):
        yield Row(f"    of these, {kind}", tuple(each[k::3]))
