"""What the tasks of this exercise have in common that are judged by their tables."""

from dataclasses import dataclass
from typing import ClassVar

from manyranks.grade.scripted import ScriptTask

_EACH = "each micro-batch, from 0 to m − 1, has each of its actions once on each stage"
ADVICE = {
    "is missing": f"{_EACH}: where the forwards end, the backwards of those in flight remain",
    "is done twice": _EACH,
    "no such micro-batch": f"{_EACH}; with few micro-batches, the warm-up has no more than there are",
    "no such stage": "with v stages a rank, stages are counted from 0 to v·p − 1",
    "is not this rank's": "stage s is on rank s % p: with p = 2 and v = 2, rank 0 has the stages 0 and 2, rank 1 has 1 and 3",
    "which it needs": "a backward needs its own forward, and a W its own I, before it in the same rank's table",
    "first sends": "micro-batches cross a boundary in one order: each rank takes them as its neighbour gives them",
    "deadlock:": "each of these ranks waits for what another one does later; the first rank warms up with most forwards",
    "the cap is": "an F makes one activation more, and the W (or B) of its micro-batch gives it back: wait with an F for a W",
}


@dataclass(frozen=True)
class TableTask(ScriptTask):
    """Runs on one rank: a table is a pure function's."""

    sizes: ClassVar[tuple[int, ...]] = (1,)
    part: ClassVar[bool] = True
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"a loop does not end", "a table is finite: count down what is left to do, and end when nothing is"),
    )
