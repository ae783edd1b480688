"""Chapter 11's drawings and explorer: what they draw is what they are given."""

import pytest

from manyranks import show, theory

H100 = theory.accelerators["H100 SXM"]
DEFAULTS = {"chip": "H100 SXM", "stride": 1, "itemsize": 2, "tile": 128, "step": 32, "warps": 8, "stages": 3}


def drawn(figure, begins):
    """The blocks whose name begins so: each one's color."""
    blocks = [patch for patch in figure.axes[0].patches if (patch.get_gid() or "").startswith(begins)]
    return [patch.get_facecolor() for patch in blocks]


def filled(figure, begins):
    return [k for k, color in enumerate(drawn(figure, begins)) if color[3]]


def test_a_chip_has_as_many_processors_as_it_has():
    assert len(drawn(show.kernels.chip(H100), "processor")) == 132
    with pytest.raises(ValueError, match="unknown processors"):
        show.kernels.chip(theory.accelerators["TPU v4"])


def test_sectors_are_filled_where_lanes_go():
    figure = show.kernels.warps({"every other": [8 * lane for lane in range(32)]})
    assert filled(figure, "sector") == list(range(8))
    figure = show.kernels.warps({"masked, across a border": [*[None] * 30, 0, 30]})
    assert filled(figure, "lane") == [30, 31]
    assert filled(figure, "sector") == [0, 1]  # 0 to 3 lies in the first, 30 to 33 in both
    assert filled(show.kernels.warps({"far": [4096 * lane for lane in range(32)]}), "sector") == [
        0
    ]  # the rest lies further right
    assert drawn(show.kernels.warps({"nothing": [None] * 32}), "sector")


def test_a_causal_walk_skips_what_lies_above_the_diagonal():
    figure = show.kernels.walk(256, 256, 64, 32)
    assert len(drawn(figure, "step")) == 6  # of the third tile of queries, whose last row sees 192 keys
    assert len(drawn(figure, "skipped")) == 6 + 4 + 2
    assert not drawn(show.kernels.walk(256, 256, 64, 32, causal=False), "skipped")


def test_the_explorer_says_what_the_theory_says():
    said = show.kernels.Tiled().update(**DEFAULTS)
    moved = theory.blocks.product_bytes(8192, 8192, 8192, 128)
    assert said.numbers["the product moves"] == show.size(moved)
    assert said.numbers["for 64 bytes, a warp"] == "touches 2 sectors"
    assert said.numbers["shared memory"].startswith("49.2 kB of")
    assert said.limit.startswith("memory, before the cache: larger tiles")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stride": 8}, "the stride wastes most of what moves"),
        ({"stages": 4, "step": 128}, "needs more shared memory than a processor"),
        ({"tile": 256, "warps": 16}, "needs more registers than a processor"),
        ({"tile": 256, "warps": 4}, "registers = 552: a thread has at most 255"),
        ({"chip": "A100-80GB SXM", "itemsize": 1}, "no rate is known at which A100-80GB SXM multiplies 1-byte numbers"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_explorer_says_what_limits_and_what_cannot_be(change, says):
    assert says in show.kernels.explorer().set(**change).status
