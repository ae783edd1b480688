"""Data parallelism on a few ranks: what a rank sends in a step, and what it holds."""

import torch

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel.data_parallel import BucketedDataParallel, OverlappedDataParallel
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss

_CONFIG = GPTConfig()
_kept: dict = {}  # on a rank: its replica


@OnRanks
def data_parallel(values, ranks, say):
    """The course's GPT on 2 to 8 replicas, in float32: bytes on the socket and in memory against 2(d − 1)/d·4Φ and 8Φ."""
    n, parameters = few(values["dp"]), _CONFIG.shape().parameters
    world = ranks(n)
    say(0.3, f"{n} replicas of {parameters:,} parameters")
    held = max(world.run(_replica, values["overlap"]))
    say(0.6, "a step")
    counted = world.measure(_step)
    sent = max(bytes_sent(counted).values())
    rows = (
        Compared("sent per rank per step", 2 * (n - 1) * 4 * parameters / n, sent),
        Compared("parameters and gradients of a rank", 8 * parameters, held),
    )
    return SmallRun(f"{n} ranks of this machine, {parameters:,} parameters in float32", rows)


def _replica(overlap: bool) -> int:
    """Bytes that this rank's parameters and gradients take after a first step."""
    torch.manual_seed(0)
    wrapper = OverlappedDataParallel if overlap else BucketedDataParallel
    _kept["model"] = wrapper(GPT(_CONFIG), bucket_bytes=2_000_000)
    _step()
    return sum(t.nbytes for p in _kept["model"].parameters() for t in (p, p.grad))


def _step() -> None:
    tokens = torch.arange(65).remainder(_CONFIG.vocab)[None]
    loss(_kept["model"](tokens[:, :-1]), tokens[:, 1:]).backward()
    _kept["model"].finish()
