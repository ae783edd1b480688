"""Watches how ranks make process groups: each call of dist.new_group is compared with the other ranks' at once.

Where one rank makes another group than the others, or none, torch's groups wait for ranks that never come, or get each other's
names: which of them happens is chance, and no message says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import distributed_c10d

from manyranks.grade.journal import Stopped

ALL_RANKS = (
    "dist.new_group is called by all ranks, for every group, in one order, also by ranks outside the group: a loop over "
    "all groups of the axis, and each rank keeps the one that it is in"
)
_PLAIN = "plain dist.new_group(ranks) is asked for: with use_local_synchronization only a group's own ranks call it"
_NAMES = "nd/groups"


@dataclass
class Making:
    """made: ranks of the groups, in the order in which this rank made them."""

    run: str
    store: dist.Store
    new_group: object
    made: list[list[int]] = field(default_factory=list)

    def __call__(self, ranks=None, *args, use_local_synchronization=False, **kwargs):
        if use_local_synchronization:
            raise Stopped("new_group was called with use_local_synchronization", _PLAIN)
        ranks = None if ranks is None else list(ranks)
        mine = sorted(range(dist.get_world_size()) if ranks is None else map(int, ranks))
        first = self.store.compare_set(f"{self.run}/{len(self.made)}", "", f"{mine}").decode()
        if first != f"{mine}":
            found = f"rank {dist.get_rank()} made a group of ranks {mine} where another rank made one of {first}"
            raise Stopped(found, ALL_RANKS)
        self.made.append(mine)
        return self.new_group(ranks, *args, **kwargs)


@contextmanager
def watched() -> Iterator[Making]:
    """Inside, new_group is ours. All ranks come in."""
    store, before = distributed_c10d._get_default_store(), distributed_c10d.new_group
    entered = store.add(_NAMES, 1) - 1
    making = Making(f"{_NAMES}/{entered // dist.get_world_size()}", store, before)
    dist.new_group = distributed_c10d.new_group = making
    try:
        yield making
    finally:
        dist.new_group = distributed_c10d.new_group = before
