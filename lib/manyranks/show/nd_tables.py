"""Chapter 10's tables: the rule of thumb's regime beside the planner's, and a small twin's bytes rank by rank."""

from collections.abc import Mapping, Sequence

from manyranks.show import units
from manyranks.show.tables import Table, table
from manyranks.theory.nd.rules import Comparison

_EQUAL = 0.005  # of the time: what loses less is as fast


def regimes(rows: Sequence[Comparison]) -> Table:
    """Of each model and cluster the rule's regime and the planner's, and what the rule loses: in its regime at best, in all.

    rows: what theory.nd.rules.compare returns. Raises ValueError for none.
    """
    if not rows:
        raise ValueError("no rows: give those of theory.nd.rules.compare")
    header = ["", "tokens/GPU", "rule of thumb", "step", "planner", "step", "its regime loses", "the rule loses"]
    return table(header, [_regime(row) for row in rows])


def _regime(row: Comparison) -> list[str]:
    rule, best = units.duration(row.rule.seconds), units.duration(row.best.seconds)
    planner = "the same" if row.same else row.best_regime
    return [row.name, f"{row.tokens:,.0f}", row.rule_regime, rule, planner, best, _share(row.regime_loss), _share(row.loss)]


def _share(loss: float) -> str:
    return f"{loss:.0%}" if loss >= _EQUAL else "–"


def twin(
    theory: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]], at: Sequence[Mapping[str, int]] = ()
) -> Table:
    """Bytes of every rank: one number where both agree, else "measured ≠ theory". Below them the sums of all ranks.

    theory, measured: by rank, quantity ("tp", "states") -> bytes; at: by rank, its coordinates, as Mesh.coordinates gives them.
    A quantity that no rank has is left out. Raises ValueError unless both have the same ranks and quantities.
    """
    if len(theory) != len(measured) or not theory or (at and len(at) != len(theory)):
        given = f"{len(theory)} ranks in theory, {len(measured)} measured" + f", {len(at)} places" * bool(at)
        raise ValueError(f"{given}: give as many of each, 1 or more")
    for rank, (one, other) in enumerate(zip(theory, measured, strict=True)):
        if one.keys() != other.keys() or one.keys() != theory[0].keys():
            raise ValueError(f"rank {rank}: theory has {list(one)}, measured {list(other)}: give the same quantities in all")
    shown = [name for name in theory[0] if any(each[name] for each in (*theory, *measured))]
    places = [" ".join(f"{axis}{k}" for axis, k in each.items()) for each in at]
    rows = [_rank(rank, places, one, other, shown) for rank, (one, other) in enumerate(zip(theory, measured, strict=True))]
    for said, ranks in (("theory", theory), ("measured", measured)):
        rows.append([f"all, {said}", *[""] * bool(at), *(sum(each[name] for each in ranks) for name in shown)])
    off = [sum(abs(b[name] - a[name]) for a, b in zip(theory, measured, strict=True)) for name in shown]
    rows.append(["difference", *[""] * bool(at), *off])
    return table(["rank", *["at"] * bool(at), *shown], rows)


def _rank(
    rank: int, places: Sequence[str], theory: Mapping[str, int], measured: Mapping[str, int], shown: Sequence[str]
) -> list:
    cells = [measured[name] if measured[name] == theory[name] else f"{measured[name]:,} ≠ {theory[name]:,}" for name in shown]
    return [rank, *places[rank : rank + 1], *cells]
