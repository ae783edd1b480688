"""When ranks waited, and when the last rank came to what they waited for."""

from collections.abc import Iterator

from manyranks.measure.budget import Wait
from manyranks.measure.calls import Call
from manyranks.world.counted.programs import key_of
from manyranks.world.rank.recording import Recording


def waits_of(calls: dict[int, list[Call]], recordings: dict[int, Recording]) -> dict[int, list[Wait]]:
    """Each rank's waits, in order. One for which it is not known what was waited for is for all collectives under way; of a
    receive from any rank it is not known who had not come, so that nobody counts as late."""
    came: dict[tuple, float] = {}
    for rank, issued in calls.items():
        for call in issued:
            key = key_of(call, rank)
            came[key] = max(came.get(key, call.started), call.started)
    return {rank: list(_waits(rank, calls[rank], recording, came)) for rank, recording in recordings.items()}


def _waits(rank: int, issued: list[Call], recording: Recording, came: dict[tuple, float]) -> Iterator[Wait]:
    under_way: dict[int, Call] = {}
    for event in recording.journal:
        if not event.waits:
            under_way[event.number] = issued[event.number]
            continue
        if event.number is None:
            waited = [call for call in under_way.values() if call.op not in ("send", "recv")]
        else:
            waited = [issued[event.number]]
        for call in waited:
            under_way.pop(call.number, None)
        yield Wait(event.started, event.finished, max((came[key_of(call, rank)] for call in waited), default=event.started))
