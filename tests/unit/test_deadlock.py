"""Ranks that wait for ever, on calls made by hand; no process is started."""

from itertools import pairwise

import pytest

from manyranks.measure.calls import Call, Recorder
from manyranks.measure.location import Place
from manyranks.world import collect
from manyranks.world.faults.deadlock import Case, Wait, waits
from manyranks.world.faults.outcome import Outcome
from manyranks.world.rank.reply import Reply
from manyranks.world.rank.watch import BRIEFLY, DETAILS, Processor, Whereabouts

PLACE = Place("/home/ada/train.py", 9)
ALL = (0, 1, 2)
GROUPS = {"default": ALL, "pair": (0, 1), "rest": (1, 2)}


def calls_of(text: str) -> list[Call]:
    """ "send 1; recv 2 tag 5; all_reduce in pair; broadcast 0; all_gather of 8", in the order a rank issues them in."""
    calls, counts = [], {}
    for words in (one.split() for one in text.split(";") if one.strip()):
        named = dict(pairwise(words))
        op, group, tag = words[0], named.get("in", "default"), int(named.get("tag", 0))
        peer = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
        key = (group, op, peer, tag) if op in ("send", "recv") else group
        sequence = counts[key] = counts.get(key, -1) + 1
        size = int(named.get("of", 4))
        call = Call(op, size, group, GROUPS[group], peer, sequence, "float32", False, 0.0, where=PLACE, tag=tag)
        call.number = len(calls)
        calls.append(call)
    return calls


def issued(calls: list[Call]) -> dict:
    counts = {}
    for call in calls:
        key = (call.group, call.op, call.peer, call.tag) if call.op in ("send", "recv") else call.group
        counts[key] = call.sequence + 1
    return {"counts": counts, "members": {call.group: call.ranks for call in calls}, "recent": calls}


def looked(calls: list[Call], blocked, certain: bool = True, **more) -> Whereabouts:
    seen = Whereabouts(True, PLACE, blocked, len(calls), 0.0, (0, 0), certain=certain, **issued(calls))
    return Whereabouts(**vars(seen) | more)


def case(**ranks: str) -> tuple[dict[int, Whereabouts], dict[int, Reply]]:
    """The calls that each rank has issued. It waits in the last one, unless other words stand before a colon."""
    looks, ended = {}, {}
    for name, text in ranks.items():
        rank, (how, _, rest) = int(name.removeprefix("rank")), text.rpartition(":")
        calls = calls_of(rest)
        if how == "returned":
            ended[rank] = Reply(**issued(calls))
        elif how == "runs":
            looks[rank] = looked(calls, None)
        elif how.startswith("in "):
            looks[rank] = looked(calls, how.removeprefix("in "), certain=False)
        elif how.startswith("first "):  # it waits for an earlier one, and has gone on after that one was issued
            looks[rank] = looked(calls, calls[int(how.removeprefix("first "))])
        else:
            looks[rank] = looked(calls, calls[-1], certain=not how, issues=how == "issues")
    return looks, ended


FOR_EVER, UNCLEAR, MET, NOT = Wait.FOR_EVER, Wait.UNCLEAR, Wait.MET, Wait.NOT


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # What a busy machine once made of two healthy notebooks
        pytest.param(
            {
                "rank0": "recv 3; recv 3; recv 3; recv 3; recv 3; recv 3",
                "rank1": "returned:",
                "rank2": "send 3; send 3; send 3; send 3; send 3; send 3",
                "rank3": "send 0; send 0; send 0; send 0; send 0; recv 2; recv 2; recv 2; recv 2; recv 2",
            },
            {0: FOR_EVER, 2: FOR_EVER, 3: MET},
            id="lab 03: rank 2's message has come, rank 3 hasn't noticed",
        ),
        pytest.param(
            {"rank0": "in init_device_mesh:", "rank1": "in init_device_mesh:", "rank2": "runs:"},
            {0: UNCLEAR, 1: UNCLEAR, 2: NOT},
            id="chapter 08: a rank runs",
        ),
        # Messages
        ({"rank0": "recv 1", "rank1": "recv 2", "rank2": "recv 0"}, {0: FOR_EVER, 1: FOR_EVER, 2: FOR_EVER}),
        ({"rank0": "send 1", "rank1": "send 0"}, {0: FOR_EVER, 1: FOR_EVER}),
        ({"rank0": "send 1", "rank1": "recv 0"}, {0: MET, 1: MET}),
        ({"rank0": "send 1; recv 1", "rank1": "recv 0"}, {0: FOR_EVER, 1: MET}),
        ({"rank0": "first 1: recv 1; send 1", "rank1": "send 0"}, {0: FOR_EVER, 1: MET}),  # an irecv is under way
        ({"rank0": "send 1 tag 1", "rank1": "recv 0 tag 2"}, {0: FOR_EVER, 1: FOR_EVER}),
        ({"rank0": "send 1 tag 1", "rank1": "recv 0 tag 1"}, {0: MET, 1: MET}),
        ({"rank0": "recv 1", "rank1": "returned: send 0"}, {0: MET}),  # an isend that outlives its function
        ({"rank0": "recv 1; recv 1", "rank1": "returned: send 0"}, {0: FOR_EVER}),
        ({"rank0": "recv 1 in pair", "rank1": "send 0"}, {0: FOR_EVER, 1: FOR_EVER}),
        ({"rank0": "send 1 of 4", "rank1": "recv 0 of 8"}, {0: MET, 1: MET}),  # gloo fills a part of it
        ({"rank0": "recv", "rank1": "returned:"}, {0: UNCLEAR}),
        ({"rank0": "send 1", "rank1": "recv"}, {0: MET, 1: UNCLEAR}),
        ({"rank0": "recv 2"}, {0: FOR_EVER}),  # rank 2 doesn't run the cell
        # Collectives
        ({f"rank{r}": "all_reduce" for r in ALL}, dict.fromkeys(ALL, MET)),
        ({"rank0": "barrier", "rank1": "barrier", "rank2": "returned:"}, {0: FOR_EVER, 1: FOR_EVER}),
        ({"rank0": "barrier", "rank1": "barrier", "rank2": "runs:"}, {0: FOR_EVER, 1: FOR_EVER, 2: NOT}),
        ({"rank0": "all_reduce", "rank1": "recv 0", "rank2": "all_reduce"}, dict.fromkeys(ALL, FOR_EVER)),
        ({"rank0": "all_reduce", "rank1": "all_reduce", "rank2": "barrier"}, dict.fromkeys(ALL, FOR_EVER)),
        ({f"rank{r}": f"all_reduce of {4 * r}" for r in ALL}, dict.fromkeys(ALL, UNCLEAR)),  # gloo aborts, or hangs
        ({"rank0": "all_reduce", "rank1": "all_reduce", "rank2": "reduce_scatter"}, dict.fromkeys(ALL, UNCLEAR)),
        (
            {"rank0": "all_reduce in pair; barrier", "rank1": "all_reduce in rest", "rank2": "barrier"},
            dict.fromkeys(ALL, FOR_EVER),
        ),
        (
            {"rank0": "all_reduce in pair", "rank1": "first 0: all_reduce in pair; send 2", "rank2": "barrier"},
            {0: MET, 1: MET, 2: FOR_EVER},
        ),
        # Some members of these may be done before others have come
        ({"rank0": "broadcast 0", "rank1": "broadcast 0", "rank2": "recv 1"}, {0: UNCLEAR, 1: UNCLEAR, 2: FOR_EVER}),
        ({"rank0": "recv 1", "rank1": "broadcast 0", "rank2": "broadcast 0"}, dict.fromkeys(ALL, FOR_EVER)),
        ({"rank0": "reduce 0", "rank1": "reduce 0", "rank2": "returned:"}, {0: FOR_EVER, 1: UNCLEAR}),
        ({"rank0": "gather 0", "rank1": "recv 0", "rank2": "recv 1"}, dict.fromkeys(ALL, FOR_EVER)),
        # What isn't certain
        ({f"rank{r}": "maybe: barrier" if r else "all_reduce" for r in ALL}, {0: FOR_EVER, 1: UNCLEAR, 2: UNCLEAR}),
        ({"rank0": "issues: all_reduce", "rank1": "recv 0", "rank2": "recv 0"}, {0: MET, 1: FOR_EVER, 2: FOR_EVER}),
        ({"rank0": "in new_group:", "rank1": "returned:", "rank2": "returned:"}, {0: UNCLEAR}),
    ],
)
def test_how_ranks_wait(ranks, expected):
    assert waits(*case(**ranks)) == expected


def test_a_call_that_is_no_longer_remembered_is_taken_for_the_same():
    looks, ended = case(rank0="barrier", rank1="all_reduce; send 2", rank2="barrier")
    assert waits(looks, ended)[0] is FOR_EVER
    looks[1].recent = looks[1].recent[1:]
    assert waits(looks, ended)[0] is MET


def test_two_groups_of_one_name_prove_nothing():
    looks, ended = case(rank0="barrier", rank1="barrier", rank2="returned:")
    looks[1].members = {"default": ()}
    assert waits(looks, ended) == {0: UNCLEAR, 1: UNCLEAR}


def test_the_debugger_waits_for_its_reader_alone():
    looks, ended = case(rank0="recv 1", rank1="recv 0")
    looks[1].debugged = True
    assert waits(looks, ended)[1] is NOT


CIRCLE = {"rank0": "recv 1", "rank1": "recv 0"}
FUNCTION = {"rank0": "in new_group:", "rank1": "recv 0"}
MATCHING = {"rank0": "send 1", "rank1": "recv 0"}


def seconds_until_proved(ranks: dict[str, str], change=lambda seen, k: None, end: int = 200) -> float | None:
    """Rounds follow half a second after each other. change: what is different in the k-th one."""
    found = Case()
    for k in range(end):
        looks, ended = case(**ranks)
        for seen in looks.values():
            seen.processor = Processor("S", k, [], 0.0)
            change(seen, k)
        if found.proved(looks, k / 2, ended):
            return k / 2
    return None


def without_a_word(seen: Whereabouts, k: int) -> None:
    seen.processor = None


def delayed(seen: Whereabouts, k: int) -> None:
    seen.processor = Processor("R", k, [(7, k)], 0.1 * k)


def starved(seen: Whereabouts, k: int) -> None:
    seen.processor = Processor("R", 0, [], 0.0)


def a_thread_starves(seen: Whereabouts, k: int) -> None:
    seen.processor = Processor("S", k, [(7, 0)], 0.0)


def a_thread_gets_a_turn_now_and_then(seen: Whereabouts, k: int) -> None:
    seen.processor = Processor("S", k, [(7, k // 6)], 0.0)


def on_a_disk(seen: Whereabouts, k: int) -> None:
    seen.processor = Processor("D", k, [], 0.0)


def moving(seen: Whereabouts, k: int) -> None:
    seen.moved = k, 0


def python_goes_on(seen: Whereabouts, k: int) -> None:
    seen.at = k


def computing(seen: Whereabouts, k: int) -> None:
    seen.cpu = 0.2 * k


@pytest.mark.parametrize("change", [without_a_word, delayed, starved, computing])
def test_calls_that_do_not_match_are_proof_however_busy_the_machine_is(change):
    assert seconds_until_proved(CIRCLE, change) == 0.5


def test_where_calls_cannot_tell_it_takes_longer_on_a_busy_machine():
    found = {change: seconds_until_proved(FUNCTION, change) for change in (lambda seen, k: None, delayed, without_a_word)}
    assert list(found.values()) == [1.5, 10.0, 10.0]


def test_calls_that_match_are_a_deadlock_only_if_nothing_moves_for_long():
    assert seconds_until_proved(MATCHING) == 10.0
    assert seconds_until_proved(MATCHING, delayed) == 25.0


@pytest.mark.parametrize("change", [starved, a_thread_starves, on_a_disk, moving, python_goes_on, computing])
@pytest.mark.parametrize("ranks", [FUNCTION, MATCHING])
def test_ranks_that_have_work_or_get_on_are_no_deadlock(ranks, change):
    assert seconds_until_proved(ranks, change) is None


def test_each_thread_must_have_had_a_few_turns():
    assert seconds_until_proved(FUNCTION, a_thread_gets_a_turn_now_and_then) == 9.0


def test_a_movement_begins_the_time_anew():
    def once(seen: Whereabouts, k: int) -> None:
        seen.moved = (k >= 10, 0)

    assert seconds_until_proved(MATCHING, once) == 15.0


def test_calls_have_to_be_the_same_twice():
    def issuing_more(seen: Whereabouts, k: int) -> None:
        seen.issued = min(k, 7)

    assert seconds_until_proved(CIRCLE, issuing_more) == 4.0


def test_a_rank_that_runs_is_no_deadlock():
    assert seconds_until_proved({"rank0": "recv 1", "rank1": "runs:"}) is None


def test_a_recorder_knows_when_only_peers_can_end_a_wait():
    recorder, (call,) = Recorder(), calls_of("recv 1")
    assert not recorder.waits_for_peers(call)
    recorder.waiting, recorder._endless = call, True
    assert recorder.waits_for_peers(call)
    recorder.broken = True
    assert not recorder.waits_for_peers(call)


class SlowTeam:
    """Ranks that answer late: rank 1 only when it is asked for its answer for the fourth time."""

    def __init__(self):
        self.questions, self._polled = [], 0

    def ask(self, ranks: list[int], question: bytes) -> None:
        self.questions.append(question)
        self._polled = 0

    def answers(self, ranks: list[int], seconds: float) -> dict[int, Whereabouts]:
        self._polled += 1
        looks, _ = case(**CIRCLE)
        return {rank: looks[rank] for rank in ranks if rank == 0 or self._polled == 4}


def test_a_round_of_looks_lasts_until_busy_ranks_have_answered(monkeypatch):
    now, team, outcome = [0.0], SlowTeam(), Outcome((0, 1))
    monkeypatch.setattr(collect.time, "monotonic", lambda: now[0])
    looks, polls = collect._Looks(team), 0
    while not looks.deadlocked(outcome):
        polls += 1
        now[0] += 0.1
        assert polls < 100
    assert team.questions == [BRIEFLY, DETAILS, DETAILS]  # and none was asked again
    assert outcome.whereabouts.keys() == {0, 1}
