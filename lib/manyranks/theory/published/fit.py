"""The constant that is fitted for all stacks, and what happens to each table when it has no part in the fit."""

import math

from manyranks import progress_bar
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.published.steps import FOUNDRY, KORTHIKANTI, PRETRAINING, SC21, TORCHTITAN, PublishedRun, rows

FITTED_ON = (SC21, KORTHIKANTI)
TABLES = (*PRETRAINING, TORCHTITAN, FOUNDRY)  # each is left out once
COARSE, FINE = [x / 20 for x in range(10, 21)], [x / 100 for x in range(-4, 5)]  # candidates, and around the best of these


def fit(tables: tuple[str, ...] = FITTED_ON) -> float:
    """The share of the best matrix product (Constants.matmul), to two digits, with the least mean square of log errors."""
    chosen = [row for row in rows() if row.table in tables]
    best = min(COARSE, key=lambda matmul: _squares(chosen, matmul))
    return min((round(best + x, 2) for x in FINE), key=lambda matmul: _squares(chosen, matmul))


def _squares(chosen: list[PublishedRun], matmul: float) -> float:
    return sum(math.log1p(row.error(Constants(matmul=matmul))) ** 2 for row in chosen)


def mean_error(chosen: list[PublishedRun], constants: Constants = DEFAULT) -> float:
    """Mean of the errors' absolute values."""
    return sum(abs(row.error(constants)) for row in chosen) / len(chosen)


def leave_one_out() -> dict[str, tuple[float, float]]:
    """Returns, for each table, the constant fitted on all others, and the table's mean absolute error with it."""
    found = {}
    for table in progress_bar.each(TABLES, "fitting"):
        matmul = fit(tuple(other for other in TABLES if other != table))
        own = [row for row in rows() if row.table == table]
        found[table] = matmul, mean_error(own, Constants(matmul=matmul))
    return found
