"""Computes what failures cost a training run, and how often to save, from closed formulas in seconds.

A job fails at random: the time to the next failure is exponential with mean `mtbf` (M), whatever happened before. It trains
for an interval τ, stands still for a stall δ while it saves, and after a failure takes R to restart. A failure may hit any of
these. An asynchronous save has a write of w seconds while training goes on. timeline.survive replays such a run under a trace.
"""

import math

from manyranks.timeline.failures import not_negative, positive


def job_mtbf(unit_mtbf: float, units: int) -> float:
    """Computes the mean time between failures of a job that stops when one of its units does.

    unit_mtbf: seconds, of one unit: a GPU, or a node
    units: number of units
    """
    positive(unit_mtbf=unit_mtbf, units=units)
    return unit_mtbf / units


def young(stall: float, mtbf: float) -> float:
    """Computes Young's interval between saves, √(2δM): it makes δ/τ + τ/2M smallest, the time for saves plus the lost training.

    stall: seconds that training stands still for a save
    mtbf: seconds between failures of the job
    Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    positive(stall=stall, mtbf=mtbf)
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Computes Daly's interval between saves: √(2δM)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ for δ < 2M, else M.

    stall, mtbf: seconds, as for young
    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 37.
    """
    positive(stall=stall, mtbf=mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    share = stall / (2 * mtbf)
    return young(stall, mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - stall


def best_interval(stall: float, mtbf: float) -> float:
    """Computes the interval with the highest goodput, by bisection: the τ with (1 − τ/M)·e^((τ+δ)/M) = 1.

    That's where the derivative of goodput is 0. Restarts and writes only scale goodput, so they don't move it; but a write
    that takes longer than this needs a longer interval.

    stall, mtbf: seconds, as for young
    """
    positive(stall=stall, mtbf=mtbf)
    low, high = 0.0, 1.0  # of τ/M
    for _ in range(50):
        middle = (low + high) / 2
        if middle + math.log1p(-middle) + stall / mtbf > 0:
            low = middle
        else:
            high = middle
    return mtbf * (low + high) / 2


def goodput(interval: float, stall: float, restart: float, mtbf: float, write: float = 0.0) -> float:
    """Computes the share of the time that goes into training that is kept: τ ÷ (M·e^((R+w)/M)·(e^((τ+δ)/M) − 1)).

    Look at the time from when one checkpoint can be used until the next one can. The first attempt takes L = τ + δ. After a
    failure, training repeats the w seconds that had passed during the write, so that later attempts take R + L + w. An attempt
    of length a that starts over until it succeeds takes M·(e^(a/M) − 1) on average. The first attempt lasts M·(1 − e^(−L/M))
    until it ends or fails, and fails with probability 1 − e^(−L/M). Together that's
    M·(1 − e^(−L/M))·(1 + e^((R+L+w)/M) − 1) = M·e^((R+w)/M)·(e^(L/M) − 1) for τ seconds that are kept.

    interval: seconds of training from save to save
    stall: seconds that training stands still for a save
    restart: seconds from a failure until training goes on
    mtbf: seconds between failures of the job
    write: seconds after the stall until the checkpoint can be used; it costs as much as a restart that many seconds longer
    Raises ValueError for a write that takes longer than the interval.
    """
    _checked(interval, stall, mtbf, write)
    not_negative(restart=restart)
    length = (interval + stall) / mtbf
    return interval / mtbf * math.exp(-(restart + write) / mtbf - length) / -math.expm1(-length)


def lost_work(interval: float, stall: float, mtbf: float, write: float = 0.0) -> float:
    """Computes the seconds of training that a failure throws away, on average; a failure during a restart throws none away.

    To first order, for δ ≪ τ ≪ M, that's half an interval and the write: τ/2 + w. The exact number is less in one way,
    because a failure sooner is more likely than one later, and more in another: one during the stall costs the whole τ.
    A failure y seconds after its last usable checkpoint was taken throws away y, but not the stall: it adds up
    e^(−y/M)/M · lost(y) over the first attempt, y from w to L + w, and over the later ones, y from 0 to L + w.

    interval, stall, mtbf, write: seconds, as for goodput
    """
    _checked(interval, stall, mtbf, write)
    tau, length, written = (seconds / mtbf for seconds in (interval, interval + stall, write))
    later = -math.expm1(-tau) - math.exp(-length) * math.expm1(-written) - (tau + written) * math.exp(-length - written)
    first = later + math.expm1(-written) + written * math.exp(-written)
    return mtbf * (later + first * math.exp(-length) / -math.expm1(-length))


def shares(interval: float, stall: float, restart: float, mtbf: float, write: float = 0.0) -> dict[str, float]:
    """Computes where the time goes, as shares of it: "work" that's kept, "lost" work, "save" and "restart".

    At any moment the job is running if the last R seconds had no failure, so restarts take 1 − e^(−R/M) of the time. In the
    rest, one failure hits per M seconds and throws its lost work away. Goodput and stalls share what's left.

    interval, stall, restart, mtbf, write: seconds, as for goodput
    """
    work, running = goodput(interval, stall, restart, mtbf, write), math.exp(-restart / mtbf)
    lost = running * lost_work(interval, stall, mtbf, write) / mtbf
    return {"work": work, "lost": lost, "save": max(0.0, running - work - lost), "restart": 1 - running}


def effective_mfu(mfu: float, goodput: float) -> float:
    """Computes the MFU over the whole run, with all that failures and saves cost, from the MFU of a step."""
    for name, share in {"mfu": mfu, "goodput": goodput}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name}={share}: give a share from 0 to 1")
    return mfu * goodput


def spares(nodes: int, node_mtbf: float, repair: float) -> int:
    """Computes how many spare nodes are enough for 99 % of the time.

    The number of nodes away at any moment is Poisson with mean nodes · repair ÷ node_mtbf, however the repairs' lengths vary
    (an M/G/∞ queue: nobody waits for a repair to begin).

    nodes: of the job
    node_mtbf: seconds between failures of one node
    repair: mean seconds that a failed node is away
    """
    positive(nodes=nodes, node_mtbf=node_mtbf, repair=repair)
    mean, found = nodes * repair / node_mtbf, 0.0
    enough = max(0, int(mean - 12 * math.sqrt(mean)))  # fewer are away for less than 10⁻³⁰ of the time
    while True:
        found += math.exp(enough * math.log(mean) - mean - math.lgamma(enough + 1))
        if found >= 0.99:
            return enough
        enough += 1


def _checked(interval: float, stall: float, mtbf: float, write: float) -> None:
    positive(interval=interval, mtbf=mtbf)
    not_negative(stall=stall, write=write)
    if write > interval:
        raise ValueError(f"write={write}, interval={interval}: a write must end before the next one begins; save less often")
