"""Chapter 06's figure: what a layer keeps, over t."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from manyranks.show import style, units
from manyranks.show.columns import columns, write
from manyranks.theory import ModelShape, Plan, tensor
from manyranks.theory.names import Named

# name -> what it says of a plan
VARIANTS = Named("variant", {"TP": {"sequence_parallel": False}, "TP + SP": {"sequence_parallel": True, "regather": True}})
VARIANTS |= {"TP + SP, gathered inputs kept": {"sequence_parallel": True, "regather": False}}
_NARROW = dict(zip(VARIANTS, ("TP", "+ SP", "+ SP,\nkept"), strict=True))  # below the bars, where each t has several
_PARTS = {"norms, dropouts and the inputs of attention and MLP: cut by SP only": (style.ORANGE, "////")}
_PARTS |= {"inside attention and MLP: cut by t": (style.BLUE, "")}


@style.styled
def saved(
    shape: ModelShape,
    plan: Plan,
    degrees: Sequence[int] = (1, 2, 4, 8),
    measured: Mapping[str, Mapping[int, float]] = {},
    variants: Sequence[str] = ("TP", "TP + SP"),
    itemsize: int = 4,
) -> style.Figure:
    """Draws the bytes that one layer keeps for backward on one rank, over t: a bar for each variant.

    plan: all but tp and what the variant says; degrees: the t that get a bar; variants: keys of VARIANTS
    measured: variant -> t -> bytes, drawn as rings; itemsize: bytes of the norms' statistics, as in theory.tensor.saved
    Raises ValueError for an unknown variant, and where a plan doesn't fit the shape.
    """
    ways = [VARIANTS[name] for name in (*variants, *measured)]  # refuses what can't be
    fig, (axes,) = style.figure(width=8.8, height=3.9)
    small, names = len(variants) * len(degrees) > 8, [_NARROW[name] for name in variants]
    own = ways[: len(variants)]
    each = [[tensor.saved(shape, replace(plan, tp=t, **way), itemsize=itemsize) for t in degrees] for way in own]
    parts = [([one.outside + one.statistics for one in of], [one.inside for one in of]) for of in each]
    sides = [dict(zip(_PARTS, both, strict=True)) for both in parts]
    places = columns(axes, [f"t = {t}" for t in degrees], sides, units.size, _PARTS)
    for x, name, of in zip(places, variants, each, strict=True):
        rings, totals = np.array([measured.get(name, {}).get(t, np.nan) for t in degrees]), [one.total for one in of]
        write(axes, x, np.fmax(totals, rings), list(map(units.size, totals)), 8 if measured else 4, 7 if small else 8)
        if (seen := ~np.isnan(rings)).any():
            look = {"fillstyle": "none", "markersize": 8 if small else 10, "markeredgewidth": 1.4, "color": style.INK}
            axes.plot(x[seen], rings[seen], "o", label=None if axes.lines else "measured", **look)
    axes.xaxis.remove_overlapping_locs = False  # the middle one of three bars stands where its t does
    two_lines = any("\n" in name for name in names)
    axes.set_xticks(np.ravel(places), np.repeat(names, len(degrees)), minor=True, fontsize=8)
    axes.tick_params(axis="x", pad=18 + 11 * two_lines)
    xlabel = "tensor-parallel ranks" + " (kept: the gathered inputs too)" * two_lines
    axes.set(xlabel=xlabel, ylabel="kept by one layer, per rank", ylim=(0, 1.12 * axes.get_ylim()[1]))
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.6)
    return fig
