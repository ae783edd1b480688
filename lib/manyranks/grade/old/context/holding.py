"""What a rank holds while blocks come by: keys and values, and results that are not merged yet."""

from typing import TYPE_CHECKING

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.context import given, travel
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.old.context.task import ContextTask

_PARTS = 3  # of one call of merge
_RESULTS = 2  # of all the queries, when a new block is begun
_BLOCKS = (
    "at most two blocks of K and V, the current and the next, and one result: let go of what has been computed with, and merge "
    "as blocks come; a copy that is made only to be sent is a third block"
)
_LONG_LISTS = "merge as blocks come: N parts of a result are as long as the whole sequence"
_UNMERGED = "merge each part into the result before the next block is computed: N parts are as long as the whole sequence"


def _merged(event: Event) -> tuple[int, int]:
    """Parts of a call of merge, and the queries of each; 0 where the event is another one."""
    if not event.what.startswith(given.MERGED):
        return 0, 0
    parts, queries = map(int, event.what.removeprefix(given.MERGED).split())
    return parts, queries


def _unmerged(events: list[Event]) -> int:
    """Queries of the results that were there when a new block was begun, at most: what attend gave, less what was merged."""
    there, most, source = 0, 0, None
    for event in events:
        parts, queries = _merged(event)
        there -= max(parts - 1, 0) * queries
        if mark := travel.attended(event):
            most, source = most if mark.source == source else max(most, there), mark.source
            there += mark.queries
    return most


def memory(task: "ContextTask", trial: Trial) -> Verdict:
    """No more than two blocks, and results of the rank's own queries only."""
    limit = trial.case.must.limit
    for rank, seen in enumerate(trial.answers):
        parts = max((parts for parts, _ in map(_merged, seen.events)), default=0)
        if parts > _PARTS:
            return Verdict(False, f"rank {rank} merged {parts} parts in one call; {_PARTS} are enough", _LONG_LISTS)
        if parts and (most := _unmerged(seen.events)) > _RESULTS * trial.case.must.tokens:
            found = f"rank {rank} had results of {most} queries, not merged, when it began with a block"
            return Verdict(False, f"{found}; it has {trial.case.must.tokens} queries", _UNMERGED)
        if limit and (most := max(seen.held, default=0) - seen.held[0]) > limit:
            there, here = sizes(most, 2 * trial.case.must.bytes)
            return Verdict(False, f"rank {rank} held {there} when it computed; two blocks of K and V have {here}", _BLOCKS)
    return Verdict(True)
