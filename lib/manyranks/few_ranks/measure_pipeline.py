"""Two pipeline schedules on a few ranks: the bubble of what the ranks did, and the bytes between stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import BACKWARD, Action, Pair, Schedule, named, singles
from manyranks.theory import pipeline as theory
from manyranks.timeline import Transfer, replay

_ROWS, _WIDTH = 256, 64  # of a micro-batch: 64 kB in float32
_LAYERS = 4  # forwards of a layer in the explorer's unit of time, whose shortest action is a quarter of one
_UNIT = _LAYERS * 2 * _ROWS * _WIDTH**2  # FLOPs
_kept: dict = {}  # on a rank: its pipeline


@OnRanks
def pipeline(values, ranks, say):
    """A linear layer a stage on 2 to 8 ranks, with more products until F, I and W take as many FLOPs as the explorer says.

    The ranks' program is replayed by its FLOPs, and each message takes the explorer's time. Bubbles are in the explorer's units
    next to a replay of the schedule's table; bytes next to 4·rows·width for each crossing.
    """
    names, p, m = list(dict.fromkeys((values["first"], values["second"]))), few(values["pp"]), values["m"]
    world, rows, takes = ranks(p), [], {kind: values[kind] for kind in "FIW"}
    for k, name in enumerate(names):
        written = theory.WRITTEN[name]
        say((2 * k + 1) / (2 * len(names) + 1), f"{written}: {p} ranks, {m} micro-batches")
        schedule = named(name, p, m, values["v"] if name == "interleaved" else 1)
        each = schedule.stages / p
        times = Times(**{kind: seconds / each for kind, seconds in takes.items()}, latency=values["message"])
        world.run(_first_step, schedule, takes | {"B": takes["I"] + takes["W"]})
        counted = world.measure(_step, flops=True)
        found = replay(counted.program, _ByWork(_UNIT * each, values["message"]))
        rows.append(Compared(f"bubble, {written}", bubble(replay(program(schedule), times)), bubble(found), "number"))
        crossings = sum(a != b for a, b in pairwise(schedule.placement))
        sent = sum(bytes_sent(counted).values())
        rows.append(Compared(f"sent by all, {written}", 2 * m * crossings * _ROWS * _WIDTH * 4, sent))
    size = f"{_ROWS * _WIDTH * 4:,} bytes"
    where = f"{p} ranks of this machine, {m} micro-batches of {size}; FLOPs and messages as F, I, W and message say"
    return SmallRun(where, tuple(rows))


class _ByWork(NamedTuple):
    """Costs of a replay: of so many FLOPs a second, and of a message these seconds."""

    flops: float
    seconds: float

    def compute(self, rank, work):
        return work.flops / self.flops

    def message(self, source, destination, bytes):
        return Transfer(self.seconds)


def _first_step(schedule: Schedule, takes: dict[str, float]) -> None:
    """Runs a first step: ranks exchange shapes. With an embedding before stage 0, every stage has an input gradient.

    takes: kind of an action -> how many times _UNIT of FLOPs.
    """
    torch.manual_seed(0)
    layers = {stage: nn.Linear(_WIDTH, _WIDTH, bias=False) for stage in schedule.stages_of(dist.get_rank())}
    stages = {s: layer if s else nn.Sequential(nn.Embedding(2, _WIDTH), layer) for s, layer in layers.items()}
    _kept["pipeline"] = Pipeline(stages, schedule, loss=F.mse_loss, pace=partial(_other_products, takes))
    _step()


@contextmanager
def _other_products(takes: dict[str, float], item: Action | Pair) -> Iterator[None]:
    """Adds to an action what its layer's own products leave of its FLOPs: a forward has one, a backward two."""
    layers = sum(takes[each.kind] * _LAYERS - (2 if each.kind == BACKWARD else 1) for each in singles(item))
    torch.zeros(_ROWS, round(layers * _WIDTH)) @ torch.zeros(round(layers * _WIDTH), _WIDTH)
    yield


def _step() -> None:
    examples = _ROWS * _kept["pipeline"].schedule.microbatches
    _kept["pipeline"].step(torch.zeros(examples, dtype=torch.int64), torch.zeros(examples, _WIDTH))
