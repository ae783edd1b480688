"""Chapter 07: context parallelism. Who has which tokens, what each rank computes of a masked attention; an explorer."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from manyranks.show import style
from manyranks.show.context_explorer import explorer
from manyranks.show.context_masks import hops, mask
from manyranks.show.context_pictures import all_to_all, layouts, ring

__all__ = ["all_to_all", "balance", "explorer", "hops", "layouts", "mask", "ring"]


@style.styled
def balance(work: Mapping[str, Sequence[float]], label: str = "work of a rank", unit: str = "FLOP") -> style.Figure:
    """The work of each rank, a panel for each name, with the mean as a dashed line and slowest ÷ mean in words.

    work: name -> numbers of rank 0, 1, …; unit: theirs. Raises ValueError for none, more than 4 names, or a name without work.
    """
    if not 1 <= len(work) <= 4:
        raise ValueError(f"{len(work)} names: a picture shows 1 to 4")
    if empty := [name for name, numbers in work.items() if not sum(numbers) > 0]:
        raise ValueError(f"{empty[0]!r}: no work, so there is no mean to compare with")
    fig, panels = style.figure(columns=len(work), width=min(9.4, 1.2 + 2.9 * len(work)), height=3.2)
    top = max(max(numbers) for numbers in work.values())
    for place, (axes, (name, numbers)) in enumerate(zip(panels, work.items(), strict=True)):
        _draw_work(axes, name, list(numbers), top, EngFormatter(unit))
        if place:
            axes.tick_params(labelleft=False)
    panels[0].set_ylabel(label)
    return fig


def _draw_work(axes: Axes, name: str, numbers: list[float], top: float, said: EngFormatter) -> None:
    mean, n = sum(numbers) / len(numbers), len(numbers)
    axes.bar(range(n), numbers, 0.7, color=style.BLUE, edgecolor="white")
    axes.axhline(mean, color=style.INK, linestyle="--", linewidth=1.4)
    axes.set(title=name, xlabel="rank", ylim=(0, 1.3 * top), xlim=(-0.6, n - 0.4))
    axes.set_xticks(range(0, n, -(-n // 16)))
    axes.yaxis.set_major_formatter(said)
    axes.grid(visible=False, axis="x")
    text = f"slowest ÷ mean: {max(numbers) / mean:.2f}\ndashed, the mean: {said(float(f'{mean:.3g}'))}"
    axes.text(0.03, 0.98, text, transform=axes.transAxes, fontsize=9, va="top")
