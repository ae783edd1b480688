"""A collective on a few ranks: the bytes on the socket of the busiest rank, and the messages."""

import torch
import torch.distributed as dist

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel import collectives as library
from manyranks.theory.collectives import rounds, sent_bytes

_ELEMENTS = 720_720  # float32; 2 to 8 ranks cut it evenly


@OnRanks
def collectives(values, ranks, say):
    """The operation and the algorithm of the explorer, on 2 to 8 ranks and 2.9 MB.

    Raises ValueError for an algorithm that the library leaves to the reader, and for one of several nodes.
    """
    operation, algorithm, n = values["operation"], values["algorithm"], few(values["n"])
    name = f"{algorithm}_{operation}"
    if name not in library.__all__ or algorithm == "hierarchical":
        here = sorted(each.removesuffix(f"_{operation}") for each in library.__all__ if each.endswith(f"_{operation}"))
        known = ", ".join(each for each in here if each != "hierarchical")
        raise ValueError(f"{operation} by {algorithm} isn't measured here: choose {known}")
    theory = sent_bytes(operation, _ELEMENTS, 4, n, algorithm)
    say(0.2, f"starting {n} ranks")
    counted = ranks(n).measure(_run, name, operation)
    sent = bytes_sent(counted)
    messages = sum(call.op == "send" for calls in counted.calls.values() for call in calls)
    rows = (
        Compared("sent by the busiest rank", max(theory), max(sent.values())),
        Compared("messages", sum(map(len, rounds(operation, _ELEMENTS, n, algorithm))), messages, "number"),
    )
    return SmallRun(f"{operation} by {algorithm}, {4 * _ELEMENTS:,} bytes, {n} ranks of this machine", rows)


def _run(name: str, operation: str) -> None:
    x_E = torch.ones(_ELEMENTS)
    shard = x_E.tensor_split(dist.get_world_size())[dist.get_rank()]
    if operation in ("all_gather", "gather"):
        getattr(library, name)(shard, elements=_ELEMENTS)
    else:
        getattr(library, name)(x_E)
