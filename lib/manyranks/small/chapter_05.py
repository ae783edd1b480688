"""Two pipeline schedules on a few ranks: the bubble of what the ranks did, and the bytes between stages."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.measure.beside import Beside, Small
from manyranks.parallel.pipeline.actions import Schedule
from manyranks.parallel.pipeline.program import bubble
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import named
from manyranks.small.ranks import OnRanks, few
from manyranks.theory import pipeline as theory
from manyranks.timeline import Transfer, replay

_ROWS, _WIDTH = 256, 64  # of a micro-batch: 64 kB in float32
_kept: dict = {}  # on a rank: its pipeline


@OnRanks
def pipeline(values, ranks, say):
    """A linear layer a stage on 2 to 8 ranks, so that F = I = W. The ranks' program is replayed by its FLOPs, without messages.

    Bubbles are beside the closed forms, which want many micro-batches; bytes beside 4·rows·width for each crossing.
    """
    names, p = list(dict.fromkeys((values["first"], values["second"]))), few(values["pp"])
    fewest = max(min(values["m"], 16), *(theory.fewest(name, p) for name in names))
    m = -(-fewest // p) * p
    world, rows = ranks(p), []
    for k, name in enumerate(names):
        written, v = theory.WRITTEN[name], values["v"] if name == "interleaved" else 1
        say((2 * k + 1) / (2 * len(names) + 1), f"{written}: {p} ranks, {m} micro-batches")
        schedule = named(name, p, m, v)
        world.run(_first_step, schedule)
        counted = world.measure(_step, flops=True)
        timeline = replay(counted.program, _ByWork())
        busy = max(map(timeline.busy, timeline.ranks))
        ideal = theory.bubble_of_ideal(name, p, m, v)
        rows.append(Beside(f"bubble ÷ ideal, {written}", ideal, bubble(timeline) / busy, "share"))
        crossings = sum(a != b for a, b in pairwise(schedule.placement))
        sent = sum((counted.sent_bytes or counted.payload_bytes).values())
        rows.append(Beside(f"sent by all, {written}", 2 * m * crossings * _ROWS * _WIDTH * 4, sent))
    return Small(f"{p} ranks of this machine, {m} micro-batches of {_ROWS * _WIDTH * 4:,} bytes", tuple(rows))


class _ByWork:
    """Costs of a replay: a second for each FLOP, nothing for a message."""

    def compute(self, rank, work):
        return float(work.flops)

    def message(self, source, destination, bytes):
        return Transfer(0.0)

    def collective(self, op, bytes, ranks):
        return Transfer(0.0)


def _first_step(schedule: Schedule) -> None:
    """A first step, in which ranks exchange shapes. With an embedding before stage 0, every stage has an input gradient."""
    torch.manual_seed(0)
    own = [stage for stage, owner in enumerate(schedule.placement) if owner == dist.get_rank()]
    layers = {stage: nn.Linear(_WIDTH, _WIDTH, bias=False) for stage in own}
    stages = {s: layer if s else nn.Sequential(nn.Embedding(2, _WIDTH), layer) for s, layer in layers.items()}
    _kept["pipeline"] = Pipeline(stages, schedule, loss=F.mse_loss)
    _step()


def _step() -> None:
    examples = _ROWS * _kept["pipeline"].schedule.microbatches
    _kept["pipeline"].step(torch.zeros(examples, dtype=torch.int64), torch.zeros(examples, _WIDTH))
