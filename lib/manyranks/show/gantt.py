"""A Timeline as a picture: one band a rank, compute in its upper half, communication in its lower one."""

from matplotlib.patches import Patch

from manyranks.show import style
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Timeline

_BAND = {COMPUTE: (-0.42, 0.4, style.BLUE, ""), COMMUNICATION: (0.02, 0.4, style.ORANGE, "////")}


@style.styled
def timeline(recorded: Timeline, title: str = "") -> style.Figure:
    """Draws compute and communication of every rank over time, in ms."""
    ranks = recorded.ranks
    fig, (axes,) = style.figure(height=1.1 + 0.5 * max(len(ranks), 1))
    for row, rank in enumerate(ranks):
        for kind, (offset, height, colour, hatch) in _BAND.items():
            bars = [(s.started * 1e3, s.seconds * 1e3) for s in recorded.of(rank, kind)]
            axes.broken_barh(bars, (row + offset, height), facecolor=colour, edgecolor="white", linewidth=0.4, hatch=hatch)
    axes.set(xlabel="time (ms)", yticks=range(len(ranks)), yticklabels=[f"rank {r}" for r in ranks], title=title)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    legend = [Patch(facecolor=c, hatch=h, edgecolor="white", label=k) for k, (_, _, c, h) in _BAND.items()]
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return fig
