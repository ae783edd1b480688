"""Tables that a learner's function gives: read on the rank, sent back as tensors, and here a Schedule again."""

from collections.abc import Callable, Iterable
from itertools import islice
from numbers import Integral

import torch

from manyranks.grade.journal import Stopped
from manyranks.grade.pipeline import ready
from manyranks.grade.verdict import Verdict
from manyranks.parallel.pipeline.actions import KINDS, Action, Schedule
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.verify import verify
from manyranks.timeline import replay


def asked(function: Callable, call: str, arguments: tuple, form: str, most: int) -> list:
    """What the function returns, as a list of so many at most. Raises Stopped where it is none; form: what it should be."""
    with ready.refused():
        return listed(function(*arguments), call, form, most)


def listed(table: Iterable, call: str, form: str, most: int) -> list:
    """Its items, so many at most; they may be made now. Raises Stopped for what has none, or more."""
    if isinstance(table, (str, bytes, dict)):
        raise Stopped(f"{call} returned a {type(table).__name__}", form)
    if not hasattr(table, "__iter__"):
        raise Stopped(f"{call} returned {table!r:.60}", form)
    found = list(islice(table, most + 1))
    if len(found) > most:
        raise Stopped(f"{call} returned more than {most} items", form)
    return found


def encoded(table: list, call: str, fields: int, form: str) -> torch.Tensor:
    """[actions, fields], the kinds as numbers. Raises Stopped for what is no action; form: of one."""
    return torch.tensor([_numbers(item, call, fields, form) for item in table], dtype=torch.int64).view(-1, fields)


def _numbers(item, call: str, fields: int, form: str) -> list[int]:
    is_row = isinstance(item, (tuple, list)) and len(item) == fields
    if not is_row or not isinstance(item[0], str) or not all(map(_is_number, item[1:])):
        raise Stopped(f"{call} has {item!r:.60} among its actions", form)
    if item[0] not in KINDS:
        raise Stopped(f"{call} has an action of kind {item[0]!r:.20}", form)
    return [KINDS.index(item[0]), *map(int, item[1:])]


def _is_number(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(value) < 1 << 31


def schedule(name: str, ranks: list[torch.Tensor], m: int, placement: tuple[int, ...]) -> Schedule:
    """Of the ranks' tables. Where an action names no stage, it is the rank's."""
    rows = tuple(tuple(_action(row, rank) for row in table.tolist()) for rank, table in enumerate(ranks))
    return Schedule(name, m, placement, rows)


def _action(row: list[int], rank: int) -> Action:
    kind, *stage, microbatch = row
    return Action(KINDS[kind], *(stage or [rank]), microbatch)


def verified(schedule: Schedule, memory: int | None = None) -> str:
    """Why the schedule cannot run, with the cell of the table; empty where it can."""
    try:
        verify(schedule, memory)
    except ValueError as error:
        return str(error)
    return ""


def waited(schedule: Schedule, times: Times) -> float:
    """The bubble on the virtual clock, in seconds."""
    return round(bubble(replay(program(schedule), times)), 6)


def batches(count: int) -> str:
    """ "1 micro-batch", "2 micro-batches"."""
    return f"{count} micro-batch{'es' * (count != 1)}"


def why_not(problem: str, advice: dict[str, str]) -> Verdict:
    """The verdict on a table that cannot run; advice: hints, by words of the problem."""
    return Verdict(False, problem, next((hint for words, hint in advice.items() if words in problem), ""))


def table_of(table: tuple[Action, ...], most: int = 14) -> str:
    """ "F0 F1 F2 B0 …"."""
    cells = [f"{action.kind}{action.microbatch}" for action in table[:most]]
    return " ".join(cells + ["…"] * (len(table) > most))
