"""Chapter 08's pictures: which token goes to which expert, how many rows travel from rank to rank, one hop and two."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.drawings.paper import Figure
from manyranks.show.looks import LOOKS, box

Rows = Sequence[Sequence[int]]
_CROSSES, _INSIDE = (style.ORANGE, 2.5, "crosses"), (style.INK, 1.0, "inside")  # looks of arrows, and their names
_LOST = {"facecolor": "none", "edgecolor": style.ORANGE, "linestyle": (0, (2, 1)), "linewidth": 1.3}
_SMALL = {"fontsize": 8, "va": "center"}


@style.styled
def routing(
    chosen_TK: Rows, experts: int, ranks: int = 1, kept_TK: Rows | None = None, capacity: int | None = None
) -> style.Figure:
    """Draws which token goes to which expert, in the look of the rank that has it; beside it the copies that experts get.

    chosen_TK: each token's experts, its first choice first; a cell says which choice it is
    kept_TK: the same with −1 where a copy was dropped, as Routing.experts_TK; their numbers are crossed out
    experts, ranks: how many there are; up to 8 ranks share the experts in blocks; capacity: copies that an expert takes
    Raises ValueError for experts that are not there, ranks that do not share them, and copies that nobody chose.
    """
    chosen = np.asarray(chosen_TK)
    found, T, own = chosen if kept_TK is None else np.asarray(kept_TK), len(chosen), experts // ranks
    if chosen.min() < 0 or chosen.max() >= experts or experts % ranks or ranks > len(LOOKS):
        there = f"give experts from 0 to {experts - 1}, and 1 to {len(LOOKS)} ranks that share them evenly"
        raise ValueError(f"chosen_TK has {chosen.min()} to {chosen.max()}, ranks={ranks}: {there}")
    if found.shape != chosen.shape or ((found != chosen) & (found != -1)).any():
        raise ValueError("kept_TK is not chosen_TK with −1 where a copy was dropped: give experts before and after dropping")
    wide, high = min(9.4, 4.4 + 0.3 * T), 1.7 + 0.27 * experts
    fig, (cells, loads) = style.figure(2, 1, wide, high, sharey=True, width_ratios=(0.3 * T, 2.6))
    for (token, choice), expert in np.ndenumerate(chosen):
        if found[token, choice] >= 0:
            box(cells, (token - 0.5, expert - 0.5), 1, 1, expert // own, str(choice + 1))
        else:
            cells.add_patch(Rectangle((token - 0.45, expert - 0.45), 0.9, 0.9, **_LOST))
            cells.text(token, expert, choice + 1, ha="center", **_SMALL)
            cells.plot([token - 0.45, token + 0.45], [expert + 0.45, expert - 0.45], "-", color=style.ORANGE, linewidth=1.2)
    names = [f"rank {k // own}, expert {k}" if k % own == 0 and ranks > 1 else f"{k}" for k in range(experts)]
    dropped = "; crossed out: dropped" * bool((found < 0).any())
    cells.set(title="tokens and their choices", xlabel=f"token; 1: its first choice, 2: second, …{dropped}", xticks=range(T))
    cells.set(xlim=(-0.5, T - 0.5), ylim=(experts - 0.5, -0.5), yticks=range(experts), yticklabels=names)
    _rule(cells, T, experts, own)
    _loads(loads, *(np.bincount(chosen[which], minlength=experts) for which in (found >= 0, found < 0)), own, capacity)
    return fig


def _loads(axes: Axes, kept: np.ndarray, lost: np.ndarray, own: int, capacity: int | None) -> None:
    """A bar for each expert, what was dropped at its end, with the mean and the capacity as lines."""
    mean, longest = (kept + lost).mean(), max(*(kept + lost), capacity or 0)
    said = [f"dashed, the mean: {mean:.3g}", f"largest ÷ mean: {max(kept + lost) / mean:.2f}"]
    for expert, (held, dropped) in enumerate(zip(kept, lost, strict=True)):
        colour, hatch = LOOKS[expert // own]
        axes.barh(expert, held, 0.72, color=colour, hatch=hatch, edgecolor="#666666", linewidth=0.6)
        axes.barh(expert, dropped, 0.72, left=held, visible=bool(dropped), **_LOST)
        axes.text(1.08 * longest, expert, f"{held}" + f", {dropped} dropped" * bool(dropped), **_SMALL)
    axes.axvline(mean, color=style.INK, linestyle="--", linewidth=1.3)
    if capacity is not None:
        axes.axvline(capacity, color=style.ORANGE, linestyle="-", linewidth=2)
        said.insert(1, f"thick line, the capacity: {capacity}")
    axes.set(title="token copies per expert", xlabel="\n".join(said), xlim=(0, 1.9 * longest), xticks=[])
    axes.grid(visible=False)


def _rule(axes: Axes, columns: int, rows: int, own: int) -> None:
    """Lines between cells, and thick ones after every so many rows."""
    axes.vlines(np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, colors=style.INK, linestyles="-", linewidths=0.4)
    wide = [0.4 if row % own else 1.4 for row in range(rows + 1)]
    axes.hlines(np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, colors=style.INK, linestyles="-", linewidths=wide)
    axes.tick_params(length=0, labelsize=8, grid_linewidth=0)
    axes.spines[:].set_visible(False)


@style.styled
def dispatch(named: Mapping[str, Rows]) -> style.Figure:
    """Draws how many rows each rank (a row of the matrix) sends to each (a column). The diagonal stays, and is gray.

    named: title -> n × n numbers; a panel for each
    """
    fig, panels = style.figure(columns=len(named), width=3.3 * len(named), height=3.2)
    for axes, (name, sent) in zip(panels, named.items(), strict=True):
        sent, n, stays = np.asarray(sent), len(sent), int(np.trace(sent))
        axes.imshow(np.eye(n), cmap=ListedColormap(["#cfe3f1", "#e0e0e0"]))
        for (rank, other), rows in np.ndenumerate(sent):
            axes.text(other, rank, f"{rows:,}", fontsize=min(9, 40 / n), color=style.BLACK, ha="center", va="center")
        said = f"to rank\nsent: {sent.sum() - stays:,} rows; stay (gray): {stays:,}"
        axes.set(title=name, xlabel=said, ylabel="from rank", xticks=range(n), yticks=range(n))
        _rule(axes, n, n, n)
    return fig


@style.styled
def hops(chosen: Sequence[int] = (1, 9, 10, 14)) -> style.Figure:
    """Draws how a token of rank 0 gets to its experts on 2 nodes of 2 ranks: by one hop, a copy for each; by two, one copy for
    the other node, which goes on from the rank with the same place there. Thick arrows cross to the other node.

    chosen: the token's experts, up to 8 of 0 to 15; each rank has 4
    Raises ValueError for experts that are not there or chosen twice.
    """
    if not 1 <= len(chosen) <= 8 or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(16)):
        raise ValueError(f"chosen={list(chosen)}: 1 to 8 different experts of 0 to 15")
    fig, away = Figure(9.0, 3.2), sum(expert >= 8 for expert in chosen)
    for x, name, copies in ((0.1, "one hop", away), (4.9, "two hops", min(1, away))):
        said = f"{copies} copies cross" if copies != 1 else "1 copy crosses"
        fig.write(x, 0.2, f"{name}: {said}", size=11, ha="left", weight="bold")
        token = copy = (x + 1.05, 1.175)  # left end of what rank 0 has, and of what is at its place in the other node
        fig.block(*token, 0.5, 0.24, "optimizer", "token", size=8.5)
        if two := name == "two hops" and away > 0:
            copy = (x + 2.45, 1.175)
            fig.block(*copy, 0.5, 0.24, "optimizer", "copy", size=8.5)
            fig.arrow(((token[0] + 0.5, 1.295), (copy[0], 1.295)), *_CROSSES)
        for expert in range(16):
            far, y = expert // 8, 0.78 + expert % 8 * 0.2625
            left, look = x + 2.35 * far, {"size": 8.5, "hollow": expert not in chosen}
            fig.block(left + (0.3, 0.99)[far], y - 0.13, 0.36, 0.26, "parameters", f"{expert}", **look)
            if expert % 4 == 0:
                fig.frame(left, y - 0.13, 1.65, 1.05)
                fig.write(left + (0.15, 1.5)[far], y + 0.4, f"rank {expert // 4}", size=8.5, rotation=90)
            if expert % 8 == 0:
                fig.write(left + 0.83, y - 0.25, f"node {far}", size=9)
            if expert in chosen:
                start, end = (copy[0] + 0.5, x + 3.34) if far else (token[0], x + 0.66)
                fig.arrow(((start, 1.295), (end, y)), *(_CROSSES if far and not two else _INSIDE))
    for x, look, said in ((0.1, _CROSSES, "to another node"), (2.2, _INSIDE, "inside a node")):
        fig.arrow(((x, 3.02), (x + 0.45, 3.02)), *look)
        fig.write(x + 0.53, 3.02, said, size=9, ha="left")
    fig.write(4.2, 3.02, "filled: the experts that the token chose", size=9, ha="left")
    return fig
