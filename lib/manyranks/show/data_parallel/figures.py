"""Chapter 02's figures: what leaves when in a step; losses."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.patheffects import withStroke

from manyranks.show import style, units
from manyranks.show.gantt import KINDS, Gantt
from manyranks.show.labels import Labels, width
from manyranks.timeline import Timeline
from manyranks.timeline.intervals import outside
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span


@style.styled
def steps(timelines: Mapping[str, Timeline], rank: int = 0, until: float | None = None) -> style.Figure:
    """What one rank does in each timeline, under each other on one scale: compute, and below it communication.

    A communication bar bears its name, numbered where several have the same, and its size where that was recorded, as far as
    there is room. Lines, and their sum at the right: communication that no compute hides. until: seconds that the axis
    reaches to at least. Raises ValueError for no timeline, and for one without the rank.
    """
    if not timelines or any(rank not in each.ranks for each in timelines.values()):
        ranks = {name: each.ranks for name, each in timelines.items()}
        raise ValueError(f"rank={rank} and timelines of ranks {ranks}: give a Timeline or more, and a rank that all have")
    rows = [each.of(rank) for each in timelines.values()]
    stacked = Timeline(tuple(span._replace(rank=row) for row, spans in enumerate(rows) for span in spans))
    fig, (axes,) = style.figure(width=8, height=1.0 + 0.85 * len(rows))
    chart = Gantt(axes)
    chart.update(stacked, max(until or 0.0, 1.3 * max(span.finished for span in stacked.spans)))  # room for the sums
    axes.set_yticks(range(len(rows)), list(timelines))
    fig.draw_without_rendering()  # places the axes: which names have room depends on their width
    _write_names(chart, stacked)
    for row, each in enumerate(timelines.values()):
        exposed = each.exposed_communication(rank)
        text = f"|—| {units.duration(exposed)} exposed" if exposed > 1e-12 else "nothing exposed"
        axes.text(0.995, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
    return fig


def _write_names(chart: Gantt, stacked: Timeline) -> None:
    """Names the communication bars where there is room, and draws lines over what of them is exposed."""
    spans = [span for span in stacked.spans if span.kind == COMMUNICATION]
    boxes = chart.moving[list(KINDS).index(COMMUNICATION)].get_path().vertices.reshape(len(spans), 5, 2)
    (left, top), (right, bottom) = boxes[:, 0].T, boxes[:, 2].T
    points = (right - left) * chart.axes.bbox.width / chart.axes.get_xlim()[1] * 72 / style.DOTS
    texts = [
        next((name for name in names if width(name, 8) + 4 <= room), "")
        for names, room in zip(_names(spans), points, strict=True)
    ]
    named = [(place, text) for *place, text in zip((left + right) / 2, (top + bottom) / 2, texts, strict=True) if text]
    labels = Labels(chart.axes, size=8, colour=style.BLACK)
    labels.artist.set_path_effects([withStroke(linewidth=3, foreground="white")])  # over hatches
    labels.update([place for place, _ in named], [text for _, text in named])
    for span, end in zip(spans, right, strict=True):
        busy = [(each.started, each.finished) for each in stacked.of(span.rank, COMPUTE)]
        for part in outside(busy, span.started, span.finished):
            x = np.array(part) * end / span.finished  # seconds in the axis's unit
            chart.axes.plot(x, [span.rank - 0.2] * 2, "-|", color=style.INK, linewidth=1.2)


def _names(spans: Sequence[Span]) -> Iterator[tuple[str, ...]]:
    """For each span what it may be called, the longest first. Replay names a collective by its operation alone."""
    alike, before = Counter((span.rank, span.name) for span in spans), Counter()
    for key in ((span.rank, span.name) for span in spans):
        name, number = key[1], before[key]
        before[key] += 1
        if recorded := re.fullmatch(r"\w+ (#\d+) of ([\d,]+) bytes.*", name):
            size = units.size(int(recorded[2].replace(",", "")))
            yield f"{recorded[1]}, {size}", size
        else:
            yield (f"{name} {number}", str(number)) if alike[key] > 1 else (name,)


@style.styled
def losses(named: Mapping[str, Sequence[float]]) -> style.Figure:
    """The loss of each step: a curve for the first run, and markers for the others, which may lie on it."""
    fig, (axes,) = style.figure(height=3.4)
    for k, ((name, values), marker) in enumerate(zip(named.items(), " " + style.MARKERS, strict=False)):
        every = (min(k, len(values) // 2), max(2, len(values) // 10))  # runs that agree do not hide each other's markers
        look = {"marker": marker, "markevery": every, "fillstyle": "none", "markersize": 7, "markeredgewidth": 1.5}
        axes.plot(range(len(values)), values, label=name, linestyle="" if k else "-", **look)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None))
    axes.legend(loc="lower left")
    return fig
