"""Lesson 03's answers on any number of ranks, and what its checks see in stages that are wrong."""

import ast

import nbformat
import pytest
import torch

import manyranks as mr
from manyranks import show, training
from manyranks.world.errors import RankFailed
from tests.conftest import matrix
from tests.notebooks import pages
from tests.notebooks.tasks import answer_of

STAGES = ("Stage1", "Stage2", "Stage3", "FSDP")
KEPT = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@pytest.fixture(scope="module")
def lesson() -> dict:
    """Everything that the lesson's cells define, with its answers, and a GPT whose parts have odd sizes."""
    found = {"config": training.GPTConfig(layers=2, hidden=10, heads=1, seq=12, tied=False), "__name__": "lesson"}
    for cell in pages.code(nbformat.read(pages.NOTEBOOKS / "03_zero.ipynb", 4)):
        answer = "answer" in cell.metadata.get("tags", ())
        tree = ast.parse(answer_of(cell) if answer else pages.python(cell.source))
        tree.body = [node for node in tree.body if isinstance(node, KEPT)]
        exec(compile(tree, "lesson", "exec"), found)
    with mr.World(1, backend="gloo", timeout=60) as one:
        (found["weights"],) = one.run(found["ordinary"])
    parts = found["Parts"](training.GPT(found["config"])).parts
    found["sizes"] = [sum(p.numel() for p in part.parameters()) for part in parts]
    return found


@pytest.fixture(scope="module")
def three():
    with mr.World(3, backend="gloo", timeout=60) as world:
        yield world


@pytest.mark.parametrize("n", matrix([2, 3, 4], [3]))
def test_every_stage_trains_like_one_process_on_any_number_of_ranks(lesson, n):
    assert n == 2 or any(size % n for size in lesson["sizes"])  # some row is padded
    with mr.World(n, backend="gloo", timeout=60) as world:
        gaps = {stage: lesson["gap"](world.measure(lesson["train"], lesson[stage])) for stage in STAGES}
    assert max(gaps.values()) < 1e-10, gaps


def seen(lesson, world, stage) -> str:
    return show.zero.whole_units(world.run, lesson["train"], stage)


def test_units_come_and_go_one_by_one_or_fetched_ahead(lesson, three):
    assert seen(lesson, three, lesson["Stage3"]) == "0 1 2 3 3 2 1 0"
    assert seen(lesson, three, lesson["FSDP"]) == "0(1) 1(2) 2(3) 3 (2)3 (1)2 (0)1 0"


def test_a_unit_that_is_waited_for_too_soon_is_seen(lesson, three):
    class Eager(lesson["FSDP"]):
        def before_backward(self, k):
            self.rows[k].wait()
            self.rows[max(k - 1, 0)].wait()

    assert seen(lesson, three, Eager) == "0(1) 1(2) 2(3) 3 23 12 01 0"


def test_a_unit_that_is_read_before_its_wait_is_named_however_late_the_reader_looks(lesson, three):
    class NoWaitInBackward(lesson["FSDP"]):
        def before_backward(self, k):
            if k > 0:
                self.rows[k - 1].start()
            torch.distributed.barrier()  # the gather is certainly done: right by luck

    class NoWaitInForward(lesson["Stage3"]):
        def before_forward(self, k):
            self.rows[k].start()

    class NotGathered(lesson["Stage3"]):
        def before_forward(self, k):
            pass

    for stage, said in (
        (NoWaitInBackward, "in backward, unit 2 was read before its wait: its gather may still be under way"),
        (NoWaitInForward, "in forward, unit 0 was read before its wait: its gather may still be under way"),
        (NotGathered, "in forward, unit 0 was read before its wait: it's free"),
    ):
        with pytest.raises(RankFailed, match=said):
            seen(lesson, three, stage)


def test_a_gather_into_memory_that_is_not_there_is_refused(lesson, three):
    def gathered():
        unit = lesson["Unit"](torch.nn.Linear(10, 1, bias=False))
        unit.row.untyped_storage().resize_(10)  # elements, not bytes
        torch.distributed.all_gather_single(unit.row, unit.shard, async_op=True)

    with pytest.raises(RankFailed, match="a gather needs 48 bytes, and its row has 10"):
        three.run(show.zero.carefully, gathered)


def test_gradients_that_are_left_until_the_step_are_counted_and_leave_once(lesson, three):
    class Late(lesson["Stage2"]):
        def after_backward(self, k):
            pass

        def step(self):
            lesson["Stage1"].step(self)

    class Twice(Late):
        after_backward = lesson["Stage2"].after_backward

    count = len(list(training.GPT(lesson["config"]).parameters()))
    assert three.run(show.zero.late_gradients, lesson["train"], Late) == [count] * 3
    assert three.run(show.zero.late_gradients, lesson["train"], lesson["Stage2"]) == [0] * 3
    with pytest.raises(RankFailed, match="have already left"):
        three.run(show.zero.late_gradients, lesson["train"], Twice)
