"""Bubbles and micro-batches in flight of pipeline schedules, in closed form, for equal stages.

p ranks, m micro-batches, v stages per rank. F, B, W: seconds that one micro-batch's forward, whole backward and weight
gradient take on all stages of one rank; the input gradient is the rest of the backward, I = B − W.
"""

import functools
from typing import NamedTuple

from manyranks.theory import checks, tables
from manyranks.theory.names import one_of
from manyranks.theory.plan import SCHEDULES

# The schedules' names, as their papers write them, and their bubbles in closed form.
WRITTEN, FORMS = ({row["name"]: row[column] for row in tables.rows("schedules")} for column in ("written", "bubble"))
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")  # run weight gradients on their own
# Share of the waits in forward that no earlier backward fills: 0 to 0.43 in replays of 2 to 16 ranks.
LAST_TURNS = 0.2


def bubble(
    schedule: str, p: int, m: int, v: int = 1, F: float = 1.0, B: float = 2.0, W: float = 1.0, FB: float | None = None
) -> float:
    """Seconds of a step that a rank waits for others.

    FB: of DualPipe's F&B, a forward together with a backward; None for F + B, one after the other. With less, our replays wait
        as long on up to 4 ranks, and less on more.

    Sources: GPipe arXiv 1811.06965; 1F1B and interleaved arXiv 2104.04473, section 2.2; ZB-H1, ZB-H2 arXiv 2401.10241, table 2;
    ZB-V arXiv 2405.15362; DualPipe arXiv 2412.19437, table 2, which has even m: with an odd one, our replays wait one F&B more.
    Where p does not divide m, interleaving waits longer: the last m mod p micro-batches cannot fill a turn. Below p that is
    exact; above, nearly: see LAST_TURNS.
    Raises ValueError for an unknown schedule, numbers that no pipeline has, or fewer micro-batches than the form holds for,
    `fewest`. Those of ZB-H1 and ZB-H2 are for W ≤ F: the bubble is larger where W is longer.
    """
    _check(schedule, p, m, v)
    if not (F >= 0 and 0 <= W <= B and F + B > 0):
        raise ValueError(f"F={F}, B={B}, W={W}: seconds cannot be negative, W is a part of B, and some of them are needed")
    if FB is not None and not (schedule.startswith("dualpipe") and FB >= 0):
        raise ValueError(f"FB={FB} with schedule={schedule!r}: give 0 or more seconds, and to 'dualpipe' or 'dualpipe-v' alone")
    if p > 1 and m < fewest(schedule, p):
        raise ValueError(f"m={m} micro-batches: the closed form of {schedule} holds from {fewest(schedule, p)} on p={p} ranks")
    pair, both = (F + B, F + 2 * B) if FB is None else (FB, FB + B)
    odd = pair if m % 2 and p > 1 else 0.0  # the last micro-batch of an odd number has no partner
    idle = {
        "naive": (p - 1) * m * (F + B),
        "gpipe": (p - 1) * (F + B) / v,
        "1f1b": (p - 1) * (F + B) / v + _unfilled(p, m, v, F, B),
        "interleaved": (p - 1) * (F + B) / v + _unfilled(p, m, v, F, B),
        "zb-h1": (p - 1) * (F + B - 2 * W),
        "zb-h2": (p - 1) * (F + B - 3 * W),
        "zb-v": (p - 1) * (F + B - 3 * W) / 2,
        "dualpipe": (p / 2 - 1) * (both - 3 * W) + odd,
        "dualpipe-v": (p - 1) * (both - 3 * W) / 2,
    }
    return max(0.0, idle[schedule])


def _unfilled(p: int, m: int, v: int, F: float, B: float) -> float:
    """Seconds that a rank has no work between its stages, for the last micro-batches are fewer than p."""
    left = m % p
    if v == 1 or not left:
        return 0
    waits = (v - 1) * (p - left) / v
    return waits * (F + B) if m < p else waits * (B + LAST_TURNS * F)


def fewest(schedule: str, p: int) -> int:
    """The fewest micro-batches that a schedule's closed form holds for."""
    return {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p, "dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(schedule, 1)


def bubble_of_ideal(schedule: str, p: int, m: int, v: int = 1, F: float = 1.0, B: float = 2.0, W: float = 1.0) -> float:
    """The bubble ÷ the time of the work itself: (p−1)/(vm) for 1F1B."""
    return bubble(schedule, p, m, v, F, B, W) / (m * (F + B))


def bubble_of_whole(schedule: str, p: int, m: int, v: int = 1, F: float = 1.0, B: float = 2.0, W: float = 1.0) -> float:
    """The bubble ÷ the whole step: (p−1)/(vm + p − 1) for 1F1B."""
    share = bubble_of_ideal(schedule, p, m, v, F, B, W)
    return share / (1 + share)


def in_flight(schedule: str, p: int, m: int, v: int = 1, rank: int = 0) -> float:
    """Most micro-batches whose activations the rank holds at once, each counted on all the rank's stages.

    With a split backward, what a weight gradient still needs counts in full; arXiv 2401.10241 gives the finer numbers.
    Sources: as for `bubble`; interleaved: arXiv 2205.05198, section 4.2.3, L(1 + (p−1)/(pv)) layers on the first rank,
    fewer where p does not divide m.
    Raises ValueError as `bubble` does, and for a rank that is not 0 to p − 1; any number of micro-batches is allowed.
    """
    _check(schedule, p, m, v)
    if not 0 <= rank < p:
        raise ValueError(f"rank={rank}: must be 0 to {p - 1}")
    return _flying(schedule, p, m, v, rank)


@functools.lru_cache(maxsize=16384)
def flights(schedule: str, p: int, m: int, v: int, ranks: tuple[int, ...]) -> tuple[float, ...]:
    """Counts as in_flight does, for several ranks; of DualPipe, each rank's on the stage that is its own."""
    if schedule == "dualpipe" and p > 1:
        return tuple(min((m + 1) // 2, p - rank) for rank in ranks)
    return tuple(_flying(schedule, p, m, v, rank) for rank in ranks)


def _flying(schedule: str, p: int, m: int, v: int, rank: int) -> float:
    if schedule in ("1f1b", "interleaved"):
        schedule = "1f1b" if v == 1 else "interleaved"
    held = {
        "naive": 1,
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": _until_first_backward(p, m, v, rank) / v,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "dualpipe": p + 1 if p > 1 else 1,
        "dualpipe-v": p + 0.5,
    }
    return min(m, held[schedule])


def _until_first_backward(p: int, m: int, v: int, rank: int) -> int:
    """Forwards that a rank of interleaved 1F1B has done when its first backward begins: p a turn, or as many as there are."""
    slots = 2 * (p - rank - 1) + (v - 1) * p + 1
    turns, left = divmod(min(slots, v * p), p)
    return turns * min(p, m) + min(left, m) + max(0, min(slots - v * p, m - p))


class Actions(NamedTuple):
    """Counts of what a rank of DualPipe does in a step: on the earlier of its two stages, and on the later.

    F, B, I, W: without a partner
    pairs: a forward of the earlier together with a backward of the later, and the other way round
    """

    F: tuple[int, int]
    B: tuple[int, int]
    I: tuple[int, int]  # noqa: E741 the field's name of it
    W: tuple[int, int]
    pairs: tuple[int, int]


def dualpipe_actions(p: int, m: int, rank: int) -> Actions:
    """Counts actions of a rank of p; m micro-batches from both ends together. Ranks r and p − 1 − r both have these stages.

    Source: the DualPipe repository, dualpipe/dualpipe.py, whose eight steps are counted. Raises ValueError for an odd p or m,
    fewer than 2p micro-batches, and a rank that is not 0 to p − 1.
    """
    checks.whole(p=p, m=m)
    if p % 2 or m % 2 or m < 2 * p or not 0 <= rank < p:
        raise ValueError(f"p={p}, m={m}, rank={rank}: give an even p, an even m from {2 * p} on and a rank from 0 to {p - 1}")
    k = min(rank, p - 1 - rank)  # ranks between this one and its end
    below, half = p // 2 - 1 - k, (k + 1) // 2
    middle = int(not below)  # of its first pair, which its neighbor waits for, the halves go one after the other
    main = m // 2 - p + k + 1
    return Actions(
        F=(2 * below + k + 1 + middle, p // 2),
        B=(half, below + k + 1 - half + middle),
        I=(below + k + 1 - half, below + half),
        W=(below + k + 1 - half, below + half),
        pairs=(main - middle, main + below),
    )


def _check(schedule: str, p: int, m: int, v: int) -> None:
    one_of(SCHEDULES, schedule=schedule)
    checks.whole(p=p, m=m, v=v)
    if v > 1 and schedule not in ("gpipe", "1f1b", "interleaved"):
        raise ValueError(f"v={v} with schedule={schedule!r}: its stages a rank are fixed; say v=1")
    if schedule == "dualpipe" and p > 1 and p % 2:
        raise ValueError(f"p={p} with schedule='dualpipe', which runs from both ends: give an even p")
