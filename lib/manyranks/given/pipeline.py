"""Measures tables for the checks of exercise 05_pipeline, which also hand out a stage that knows what is alive."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyranks.given.numbers import EXACT, seed_of, uneven
from manyranks.measure.fingerprints import Fact
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.schedules import Action, Schedule
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.theory import pipeline as theory
from manyranks.timeline import replay

ONE_SECOND = {"F": 1, "I": 1, "W": 1}
WHY, WAITS, EARLY = "why it cannot run", "the seconds that a rank waits", "what comes before an earlier micro-batch's"
HIDDEN = 16


class Case(NamedTuple):
    """A case: p ranks, m micro-batches, v stages a rank, most activations of one, seconds of F, I and W; 0 where not asked."""

    p: int
    m: int
    v: int = 0
    cap: int = 0
    times: dict[str, int] = ONE_SECOND

    def __str__(self) -> str:
        shown = (item for item in self._asdict().items() if item[1] not in (0, ONE_SECOND))
        return "with " + ", ".join(f"{name} = {value}" for name, value in shown)


def facts_of(case: Case, tables: list[list[tuple]]) -> dict:
    """Returns what is judged of the tables of all ranks, None where they cannot run, and their traits."""
    p, v = case.p, case.v or 1
    rows = (tuple(Action(kind, *(stage or [r]), i) for kind, *stage, i in table) for r, table in enumerate(tables))
    schedule, problem = Schedule("the table", case.m, tuple(s % p for s in range(v * p)), tuple(rows)), ""
    try:
        verify(schedule, case.cap or None)
    except ValueError as error:
        problem = str(error).removeprefix("the table, ")
    waits = [None if problem else bubble(replay(program(schedule), Times(**case.times, latency=late))) for late in (0, 0.5)]
    found = {WHY: problem, WAITS: waits[0], f"with messages of 0.5 s, {WAITS}": waits[1]}
    found |= {f"what rank {rank} holds": None if problem else most for rank, most in enumerate(peaks(schedule))}
    found |= {f"trait: {name}": trait for name, trait in _traits(case, tables).items()}
    if not (case.v or case.cap):
        pairs = ((kind, i, j) for table in tables for kind in "FB" for i, j in pairwise(i for one, i in table if one == kind))
        found[EARLY] = next((f"{kind}{i}, of {kind}{j}" for kind, i, j in pairs if i > j), "nothing")
    return found | (_against_papers(case, found[WAITS]) if case.cap else {})


def _traits(case: Case, tables: list[list[tuple]]) -> dict[str, Fact]:
    """Returns traits that tell mistakes from one another."""
    first, last = ("".join(kind for kind, *_ in table) for table in (tables[0], tables[-1]))
    ahead, late = len(first) - len(first.lstrip("F")), last.partition("W")[0].count("I")  # I before the first W
    if case.v:
        back = next((stage for kind, stage, _ in tables[0] if kind == "B"), None)
        return {"stages of rank 0": len({stage for _, stage, _ in tables[0]}), "stage of its first B": back}
    deep = {"one by one": ahead == 1, "as with a cap of p": ahead <= case.p < 2 * case.p - 1 <= case.cap}
    return deep | {"whole B": "B" in last, "early W": late < case.p} if case.cap else {}


def _against_papers(case: Case, waits: float | None) -> dict:
    """Compares a rank's waiting with the waiting in the papers' schedules that keep to this cap."""
    (p, m, _, cap, times), found = case, {}
    for paper, least, enough in (("1F1B", p, "less"), ("ZB-H1", p, "no more"), ("ZB-H2", 2 * p - 1, "no more")):
        if 1 < p <= m and least <= min(cap, m):
            bound = theory.bubble(paper.lower(), p, m, F=times["F"], B=times["I"] + times["W"], W=times["W"])
            good = waits is not None and waits < bound + (-1e-6 if enough == "less" else 1e-6)
            found[f"the waiting of a rank ({paper}: {bound:g} s)"] = enough if good else waits and f"{waits:g} s"
    return found


class Stage(nn.Module):
    """A rank's part of the model, from [b, s, h] to [b, s, h]. For its backward it keeps several times its input.

    computed: "F" with a number that tells its input from others when a micro-batch comes forward, and "B" with that number
    when its gradient arrives. graphs, inputs: how many were alive at most; overwritten: whether an input came where another
    one still lay.
    """

    def __init__(self, *words):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed_of(*words))
            self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, **EXACT), nn.Linear(2 * HIDDEN, HIDDEN, **EXACT)
        self.computed: list[tuple[str, float]] = []
        self.graphs, self.inputs, self.overwritten = 0, 0, False
        self._hidden: list[StorageWeakRef] = []  # alive as long as its graph needs it
        self._inputs: dict[int, tuple[StorageWeakRef, float]] = {}  # where it lies -> which one

    def forward(self, x_BSH: Tensor) -> Tensor:
        name = float((x_BSH.detach() * uneven(x_BSH.shape)).sum())
        self.computed.append(("F", name))
        self._meet(x_BSH, name)
        hidden = torch.tanh(self.up(x_BSH))
        y_BSH = x_BSH + self.down(hidden)
        self._hidden.append(StorageWeakRef(hidden.untyped_storage()))
        del hidden
        self.graphs = max(self.graphs, sum(not ref.expired() for ref in self._hidden))
        if y_BSH.requires_grad:
            y_BSH.register_hook(lambda grad: self.computed.append(("B", name)))
        return y_BSH

    def _meet(self, x_BSH: Tensor, name: float) -> None:
        """Counts the inputs that are alive."""
        place = x_BSH.data_ptr()
        self._inputs = {at: one for at, one in self._inputs.items() if not one[0].expired()}
        self.overwritten |= self._inputs.get(place, (None, name))[1] != name
        self._inputs[place] = StorageWeakRef(x_BSH.untyped_storage()), name
        self.inputs = max(self.inputs, len(self._inputs))


def half_loss_of(y_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """Half of `loss_of`: nobody knows it who does not call it."""
    return loss_of(y_BSH, target_BSH) / 2


def loss_of(y_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """The mean over the micro-batch."""
    return (y_BSH - target_BSH).square().mean()
