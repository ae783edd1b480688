"""Chapter 02's figures: copies of a model, each with a part of the batch, and what leaves when in a step."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patheffects import withStroke

from manyranks.show import gantt, style, units
from manyranks.show.drawings.paper import LARGE, WIDTH, Figure
from manyranks.timeline import Timeline
from manyranks.timeline.intervals import outside
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span


@style.styled
def replicas(n: int = 4) -> style.Figure:
    """Draws one step of n replicas: each takes its part of the batch, and an all-reduce gives all of them the same gradient."""
    fig, wide = Figure(WIDTH, 3.75), (WIDTH - 1.35) / n
    rows = {"weights": 0.35, "batch": 0.95, "gradient": 1.65, "mean": 2.75, "new weights": 3.3}
    for name, y in rows.items():
        fig.write(1.2, y + 0.19, name, (1.2, 1), ha="right")
    for rank in range(n):
        x = 1.35 + rank * wide
        middle, room = x + wide / 2, wide - 0.12
        fig.rank(middle, 0.15, rank, wide)
        for name, kind, text in (
            ("weights", "parameters", "W"),
            ("batch", "activations", f"part {rank}"),
            ("gradient", "gradients", f"g{rank}"),
            ("mean", "gradients", "g"),
            ("new weights", "parameters", "W′"),
        ):
            fig.block(x + 0.06, rows[name], room, 0.38, kind, text, f"{name} {rank}", size=LARGE)
        fig.arrow([(middle, 1.34), (middle, 1.64)], name=f"backward {rank}")
        fig.arrow([(middle, 2.04), (middle, 2.26)], name=f"to the sum {rank}")
        fig.arrow([(middle, 2.52), (middle, 2.74)], name=f"from the sum {rank}")
    fig.block(1.41, 2.26, n * wide - 0.12, 0.26, "compute", f"all-reduce: g = (g0 + … + g{n - 1}) / {n}", "all-reduce")
    return fig


def order(measured, rank: int = 0) -> str:
    """Returns what a rank did, a letter each: C computes, A starts a collective, W waits for one.

    measured: what world.measure(…, flops=True) returned
    """
    letters = {"Compute": "C", "Collective": "A", "Wait": "W"}
    return "".join(letters[type(item).__name__] for item in measured.program.ranks[rank])


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
    boxes = gantt.boxes(stacked)
    boxes.name = _names(stacked.spans)
    until = max(until or 0.0, 1.3 * max(span.finished for span in stacked.spans))  # room for the sums
    chart = gantt.chart("", list(timelines), boxes, until, 0.85)
    chart.names.artist.set_path_effects([withStroke(linewidth=3, foreground="white")])  # over hatches
    second, _, high, _ = chart.pixels
    for row, each in enumerate(timelines.values()):
        exposed = each.exposed_communication(rank)
        text = f"|—| {units.duration(exposed)} exposed" if exposed > 1e-12 else "nothing exposed"
        chart.axes.text(chart.wide, (row + 0.5) * high, text, ha="right", va="center", fontsize=9)
        busy = [span[3:] for span in each.of(rank, COMPUTE)]
        for span in each.of(rank, COMMUNICATION):
            for part in outside(busy, span.started, span.finished):
                y = (row + 0.3) * high
                chart.axes.plot(np.array(part) * second, [y, y], "-|", color=style.INK, linewidth=1.2)
    return chart.axes.figure


def _names(spans: Sequence[Span]) -> list[str]:
    """What communication may be called, as gantt.boxes has it. Replay names a collective by its operation alone."""
    keys, names = [(span.rank, span.name) for span in spans], []
    alike, before = Counter(keys), Counter()
    for span, key in zip(spans, keys, strict=True):
        name, number = span.name, before[key]
        if recorded := re.fullmatch(r"\w+ (#\d+) of ([\d,]+) bytes.*", name):
            size = units.size(int(recorded[2].replace(",", "")))
            name = f"{recorded[1]}, {size}|{size}"
        elif alike[key] > 1:
            name = f"{name} {number}|{number}"
        names.append(name if span.kind == COMMUNICATION else "")
        before[key] += 1
    return names
