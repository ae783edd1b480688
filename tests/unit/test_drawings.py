"""The drawings of every lesson: every mark is what the data says, no text is on another, and both themes can be read."""

import base64
import io
from functools import cache
from itertools import pairwise

import numpy as np
import PIL.Image
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path

from manyranks import show
from manyranks.show.drawings import EDGE, INK, LEAST, contrast, on

from .figures_drawn import assert_readable

drawings = show.drawings
PAGES = ("#ffffff", "#111111")  # JupyterLab's light and dark theme
SIZES = {"parameters": 2, "gradients": 2, "optimizer": 12}


def zero(stage, n=4):
    """Sharded from the last kind to the first: the optimizer in stage 1, gradients too in 2, parameters too in 3."""
    whole = len(SIZES) - stage
    return [[(k, k, (r, n) if i >= whole else None, size) for i, (k, size) in enumerate(SIZES.items())] for r in range(n)]


@cache
def stages(n=4):
    titles = ("no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    panels = {title: zero(stage, n) for stage, title in enumerate(titles)}
    return drawings.who_holds(panels, below=("16", "4 + 12/N", "2 + 14/N", "16/N"), unit="bytes per\nparameter")


@cache
def all_reduce(n=4):
    before = [[f"{c}{k}" for k in range(n)] for c in "abcdefgh"[:n]]
    sums = [[f"Σ{k}" if k == r else None for k in range(n)] for r in range(n)]
    steps = [("reduce-scatter", "3 MB", "+"), ("all-gather", "3 × 1 MB", "")]
    panels = {"before": before, "sums": sums, "after": [[f"Σ{k}" for k in range(n)]] * n}
    return drawings.pieces(panels, steps, ["gradients"] * 3)


WITHOUT = {
    "compute": [(1, 2, "1", "compute"), (3, 4, "2", "compute"), (4, 6, "2", "compute"), (8, 10, "1", "compute")],
    "communication": [
        (0, 1, "gather 1", "gathered"),
        (2, 3, "gather 2", "gathered"),
        (6, 7, "reduce 2", "gradients"),
        (7, 8, "gather 1", "gathered"),
        (10, 11, "reduce 1", "gradients"),
    ],
}
WITH = {
    "compute": [(1, 2, "1", "compute"), (2, 3, "2", "compute"), (3, 5, "2", "compute"), (5, 7, "1", "compute")],
    "communication": [
        (0, 1, "gather 1", "gathered"),
        (1, 2, "gather 2", "gathered"),
        (3, 4, "gather 1", "gathered"),
        (5, 6, "reduce 2", "gradients"),
        (7, 8, "reduce 1", "gradients"),
    ],
}


@cache
def fsdp():
    phases = {"without": [(0, 4, "forward"), (4, 11, "backward")], "with": [(0, 3, "forward"), (3, 8, "backward")]}
    return drawings.when({"without": WITHOUT, "with": WITH}, phases)


HELD = {"optimizer": [12e9] * 5, "gradients": [0, 0, 1e9, 2e9, 2e9], "activations": [1e9, 2e9, 2e9, 1e9, 0]}
PHASES = [(0, 2, "forward"), (2, 4, "backward"), (4, 5, "step")]


@cache
def memory():
    kept = HELD | {"gathered": [4e9, 8e9, 8e9, 4e9, 0]}
    return drawings.memory_over_time({"kept": kept, "freed": HELD | {"gathered": [4e9] * 4 + [0]}}, PHASES)


DRAWN = {
    "ZeRO": stages,
    "ZeRO on 8 ranks": lambda: stages(8),
    "layers": lambda: drawings.who_holds([[(f"layer {4 * r + i}", "parameters") for i in range(4)] for r in range(4)]),
    "other shards": lambda: drawings.who_holds([[("a long name", "gathered", (r, 8)), (f"b{r}", "compute")] for r in range(8)]),
    **{f"all-reduce of {n}": lambda n=n: all_reduce(n) for n in (2, 4, 8)},
}
OVER_TIME = {
    "FSDP": fsdp,
    "memory": memory,
    "three series": lambda: drawings.memory_over_time({f"{n}": HELD for n in range(3)}, PHASES),
}


@pytest.fixture(scope="module", params=DRAWN)
def drawn(request):
    return DRAWN[request.param]()


def marks(figure):
    """For each named patch, left, top, width and height in inches; an arrow has the points of its shaft."""
    named = [patch for patch in figure.paper.patches if patch.get_gid()]
    return {p.get_gid(): np.array(shaft(p) if isinstance(p, FancyArrowPatch) else box(p)) for p in named}


def shaft(arrow):
    path = arrow.get_path()
    return path.vertices[: list(path.codes).index(Path.MOVETO, 1)]  # its head follows


def box(patch):
    inside = patch.get_path().transformed(patch.get_patch_transform()).get_extents()
    return inside.x0, inside.y0, inside.width, inside.height


def texts(figure):
    return [text.get_text() for text in figure.paper.texts]


def test_no_text_is_on_another_or_leaves_the_drawing_or_is_too_small(drawn):
    assert_readable(drawn)
    assert drawn.get_figwidth() <= 7.2
    assert all(text.get_fontsize() >= LEAST for text in drawn.paper.texts)


def test_no_block_or_arrow_leaves_the_drawing(drawn):
    wide, high = drawn.get_size_inches() + 1e-9
    for patch in drawn.paper.patches:
        inside = patch.get_window_extent().padded(-1)
        assert min(inside.x0, inside.y0, 100 * wide - inside.x1, 100 * high - inside.y1) >= 0


def test_a_text_in_a_block_stays_inside(drawn):
    drawn.draw_without_rendering()
    blocks = [patch.get_window_extent() for patch in drawn.paper.patches if patch.get_facecolor()[3] == 1]
    for text in drawn.paper.texts:
        inside = text.get_window_extent()
        middle = (inside.x0 + inside.x1) / 2, (inside.y0 + inside.y1) / 2
        for block in blocks:
            if text.get_color() != INK and block.contains(*middle) and block.width < 300:
                assert min(inside.x0 - block.x0, block.x1 - inside.x1) >= 0, text.get_text()


def test_colors_can_be_told_from_both_pages_and_read():
    for page in PAGES:
        assert contrast(INK, page) >= 4
        assert all(contrast(color, page) >= 3 for color in drawings.KINDS.values())
    assert all(contrast(on(color), color) >= 4 for color in [INK, *drawings.KINDS.values()])
    assert len(set(drawings.KINDS.values())) == len(drawings.KINDS)
    assert contrast("white", "black") == pytest.approx(21)


def test_every_text_has_a_color_that_both_pages_or_its_block_allow(drawn):
    assert {text.get_color() for text in drawn.paper.texts} <= {INK, "white", EDGE}
    faint = [patch.get_window_extent() for patch in drawn.paper.patches if patch.get_alpha()]
    for text in (text for text in drawn.paper.texts if text.get_color() == INK):
        assert not any(text.get_window_extent().shrunk(0.9, 0.9).overlaps(patch) for patch in faint), text.get_text()


@pytest.mark.parametrize("draw", OVER_TIME.values(), ids=OVER_TIME)
def test_no_text_is_on_another_over_time(draw):
    figure = draw()
    assert_readable(figure)
    assert figure.get_figwidth() <= 7.2
    for one, other in pairwise(axes.get_tightbbox() for axes in figure.axes):
        assert not one.shrunk(0.99, 0.99).overlaps(other)
    assert {text.get_color() for axes in figure.axes for text in axes.texts} <= {INK, "white", EDGE}


def test_a_notebook_shows_twice_the_pixels_on_a_transparent_page():
    figure = fsdp()
    data, about = DisplayFormatter().format(figure)
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
    assert data["text/plain"].startswith("<Figure")
    assert picture.size == (2 * about["image/png"]["width"], 2 * about["image/png"]["height"])
    assert picture.getpixel((0, 0))[3] == 0


@pytest.mark.parametrize("draw", [all_reduce, memory])
def test_the_same_data_is_the_same_bytes(draw):
    one, other = (draw.__wrapped__()._repr_png_() for _ in range(2))
    assert one == other
    assert b"matplotlib" not in one


def test_a_shard_is_its_slice_of_the_whole():
    found = marks(stages())
    unit = found["no ZeRO 0 parameters"][3] / 2
    for stage, title in enumerate(("no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        for rank, blocks in enumerate(zero(stage)):
            for kind, _, shard, size in blocks:
                _, top, _, high = found[f"{title} {rank} {kind}"]
                part, of = shard or (0, 1)
                assert high == pytest.approx(size / of * unit)
                assert top == pytest.approx(found[f"no ZeRO 0 {kind}"][1] + part * high)


def test_blocks_with_their_own_names_have_them_inside_and_others_have_them_once_beside():
    assert [f"layer {i}" for i in range(16)] == [t for t in texts(DRAWN["layers"]()) if t.startswith("layer")]
    assert [texts(stages()).count(kind) for kind in SIZES] == [1, 1, 1]
    assert [text for text in ("16", "4 + 12/N", "bytes per\nparameter") if text not in texts(stages())] == []
    crowded = drawings.who_holds([[("a name as long as this", "gathered"), (f"{r}", "compute")] for r in range(8)])
    assert texts(crowded)[-1] == "gathered"  # explained at the bottom


def test_each_piece_goes_along_its_row_to_the_rank_that_gets_it():
    found = marks(all_reduce())
    for k in range(4):
        start, end = found[f"reduce-scatter {k}"][0], found[f"reduce-scatter {k}"][-1]
        left, top, wide, high = found[f"sums {k} {k}"]
        assert start[1] == end[1] == pytest.approx(top + high / 2)
        assert start[0] >= found[f"before 3 {k}"][0] + wide
        assert left - 0.1 < end[0] < left
        assert left + wide < found[f"all-gather {k}"][0][0] < left + wide + 0.1
    assert "sums 0 1" not in found
    assert texts(all_reduce()).count("+") == 4
    assert "3 MB" in texts(all_reduce())


def test_spans_are_where_their_times_are_and_panels_share_the_axis():
    figure = fsdp()
    for axes, lanes in zip(figure.axes, (WITHOUT, WITH), strict=True):
        assert axes.get_xlim() == (0, 11)
        bars = [bar for bar in axes.patches if not bar.get_alpha()]
        found = [(round(b.get_y() + 0.4), b.get_x(), b.get_x() + b.get_width(), to_hex(b.get_facecolor())) for b in bars]
        expected = [
            (row, start, end, drawings.KINDS[kind].lower())
            for row, spans in enumerate(lanes.values())
            for start, end, _, kind in spans
        ]
        assert found == expected
        assert [text.get_text() for text in axes.get_xticklabels()] == ["forward", "backward"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["1", "2", "2", "1", "g1", "g2", "g1", "r2", "r1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["g: gather", "r: reduce"]


def test_areas_are_as_high_as_the_bytes_and_stand_on_each_other():
    figure = memory()
    for axes, gathered in zip(figure.axes, ([4e9, 8e9, 8e9, 4e9, 0], [4e9] * 4 + [0]), strict=True):
        low = np.zeros(5)
        for area, (kind, held) in zip(axes.patches, (HELD | {"gathered": gathered}).items(), strict=True):
            high, edges, baseline = area.get_data()
            assert (area.get_label(), list(edges)) == (kind, [*range(6)])
            np.testing.assert_allclose(baseline, low)
            np.testing.assert_allclose(high, low := low + held)
    assert [axes.texts[0].get_text().strip() for axes in figure.axes] == ["peak 23 GB", "peak 19 GB"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*HELD, "gathered"]


def test_curves_are_over_their_steps():
    (axes,) = drawings.curves({"a": [3.0, 2.0, 1.5], "b": [3.0, 2.5, 2.0]}, "step", "loss").axes
    assert axes.lines[0].get_xydata().tolist() == [[0, 3.0], [1, 2.0], [2, 1.5]]
    assert list(axes.get_xticks()) == [0, 1, 2]
