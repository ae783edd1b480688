"""A message handed round a ring of a few ranks, in pieces: the bytes on a rank's socket, and the messages."""

import torch
import torch.distributed as dist

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun

_MOST = 2**24  # bytes


@OnRanks
def hardware(values, ranks, say):
    """The explorer's size, 16.8 MB at most, in N pieces around a ring of N ranks, 2 to 8."""
    n = few(values["n"])
    piece = max(1, min(int(values["size"]), _MOST) // n)
    say(0.2, f"starting {n} ranks")
    counted = ranks(n).measure(_around, piece)
    sent = bytes_sent(counted)
    messages = sum(call.op == "send" for call in counted.calls[0])
    rows = (
        Compared("sent by a rank", (n - 1) * piece, max(sent.values())),
        Compared("messages of a rank", n - 1, messages, "number"),
    )
    return SmallRun(f"{n} pieces of {piece:,} bytes around a ring of {n} ranks of this machine", rows)


def _around(piece: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    passing, coming = torch.zeros(2, piece, dtype=torch.uint8)
    for _ in range(n - 1):
        for work in [dist.isend(passing, (rank + 1) % n), dist.irecv(coming, (rank - 1) % n)]:
            work.wait()
        passing, coming = coming, passing
