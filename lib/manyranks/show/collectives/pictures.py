"""Collectives before and after, drawn from the tensors that the ranks really held."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from manyranks.show import style
from manyranks.show.collectives.holdings import Holdings, Row

Rows = Sequence[Row]  # one a rank: a tensor, a list of numbers, or None for nothing
_GAP = 1.4  # columns between before and after


@style.styled
def before_after(operations: Mapping[str, tuple[Rows, Rows]]) -> style.Figure:
    """What each rank holds before and after each operation, two operations a line. operations: name -> (before, after).

    Give rank r numbers times 10**r: then each digit of a sum is one rank's. A rank that has fewer elements than the largest
    holds a chunk. Raises ValueError for more than 6 ranks, or where two pictures differ in their number of ranks.
    """
    counts = {name: (len(before), len(after)) for name, (before, after) in operations.items()}
    if len({n for both in counts.values() for n in both}) != 1:
        raise ValueError(f"ranks before and after: {counts}; give one row a rank, the same number everywhere")
    n, lines = next(iter(counts.values()))[0], -(-len(operations) // 2)
    fig, axes = style.figure(columns=2, rows=lines, width=8.8, height=lines * (0.65 + 0.26 * n))
    fig.get_layout_engine().set(wspace=0.08)
    for place, (name, (before, after)) in zip(axes, operations.items(), strict=False):
        _operation(place, name, before, after)
    for empty in axes[len(operations) :]:
        empty.set_axis_off()
    return fig


def _operation(axes: Axes, name: str, before: Rows, after: Rows) -> None:
    n, columns = len(before), max(len(row) for row in [*before, *after] if row is not None)
    Holdings(axes, n, columns).update(before)
    Holdings(axes, n, columns, left=columns + _GAP).update(after)
    middle = columns + _GAP / 2
    axes.annotate("", (middle + 0.45, n / 2), (middle - 0.45, n / 2), arrowprops={"arrowstyle": "-|>", "color": style.INK})
    axes.set_title(name)
