"""Things that chapters show: units, tables, listings, figures, and explorers that are driven from code."""

import base64
import io
import itertools
import re

import PIL.Image
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from manyranks import show, theory
from manyranks.show.drawings import contrast
from manyranks.theory import collectives
from manyranks.timeline import Failure, Span, Timeline, survive

SIZES = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 999_999: "1 MB", 8.48e12: "8.48 TB", 2e18: "2,000 PB"}
TIMES = {0: "0 ns", 5e-9: "5 ns", 14e-6: "14 µs", 3.2e-3: "3.2 ms", 90: "1.5 min", 3.16e8: "10 years"}


@pytest.mark.parametrize(("n", "text"), SIZES.items())
def test_sizes_are_in_powers_of_ten(n, text):
    assert show.size(n) == text


@pytest.mark.parametrize(("seconds", "text"), TIMES.items())
def test_durations_take_the_unit_that_fits(seconds, text):
    assert show.duration(seconds) == text


def test_rates_are_sizes_per_second():
    assert show.rate(50e9) == "50 GB/s"


def test_theory_and_measurement_stand_side_by_side():
    table = show.reconcile({"a": 100, "b": 7}, {"a": 100, "b": 14})
    assert [row[-1] for row in table.rows] == ["0", "7 (+100.0%)"]
    assert table.header == ["", "theory", "measured", "difference"]
    assert show.reconcile({"a": 1}, {"a": 1}, against="published").header[2] == "published"
    assert "<td" in table._repr_html_()
    with pytest.raises(ValueError, match="give the same quantities in both"):
        show.reconcile({"a": 1}, {"b": 1})


def test_a_table_escapes_what_it_shows():
    assert "<b>" not in show.table(["<b>"], [["<b>"]])._repr_html_()


def test_the_source_that_is_shown_is_the_source_that_runs():
    listing = show.source(collectives.chunk_sizes)
    assert repr(listing).startswith("def chunk_sizes(")
    assert "elements" in listing._repr_html_()
    assert repr(show.source(show.Explorer.set)).startswith("def set(self")  # a method stands at the margin
    with pytest.raises(ValueError, match="only functions and classes"):
        show.source(len)


def test_a_listing_can_be_read_on_a_page_of_any_color():
    """Its panel and each of its colors are in the page itself, so no style sheet and no theme changes them."""
    sources = (show.source(show.Explorer, contrast, theory.step.estimate), show.source(Timeline))
    for shown in (listing._repr_html_() for listing in sources):
        panels = re.findall(r'<pre style="background-color: (\S+); color: (\S+);', shown)
        assert len(panels) == shown.count("<pre")
        ((paper, ink),) = set(panels)
        inks = {color for color, text in re.findall(r'<span style="color: (#\w+)[^>]*>([^<]*)', shown) if text.strip()}
        assert len(inks) >= 5
        assert all(contrast(color, paper) >= 4.5 for color in {ink, *inks})


RUNS = {f"{spares} spares": survive([Failure(50), Failure(90)], 100, 20, 2, 5, 0, spares, 60) for spares in (0, 2)}
SPANS = (
    Span(0, "compute", "compute", 0, 1),
    Span(1, "communication", "send", 0.5, 2),
    Span(1, "compute", "compute", 0, 0.5),
)
H100 = theory.accelerators["H100 SXM"]
FIGURES = {
    "timeline": lambda: show.timeline(Timeline(SPANS), "title"),
    "empty timeline": lambda: show.timeline(Timeline(())),
    "links": lambda: show.hardware.links(theory.links),
    "topologies": lambda: show.hardware.topologies(),
    "ping-pong": lambda: show.hardware.ping_pong([1, 1000, 10**6], [1e-5, 1.1e-5, 1e-3], theory.links["PCIe 4.0 x16"]),
    "models": lambda: show.hardware.outgrown({"GPT-3": (2020, 2.8e12, 3.1e23)}, {"H100": (2022, 80e9, 989e12)}),
    "path of a message": lambda: show.hardware.path_of_a_message(),
    "chip": lambda: show.kernels.chip(H100),
    "warps": lambda: show.kernels.warps({"stride 8": range(0, 1024, 32)}),
    "tiles": lambda: show.kernels.tiles(256, 192, 320, 64, 64, 32),
    "walk": lambda: show.kernels.walk(256, 256, 64, 32),
    "requested": lambda: show.kernels.requested({"softmax": {"five operators": 8e6, "one kernel": 2e6}}),
    "waves": lambda: show.kernels.waves(H100, range(256, 4097, 64)),
    "history": lambda: show.failures.history(RUNS),
    "intervals": lambda: show.failures.intervals(30, 300, 11_000, simulated=[(600, 0.9), (3600, 0.8)]),
    "lost": lambda: show.failures.lost(),
    "standstill": lambda: show.failures.standstill(),
    "saves": lambda: show.failures.saves(),
    "heat": lambda: show.failures.heat([[1.0, 1.01], [1.1, 1.12], [1.0, 0.99]]),
    "interruptions": lambda: show.failures.interruptions(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_picture_without_overlapping_text(name):
    figure = FIGURES[name]()
    data, shown = figure._repr_mimebundle_()
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
    assert picture.width >= 1200
    assert picture.getpixel((0, 0))[3] == 0  # no background
    assert shown["image/png"]["width"] == pytest.approx(picture.width / 2, abs=1)  # sharp where a screen has twice the pixels
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        ticks = [t.get_window_extent(canvas.get_renderer()) for t in axes.get_xticklabels() if t.get_text() and t.get_visible()]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(ticks))


def explorer():
    return show.hardware.explorer()


def test_an_explorer_is_set_and_read_from_code():
    shown = explorer()
    before = shown.png
    shown.set(size=1, link="NVLink, H100")
    assert shown.values == {"link": "NVLink, H100", "size": 1, "n": 8}
    assert "Limit: latency." in shown.status
    assert shown.png != before
    assert "1 B over NVLink, H100" in repr(shown)


def test_an_explorer_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match="'bytes': this explorer has link, size, n"):
        explorer().set(bytes=3)
    with pytest.raises(ValueError, match="link='Ethernet'"):
        explorer().set(link="Ethernet")
