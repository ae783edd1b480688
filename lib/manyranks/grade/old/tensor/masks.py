"""Dropout's masks, read off what a learner's module returned: the ranks' must differ, and a seed's must be the same again."""

from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict

if TYPE_CHECKING:
    from manyranks.grade.old.tensor.task import TensorTask

KEPT = "what was kept"  # with the number of the seed: a result of the script
P = 0.25
_TOLERANCE = 1e-6
_FEW, _MANY = 0.4 * P, 1.6 * P  # of elements dropped
_SAME_RANKS = (
    "each rank has other positions, so its mask has to be another one: with one seed, or one random state, on all "
    "ranks they are alike, and positions of different ranks lose the same elements"
)
_SAME_SEEDS = "each step has a seed of its own, which has to count"
_COLLIDES = (
    "each pair of a rank and a seed needs a mask of its own, but here two pairs come to the same number: "
    "seed * t + rank is another number for each pair"
)
_AGAIN = (
    "the same seed has to give the same mask, however often it is used: a generator of its own, made from the seed, each time"
)
_NONE = "nothing was dropped: F.dropout(y, p) or a mask, also where the module is not asked for training"
_READ = "the masks are read off the result: put that right first"
_SHARE = "an element is dropped with probability p, by itself, and those that stay are divided by 1 − p"


def seeds(t: int) -> tuple[int, ...]:
    """Of the forwards: small ones, where rules like r · t + seed collide, some far from them, and the first one again."""
    return 7, 8, *(seed for seed in range(2 * t + 1) if seed not in (7, 8)), 107, 1007, 7


def read(result_sBH: Tensor, x_sBH: Tensor, whole_sBH: Tensor) -> Tensor:
    """1 where an element of the sum was kept, 0 where it was dropped, something between or beyond where neither is so."""
    return (result_sBH.detach() - x_sBH.detach()) / whole_sBH * (1 - P)


def is_dropout(kept_sBH: Tensor) -> bool:
    """Whether each element was either kept or dropped."""
    return torch.allclose(kept_sBH, kept_sBH.round().clamp(0, 1), atol=_TOLERANCE)


def differ(task: "TensorTask", trial: Trial) -> Verdict:
    """Over ranks and seeds, no two are alike; the same seed gives the same one again."""
    layout, seeds = trial.case.must.layout, trial.case.must.seeds
    for ranks in layout.groups if seeds else ():
        found = {(r, k): trial.answers[r].tensors[f"{KEPT} {k}"] for r in ranks for k in range(len(seeds))}
        if all(torch.allclose(kept, torch.full_like(kept, 1 - P), atol=_TOLERANCE) for kept in found.values()):
            return Verdict(False, f"rank {ranks[0]} dropped no element; p is {100 * P:.0f} %", _NONE)
        if wrong := [rank for (rank, _), kept in found.items() if not is_dropout(kept)]:
            return Verdict(False, f"which elements rank {wrong[0]} dropped cannot be told from its result", _READ)
        found = {key: kept.round() for key, kept in found.items()}
        verdict = _share(found) or _again(found, ranks, seeds) or _constant(found, ranks, seeds) or _alike(found, seeds)
        if verdict:
            return verdict
    return Verdict(True)


def _share(found: dict[tuple[int, int], Tensor]) -> Verdict | None:
    for (rank, _), kept in found.items():
        dropped = 1 - kept.mean().item()
        if not _FEW < dropped < _MANY:
            return Verdict(False, f"rank {rank} dropped {100 * dropped:.0f} % of the elements; p is {100 * P:.0f} %", _SHARE)
    return None


def _again(found: dict[tuple[int, int], Tensor], ranks: list[int], seeds: tuple[int, ...]) -> Verdict | None:
    last = len(seeds) - 1
    for rank in ranks:
        if not torch.equal(found[rank, 0], found[rank, last]):
            return Verdict(False, f"rank {rank} dropped other elements when seed {seeds[0]} came again", _AGAIN)
    return None


def _constant(found: dict[tuple[int, int], Tensor], ranks: list[int], seeds: tuple[int, ...]) -> Verdict | None:
    """Where the rank, or the seed, does not count at all."""
    numbers = range(len(seeds) - 1)
    for one, other in combinations(ranks, 2):
        if all(torch.equal(found[one, k], found[other, k]) for k in numbers):
            return Verdict(False, f"ranks {one} and {other} dropped the same elements", _SAME_RANKS)
    for rank in ranks:
        if all(torch.equal(found[rank, 0], found[rank, k]) for k in numbers):
            return Verdict(False, f"rank {rank} dropped the same elements with each seed", _SAME_SEEDS)
    return None


def _alike(found: dict[tuple[int, int], Tensor], seeds: tuple[int, ...]) -> Verdict | None:
    last = len(seeds) - 1
    for ((one, first), here), ((other, second), there) in combinations(found.items(), 2):
        if last not in (first, second) and torch.equal(here, there):
            who = f"rank {other} with seed {seeds[second]} draws the mask of rank {one} with seed {seeds[first]}"
            return Verdict(False, who, _SAME_SEEDS if one == other else _COLLIDES)
    return None
