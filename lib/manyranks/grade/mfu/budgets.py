"""The task time_budget: where each rank's step went, from its spans and the moments at which all ranks came to each call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch.distributed as dist

from manyranks.grade.mfu import amounts, spent
from manyranks.grade.mfu.amounts import SECONDS, aspect
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.spent import NETWORK, OPERATORS, Case
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.mfu.trace import (
    CALLS,
    MATMUL,
    OTHER,
    PARTS,
    PYTHON,
    UNIT,
    Op,
    Python,
    Start,
    Wait,
    recorded,
)
from manyranks.grade.mfu.traffic import one_message
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

CALL = "time_budget(spans, arrived, step, zero)"
_LEFT = "what is wrong in the other parts is missing here, or too much: mend them first"
_NOT_ALL = "one number for each call is enough: the moment at which this rank came to it"
_UNEXPLAINED = (
    "each moment of the step belongs to the innermost span that covers it; of a wait, what is before the last rank's moment is "
    'waiting, the rest communication; "calls" and what is not covered is python'
)


def _run(case: Case, function: Callable, watch) -> Tensors:
    trace = case.traces[dist.get_rank()]
    with own():
        found = function(list(trace.spans), list(trace.arrived), trace.step, trace.zero)
    return amounts.named(found, PARTS, CALL)


@cache
def cases(n: int) -> list[Scene]:
    """Calls that are waited for at once; calls that run while the rank computes."""
    zeros = [UNIT * (11 + 14 * (3 * rank % (n + 1))) for rank in range(n)]
    begin = [8 + 3 * rank for rank in range(n)]
    plans = {"calls that are waited for at once": _plain, "asynchronous calls": _hidden}
    made = {what: recorded([plan(rank) for rank in range(n)], begin, zeros) for what, plan in plans.items()}
    return [_scene(Case(n, *both, what)) for what, both in made.items()]


def _plain(rank: int) -> tuple:
    """Operators in operators, three deep, and a call in one; the ranks come at different times, each is the last one once."""
    slow = [40, 90, 65, 110][rank]
    linear = Op("linear", CALLS, 3, (Op("addmm", MATMUL, slow, (Op("copy_", OTHER, 4),), 1),), 2)
    layer = Op("layer", CALLS, 7, (linear, Python(4), Op("norm", OTHER, 9, (Op("mean", OTHER, 5),), 6)), 1)
    scores = Op("scores", OTHER, 5, (Op("bmm", MATMUL, 30 - 7 * (rank % 3)), Op("view", CALLS, 2)), 1)
    attention = Op("attention", OTHER, 6, (scores, Op("softmax", OTHER, 8)), 10)
    waits = (Start(0, 25), Wait(0), Python(3), layer, Start(1, 14), Op("sync", CALLS, 2, (Wait(1),), 1))
    late = 55 if rank == 0 else 5 + 2 * rank
    return (Python(11), layer, *waits, Op("update", OTHER, late), attention, Start(2, 31), Wait(2), Python(9))


def _hidden(rank: int) -> tuple:
    """Of three calls one ends behind what is computed, and for one a rank comes late; the last one is waited for first."""
    late = [5, 190, 220, 33][rank]
    product = Op("mm", MATMUL, [60, 70, 60, 100][rank])
    block = Op(
        "block", CALLS, 4, (Op("matmul", CALLS, 1, (product,), 2), Op("attention", OTHER, 12, (Op("bmm", MATMUL, 5),), 2)), 3
    )
    first = (Op("embedding", OTHER, late), Start(0, 20), block, Start(1, 150), Op("mm", MATMUL, 25))
    second = (Op("backward", CALLS, 2, (Wait(0), block, Start(2, 40), Python(6)), 2), Op("flatten", OTHER, 3, (Wait(2),), 2))
    return (Python(7), *first, Python(2), *second, Op("add_", OTHER, 15 + 4 * rank), Wait(1), Python(13))


def _scene(case: Case) -> Scene:
    right, wrong = [amounts.exact(own) for own in case.parts], partial(spent.wrong, case)
    return Scene(case.n, partial(_run, case), right, lambda: amounts.mistakes(right, wrong()), case, f"with {case.what}")


def _adds_up(task: "TimeBudget", trial: Trial) -> Verdict:
    """The parts are the step."""
    for rank, seen in enumerate(trial.answers):
        begun, ended = trial.case.must.traces[rank].step
        parts = {name: seen.tensors[name].item() for name in PARTS}
        below = [f"rank {rank}: {name} is {SECONDS(part)}" for name, part in parts.items() if part < -UNIT / 1000]
        if below:
            return Verdict(False, below[0], "no part is below 0: what is too much in one of the others is missing here")
        if not abs(sum(parts.values()) - (ended - begun)) < UNIT / 1000:
            found = f"rank {rank}: the parts add up to {SECONDS(sum(parts.values()))}, the step took {SECONDS(ended - begun)}"
            return Verdict(False, found, "each moment of the step belongs to one part: none twice, none to nobody")
    return Verdict(True)


@dataclass(frozen=True)
class TimeBudget(MfuTask):
    measured: ClassVar[str] = "right is"
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("the operators' time is right", 0.4, OPERATORS, SECONDS),
        aspect("communication and waiting are right", 0.25, NETWORK, SECONDS),
        aspect("Python has what is left", 0.05, (PYTHON,), SECONDS),
        Aspect("the parts add up to the step", 0.1, _adds_up, each_world=True),
        one_message("sends the moments of its calls, once", 0.2, _NOT_ALL),
    )

    def otherwise(self, trial: Trial, name: str) -> str:
        """Python's part is wrong where another one is."""
        pairs = [(seen.tensors, right) for seen, right in zip(trial.answers, trial.case.expected, strict=True)]
        others = all(amounts.alike(got[other], right[other]) for got, right in pairs for other in PARTS[:-1])
        return "" if others or name != PYTHON else _LEFT
