"""world.waits: what a wait was for, and when the last rank had come to that."""

from manyranks.measure.calls import Call, Event
from manyranks.world.counted.programs import waits_of
from manyranks.world.rank.recording import Recording

ALL = (0, 1)


def collective(number: int, started: float, sequence: int = 0, group: str = "default") -> Call:
    return Call("all_reduce", 8, group, ALL, None, sequence, "float32", True, started, number=number)


def message(number: int, op: str, peer: int | None, started: float, sequence: int = 0) -> Call:
    return Call(op, 8, "default", ALL, peer, sequence, "float32", True, started, number=number)


def waits(*ranks: tuple[list[Call], list[tuple[int | None, float, float]]]) -> dict[int, list[tuple[float, float, float]]]:
    """Waits of ranks' calls, all made before the waits (call, started, finished)."""
    recordings = {}
    for rank, (calls, waited) in enumerate(ranks):
        journal = [Event(False, call.number, call.started, call.started, 0, 0) for call in calls]
        journal += [Event(True, number, started, finished, 0, 0) for number, started, finished in waited]
        recordings[rank] = Recording(0.0, 100.0, calls, journal)
    found = waits_of({rank: calls for rank, (calls, _) in enumerate(ranks)}, recordings)
    return {rank: [tuple(wait) for wait in waited] for rank, waited in found.items()}


def test_a_collective_is_complete_when_its_last_rank_has_called_it():
    early = [collective(0, 1.0), collective(1, 2.0, sequence=1)], [(0, 3.0, 8.0), (1, 8.0, 9.0)]
    late = [collective(0, 7.0), collective(1, 7.5, sequence=1)], [(0, 7.6, 8.0)]
    assert waits(early, late) == {0: [(3.0, 8.0, 7.0), (8.0, 9.0, 7.5)], 1: [(7.6, 8.0, 7.0)]}


def test_groups_do_not_mix():
    first = [collective(0, 1.0, group="a"), collective(1, 1.5, group="b")], [(0, 2.0, 3.0), (1, 3.0, 9.0)]
    second = [collective(0, 8.0, group="b"), collective(1, 1.2, group="a")], []
    assert waits(first, second)[0] == [(2.0, 3.0, 1.2), (3.0, 9.0, 8.0)]


def test_a_message_has_two_ends_and_those_of_a_pair_go_in_order():
    sender = (
        [message(0, "send", 1, 1.0), message(1, "send", 1, 2.0, sequence=1), message(2, "recv", 1, 3.0)],
        [(0, 3.0, 6.0), (1, 6.0, 7.0), (2, 7.0, 9.0)],
    )
    receiver = [message(0, "recv", 0, 5.0), message(1, "recv", 0, 6.5, sequence=1), message(2, "send", 0, 8.0)], []
    assert waits(sender, receiver)[0] == [(3.0, 6.0, 5.0), (6.0, 7.0, 6.5), (7.0, 9.0, 8.0)]


def test_a_wait_that_does_not_say_for_what_is_for_all_collectives_under_way_and_for_them_alone():
    calls = [collective(0, 1.0), collective(1, 2.0, sequence=1), message(2, "send", 1, 3.0)]
    others = [collective(0, 4.0), collective(1, 6.0, sequence=1), message(2, "recv", 0, 50.0)]
    assert waits((calls, [(None, 3.0, 7.0), (None, 8.0, 9.0)]), (others, []))[0] == [(3.0, 7.0, 6.0), (8.0, 9.0, 8.0)]
    assert waits((calls, [(1, 3.0, 7.0), (None, 7.0, 9.0)]), (others, []))[0] == [(3.0, 7.0, 6.0), (7.0, 9.0, 4.0)]


def test_for_a_receive_from_any_rank_nobody_counts_as_late():
    assert waits(([message(0, "recv", None, 2.0)], [(0, 3.0, 9.0)]), ([message(0, "send", 0, 8.0)], []))[0] == [(3.0, 9.0, 2.0)]
