"""Wrong answers to the last task of 05_pipeline: less waiting under a cap."""

from tests.grading.zoo.pipeline_right import capped, numbered, steady
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "under_a_cap"


def halved(table, late=0):
    """Each B an I, and each W so many I later."""
    rows, waiting = [], []
    for kind, i in table:
        rows.append(("I" if kind == "B" else kind, i))
        waiting += [i] if kind == "B" else []
        rows += [("W", waiting.pop(0))] if kind == "B" and len(waiting) > late else []
    return rows + [("W", i) for i in waiting]


@wrong(TASK, "return a list of p tables, one a rank")
def does_nothing(p, m, cap, times):
    pass


@wrong(TASK, "F0 of stage 0 is missing")
def returns_empty_tables(p, m, cap, times):
    return [[] for _ in range(p)]


@wrong(TASK, "returned 3 tables")
def forgets_a_rank(p, m, cap, times):
    return capped(p, m, cap)[:3]


@wrong(TASK, "return a list of p tables, one a rank")
def returns_one_table(p, m, cap, times):
    return capped(p, m, cap)[0]


@wrong(TASK, "give I first, and do a W where the rank would wait", right_values=True)
def one_f_one_b(p, m, cap, times):
    return [steady(min(cap - 1, p - 1 - rank), m) for rank in range(p)]


@wrong(TASK, "rank 3 puts its W off by 0 rounds, and has room for 3", right_values=True)
def does_w_after_its_i(p, m, cap, times):
    return [halved(table) for table in one_f_one_b(p, m, cap, times)]


@wrong(TASK, "makes 5 activations in flight; the cap is 4")
def puts_all_w_off(p, m, cap, times):
    return [halved(table, m) for table in one_f_one_b(p, m, cap, times)]


@wrong(TASK, "makes 5 activations in flight; the cap is 4")
def has_the_first_ranks_room_on_all(p, m, cap, times):
    return [numbered("F" * (p - 1 - rank) + "FI" * p + "FIW" * m, m) for rank in range(p)]


@wrong(TASK, "a W its own I, before it")
def does_w_before_i(p, m, cap, times):
    return [numbered("F" * min(cap - 1, p - 1 - rank) + "FWI" * m, m) for rank in range(p)]


@wrong(TASK, "makes 3 activations in flight; the cap is 2", right_values=True)
def is_always_zb_h1(p, m, cap, times):
    return capped(p, m, p)


@wrong(TASK, "makes 5 activations in flight; the cap is 4")
def is_always_zb_h2(p, m, cap, times):
    return capped(p, m, 2 * p - 1)


@wrong(
    TASK,
    "keeps to a cap below p: with p = 4, m = 6, cap = 2, under_a_cap(4, 6, 2, times) raised ValueError",
    True,
)
def raises_below_p(p, m, cap, times):
    if cap < p:
        raise ValueError("cap")
    return capped(p, m, cap)


@wrong(TASK, "under_a_cap(4, 6, 2, times) raised NotImplementedError", right_values=True)
def is_not_written_below_p(p, m, cap, times):
    if cap < p:
        raise NotImplementedError
    return capped(p, m, cap)


@wrong(TASK, "keeps to a cap below p: with p = 4, m = 6, cap = 2, under_a_cap(4, 6, 2, times) returned None", True)
def returns_none_below_p(p, m, cap, times):
    return capped(p, m, cap) if cap >= p else None


@wrong(TASK, "under_a_cap(4, 6, 2, times) was not over after 2 s", right_values=True)
def never_ends_below_p(p, m, cap, times):
    while cap < p:
        pass
    return capped(p, m, cap)


never_ends_below_p.seconds = 60  # two of processor time, on a busy machine


@wrong(TASK, "rank 0 has only one micro-batch under way", right_values=True)
def goes_one_by_one(p, m, cap, times):
    return [[(kind, i) for i in range(m) for kind in "FB"] for _ in range(p)]


@wrong(TASK, "there is room for more", right_values=True)
def is_zb_h1_at_most(p, m, cap, times):
    return capped(p, m, min(cap, p))


@wrong(TASK, "rank 3 puts its W off by 1 round, and has room for 3", right_values=True)
def puts_w_off_by_one_round_on_all(p, m, cap, times):
    """Rank 0 has no room for it, and holds a micro-batch less."""
    ahead = [min(cap - 1, p - 1 - rank) for rank in range(p)]
    return [numbered("F" * a + "FI" * min(1, cap - 1 - a) + "FIW" * m, m) for a in ahead]


@wrong(TASK, "makes 3 activations in flight; the cap is 2", right_values=True)
def ignores_the_cap(p, m, cap, times):
    return [halved(steady(p - 1 - rank, m), rank) for rank in range(p)]


@wrong(TASK, "is missing")
def forgets_w(p, m, cap, times):
    return [[action for action in table if action[0] != "W"] for table in capped(p, m, cap)]


@wrong(TASK, "is done twice")
def does_b_and_w(p, m, cap, times):
    return [[("B" if kind == "I" else kind, i) for kind, i in table] for table in capped(p, m, cap)]


@wrong(TASK, "these ranks waits for what another one does later")
def turns_the_ranks_round(p, m, cap, times):
    return capped(p, m, cap)[::-1]


@wrong(TASK, "is not allowed; ")
def the_librarys(p, m, cap, times):
    from manyranks.parallel.pipeline.automatic import automatic

    ranks = automatic(p, m, **times, memory=cap).ranks
    return [[(action.kind, action.microbatch) for action in table] for table in ranks]
