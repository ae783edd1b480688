"""Wrong answers to the first and the third task of 05_pipeline: tables of 1F1B, with one stage a rank and with several."""

from tests.grading.zoo.pipeline_right import loops, numbered, steady
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
ONE, LOOPS = "one_f_one_b", "interleaved"
AHEAD = "Rank r warms up with p − 1 − r forwards"


@wrong(ONE, "return a list of pairs, the kind and the micro-batch")
def does_nothing(p, m, rank):
    pass


@wrong(ONE, "F0 of stage 0 is missing")
def returns_an_empty_table(p, m, rank):
    return []


@wrong(ONE, "return a list of pairs, the kind and the micro-batch")
def returns_what_it_was_given(p, m, rank):
    return p, m, rank


@wrong(ONE, "return a list of pairs, the kind and the micro-batch")
def writes_words(p, m, rank):
    return [f"{kind}{i}" for kind, i in steady(p - 1 - rank, m)]


@wrong(ONE, "that is GPipe's memory", right_values=True)
def gpipe(p, m, rank):
    return numbered("F" * m + "B" * m, m)


@wrong(ONE, "rank 0 holds 8 micro-batches; 1F1B holds 4", right_values=True)
def gpipe_with_numbers(p, m, rank):
    return steady(m, m)


@wrong(ONE, "rank 0 holds 1 micro-batch; 1F1B holds 4", right_values=True)
def one_at_a_time(p, m, rank):
    return steady(0, m)


@wrong(ONE, "rank 0 holds 5 micro-batches; 1F1B holds 4", right_values=True)
def warms_up_too_long(p, m, rank):
    return steady(p - rank, m)


@wrong(ONE, "the warm-up here is too short", right_values=True)
def warms_up_too_short(p, m, rank):
    return steady(max(0, p - 2 - rank), m)


@wrong(ONE, "rank 1 holds 4 micro-batches; 1F1B holds 3", right_values=True)
def warms_up_alike(p, m, rank):
    return steady(p - 1, m)


@wrong(ONE, AHEAD)
def counts_ranks_from_below(p, m, rank):
    return steady(rank, m)


@wrong(ONE, "F and B strictly take turns", right_values=True)
def bunches(p, m, rank):
    """Holds what 1F1B holds, and waits longer."""
    return numbered("F" * p + "BBFF" * m, m) if rank == 0 and p > 1 else steady(p - 1 - rank, m)


@wrong(ONE, "with few micro-batches, the warm-up has no more than there are", right_values=True)
def forgets_that_m_may_be_small(p, m, rank):
    ahead = p - 1 - rank
    table = [("F", i) for i in range(ahead)]
    for i in range(m - ahead):
        table += [("F", ahead + i), ("B", i)]
    return table + [("B", i) for i in range(m - ahead, m)]


@wrong(ONE, "one_f_one_b(4, 2, 0) raised AssertionError", right_values=True)
def fails_where_m_is_small(p, m, rank):
    assert m >= p
    return steady(p - 1 - rank, m)


@wrong(ONE, "one_f_one_b(4, 8, 1) raised ValueError: not here")
def fails_on_a_rank(p, m, rank):
    if rank == 1:
        raise ValueError("not here")
    return steady(p - 1 - rank, m)


@wrong(ONE, "one_f_one_b(4, 8, 1) was not over after 2 s")
def never_ends_on_a_rank(p, m, rank):
    while rank == 1:
        pass
    return steady(p - 1 - rank, m)


never_ends_on_a_rank.seconds = 60  # two of processor time, on a busy machine


@wrong(ONE, "where the forwards end, the backwards of those in flight remain")
def forgets_the_end(p, m, rank):
    return steady(p - 1 - rank, m)[: 2 * m - (p - 1 - rank)]


@wrong(ONE, "F8 of stage 0: no such micro-batch; there are 0 to 7")
def counts_from_one(p, m, rank):
    return [(kind, i + 1) for kind, i in steady(p - 1 - rank, m)]


@wrong(ONE, "a backward needs its own forward")
def goes_back_first(p, m, rank):
    return numbered("F" * (p - 1 - rank) + "BF" * m + "B", m)


@wrong(ONE, "takes them as its neighbour gives them")
def goes_back_from_the_newest(p, m, rank):
    table, flying = [], []
    for kind, i in steady(p - 1 - rank, m):
        flying += [i] if kind == "F" else []
        table.append((kind, i if kind == "F" else flying.pop()))
    return table


@wrong(ONE, "with p = 1, m = 2, rank 0, position")
def knows_only_p_4(p, m, rank):
    return steady(3 - rank, m) if p == 4 else steady(max(0, 3 - rank), m)[::-1]


_TABLE = []


@wrong(ONE, "is done twice")
def has_one_list_for_all_calls(p, m, rank):
    _TABLE.extend(steady(p - 1 - rank, m))
    return _TABLE


@wrong(ONE, "is not allowed; ")
def the_librarys(p, m, rank):
    from manyranks.parallel.pipeline import schedules

    return [(action.kind, action.microbatch) for action in schedules.one_f_one_b(p, m).ranks[rank]]


@wrong(ONE, "the check calls one_f_one_b(p, m, rank)")
def takes_two_arguments(p, m):
    return steady(p, m)


@wrong(ONE, "a table is finite")
def never_ends(p, m, rank):
    table = []
    while len(table) < 2 * m or p > 0:
        table[:] = steady(p - 1 - rank, m)
    return table


never_ends.seconds = 2


@wrong(ONE, "returned more than")
def yields_for_ever(p, m, rank):
    while True:
        yield "F", 0


@wrong(LOOPS, "F0 of stage 0 is missing")
def returns_nothing_of_several(p, m, v, rank):
    return []


@wrong(LOOPS, "return a list of triples")
def forgets_the_stage(p, m, v, rank):
    return steady(p - 1 - rank, m)


@wrong(LOOPS, "is missing")
def ignores_v(p, m, v, rank):
    return [(kind, rank, i) for kind, i in steady(p - 1 - rank, m)]


@wrong(
    LOOPS, "backwards begin with the rank's last stage, when its forward is over; rank r warms up with 2(p − 1 − r) + (v − 1)p"
)
def warms_up_as_with_one_stage(p, m, v, rank):
    return loops(p, m, v, rank, p - 1 - rank)


@wrong(LOOPS, "B0 of stage 3 comes before F0 of stage 3")
def warms_up_without_the_rounds(p, m, v, rank):
    return loops(p, m, v, rank, 2 * (p - 1 - rank))


@wrong(LOOPS, "with messages of 0.5 s, a rank waits 8 s; interleaved, 6 s", right_values=True)
def warms_up_as_if_messages_took_no_time(p, m, v, rank):
    return loops(p, m, v, rank, (p - 1 - rank) + (v - 1) * p)


@wrong(LOOPS, "then does one forward and one backward in turn", right_values=True)
def warms_up_alike_with_stages(p, m, v, rank):
    return loops(p, m, v, rank, (v - 1) * p)


@wrong(LOOPS, "the warm-up here is too long", right_values=True)
def warms_up_a_little_long(p, m, v, rank):
    return loops(p, m, v, rank, 2 * (p - 1 - rank) + (v - 1) * p + 1)


@wrong(LOOPS, "the warm-up here is too long", right_values=True)
def warms_up_with_whole_rounds(p, m, v, rank):
    return loops(p, m, v, rank, 2 * (p - rank) + (v - 1) * p)


@wrong(LOOPS, "all forwards come first", right_values=True)
def all_forwards_first(p, m, v, rank):
    return loops(p, m, v, rank, m * v)


@wrong(LOOPS, "take p of them through one stage before the next stage begins", right_values=True)
def takes_each_through_all_stages(p, m, v, rank):
    return loops(p, m, v, rank, m * v, [(k, i) for i in range(m) for k in range(v)])


@wrong(LOOPS, "And forwards go p at a time through each of a rank's stages, backwards the same, from its last")
def goes_back_from_the_first_stage(p, m, v, rank):
    turns = [(k, i + j) for i in range(0, m, p) for k in range(v) for j in range(p)]
    return loops(p, m, v, rank, m * v, turns, [(v - 1 - k, i) for k, i in turns])


@wrong(LOOPS, "stage s is on rank s % p")
def has_neighbouring_stages(p, m, v, rank):
    return [(kind, rank * v + stage // p, i) for kind, stage, i in loops(p, m, v, rank)]


@wrong(LOOPS, "the second is the stage, the third the micro-batch")
def swaps_stage_and_micro_batch(p, m, v, rank):
    return [(kind, i, stage) for kind, stage, i in loops(p, m, v, rank)]


@wrong(LOOPS, "· hides messages as far as it can: with p = 2, m = 4, v = 2, the table cannot run")
def goes_back_first_of_all(p, m, v, rank):
    return loops(p, m, v, rank)[::-1]


@wrong(LOOPS, "interleaved(2, 4, 2, 1) raised ValueError")
def fails_on_rank_1(p, m, v, rank):
    if rank == 1:
        raise ValueError
    return loops(p, m, v, rank)


@wrong(LOOPS, "no such stage")
def counts_stages_from_one(p, m, v, rank):
    return [(kind, stage + p, i) for kind, stage, i in loops(p, m, v, rank)]


@wrong(LOOPS, "is not allowed; ")
def the_librarys_of_several(p, m, v, rank):
    from manyranks.parallel.pipeline import schedules

    return [tuple(action) for action in schedules.interleaved(p, m, v).ranks[rank]]
