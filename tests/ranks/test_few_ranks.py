"""An explorer's "Measure it": a small group of real ranks counts what theory says, and is gone afterwards."""

import math
import multiprocessing
import threading
import time
from dataclasses import replace

import pytest

from manyranks import World, few_ranks, show
from manyranks.few_ranks import ranks
from manyranks.measure.compared import Compared, SmallRun
from manyranks.show import page

# chapter -> values of its explorer, beside the defaults
CHAPTERS = {
    "hardware": [{"n": 4}, {"n": 1024, "size": 1}],
    "collectives": [{"algorithm": "tree", "n": 6}, {"operation": "gather", "algorithm": "tree", "n": 5}],
    "data_parallel": [{"dp": 1}, {"dp": 1024, "overlap": False}],
    "zero": [{}, {"stage": "data parallelism", "dp": 2}, {"stage": "ZeRO-3", "dp": 4}, {"stage": "HSDP", "k": 2, "dp": 8}],
    "checkpointing": [{}, {"strategy": "keep everything"}, {"strategy": "optimal"}],
    "pipeline": [{"first": "zb-v", "second": "interleaved", "v": 3}, {"pp": 1, "first": "gpipe", "m": 3}],
    "tensor": [{}, {"tp": 1}, {"tp": 64, "sequence_parallel": False}],
    "context": [{"cp": 1, "layout": "zigzag"}, {"cp": 4, "variant": "ring-ulysses"}, {"cp": 4, "variant": "all-gather"}],
    "expert": [{"ep": 1}, {"ep": 4, "imbalance": 2, "limit": 1}],
    "mfu": [{}, {"microbatch": 2}],
    "kernels": [{"stride": 8}, {"itemsize": 4, "tile": 32, "stride": 1}],
    "failures": [{}, {"gpus": 131072, "stall": 600}, {"gpus": 4, "interval": 86400}],
    "nd": [{"cp": 8}, {"tp": 1, "pp": 1, "zero": 3}, {"schedule": "zb-v", "zero": 0}],
}


@pytest.mark.lenient
@pytest.mark.few(8)
@pytest.mark.parametrize(("chapter", "change"), [(name, change) for name, each in CHAPTERS.items() for change in each])
def test_ranks_count_what_theory_says(chapter, change):
    explorer = getattr(show, chapter).explorer(measure=getattr(few_ranks, chapter))
    heard = []
    counted = getattr(few_ranks, chapter)(explorer.set(**change).values, lambda share, words: heard.append(share))
    for row in counted.rows:
        if row.unit == "seconds":  # a machine that does other things, too, takes any time
            assert min(row[1:3]) > 0, row
        else:
            assert row.measured == pytest.approx(row.theory, rel={"bytes": 0.02, "flops": 1e-9}.get(row.unit, 0.25)), row
    assert heard == sorted(heard)
    assert all(0 < share < 1 for share in heard)
    assert not multiprocessing.active_children()


def test_it_can_be_stopped_while_ranks_run():
    def waits(values, world, say):
        world(2).run(time.sleep, 60)

    runs, raised = ranks.OnRanks(waits), []

    def run():
        try:
            runs({})
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(1)
    runs.stop()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert "closed" in str(raised[0])


def test_stopped_before_ranks_are_there_it_starts_none():
    def stops(values, world, say):
        runs.stop()
        world(2).run(print, "never")

    runs = ranks.OnRanks(stops)
    with pytest.raises(RuntimeError, match="stopped"):
        runs({})


def test_bytes_that_a_system_does_not_count_are_not_theory_s():
    with World(2, backend="gloo") as world:
        counted = replace(world.measure(int), sent_bytes=None)
    assert all(map(math.isnan, ranks.bytes_sent(counted).values()))
    shown = page.measured(SmallRun("here", (Compared("sent", 8.0, math.nan),)), page.Said())
    assert "not counted on this system" in shown
    assert "theory 8 B" in shown
