"""Seconds of all that a rank says to others in a step, as if nothing hid it: each axis's calls, on its group's route.

calls.py lists the calls, with their bytes.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import calls, expert, network
from manyranks.theory.compute import Site, Speeds, Work
from manyranks.theory.network import Seconds
from manyranks.theory.states import SentRow, SentRows

BETWEEN = "between stages"


class Passing(NamedTuple):
    """The way of one micro-batch through a part of a stage, as Dealt.parts names it, or BETWEEN stages.

    pipeline: ranks of it, and the stride
    """

    site: Site
    part: str
    pipeline: tuple[int, int] = (1, 1)

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        return self.site.plan.groups | {"pp": self.pipeline}


class Said(NamedTuple):
    """All that is said while a micro-batch passes a pipeline's ranks.

    names: of their parts
    pipeline: as in Passing
    """

    site: Site
    names: tuple[str, ...]
    pipeline: tuple[int, int]

    @property
    def items(self) -> dict[str, Passing]:
        """Each Passing by its part's name."""
        found = {part: Passing(self.site.of_calls(part), part) for part in self.names}
        between = {BETWEEN: Passing(self.site.of_calls(BETWEEN), BETWEEN, self.pipeline)} if self.pipeline[0] > 1 else {}
        return found | between


@dataclass(frozen=True, eq=False, slots=True)
class Timed:
    """Seconds by item (a part's name, BETWEEN, or a row's key), then by axis and when: see network.Seconds."""

    items: dict[Hashable, Seconds]


class Sent(NamedTuple):
    """The times of calls.

    passes: of one micro-batch's, of each part
    states: of each row of gradients and parameters
    """

    passes: Timed
    states: Timed


def communicate(work: Work, stride: int, rows: SentRows) -> Sent:
    """Times what all parts of the work say, and what sums gradients and gathers parameters.

    stride: ranks from one of a pipeline to the next. Raises ValueError for a group that the cluster has no room for.
    """
    said = Said(work.site, work.dealt.names, (work.dealt.plan.pp, stride))
    return Sent(*[timed(each, work.site.speeds) for each in (said, rows)])


@functools.lru_cache(maxsize=65536)
def timed(said: Said | SentRows, speeds: Speeds) -> Timed:
    """Times each of these items."""
    return Timed({name: seconds(what, speeds) for name, what in said.items.items()})


@functools.lru_cache(maxsize=65536)
def seconds(what: Passing | SentRow, speeds: Speeds) -> Seconds:
    """Seconds of these calls, by axis and by when they are made."""
    cluster = speeds.cluster
    routes = {group: cluster.route(*ranks) for group, ranks in what.groups.items()}
    if isinstance(what, SentRow):
        found = calls.data_parallel(what)
    elif what.part == BETWEEN:
        found = calls.between_stages(what.site.shape, what.site.plan)
    else:
        shape, plan, part, imbalance = what.site.shape, what.site.plan, what.part, what.site.imbalance
        found = calls.tensor(shape, plan, part, imbalance)
        found += calls.context(shape, plan) if part in ("dense", "moe") else []
        if part == "moe":
            found += calls.experts(shape, plan, expert.travel(shape, plan.ep, routes["ep"].inside), imbalance)
    return network.seconds(found, routes, speeds.constants, trees=isinstance(what, SentRow))
