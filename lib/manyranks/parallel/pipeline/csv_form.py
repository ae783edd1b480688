"""Schedules in the CSV form of torch.distributed.pipelining: a rank a row.

A cell is stage, action and micro-batch: 2F0, 2B0, 2I0, 2W0. A Pair is (0F7;7B3)OVERLAP_F_B.
PyTorch leaves cells empty where a rank waits; its "compute_comms" form also has messages
and the gathering of sharded parameters (2SEND_F0, 2RECV_F0, 2UNSHARD, 2REDUCE_GRAD),
and from 2.15 on waits for them (2WAIT_SEND_F0). All of these are left out when read: here
who runs a schedule sees to them.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from manyranks.parallel.pipeline.actions import Action, Pair, Schedule, singles

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")
_OTHER = re.compile(r"\d+((SEND|RECV|WAIT_SEND)_[FB]\d+|(UN|RE)SHARD|(WAIT_)?REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """The text of PyTorch's "compute_only" form; write it to a file with newline=""."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(_written, items) for items in schedule.ranks)
    return text.getvalue()


def from_csv(text: str, name: str = "imported") -> Schedule:
    """The schedule of such a text. Raises ValueError as `from_rows`."""
    return from_rows(csv.reader(io.StringIO(text, newline="")), name)


def from_rows(rows: Iterable[Iterable[object]], name: str = "imported") -> Schedule:
    """The schedule of rows of cells: strings, None, or PyTorch's actions.

    Those print as cells, so `from_rows(order[rank] for rank in sorted(order))` reads the
    pipeline_order of a PyTorch schedule. Micro-batches and the rank of each stage are those
    that the cells show. Raises ValueError for a cell that is none, a stage on two ranks,
    and a stage that is on no rank; the rest is verify's.
    """
    ranks = []
    for rank, row in enumerate(rows):
        cells = [_read(cell, rank, position) for position, cell in enumerate(row)]
        ranks.append(tuple(filter(None, cells)))
    m = 1 + max((a.microbatch for row in ranks for a in _actions(row)), default=-1)
    return Schedule(name, m, _placement(ranks), tuple(ranks))


def _placement(ranks: list[tuple[Action | Pair, ...]]) -> tuple[int, ...]:
    """The rank of each stage."""
    owner: dict[int, int] = {}
    for rank, items in enumerate(ranks):
        for stage in {action.stage for action in _actions(items)}:
            if (other := owner.setdefault(stage, rank)) != rank:
                both = f"rank {other} and rank {rank}"
                raise ValueError(f"stage {stage} is on {both}; a stage has one rank")
    if not owner:
        raise ValueError("there is no action in any row; give a row of cells for each rank")
    if missing := set(range(max(owner))) - set(owner):
        gap = f"no rank has stage {min(missing)}"
        raise ValueError(f"{gap}; stages are counted from 0, without gaps")
    return tuple(owner[stage] for stage in range(len(owner)))


def _actions(items: tuple[Action | Pair, ...]) -> Iterator[Action]:
    return chain.from_iterable(map(singles, items))


def _written(item: Action | Pair) -> str:
    if isinstance(item, Pair):
        return f"({_written(item.forward)};{_written(item.backward)})OVERLAP_F_B"
    return f"{item.stage}{item.kind}{item.microbatch}"


def _read(cell: object, rank: int, position: int) -> Action | Pair | None:
    """The cell's action; None for an empty one and for what is no action of a Schedule."""
    text = "" if cell is None else str(cell).strip()
    if not text or _OTHER.fullmatch(text):
        return None
    if match := _CELL.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(kind, int(stage), int(microbatch))
    if match := _PAIR.fullmatch(text):
        both = [_read(part, rank, position) for part in match.groups()]
        if all(isinstance(action, Action) for action in both):
            return Pair(*both)
    form = "stage, F, B, I or W, and micro-batch, as in 2F0, or (0F7;7B3)OVERLAP_F_B"
    where = f"row {rank}, cell {position}"
    raise ValueError(f"{where}: {text!r} is no action; it must be {form}")
