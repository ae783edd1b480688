"""ZeRO on a few ranks: what a rank holds after backward, and what it sends in a step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel.data_parallel import BucketedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.theory import sharding
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss

_CONFIG = GPTConfig(tied=False)
_kept: dict = {}  # on a rank: its model and optimizer
STAGES = {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2}  # the others are stage 3


@OnRanks
def zero(values, ranks, say):
    """The course's GPT on 2 to 8 ranks with Adam, all in float32, which is 4 + 4 + 8 bytes per parameter: what each
    stage holds and sends, against theory.sharding.held and sent. HSDP has K shards, or as many as there are ranks."""
    stage, n = STAGES.get(values["stage"], 3), few(values["dp"])
    k = min(values["k"], n) if values["stage"] == "HSDP" else n
    units = sharding.unit_sizes(_CONFIG.shape())
    world = ranks(n)
    say(0.3, f"{n} ranks, {sum(units):,} parameters")
    world.run(_start, stage, k)
    say(0.6, "a step")
    counted = world.measure(_step)
    say(0.8, "what is held")
    held = world.run(_held, stage)
    sizes = {"parameter": 4, "gradient": 4, "master": 0, "states": (4, 4), "replicas": n // k}
    theory = sharding.held(units if stage == 3 else [sum(units)], n, stage, **sizes)
    sent = sharding.sent(units, n, stage, 4, 4, replicas=n // k).total
    rows = (
        Compared("parameters and gradients of a rank", theory.parameters + theory.gradients, max(each[0] for each in held)),
        Compared("optimizer states of a rank", theory.states, max(each[1] for each in held)),
        Compared("sent per rank per step", sent, max(bytes_sent(counted).values())),
    )
    return SmallRun(f"{values['stage']} on {n} ranks of this machine, {sum(units):,} parameters in float32", rows)


def _start(stage: int, shards: int) -> None:
    """Makes this rank's model and optimizer, and takes a first step, after which Adam has its moments."""
    torch.manual_seed(0)
    model, n = GPT(_CONFIG), dist.get_world_size()
    if stage == 0:
        model = BucketedDataParallel(model)
    elif stage == 3:
        mesh = init_device_mesh("cpu", (n // shards, shards)) if shards < n else None
        model = FullyShardedDataParallel(model, mesh=mesh)
    sharded = stage in (1, 2)
    adam = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage) if sharded else torch.optim.AdamW(model.parameters())
    _kept.update(model=model, optimizer=adam)
    _step()


def _backward() -> None:
    _kept["optimizer"].zero_grad()
    tokens = torch.arange(65).remainder(_CONFIG.vocab)[None]
    loss(_kept["model"](tokens[:, :-1]), tokens[:, 1:]).backward()
    if hasattr(_kept["model"], "finish"):
        _kept["model"].finish()


def _step() -> None:
    _backward()
    _kept["optimizer"].step()


def _held(stage: int) -> tuple[int, int]:
    """Bytes of parameters and gradients, and of Adam's moments, on this rank after a backward."""
    _backward()
    model, optimizer = _kept["model"], _kept["optimizer"]
    if stage:
        found = model.held(optimizer) if stage == 3 else optimizer.held()
        return sum(t.nbytes for t in (*found.parameters, *found.gradients)), sum(t.nbytes for t in found.states)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return sum(t.nbytes for p in model.parameters() for t in (p, p.grad)), sum(t.nbytes for t in moments)
