"""Splits of operators and cuts into stages: exact, as known patterns are, and beside the planner."""

from itertools import product

import pytest

from manyranks.theory import Plan, clusters, kernels, network
from manyranks.theory.nd import cuts, operators, splits
from manyranks.theory.nd.cuts import FOUR
from manyranks.theory.nd.operators import Work
from manyranks.theory.shapes import models

H100 = clusters["h100-dgx"]
SMALL_NODES = H100.with_nodes_of(4)
ATTENTION, MLP = operators.blocks(FOUR)
ENDS = {"norm", "qkv", "core", "out", "up", "down"}


# Every assignment --------------------------------------------------------------------------------------------------------


def least(block, work) -> dict:
    """Of every assignment to a block, the fastest by the stream before and after it; and how many there were."""
    found, count = {}, 0
    for path, end in splits.every(block, work):
        ends = path.choices[0], end
        count += 1
        if ends not in found or path.seconds < found[ends]:
            found[ends] = path.seconds
    return found | {"count": count}


def every_layer(work: Work, limit: float) -> float:
    """The fastest layer that fits, of all pairs of paths that meet."""
    attention, mlp = (list(splits.every(block, work)) for block in (ATTENTION, MLP))
    meeting = ((a, b) for (a, end), (b, _) in product(attention, mlp) if end == b.choices[0])
    pairs = ((a, b) for a, b in meeting if a.memory(1) + b.memory(1) <= limit)
    return min(a.seconds + b.seconds for a, b in pairs)


@pytest.mark.parametrize(("mesh", "sequences"), [((4,), 4), ((2, 2), 2)])
def test_the_shortest_path_is_the_fastest_of_every_assignment(mesh, sequences):
    work = Work(FOUR, H100, mesh, sequences, 4096)
    attention, mlp = least(ATTENTION, work), least(MLP, work)
    assert attention.pop("count") + mlp.pop("count") > {1: 200, 2: 30_000}[len(mesh)]
    best = min(a + b for (_, end), a in attention.items() for (start, _), b in mlp.items() if end == start)
    found = splits.fastest(work, layers=1)
    assert found.seconds + found.once == pytest.approx(best)


@pytest.mark.parametrize("share", [1.2, 1.01])
def test_under_a_limit_it_is_the_fastest_that_fits(share):
    work = Work(FOUR, H100, (4,), 16, 4096)
    free = splits.fastest(work, layers=1)
    small = sum(min(path.memory(1) for path, _ in splits.every(block, work)) for block in (ATTENTION, MLP))
    found = splits.fastest(work, layers=1, limit=share * small)
    assert found.memory <= share * small < free.memory
    assert found.seconds + found.once == pytest.approx(every_layer(work, share * small))


def test_where_nothing_fits_there_is_nothing():
    assert splits.fastest(Work(FOUR, H100, (4,), 4, 4096), layers=1, limit=1e6) is None
    assert cuts.solve(FOUR, H100, 2, 4, 4096, [1], memory=1e6) == []


# What it costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "times"),
    [("sum", "whole", 2), ("sum", "tokens", 1), ("columns", "whole", 1), ("tokens", "whole", 1), ("whole", "tokens", 0)],
)
def test_laying_out_anew_is_a_gather_or_a_reduction(before, after, times):
    work = Work(FOUR, H100, (4,), 1, 4096)
    one = network.gather(H100.route(4), 2 * 4096 * 100, kernels.DEFAULT)
    assert operators.reshard((before,), (after,), 100, work) == pytest.approx(times * one)


def test_tokens_become_heads_by_an_all_to_all():
    work = Work(FOUR, H100, (4,), 1, 4096)
    sent = network.exchange(H100.route(4), 2 * 4096 * 100 / 4, kernels.DEFAULT)
    assert operators.reshard(("tokens",), ("columns",), 100, work) == pytest.approx(sent)


def test_what_the_other_axis_holds_apart_is_not_gathered():
    work = Work(FOUR, SMALL_NODES, (2, 4), 2, 4096)
    one = network.gather(SMALL_NODES.route(4), 2 * 4096 * 100, kernels.DEFAULT)
    assert operators.reshard(("tokens", "columns"), ("tokens", "whole"), 100, work) == pytest.approx(one)


@pytest.mark.parametrize("mesh", [(4,), (8,)])
def test_megatrons_way_communicates_eight_times_a_layer(mesh):
    work = Work(FOUR, H100, mesh, 1, 4096)
    fast = Work(FOUR, H100.with_link("node", bandwidth=1e30, latency=0.0), mesh, 1, 4096)
    stage, without = (splits.of_pattern(["Megatron"], one, layers=3) for one in (work, fast))
    size = 2 * work.tokens * FOUR.hidden
    once = network.gather(H100.route(*mesh), size, kernels.DEFAULT) - kernels.OVERHEAD
    assert stage.seconds - without.seconds == pytest.approx(3 * 8 * once)
    assert stage.once == 0


def test_data_parallelism_reduces_and_gathers_every_weight_once_a_step():
    stage = splits.of_pattern(["data"], Work(FOUR, H100, (4,), 4, 4096), layers=2, m=4)
    sizes = [2 * w for w in (4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096)]
    assert stage.once == pytest.approx(2 * 2 * sum(network.fastest(H100.route(4), size, kernels.DEFAULT) for size in sizes))


# What is best ------------------------------------------------------------------------------------------------------------


def test_a_small_batch_is_split_as_megatron_does_and_a_large_one_by_tokens():
    small, middle, large = (cuts.solve(FOUR, H100, 4, *work)[0] for work in ((1, 1024), (4, 4096), (16, 4096)))
    assert small.name == "Megatron 4"
    assert large.name == "data 4"
    assert middle.name == "data 2 × data, and Megatron's MLP 2"  # whose weights are four times those of attention
    assert {name for name, _ in middle.stages[0].choices} == ENDS


def test_megatrons_way_is_columns_then_rows_without_communication_between():
    choices = dict(cuts.solve(FOUR, H100, 4, 1, 1024)[0].stages[0].choices)
    products = [choices[name][0] for name in ("qkv", "core", "out", "up", "down")]
    assert products == ["columns", "columns", "rows", "columns", "rows"]


def test_between_nodes_the_model_is_cut_into_stages():
    across, inside = (cuts.solve(FOUR, cluster, 8, 4, 4096, microbatches=(1, 4))[0] for cluster in (SMALL_NODES, H100))
    assert across.name.startswith("PP 2 (2+2 layers)")
    assert len(inside.stages) == 1


def test_all_cuts_are_tried():
    tried = set(cuts.cuts(4, 8))
    assert {((4, 8),), ((1, 4), (3, 4)), ((2, 2), (1, 2), (1, 4)), ((1, 2),) * 4} <= tried
    assert all((sum(n for n, _ in cut), sum(r for _, r in cut)) == (4, 8) for cut in tried)
    assert len(tried) == 1 * 1 + 3 * 1 + 3 * 3 + 1 * 13  # ways to cut four layers, times ways to cut eight ranks


# Beside the planner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "batch", "seq"), [(4, 1, 1024), (8, 2, 4096), (8, 8, 4096), (4, 16, 4096)])
def test_the_planner_ranks_what_splits_can_express_as_splits_do(ranks, batch, seq):
    rows = cuts.beside_planner(FOUR, H100, ranks, batch, seq)
    assert rows[0].plan == min(rows, key=lambda row: row.splits).plan
    assert cuts.agreement(rows) > 0.95
    # The step has the embedding and the head as well, whose five gathers are most beside much tensor parallelism.
    assert all(-0.08 < row.splits / row.step - 1 < 0 for row in rows)


def test_splitting_operator_by_operator_is_never_slower_than_one_degree_for_all():
    for batch in (2, 8):
        best = cuts.solve(FOUR, H100, 8, batch, 4096, microbatches=[1])[0].seconds
        assert best <= 1.000001 * min(row.splits for row in cuts.beside_planner(FOUR, H100, 8, batch, 4096))


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "ranks", "batch", "message"),
    [
        (models["mixtral-8x7b"], 8, 8, "dense model"),
        (FOUR, 6, 8, "ranks=6: give a power of two"),
        (FOUR, 0, 8, "ranks=0"),
        (FOUR, 8, 0, "batch=0"),
    ],
)
def test_bad_input_is_refused(shape, ranks, batch, message):
    with pytest.raises(ValueError, match=message):
        cuts.solve(shape, H100, ranks, batch, 4096)


def test_every_cut_of_a_deep_model_is_made_without_trying_all_others():
    assert len(list(cuts.cuts(32, 2))) == 1 + 31  # one stage, or two of one rank each
    assert {sum(layers for layers, _ in cut) for cut in cuts.cuts(6, 4)} == {6}
    assert len(set(cuts.cuts(6, 4))) == len(list(cuts.cuts(6, 4)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cuts.solve(FOUR, H100, 8, 8, 2048, microbatches=(0,)), "microbatches=0"),
        (lambda: cuts.agreement([]), "0 plans: there is no pair"),
        (lambda: cuts.uniform(FOUR, H100, Plan(pp=3, seq=2048)), "pp=3 does not divide 4 layers"),
    ],
)
def test_what_cannot_be_priced_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
