"""A rank without its process group, for as long as cells run on it that were written for a notebook, which has none."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_KEPT = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def without_a_group() -> Iterator[None]:
    """Hides the group and its names. Groups that are made meanwhile are destroyed, as the end of a notebook does it."""
    kept, world = {name: getattr(c10d, name) for name in _KEPT}, vars(c10d._world).copy()
    _replace({name: type(value)() for name, value in kept.items()}, vars(c10d._World()))
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # there may be none
            dist.destroy_process_group()
        _replace(kept, world)


def _replace(kept: dict, world: dict) -> None:
    c10d._unregister_all_process_groups()
    vars(c10d).update(kept)
    vars(c10d._world).update(world)
    c10d._update_default_pg(c10d._world.default_pg)
    for group, name in c10d._pg_names.items():
        c10d._register_process_group(name, group)
