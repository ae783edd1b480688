"""Chapter 07's pictures and explorer show the theory's figures, and every setting is shown or refused in words."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.axes import Axes

from manyranks.show import context, units
from manyranks.show.context.explorer import LENGTHS, SHOWN, TILE, VARIANTS, Ranks, Shared
from manyranks.show.units import percent
from manyranks.theory import Plan, clusters, models, step
from manyranks.theory import context as theory
from manyranks.theory.context.times import Pass
from tests.drawn import boxes, named, texts, widths, words
from tests.unit.figures_drawn import assert_readable

DEFAULT = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 2**17, "cp": 8}
DEFAULT |= {"tp": 1, "causal": True, "layout": "contiguous", "variant": "ring", "ulysses": 0}
FIGURES = {
    "layouts": lambda: context.layouts(),
    "ring": lambda: context.ring(),
    "mask": lambda: context.mask(),
    "mask by ranks": lambda: context.mask(order="ranks", tile=2),
    "mask of documents": lambda: context.mask("zigzag", seq=32, documents=(12, 15, 5), tile=4),
    "hops": lambda: context.hops("striped"),
    "homeward": lambda: context.homeward(),
    "behind attention": lambda: context.behind_attention({"half": 0.5, "twice": 2}),
    "heads": lambda: context.all_to_all(),
    "grouped heads": lambda: context.all_to_all(8, 4, 2),
    "balance": lambda: context.balance({name: [1e9, 2e9, 3.123e9] for name in theory.LAYOUTS}),
}


def now(**change) -> Shared:
    return Shared(**DEFAULT | change)


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_meet_and_a_figure_is_no_wider_than_a_laptop_s(name):
    assert_readable(FIGURES[name]())


# Layouts, ring, heads


def test_each_token_has_the_number_of_its_rank():
    figure = context.layouts()
    cells = [text.get_text() for text in figure.axes[0].texts if text.get_bbox_patch() is not None]
    assert cells[:48] == [str(rank) for layout in theory.LAYOUTS for rank in theory.owners(16, 4, layout)]
    for layout in theory.LAYOUTS:
        assert ", ".join(map(str, theory.totals(theory.work(16, 4, layout)))) in texts(figure)


def test_after_a_hop_a_rank_has_the_keys_of_the_one_before_it():
    held = [text for text in texts(context.ring()) if text.startswith("K,V")]
    assert held == [f"K,V {rank}" for rank in range(4)] + [f"K,V {(rank - 1) % 4}" for rank in range(4)]
    assert texts(context.ring()).count("queries stay") == 1


@pytest.mark.parametrize(("kv_heads", "below"), [(2, "0011"), (4, "0123"), (1, "0000")])
def test_ulysses_gives_each_rank_the_key_value_heads_that_its_queries_read(kv_heads, below):
    figure = context.all_to_all(8, 4, kv_heads)
    heads = [text.get_text() for text in figure.axes[0].texts if text.get_position()[1] == pytest.approx(0.58)]
    assert "".join(heads[-4:]) == below
    assert ("own heads, all tokens, copied" in texts(figure)) is (kv_heads < 4)
    assert texts(figure).count("all-to-all") == 2


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: context.all_to_all(8, 3), "Ulysses needs n=3 to divide heads=8"),
        (lambda: context.all_to_all(8, 8), "heads=8, n=8: a picture has room for 8 heads on 2 to 4 ranks"),
        (lambda: context.all_to_all(16, 4), "heads=16, n=4: a picture has room"),
        (lambda: context.mask("zig"), "layout='zig': did you mean 'zigzag'"),
        (lambda: context.mask("zigzag", seq=12), "seq=12 in 8 chunks, zigzag on n=4 ranks: give 8 or 16"),
        (lambda: context.mask(documents=(8, 9)), "documents=(8, 9) have 17 tokens, the sequence 16: "),
        (lambda: context.mask(documents=(0, 16)), "documents=(0, 16) have 16 tokens"),
        (lambda: context.mask(tile=0), "tile=0: "),
        (lambda: context.mask(order="rank"), "order='rank': did you mean 'ranks'"),
        (lambda: context.hops("ring"), "layout='ring': "),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        draw()


# Masks


def areas(figure) -> tuple[list[int], int]:
    """Cells that are filled in each rank's color, and those that are hatched."""
    (axes,) = figure.axes
    filled = np.bincount(named(axes, "cells").get_array().compressed().astype(int)).tolist()
    return filled, len(named(axes, "for nothing").get_paths())


@pytest.mark.parametrize("layout", theory.LAYOUTS)
@pytest.mark.parametrize(("tile", "order"), [(None, "sequence"), (3, "sequence"), (64, "ranks")])
def test_a_mask_s_cells_are_the_scores_that_the_theory_counts(layout, tile, order):
    figure = context.mask(layout, seq=24, tile=tile, order=order)
    computed, visible = (theory.totals(theory.work(24, 4, layout, tile=size)) for size in (tile or 1, 1))
    assert areas(figure) == (visible, sum(computed) - sum(visible))
    together = (np.diff(named(figure.axes[0], "cells").get_array().mean(axis=1)) >= 0).all()  # a rank's rows
    assert together or order == "sequence"
    said = texts(figure)[-1].splitlines()
    assert said[:2] == ["scores of each rank:", ", ".join(map(str, computed))]
    assert said[2] == f"slowest ÷ mean: {theory.balance([[each] for each in computed]):.2f}"
    assert (len(said) == 4) is (tile is not None)
    packed = context.mask(layout, seq=24, documents=(6, 18))
    assert areas(packed)[0] == theory.totals(theory.document_work([6, 18], 4, layout))


@pytest.mark.parametrize("layout", theory.LAYOUTS)
def test_a_hop_shows_its_source_its_scores_and_who_is_waited_for(layout):
    figure, counts = context.hops(layout), theory.work(32, 4, layout)
    hops = list(itertools.product(range(4), range(4)))
    assert [axes.get_title().split()[-1] for axes in figure.axes] == [f"{(rank - hop) % 4}" for rank, hop in hops]
    assert [named(axes, "cells").get_array().count() for axes in figure.axes] == [counts[rank][hop] for rank, hop in hops]
    waits = [axes.get_xlabel().startswith("waits") for axes in figure.axes]
    thick = [axes.spines["left"].get_linewidth() > 1 for axes in figure.axes]
    assert sum(waits) == sum(thick) == (6 if layout == "contiguous" else 0)
    together = {"contiguous": "3.5 whole blocks; idle: 43%"}.get(layout, "2 whole blocks; idle: 0%")
    assert figure.get_supxlabel() == f"together: {together}"


def test_balance_shows_each_rank_and_says_how_far_the_slowest_is_from_the_mean():
    figure = context.balance({"a": [1.0, 3.0], "b": [2.0, 2.0]})
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[1, 3], [2, 2]]
    said = [axes.texts[0].get_text().splitlines()[0] for axes in figure.axes]
    assert said == ["slowest ÷ mean: 1.50", "slowest ÷ mean: 1.00"]
    assert [axes.lines[0].get_ydata()[0] for axes in figure.axes] == [2, 2]


# What the explorer shows of a setting


BESIDE = {"model": "llama3-405b", "tp": 8}


@pytest.mark.parametrize(
    ("n", "change", "heads", "stride"), [(16, {}, (32, 8), 1), (8, BESIDE, (16, 1), 8)], ids=["ring", "tp"]
)
def test_a_ring_s_seconds_and_bytes_are_the_theory_s(n, change, heads, stride):
    """Tensor-parallel ranks take heads, and lie between."""
    one, sizes = now(layout="zigzag", cp=n, **change), (1, 2**17, *heads, 128, n)
    how = {"tile": TILE, "stride": stride}
    found = [theory.hops(*sizes, clusters["h100-dgx"], backward=backward, **how) for backward in (False, True)]
    assert [each.seconds for each in one.times()] == pytest.approx([each.seconds for each in found])
    assert [each.messages for each in one.times()] == pytest.approx([each.exposed for each in found])
    assert [[*each.under] for each in one.times()] == [list(each.messages[:-1]) for each in found]
    assert one.bytes() == theory.ring(*sizes).both.bytes


@pytest.mark.parametrize("layout", theory.LAYOUTS)
def test_ranks_wait_as_the_work_is_shared_out(layout):
    balance = theory.balance(theory.work(2**17, 8, layout, tile=TILE))
    for variant, waits in {"ring": balance, "all-gather": balance, "ulysses": 1}.items():
        forward = now(layout=layout, variant=variant).times().forward
        assert sum(forward.hops) / forward.computing == pytest.approx(waits, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "u", "r"),
    [
        ({"cp": 64}, 8, 8),
        ({"cp": 4}, 4, 1),
        ({"cp": 64, "ulysses": 4}, 4, 16),
        ({"model": "llama3-405b", "cp": 16, "tp": 8}, 1, 16),
        ({"model": "small GPT"}, 4, 2),
    ],
    ids=str,
)
def test_ring_and_ulysses_share_the_ranks_by_nodes_and_heads(change, u, r):
    one = now(variant="ring-ulysses", layout="zigzag", **change)
    assert (one.together, one.ring.n) == (u, r)
    same = one._replace(variant={one.cp: "ulysses", 1: "ring"}.get(u, "ring-ulysses"))
    assert one.bytes() == same.bytes()
    assert one.times().both("seconds") == pytest.approx(same.times().both("seconds"))
    assert np.shape(one.times().forward.own) == (one.cp, r)


def test_the_two_curves_are_those_of_the_second_hop():
    for change in ({}, {"layout": "zigzag", "cp": 16}, {"causal": False}, {"variant": "ring-ulysses", "cp": 64}):
        one = now(**change)
        assert one.hop() == pytest.approx((one.times().forward.hops[1], one.times().forward.under[0]))
    whole = now(variant="all-gather")
    assert whole.hop() == (np.max(whole.times().forward.own), whole.times().forward.messages)


def test_of_a_message_is_waited_for_what_is_longer_than_its_hop():
    one = Pass.of([[1.0, 2.0, 1.0], [3.0, 2.0, 1.0]], under=[2.5, 2.5, 0.0], before=1.0)
    assert (one.late, one.messages, one.slower, one.computing) == ([0, 0.5, 0], 1.5, 1.0, 5.0)
    assert one.seconds == 7.5


# The explorer


def test_it_opens_on_contiguous_shards_and_shows_the_step_around_them_and_the_longest_sequence_that_fits():
    opened, plan = context.explorer(), Plan(cp=8, dp=8, zero=3, seq=2**17)
    assert opened.values == DEFAULT
    found = step.estimate(models["llama3-8b"], plan, clusters["h100-dgx"])
    assert (now().scenario.cost.seconds, now().scenario.cost.mfu) == (found.seconds, found.mfu)
    assert f"<b>{percent(found.mfu)}</b>" in opened.tiles.value
    longest = theory.longest(models["llama3-8b"], plan, clusters["h100-dgx"])
    assert f"fits up to s = {longest:,}" in re.sub("<[^>]+>", "", opened.status)
    assert [now(seq=seq).fits for seq in (longest, longest + 16)] == [True, False]


PARTS = "compute", "waits for slower ranks", "waits for messages"


def plotted(**change) -> Ranks:
    plot = Ranks()
    plot.update(**DEFAULT | change)
    return plot


def drawn(**change) -> list[Axes]:
    """The panels: ranks, lengths, variants."""
    return plotted(**change).figure.axes


@pytest.mark.parametrize("change", [{}, {"cp": 16, "seq": 2**15}, {"variant": "all-gather"}, {"cp": 64, "seq": 2**15}], ids=str)
def test_each_rank_s_row_is_its_time_and_says_it(change):
    plot, one = plotted(**change), now(**change)
    forward, found = one.times().forward, {part: boxes(plot.figure.axes[0], part) for part in PARTS}
    rows, says = np.linspace(0, one.cp - 1, min(one.cp, SHOWN)).round().astype(int), [part.says for part in plot.parts()]
    assert f"{one.variant}, compute: {units.duration(one.times().both('computing'))}" in says
    for row, rank in enumerate(rows):
        middle, own = (row + 0.5) / len(rows), sum(forward.own[rank])
        sums = [sum(end - start for start, end, *y in each if y[0] < middle < y[1]) for each in found.values()]
        times = own, sum(forward.hops) - own, forward.messages
        assert sums == pytest.approx([seconds / forward.seconds for seconds in times])
        said = (f"{part} {units.duration(seconds)}" for part, seconds in zip(PARTS, times, strict=True))
        assert says[row] == f"rank {rank}, forward: {', '.join(said)}"


def test_bars_and_numbers_of_the_variants_are_theirs():
    *_, variants = drawn()
    each = [now(variant=name) for name in VARIANTS]
    seconds, lengths = [one.times().both("seconds") for one in each], [sum(row) for row in widths(variants)]
    assert lengths == pytest.approx([one / max(seconds) * max(lengths) for one in seconds])
    said = [f"{units.duration(one.times().both('seconds'))}, {units.size(one.bytes())}" for one in each]
    assert words(variants) == [*said[:-1], f"{said[-1]}, ring of 1"]
    *_, variants = drawn(cp=64)
    assert words(variants)[VARIANTS.index("ulysses")] == "not possible"


def test_many_ranks_are_some_rows_and_many_hops_a_sum():
    for n, hops in ((64, ["sum of 64 hops"]), (16, [str(hop) for hop in range(0, 16, 2)])):
        ranks, *_ = drawn(cp=n)
        names = words(ranks, "ranks")
        assert (len(names), names[0], names[-1]) == (SHOWN, "rank 0", f"rank {n - 1}")
        assert words(ranks, "hops")[2:] == hops


def test_curves_have_a_point_for_each_s_and_cross_where_a_hop_hides_its_message():
    _, lengths, _ = drawn(cp=16, layout="zigzag")
    computing, message = (named(lengths, name).get_ydata() for name in ("compute, slowest rank", "message"))
    assert list(named(lengths, "compute, slowest rank").get_xdata()) == LENGTHS
    hidden = [s for s, a, b in zip(LENGTHS, computing, message, strict=True) if a >= b]
    least = 16 * theory.least_shard(989e12, 50e9, 32, 8, causal=True)  # of peak rates; both are reached in part
    assert hidden[0] / 2 < least < 2 * hidden[0]
    assert list(named(lengths, "now").get_xdata()) == [2**17] * 2
    _, lengths, _ = drawn(cp=1)
    assert np.isnan(named(lengths, "message").get_ydata()).all()


LIMITS = [
    ({"cp": 1, "seq": 2**14}, "Limit: compute: one rank sends nothing."),
    ({"cp": 1}, "Does not fit. Limit: memory; CP 8 fits."),
    ({"seq": 2**20, "cp": 32}, "Limit: memory; CP 64 fits."),
    ({"model": "gpt3-175b", "cluster": "a100-dgx", "seq": 2**20, "layout": "zigzag"},
     "Limit: memory; no value of c or t makes it fit: recompute whole layers"),
    ({"model": "gpt3-175b", "seq": 2**18, "layout": "zigzag"}, "Does not fit. Limit: memory; TP 32 fits."),
    ({"cp": 64, "layout": "zigzag"}, "Limit: messages between nodes; with ring-ulysses: 14.9 ms."),
    ({"model": "gpt3-175b", "seq": 2**15, "cp": 32, "variant": "ulysses"}, "Limit: messages between nodes."),
    ({"seq": 2**12, "layout": "zigzag"}, "Limit: small blocks: 8 GPUs use 2.31 times the GPU time of one."),
    ({"causal": False}, "waits for slower ranks 0%"),
    ({"variant": "ring-ulysses", "ulysses": 16}, "Not possible: 16 ranks that exchange heads don't divide c = 8: choose a"),
    ({"model": "llama3-405b", "cluster": "tpu-v5p", "cp": 16, "tp": 8}, "Not possible: 16,384 GPUs: tpu-v5p has only 8,960"),
    ({"cp": 64, "variant": "ulysses"}, "Not possible: llama3-8b: Ulysses needs c = 64 to divide heads = 32: choose a "
     "divisor of 32, or take another variant: ring, all-gather, ring-ulysses"),
    ({"model": "small GPT", "variant": "ulysses"}, "Not possible: small GPT: Ulysses needs c = 8 to divide heads = 4"),
]  # fmt: skip


def test_the_sentence_names_the_limit_and_a_way_out():
    explorer = context.explorer()
    said = {str(change): explorer.set(**DEFAULT | change).status for change, _ in LIMITS}
    assert {change: said[change] for change, text in ((str(k), text) for k, text in LIMITS) if text not in said[change]} == {}
