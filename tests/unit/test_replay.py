"""Replay: the virtual clock, against hand-worked schedules and a simulator that knows no events."""

import os
import subprocess
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.timeline import (
    Collective,
    Compute,
    Deadlock,
    Durations,
    Program,
    Recv,
    Send,
    Span,
    Timeline,
    Transfer,
    Wait,
    Work,
    replay,
)
from manyranks.timeline.spans import COMMUNICATION, COMPUTE

F, B = Compute("F", "F"), Compute("B", "B")
BOTH = pytest.mark.parametrize("sharing", [False, True])


# Pipelines -----------------------------------------------------------------------------------------------------------


def gpipe(p: int, m: int) -> Program:
    return pipeline(p, lambda stage: [("F", i) for i in range(m)] + [("B", i) for i in range(m)])


def one_f_one_b(p: int, m: int) -> Program:
    def order(stage: int) -> list[tuple[str, int]]:
        ahead = min(m, p - 1 - stage)
        steady = [action for i in range(m - ahead) for action in (("F", ahead + i), ("B", i))]
        return [("F", i) for i in range(ahead)] + steady + [("B", i) for i in range(m - ahead, m)]

    return pipeline(p, order)


def pipeline(p: int, order) -> Program:
    """F goes up the stages and B down; sends are asynchronous, receives block."""
    return Program(tuple(tuple(i for action in order(stage) for i in actions(p, stage, *action)) for stage in range(p)))


def actions(p: int, stage: int, kind: str, microbatch: int):
    before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
    if 0 <= before < p:
        yield Recv(before, 8, kind)
    yield Compute(f"{kind}{microbatch}", kind)
    if 0 <= after < p:
        yield Send(after, 8, kind, handle=(kind, microbatch))


@BOTH
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 4), (4, 9), (5, 3)])
@pytest.mark.parametrize("times", [{"F": 1.0, "B": 1.0}, {"F": 1.0, "B": 2.0}])
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m_plus_p_minus_1(build, p, m, times, sharing):
    timeline = replay(build(p, m), Durations(times), sharing)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.utilization(rank) == pytest.approx(m / (m + p - 1))


@BOTH
def test_a_1f1b_schedule_with_latency_worked_by_hand(sharing):
    timeline = replay(one_f_one_b(2, 2), Durations({"F": 1.0, "B": 1.0}, latency=0.5), sharing)
    times = {rank: [(s.name, s.started, s.finished) for s in timeline.of(rank, COMPUTE)] for rank in (0, 1)}
    assert times[0] == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 5), ("B1", 6, 7)]
    assert times[1] == [("F0", 1.5, 2.5), ("B0", 2.5, 3.5), ("F1", 3.5, 4.5), ("B1", 4.5, 5.5)]


# Messages ------------------------------------------------------------------------------------------------------------


def seconds(*ranks, sharing: bool = False, costs=None) -> Timeline:
    """Replays with F of 1 s, B of 2 s and links of 1 byte/s without latency."""
    return replay(Program(ranks), costs or Durations({"F": 1.0, "B": 2.0}, bandwidth=1.0), sharing)


def ends(timeline: Timeline, name: str) -> list[tuple[float, float]]:
    return [(s.started, s.finished) for s in timeline.spans if s.name == name]


@BOTH
def test_a_message_takes_latency_and_bytes_over_bandwidth_on_both_ranks(sharing):
    timeline = replay(Program(((F, Send(1, 6)), (Recv(0, 6), F))), Durations({"F": 1.0}, latency=0.5, bandwidth=2.0), sharing)
    assert timeline.of(0) == [Span(0, COMPUTE, "F", 0, 1), Span(0, COMMUNICATION, "send → 1", 1, 4.5)]
    assert timeline.of(1) == [Span(1, COMMUNICATION, "recv ← 0", 1, 4.5), Span(1, COMPUTE, "F", 4.5, 5.5)]


@BOTH
def test_an_eager_message_travels_before_its_recv_is_posted(sharing):
    timeline = seconds((Send(1, 2, handle="h"),), (B, B, Recv(0, 2), F), sharing=sharing)
    assert ends(timeline, "recv ← 0") == [(0, 2)]
    assert timeline.makespan == 5


@BOTH
def test_a_rendezvous_starts_when_both_sides_are_there(sharing):
    timeline = seconds((Send(1, 2, handle="h", rendezvous=True), F, Wait("h"), F), (B, B, Recv(0, 2), F), sharing=sharing)
    assert ends(timeline, "send → 1") == ends(timeline, "recv ← 0") == [(4, 6)]
    assert sorted(ends(timeline, "F")) == [(0, 1), (6, 7), (6, 7)]
    early = seconds((B, Send(1, 2, rendezvous=True)), (Recv(0, 2, handle="h"), Wait("h"), F), sharing=sharing)
    assert ends(early, "send → 1") == [(2, 4)]


@BOTH
def test_a_blocking_send_holds_the_rank_and_one_with_a_handle_does_not(sharing):
    receiver = (Recv(0, 3), Recv(0, 3))
    assert ends(seconds((Send(1, 3), F, Send(1, 3)), receiver, sharing=sharing), "F") == [(3, 4)]
    assert ends(seconds((Send(1, 3, handle=1), F, Send(1, 3)), receiver, sharing=sharing), "F") == [(0, 1)]


@BOTH
def test_messages_of_a_directed_pair_go_one_after_another_and_those_of_two_pairs_together(sharing):
    timeline = seconds(
        (Send(1, 2, "a", handle=1), Send(1, 2, "b", handle=2), Send(2, 2, handle=3)),
        (Recv(0, 2, "b"), Recv(0, 2, "a")),
        (Recv(0, 2),),
        sharing=sharing,
    )
    assert sorted(ends(timeline, "send → 1")) == [(0, 2), (2, 4)]
    assert ends(timeline, "send → 2") == [(0, 2)]


@BOTH
def test_a_rendezvous_nobody_receives_yet_keeps_back_the_messages_behind_it(sharing):
    sender = (Send(1, 2, "a", handle=1, rendezvous=True), Send(1, 1, "b", handle=2))
    timeline = seconds(sender, (F, Recv(0, 2, "a", handle=1), Recv(0, 1, "b")), sharing=sharing)
    assert sorted(ends(timeline, "send → 1")) == [(1, 3), (3, 4)]


@BOTH
def test_messages_with_one_tag_match_in_order(sharing):
    timeline = seconds(
        (Send(1, 1), Send(1, 5)), (Recv(0, 1, handle="x"), Recv(0, 5, handle="y"), Wait("x"), F), sharing=sharing
    )
    assert ends(timeline, "F") == [(1, 2)]


# Collectives ---------------------------------------------------------------------------------------------------------


@BOTH
def test_a_collective_starts_when_its_last_rank_arrives_and_ends_on_all_at_once(sharing):
    op = Collective("all_reduce", 4, (0, 1, 2), name="gradients")
    timeline = seconds((op, F), (F, op), (B, op), sharing=sharing)
    assert [s for s in timeline.spans if s.kind == COMMUNICATION] == [
        Span(r, COMMUNICATION, "gradients", 2, 6) for r in (0, 1, 2)
    ]
    assert [(s.rank, s.name) for s in timeline.critical_path()] == [(2, "B"), (2, "gradients"), (0, "F")]


@BOTH
def test_collectives_of_a_group_go_one_after_another_and_those_of_two_groups_together(sharing):
    a, b = Collective("all_gather", 4, (0, 1), handle=1), Collective("all_reduce", 3, (0, 1), handle=2)
    other = Collective("all_to_all", 5, (1, 0), handle=3)
    timeline = seconds((a, b, other), (a, b, other), sharing=sharing)
    assert ends(timeline, "all_gather") == [(0, 4)] * 2
    assert ends(timeline, "all_reduce") == [(4, 7)] * 2
    assert ends(timeline, "all_to_all") == [(0, 5)] * 2


@BOTH
@pytest.mark.parametrize(("size", "exposed"), [(3, 0), (4, 0), (7, 3)])
def test_an_asynchronous_all_reduce_hides_under_compute_and_a_wait_exposes_the_rest(size, exposed, sharing):
    rank = (B, Collective("all_reduce", size, (0, 1), handle="grad"), B, B, Wait("grad"), F)
    timeline = seconds(rank, rank, sharing=sharing)
    assert timeline.exposed_communication(0) == timeline.exposed_communication(1) == exposed
    assert timeline.makespan == 7 + exposed


# Programs that cannot be run -----------------------------------------------------------------------------------------


@BOTH
def test_two_synchronous_sends_at_each_other_are_a_deadlock_that_is_reported_by_name(sharing):
    ranks = [(F, Send(1 - rank, 8, "x", rendezvous=True), Recv(1 - rank, 8, "x")) for rank in (0, 1)]
    with pytest.raises(Deadlock) as caught:
        seconds(*ranks, (F,), sharing=sharing)
    _, zero, one = str(caught.value).splitlines()
    assert "rank 0, instruction 1: Send(to=1" in zero
    assert "waits for rank 1 to receive" in zero
    assert "rank 1, instruction 1: Send(to=0" in one
    assert "waits for rank 0 to receive" in one


ALL = Collective("all_reduce", 8, (0, 1), handle="h")
STUCK = {
    "rank 1, instruction 0: Recv.*waits for rank 0 .which has ended. to send": [(), (Recv(0, 8),)],
    "rank 0, instruction 1: Wait.*waits for rank 1 .which has ended. to come": [(ALL, Wait("h")), (F,)],
    r"rank 0, instruction 1: Send\(.*the messages before it.*waits for rank 1 to receive": [
        (Send(1, 8, handle=1, rendezvous=True), Send(1, 8, "late")),
        (Recv(0, 8, "late"), Recv(0, 8)),
    ],
    "Collective.*never takes place: it waits for rank 1": [(ALL, F), ()],
    "message 0 from rank 0 to rank 1 with tag 5 never takes place: .*rank 0": [(), (Recv(0, 8, 5, handle="h"),)],
    "message 0 from rank 0 to rank 1 with tag 0 never .*rank 1": [(Send(1, 8, handle="h", rendezvous=True),), ()],
}


@BOTH
@pytest.mark.parametrize("message", STUCK)
def test_what_can_never_happen_is_reported(message, sharing):
    with pytest.raises(Deadlock, match=message):
        seconds(*STUCK[message], sharing=sharing)


BAD = {
    r"rank 0, instruction 1: Send\(to=2.*another rank, from 0 to 1": [(F, Send(2, 8)), ()],
    r"Send\(to=0.*another rank": [(Send(0, 8),), ()],
    r"Recv\(source=-1.*another rank": [(Recv(-1, 8),), ()],
    r"Send\(to=1, bytes=-8.*not negative": [(Send(1, -8),), (Recv(0, -8),)],
    r"rank 1, instruction 2: Recv\(.*bytes=9.*rank 0, instruction 1: Send\(.*bytes=8": [
        (Send(1, 8), Send(1, 8)),
        (Recv(0, 8), F, Recv(0, 9)),
    ],
    r"Collective\(.*bytes=8.*rank 0 must be in": [(Collective("all_reduce", 8, (1,)),), ()],
    r"Collective\(.*different ranks, from 0 to 1": [(Collective("all_reduce", 8, (0, 2)),), ()],
    r"Collective\(.*\(0, 0\).*different ranks": [(Collective("all_reduce", 8, (0, 0)),), ()],
    r"Collective\(op='all_gather'.*Collective\(op='all_reduce'": [
        (Collective("all_gather", 8, (0, 1)),),
        (Collective("all_reduce", 8, (0, 1)),),
    ],
    r"Collective\(.*bytes=[89].*Collective\(.*bytes=[89]": [(ALL,), (ALL._replace(bytes=9),)],
    r"Collective\(.*bytes=nan.*finite": [(Collective("all_reduce", float("nan"), (0, 1)),), ()],
    r"rank 0, instruction 2: Wait\(handle='hh'\).*there are 'h'": [(Send(1, 8, handle="h"), F, Wait("hh")), (Recv(0, 8),)],
    r"Compute\(name='G0', work='FF'\).*'F'": [(Compute("G0", "FF"),)],
    "rank 0, instruction 0: 'F'.* must be a Compute": [("F",)],
}


@BOTH
@pytest.mark.parametrize("message", BAD)
def test_a_bad_instruction_is_shown(message, sharing):
    with pytest.raises(ValueError, match=message) as caught:
        seconds(*BAD[message], sharing=sharing)
    assert not isinstance(caught.value, Deadlock)


@pytest.mark.parametrize("cost", [-1.0, float("inf"), float("nan"), None])
def test_costs_must_be_finite_and_not_negative(cost):
    with pytest.raises(ValueError, match=r"instruction 0: Compute.*finite"):
        replay(Program(((F,),)), Durations({"F": cost}))
    with pytest.raises(ValueError, match=r"instruction 0: Send.*finite"):
        replay(Program(((Send(1, 8),), ())), Durations({}, latency=cost))


@pytest.mark.parametrize("channels", [(("x", 0.0),), (("x", float("nan")),), (("x", 1.0), ("x", 2.0))])
def test_a_channel_needs_a_capacity_and_is_taken_once(channels):
    with pytest.raises(ValueError, match=r"Send\(.*channel"):
        replay(Program(((Send(1, 8),), ())), Network(routes={(0, 1): channels}))


# Any program ---------------------------------------------------------------------------------------------------------


@dataclass
class Network:
    """Work is its seconds. routes: pair or group -> channels; else each has its own of 1 byte/s, slowed as `slower` says."""

    routes: dict = field(default_factory=dict)
    slower: dict = field(default_factory=dict)
    latency: float = 0.25

    def compute(self, rank, work):
        return work.flops if isinstance(work, Work) else work

    def message(self, source, destination, bytes):
        return self.transfer((source, destination), bytes)

    def collective(self, op, bytes, ranks):
        return self.transfer(("group", *ranks), bytes)

    def transfer(self, key, bytes):
        return Transfer(self.latency, bytes, self.routes.get(key) or ((key, 1.0 / self.slower.get(key, 1)),))


PAIRS = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda pair: (pair[0], sum(pair) % 4))
GROUPS = st.sampled_from([(0, 1), (1, 2, 3), (0, 1, 2, 3), (3, 0)])
DOINGS = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("send"), PAIRS, st.sampled_from("ab"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("recv"), PAIRS, st.sampled_from("ab"), st.booleans()),
    st.tuples(st.just("rendezvous"), PAIRS, st.integers(0, 5), st.booleans(), st.booleans()),
    st.tuples(st.just("collective"), GROUPS, st.integers(0, 5), st.lists(st.booleans(), min_size=4, max_size=4)),
    st.tuples(st.just("wait"), st.integers(0, 3), st.integers(0, 20)),
)


def program_of(doings) -> Program:
    """A program of four ranks. A blocking call needs only what was written before or with it, so nothing deadlocks."""
    ranks: list[list] = [[] for _ in range(4)]
    on_the_way = defaultdict(deque)  # bytes of the messages without a Recv

    def handle(rank: int, asynchronous: bool):
        return ("h", len(ranks[rank])) if asynchronous else None

    for what, where, *details in doings:
        if what == "compute":
            ranks[where].append(Compute(f"c{len(ranks[where])}", details[0] / 4))
        elif what == "send":
            tag, size, asynchronous = details
            ranks[where[0]].append(Send(where[1], size, tag, handle(where[0], asynchronous)))
            on_the_way[where, tag].append(size)
        elif what == "recv" and on_the_way[where, details[0]]:
            tag, asynchronous = details
            size = on_the_way[where, tag].popleft()
            ranks[where[1]].append(Recv(where[0], size, tag, handle(where[1], asynchronous)))
        elif what == "rendezvous":
            size, here, there = details
            ranks[where[0]].append(Send(where[1], size, "r", handle(where[0], here), rendezvous=True))
            ranks[where[1]].append(Recv(where[0], size, "r", handle(where[1], there)))
        elif what == "collective":
            for rank in where:
                ranks[rank].append(Collective("all_reduce", details[0], where, handle(rank, details[1][rank])))
        elif what == "wait":
            known = [i.handle for i in ranks[where] if getattr(i, "handle", None) is not None]
            ranks[where] += [Wait(known[details[0] % len(known)])] if known else []
    return Program(tuple(map(tuple, ranks)))


PROGRAMS = st.lists(DOINGS, max_size=40).map(program_of)


def by_fixpoint(program: Program, costs) -> list[Span]:
    """The spans that take time, by repeating what must hold for every start and end until nothing changes."""
    places = [(rank, i) for rank, of_rank in enumerate(program.ranks) for i in range(len(of_rank))]
    what = {place: program.ranks[place[0]][place[1]] for place in places}
    of_kind = {kind: [place for place in places if type(what[place]) is kind] for kind in (Send, Recv, Collective)}
    takers, before = {}, {}  # exchange, named by the place of its Send or its first rank -> places it needs; exchange before it
    exchange_of = {}

    def line_up(exchanges):
        for earlier, later in pairwise(exchanges):
            before[later] = earlier

    for pair in {(rank, what[rank, i].to) for rank, i in of_kind[Send]}:
        sends = [place for place in of_kind[Send] if (place[0], what[place].to) == pair]
        recvs = [place for place in of_kind[Recv] if (what[place].source, place[0]) == pair]
        line_up(sends)
        for tag in {what[place].tag for place in sends}:
            tagged = [[place for place in side if what[place].tag == tag] for side in (sends, recvs)]
            exchange_of |= {place: place for place in tagged[0]} | dict(zip(tagged[1], tagged[0], strict=False))
            recv_of = dict(zip(*tagged, strict=False))
            takers |= {send: [send, recv_of[send]] if what[send].rendezvous else [send] for send in tagged[0]}
    for group in {what[place].group for place in of_kind[Collective]}:
        by_rank = [[p for p in of_kind[Collective] if p[0] == rank and what[p].group == group] for rank in group]
        line_up(by_rank[0])
        for together in zip(*by_rank, strict=True):
            takers[together[0]] = list(together)
            exchange_of |= dict.fromkeys(together, together[0])

    def exchange_at(place):
        if type(what[place]) is not Wait:
            return exchange_of[place]
        return exchange_of[
            max(p for p in exchange_of if p[0] == place[0] and p < place and what[p].handle == what[place].handle)
        ]

    def cost(place):
        i = what[place]
        transfer = costs.message(place[0], i.to, i.bytes) if type(i) is Send else costs.collective(i.op, i.bytes, i.group)
        return transfer.seconds

    reached, started, over = (
        dict.fromkeys(keys, 0.0) for keys in (places, takers, takers)
    )  # reached: the end of the one before
    while True:
        earlier = reached.copy(), started.copy(), over.copy()
        for exchange, needed in takers.items():
            started[exchange] = max([reached[p] for p in needed] + [over[before[exchange]] if exchange in before else 0.0])
            over[exchange] = started[exchange] + cost(exchange)
        for rank, i in places:
            instruction, end = what[rank, i], reached[rank, i]
            if type(instruction) is Compute:
                end += costs.compute(rank, instruction.work)
            elif type(instruction) is Wait or instruction.handle is None:
                end = max(end, over[exchange_at((rank, i))])
            if (rank, i + 1) in reached:
                reached[rank, i + 1] = end
        if (reached, started, over) == earlier:
            break
    spans = [
        Span(p[0], COMPUTE, what[p].name, reached[p], reached[p] + costs.compute(p[0], what[p].work))
        for p in places
        if type(what[p]) is Compute
    ]
    for x in takers:
        to = what[x].to if type(what[x]) is Send else None
        names = {x[0]: f"send → {to}", to: f"recv ← {x[0]}"} if to is not None else dict.fromkeys(what[x].group, what[x].op)
        spans += [Span(rank, COMMUNICATION, name, started[x], over[x]) for rank, name in names.items()]
    return sorted(s for s in spans if s.finished > s.started)


@given(PROGRAMS, st.sampled_from([0.0, 0.25]))
def test_replay_agrees_with_a_simulator_that_iterates_to_a_fixpoint(program, latency):
    costs = Network(latency=latency)
    assert sorted(replay(program, costs).spans) == by_fixpoint(program, costs)


@given(PROGRAMS, st.one_of(PAIRS, GROUPS.map(lambda group: ("group", *group))), st.integers(1, 9))
def test_without_sharing_a_slower_link_makes_no_program_faster(program, link, factor):
    assert replay(program, Network(slower={link: factor})).makespan >= replay(program, Network()).makespan


@given(PROGRAMS)
def test_sharing_changes_nothing_where_no_two_transfers_have_a_channel_in_common(program):
    for costs in (Network(), Durations(dict.fromkeys((i / 4 for i in range(6)), 0.1), latency=0.3, bandwidth=0.7)):
        assert sorted(replay(program, costs, sharing=True).spans) == sorted(replay(program, costs).spans)


ONE_SWITCH = {(a, b): (("switch", 1.0),) for a in range(4) for b in range(4)}


@given(PROGRAMS, st.booleans())
def test_the_critical_path_leads_from_zero_to_the_makespan_without_a_gap(program, sharing):
    timeline = replay(program, Network(routes=ONE_SWITCH), sharing)
    path = timeline.critical_path()
    if path:
        assert path[0].started == 0
        assert path[-1].finished == timeline.makespan
    assert all(a.finished == b.started for a, b in pairwise(path))
    assert sum(span.seconds for span in path) == pytest.approx(timeline.makespan)


@given(PROGRAMS, st.booleans())
def test_the_same_program_gives_the_same_timeline(program, sharing):
    first, second = (replay(program, Network(routes=ONE_SWITCH), sharing) for _ in range(2))
    assert (first.spans, first.causes) == (second.spans, second.causes)


def test_the_timeline_does_not_depend_on_the_order_of_hashes():
    code = """
from manyranks.timeline import *
class Costs:
    def compute(self, rank, work): return len(work) / 7
    def message(self, source, destination, bytes): return Transfer(0.1, bytes, (("up", 3.0), (("down", destination), 1.7)))
    def collective(self, op, bytes, ranks): return Transfer(0.1, bytes, (("up", 3.0),))
ranks = [[] for _ in range(5)]
for step in range(12):
    for r in range(5):
        ranks[r] += [Compute("c", "x" * (1 + (r + step) % 3)), Send((r + 1 + step % 4) % 5, 2, tag=str(step), handle=str(step))]
        ranks[r] += [Collective("all_reduce", 3, ((0, 1, 2, 3, 4), (4, 1, 0, 2, 3))[step % 2], handle="c")]
        ranks[r] += [Recv((r - 1 - step % 4) % 5, 2, tag=str(step))]
for sharing in (False, True):
    print(replay(Program(ranks), Costs(), sharing))
"""
    outputs = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, timeout=60)
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


# Sharing -------------------------------------------------------------------------------------------------------------


def test_two_equal_transfers_on_one_channel_take_twice_as_long():
    ranks = (Send(2, 4),), (Send(3, 4),), (Recv(0, 4),), (Recv(1, 4),)
    costs = Network(routes={(0, 2): (("switch", 2.0),), (1, 3): (("switch", 2.0),)}, latency=0.5)
    assert seconds(*ranks, costs=costs).makespan == 2.5
    assert {s.finished for s in seconds(*ranks, costs=costs, sharing=True).spans} == {4.5}


def test_who_comes_later_shares_what_is_left_and_the_first_to_end_makes_room():
    ranks = (Send(2, 4),), (Compute("", 2.0), Send(3, 4)), (Recv(0, 4),), (Recv(1, 4),)
    costs = Network(routes={(0, 2): (("switch", 1.0),), (1, 3): (("switch", 1.0),)}, latency=0)
    timeline = seconds(*ranks, costs=costs, sharing=True)
    assert ends(timeline, "send → 2") == [(0, 6)]  # 2 bytes alone, 2 at half the rate
    assert ends(timeline, "send → 3") == [(2, 8)]  # 2 at half the rate, 2 alone


def test_a_transfer_goes_at_the_least_share_of_its_channels():
    ranks = (Send(3, 6, handle=1), Send(4, 6, handle=2)), (Send(5, 6),), (), (), (), ()
    routes = {(0, 3): (("nic", 2.0), ("a", 0.5)), (0, 4): (("nic", 2.0), ("b", 9.0)), (1, 5): (("b", 9.0),)}
    timeline = seconds(*ranks, costs=Network(routes=routes, latency=0), sharing=True)
    assert ends(timeline, "send → 3") == [(0, 12)]  # its own channel is slower than its half of the NIC
    assert ends(timeline, "send → 4") == [(0, 6)]  # half of the NIC, though the other half is not used up
    assert ends(timeline, "send → 5") == [(0, pytest.approx(6 / 4.5))]


def test_latency_takes_no_share_of_a_channel():
    ranks = (Send(2, 4),), (Compute("", 4.0), Send(3, 4)), (), ()
    costs = Network(routes={(0, 2): (("switch", 1.0),), (1, 3): (("switch", 1.0),)}, latency=1)
    assert {s.finished for s in seconds(*ranks, costs=costs, sharing=True).spans if s.kind == COMMUNICATION} == {5, 9}


def test_with_sharing_a_slower_link_can_make_a_program_faster():
    """Rank 0's message to rank 1 goes out when rank 3 says so. Said later, it no longer gets in the way of rank 2's."""
    ranks = (Recv(3, 1), Send(1, 4)), (Recv(0, 4),), (Send(4, 4),), (Send(0, 1),), (Recv(2, 4), Compute("long", 20.0))
    switch = {(0, 1): (("switch", 1.0),), (2, 4): (("switch", 1.0),)}
    fast, slow = (Network(routes=switch, slower={(3, 0): factor}, latency=0) for factor in (1, 4))
    assert seconds(*ranks, costs=fast, sharing=True).makespan == 27  # 1 byte alone, 3 at half the rate
    assert seconds(*ranks, costs=slow, sharing=True).makespan == 24
    assert seconds(*ranks, costs=fast).makespan == seconds(*ranks, costs=slow).makespan == 24


TRANSFERS = st.tuples(st.integers(0, 8), st.integers(0, 9), st.lists(st.sampled_from("wxyz"), min_size=1, unique=True))


@given(st.lists(TRANSFERS, min_size=1, max_size=6))
def test_the_rates_of_a_shared_channel_add_up_to_the_bytes_that_were_sent(transfers):
    """The timeline says which transfers are under way when; the shares that follow must move every byte in that time."""
    n, capacity, latency = len(transfers), {"w": 0.5, "x": 1.0, "y": 2.0, "z": 3.0}, 0.25
    senders = [(Compute("", start / 4), Send(n + i, size)) for i, (start, size, _) in enumerate(transfers)]
    routes = {(i, n + i): tuple((key, capacity[key]) for key in keys) for i, (_, _, keys) in enumerate(transfers)}
    timeline = seconds(*senders, *[()] * n, costs=Network(routes=routes, latency=latency), sharing=True)
    under_way = {i: (span.started + latency, span.finished) for i in range(n) for span in timeline.of(i, COMMUNICATION)}
    moments = sorted({time for pair in under_way.values() for time in pair})
    moved = dict.fromkeys(range(n), 0.0)
    for start, end in pairwise(moments):
        active = [i for i, (begun, over) in under_way.items() if begun <= start and end <= over]
        users = {key: sum(key in transfers[i][2] for i in active) for key in capacity}
        for i in active:
            moved[i] += (end - start) * min(capacity[key] / users[key] for key in transfers[i][2])
    assert moved == pytest.approx({i: size for i, (_, size, _) in enumerate(transfers)}, abs=1e-9)


def test_one_channel_has_one_capacity():
    routes = {(0, 1): (("switch", 1.0),), (1, 0): (("switch", 2.0),)}
    with pytest.raises(ValueError, match="channel 'switch' has"):
        seconds((Send(1, 4),), (Send(0, 4),), costs=Network(routes=routes), sharing=True)


# Costs ---------------------------------------------------------------------------------------------------------------


def test_compute_is_charged_by_its_work_on_its_rank():
    class Chips(Network):
        def compute(self, rank, work):
            return work.flops / (10, 5)[rank] + work.bytes

    attention = Compute("attention", Work(20, bytes=3))
    timeline = replay(Program(((attention,), (attention,))), Chips())
    assert [timeline.busy(rank) for rank in (0, 1)] == [5, 7]


@BOTH
def test_what_takes_no_time_leaves_no_span_and_does_not_break_the_critical_path(sharing):
    timeline = replay(Program(((F, Send(1, 8)), (Recv(0, 8), Compute("nothing", 0), F))), Durations({"F": 1.0, 0: 0}), sharing)
    assert timeline.spans == (Span(0, COMPUTE, "F", 0, 1), Span(1, COMPUTE, "F", 1, 2))
    assert timeline.critical_path() == list(timeline.spans)


@BOTH
def test_an_empty_program_takes_no_time(sharing):
    for program in (Program(()), Program(((), ()))):
        assert replay(program, Durations({}), sharing) == Timeline(())


def test_the_critical_path_goes_through_what_held_up_the_end():
    timeline = seconds((F, Send(1, 3)), (B, Recv(0, 3), B, Send(2, 1)), (F, Recv(1, 1), F))
    assert [(s.rank, s.name) for s in timeline.critical_path()] == [
        (0, "F"),
        (0, "send → 1"),
        (1, "B"),
        (1, "send → 2"),
        (2, "F"),
    ]
