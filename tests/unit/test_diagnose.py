"""Reports of hangs, and where calls diverge, on outcomes made by hand."""

import re

import pytest

from manyranks.measure.calls import RECENT, Call
from manyranks.measure.divergence import first_divergence
from manyranks.measure.location import Place
from manyranks.world.faults.diagnose import hang_report, last_seen, ranks_text
from manyranks.world.faults.outcome import Outcome
from manyranks.world.rank.reply import Failure, Reply
from manyranks.world.rank.watch import Whereabouts

ALL_WAIT = "the ranks wait for each other and nothing moves: a deadlock"
SOME_WAIT = "nothing moves any more: ranks wait for what will not come"


def call(op, size=4000, ranks=(0, 1), peer=None, sequence=0, dtype="float32", line=9, group="default", tag=0) -> Call:
    return Call(op, size, group, ranks, peer, sequence, dtype, False, 0.0, where=Place("/home/ada/train.py", line), tag=tag)


def said(op, *args, where="train.py, line 9", **kwargs) -> Call:
    """A call as `first_divergence` gets it: its place readable already."""
    made = call(op, *args, **kwargs)
    made.where = where
    return made


def waiting(blocked: Call, recent: list[Call] | None = None) -> Whereabouts:
    return Whereabouts(True, blocked.where, blocked, 1, 0.0, (0, 0), [blocked] if recent is None else recent)


def in_function(name: str | None, line: int) -> Whereabouts:
    return Whereabouts(True, Place("/home/ada/train.py", line), name, 0, 0.0, (0, 0), [])


def returned(*recent: Call) -> tuple:
    return Reply(recent=list(recent)), []


def deadlock(**whereabouts) -> Outcome:
    seen = {int(name.removeprefix("rank")): there for name, there in whereabouts.items()}
    return Outcome(tuple(seen), deadlock=True, whereabouts=seen)


def sentences(outcome: Outcome) -> list[str]:
    """The lines of the report on who waits for whom."""
    head, *lines = hang_report(outcome, 300.0).split("\n\n")[0].splitlines()
    assert head == (ALL_WAIT if len(outcome.missing) == len(outcome.ranks) else SOME_WAIT)
    return [line for line in lines if not line.startswith("the calls diverge")]


def test_all_reduce_against_recv_is_one_sentence_and_said_to_diverge():
    outcome = deadlock(rank0=waiting(call("all_reduce")), rank1=waiting(call("recv", 16, peer=0, line=12)))
    assert "the calls diverge: rank 0 issued all_reduce #0 of 4,000 bytes" in hang_report(outcome, 300.0)
    assert sentences(outcome) == [
        "rank 0 waits in all_reduce #0 of 4,000 bytes (train.py, line 9) for rank 1, "
        "which waits in recv #0 of 16 bytes from rank 0 (train.py, line 12)"
    ]


def test_a_cycle_of_three_recvs_is_one_sentence():
    a, b, c = (call("recv", 16, ranks=(0, 1, 2), peer=(r + 1) % 3, line=r) for r in range(3))
    assert sentences(deadlock(rank0=waiting(a), rank1=waiting(b), rank2=waiting(c))) == [
        "rank 0 waits in recv #0 of 16 bytes from rank 1 (train.py, line 0), "
        "which waits in recv #0 of 16 bytes from rank 2 (train.py, line 1), "
        "which waits in recv #0 of 16 bytes from rank 0 (train.py, line 2)"
    ]


def test_two_cycles_are_two_sentences():
    ops = ("recv", "recv", "send", "send")
    seen = {f"rank{r}": waiting(call(op, 16, ranks=(0, 1, 2, 3), peer=r ^ 1)) for r, op in enumerate(ops)}
    assert [line.partition(" waits")[0] for line in sentences(deadlock(**seen))] == ["rank 0", "rank 2"]


def test_a_member_that_has_returned_is_the_one_a_collective_waits_for():
    last = call("all_reduce", ranks=(0, 1, 2), sequence=1)
    first = call("all_reduce", ranks=(0, 1, 2), line=8)
    seen = {rank: waiting(last, [first, last]) for rank in (0, 1)}
    outcome = Outcome((0, 1, 2), replies={2: returned(first)}, deadlock=True, whereabouts=seen)
    assert sentences(outcome) == [
        f"rank {rank} waits in all_reduce #1 of 4,000 bytes (train.py, line 9) for rank 2, which has returned"
        for rank in (0, 1)
    ]
    assert re.search(r"the calls diverge: rank 0 issued all_reduce #1 .*, rank 2 .*\b1 collective", hang_report(outcome, 300.0))
    assert last_seen(outcome)[2] == "had returned"


def test_a_rank_that_has_returned_is_named_before_one_that_waits_elsewhere():
    alone, lost = call("all_reduce", ranks=(0, 1, 2)), call("recv", 16, ranks=(0, 1, 2), peer=2, line=12)
    outcome = Outcome((0, 1, 2), {2: returned()}, deadlock=True, whereabouts={0: waiting(alone), 1: waiting(lost)})
    assert [line.endswith("which has returned") for line in sentences(outcome)] == [True, True]


def test_a_rank_that_does_not_run_the_cell_is_named_as_such():
    seen = {rank: waiting(call("barrier", 0, ranks=(0, 1, 2), dtype="")) for rank in (0, 2)}
    outcome = Outcome((0, 2), deadlock=True, whereabouts=seen)
    assert sentences(outcome) == [
        f"rank {rank} waits in barrier #0 (train.py, line 9) for rank 1, which does not run this cell" for rank in (0, 2)
    ]
    assert "diverge" not in hang_report(outcome, 300.0)


def test_a_rank_that_computes_is_said_to_run():
    outcome = Outcome((0, 1), late=True, whereabouts={0: waiting(call("recv", 16, peer=1)), 1: in_function(None, 33)})
    report = hang_report(outcome, 2.5)
    assert report.startswith("the run was not over after 2.5 s; World(..., timeout=...) sets the limit")
    assert "from rank 1 (train.py, line 9), which is running train.py, line 33" in report


def test_a_rank_that_does_not_answer_is_placed_if_it_can_be():
    outcome = Outcome((0, 1), late=True, whereabouts={0: waiting(call("recv", 16, peer=1)), 1: None})
    assert "which did not answer: its process is stopped" in hang_report(outcome, 1.0)
    outcome.faults[1] = 'Current thread 0x1 (most recent call first):\n  File "/home/ada/train.py", line 5 in work\n'
    assert "which is in code that holds the interpreter, at train.py, line 5" in hang_report(outcome, 1.0)


def test_a_function_without_a_call_is_named():
    outcome = deadlock(rank0=in_function("monitored_barrier", 4))
    assert sentences(outcome) == ["rank 0 waits in torch.distributed's monitored_barrier (train.py, line 4)"]


def test_a_recv_from_any_rank_blames_none():
    outcome = deadlock(rank0=waiting(call("recv", 16)))
    assert sentences(outcome) == ["rank 0 waits in recv #0 of 16 bytes from any rank (train.py, line 9)"]


def test_a_group_of_its_own_is_named():
    alone = call("all_gather", ranks=(1, 3), group="pp", sequence=2)
    elsewhere = call("all_gather", ranks=(1, 3), group="tp", sequence=2, line=10)
    assert (
        "all_gather #2 of 4,000 bytes in group pp (train.py, line 9) for rank 3"
        in sentences(deadlock(rank1=waiting(alone), rank3=waiting(elsewhere)))[0]
    )


def test_a_rank_that_died_is_not_said_to_have_returned():
    outcome = Outcome((0, 1), deaths={1: -9}, deadlock=True, whereabouts={0: waiting(call("recv", 16, peer=1))})
    assert sentences(outcome)[0].endswith("which has died")


def test_states_say_what_every_rank_did():
    failure = Failure("ValueError", "no", [], None, "ValueError: no", 0.0)
    seen = {0: waiting(call("all_reduce", ranks=(0, 1, 2, 3))), 3: in_function(None, 5)}
    outcome = Outcome((0, 1, 2, 3), {1: returned(), 2: (Reply(failure=failure), [])}, whereabouts=seen)
    assert last_seen(outcome) == {
        0: "waited in all_reduce #0 of 4,000 bytes (train.py, line 9)",
        1: "had returned",
        2: "had raised",
        3: "was running train.py, line 5",
    }


def test_the_table_has_a_row_for_every_rank():
    seen = {0: waiting(call("all_reduce", ranks=(0, 1, 2))), 1: waiting(call("recv", 16, peer=0, line=12))}
    outcome = Outcome((0, 1, 2), {2: returned()}, deadlock=True, whereabouts=seen)
    assert hang_report(outcome, 300.0).split("\n\n")[1].splitlines() == [
        "rank  in             group    peer  where",
        "0     all_reduce #0  default        train.py, line 9",
        "1     recv #0        default  0     train.py, line 12",
        "2     had returned",
    ]


@pytest.mark.parametrize(
    ("ranks", "size", "text"),
    [
        ([2], 4, "rank 2"),
        ([0, 1], 4, "ranks 0 and 1"),
        ([0, 1, 3], 4, "ranks 0, 1 and 3"),
        ([0, 1, 2], 3, "all 3 ranks"),
        ([0], 1, "rank 0"),
    ],
)
def test_ranks_are_listed_in_words(ranks, size, text):
    assert ranks_text(ranks, size) == text


EQUAL = [said("all_reduce"), said("broadcast", peer=0, sequence=1), said("barrier", 0, sequence=2, dtype="")]
TP, DP, PAIR = said("all_reduce", group="tp"), said("all_gather", group="dp"), said("all_reduce", ranks=(0, 2))
TAGGED = [said("send", 4, peer=1, tag=1), said("send", 8, peer=1), said("send", 16, peer=1, sequence=1)]
FORWARDED = [said("recv", 16, peer=0, sequence=i) for i in range(10)]
FORWARDED += [said("send", 16, ranks=(0, 1, 2), peer=2, sequence=i) for i in range(RECENT - 10)]
MATCH = {
    "equal calls": {0: EQUAL, 1: EQUAL},
    "no calls": {0: [], 1: []},
    "no ranks": {},
    "sizes may differ in all_to_all": {0: [said("all_to_all", 40)], 1: [said("all_to_all", 80)]},
    "and in scatter": {0: [said("scatter", 80, peer=0)], 1: [said("scatter", 0, peer=0)]},
    "each group counts for itself": {0: [TP, DP], 1: [DP, TP]},
    "a rank outside the group is not missed": {0: [PAIR], 1: [], 2: [PAIR]},
    "nor one outside the cell": {0: [said("all_reduce")]},
    "messages by their number in the pair": {
        0: [said("send", 16 * (i + 1), peer=1, sequence=i) for i in range(3)],
        1: [said("recv", 16 * (i + 1), peer=0, sequence=i) for i in range(3)],
    },
    "in both directions": {r: [said("send", 16 << r, peer=1 - r), said("recv", 32 >> r, peer=1 - r)] for r in (0, 1)},
    "collectives that only fell out of the recent calls": {
        0: [said("barrier", 0, dtype=""), *(said("send", 16, peer=1, sequence=i) for i in range(10))],
        1: FORWARDED,
    },
    "with tags in another order": {
        0: TAGGED,
        1: [said("recv", 8, peer=0), said("recv", 16, peer=0, sequence=1), said("recv", 4, peer=0, tag=1)],
    },
    "a recv from any rank may take the first of two": {0: TAGGED[1:], 1: [said("recv", 8), said("recv", 16, peer=0)]},
}


@pytest.mark.parametrize("calls", MATCH.values(), ids=MATCH)
def test_calls_that_do_not_diverge(calls):
    assert first_divergence(calls) is None


HERE, THERE = "(train.py, line 9)", "(train.py, line 12)"
DIVERGE = [
    (
        [said("all_reduce")],
        [said("broadcast", peer=0, where="train.py, line 12")],
        f"rank 0's call is all_reduce #0 of 4,000 bytes of float32 {HERE}, "
        f"rank 1's is broadcast #0 of 4,000 bytes with root 0 of float32 {THERE}",
    ),
    *(
        ([said(op, 4000)], [said(op, 8000)], f"{op} #0 of 4,000 bytes of float32 {HERE}, rank 1's is {op} #0 of 8,000 bytes")
        for op in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
    ),
    ([said("all_reduce")], [said("all_reduce", dtype="int32")], f"of float32 {HERE}, rank 1's is .* of int32"),
    ([said("broadcast", peer=0)], [said("broadcast", peer=1)], "with root 0 of .* with root 1 of"),
    (
        [said("all_reduce"), said("all_reduce", sequence=1)],
        [said("all_reduce")],
        rf"^rank 0 issued all_reduce #1 of 4,000 bytes of float32 {HERE}, rank 1 .*\b1 collective",
    ),
    (
        [said("all_reduce"), said("all_reduce", 8, sequence=1), said("barrier", 0, sequence=2)],
        [said("all_reduce"), said("all_reduce", 12, sequence=1), said("all_gather", 0, sequence=2)],
        "#1",
    ),
    (
        [said("send", 16, peer=1)],
        [said("recv", 32, peer=0, where="train.py, line 12")],
        f"rank 0's call is send #0 of 16 bytes to rank 1 {HERE}, rank 1's is recv #0 of 32 bytes from rank 0 {THERE}",
    ),
    ([said("all_reduce", 4, where="")], [said("all_reduce", 8, where="")], "of float32, rank 1's is .* of float32$"),
]


@pytest.mark.parametrize(("one", "other", "text"), DIVERGE)
def test_the_first_divergence_is_told(one, other, text):
    pattern = text.replace("(", r"\(").replace(")", r"\)")
    assert re.search(pattern, first_divergence({0: one, 1: other}))
