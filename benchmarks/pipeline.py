"""Pipeline parallelism: steps against torch.distributed.pipelining, the backward in halves, making tables, paced bubbles."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, one_thread, pairs, processor_seconds
from benchmarks.training import Step
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.automatic import automatic
from manyranks.parallel.pipeline.dualpipe import dualpipe
from manyranks.parallel.pipeline.paced import paced, timeline
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import Action, Schedule
from manyranks.parallel.pipeline.split import Stage, split
from manyranks.parallel.pipeline.split_backward import SplitBackward
from manyranks.parallel.pipeline.verify import verify
from manyranks.timeline import Timeline, replay
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer, loss

RANKS, MICROBATCHES, ROUNDS, STEPS = 4, 8, 15, 2
CONFIG = GPTConfig(layers=8, tied=False)  # theirs has no shared parameters
SIZE = CONFIG.shape().parameters / 1e6
BATCH = 2 * MICROBATCHES  # sequences

HALVES = (  # style, hidden size, sequences, tokens a sequence
    ("llama", 256, 1, 128),
    ("llama", 256, 4, 128),
    ("llama", 384, 2, 128),
    ("llama", 512, 2, 128),
    ("gpt2", 256, 1, 128),
    ("gpt2", 256, 4, 128),
)

SECONDS = 0.06  # of a paced action; a B takes two
TARGET, TRIES = 0.03, 3  # of the difference of bubbles, as shares; runs, where one is disturbed

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    for benchmark in (_tables, _halves, _steps, _paced):
        yield from benchmark()


# Making tables


def _tables() -> Iterator[Row]:
    big = partial(schedules.interleaved, 64, 512, 4)
    seconds = tuple(processor_seconds(lambda: verify(big())) for _ in range(3))
    yield Row("interleaved made and verified: p = 64, m = 512, v = 4", seconds, at_most=2.0)
    yield Row("automatic, p = 8, m = 32", tuple(processor_seconds(lambda: automatic(8, 32)) for _ in range(3)))
    table, times = program(schedules.one_f_one_b(8, 32)), Times()
    yield Row("1F1B replayed, p = 8, m = 32", tuple(processor_seconds(lambda: replay(table, times)) for _ in range(9)))


# I and W against a whole backward, on one thread


def _halves() -> Iterator[Row]:
    with one_thread():
        for style, hidden, sequences, length in HALVES:
            config = GPTConfig(2, hidden, hidden // 64, seq=length, style=style)
            x_BSH = torch.randn(sequences, length, hidden)
            _check_halves(config, x_BSH)
            what = f"I and W of 2 {style} layers, hidden {hidden}, {sequences} × {length} tokens; a plain backward"
            yield Row(what, **_both(config, x_BSH), ratio_at_most=1.12)


def _stage(config: GPTConfig) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(config), Layer(config))


def _both(config: GPTConfig, x_BSH: torch.Tensor) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds of the processor: of I and W, and of a backward. Forwards are not counted."""
    stage, grad_BSH = _stage(config), torch.ones_like(x_BSH)
    measures = [lambda run=run: min(run(stage, x_BSH, grad_BSH)[0] for _ in range(6)) for run in (_split, _whole)]
    pairs(*measures, rounds=1)
    return pairs(*measures, rounds=9)


def _split(stage: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, torch.Tensor]:
    stage.zero_grad()
    x, halves, into = x.detach().requires_grad_(), SplitBackward(stage), []
    with halves:
        y = stage(x.view_as(x))

    def backward() -> None:
        into.append(halves.input_gradient(y, grad, x))
        halves.weight_gradients()

    return processor_seconds(backward), into[0]


def _whole(stage: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, torch.Tensor]:
    stage.zero_grad()
    x = x.detach().requires_grad_()
    y = stage(x.view_as(x))
    return processor_seconds(lambda: y.backward(grad)), x.grad


def _check_halves(config: GPTConfig, x_BSH: torch.Tensor) -> None:
    """Both ways give the same gradients, to the bit in fp64."""
    stage, x_BSH = _stage(config).double(), x_BSH.double()
    found = []
    for run in (_split, _whole):
        _, into = run(stage, x_BSH, torch.ones_like(x_BSH))
        found.append([into, *(p.grad for p in stage.parameters())])
    if not all(map(torch.equal, *found)):
        raise RuntimeError("I and W gave other gradients than a plain backward: the comparison means nothing")


# Steps against torch.distributed.pipelining


class Compared(NamedTuple):
    """Two pipelines with stages in the same places. ours: from their schedule object."""

    names: str
    ours: Callable[[object], Schedule]
    theirs: str
    placement: tuple[int, ...]
    at_most: float


ONE, LOOPED, V = schedules.one_stage_a_rank(RANKS), schedules.looped(RANKS, 2), schedules.v_shape(RANKS)
COMPARED = (
    Compared("1F1B; Schedule1F1B", lambda other: schedules.one_f_one_b(RANKS, MICROBATCHES), "Schedule1F1B", ONE, 1.03),
    Compared(
        "interleaved; ScheduleInterleaved1F1B",
        lambda other: schedules.interleaved(RANKS, MICROBATCHES, 2),
        "ScheduleInterleaved1F1B",
        LOOPED,
        1.03,
    ),
    Compared(
        "the same table; ScheduleInterleavedZeroBubble",
        lambda other: from_rows([other.pipeline_order[rank] for rank in range(RANKS)]),
        "ScheduleInterleavedZeroBubble",
        LOOPED,
        1.0,
    ),
    Compared("ZB-V; ScheduleZBVZeroBubble", lambda other: schedules.zb_v(RANKS, MICROBATCHES), "ScheduleZBVZeroBubble", V, 1.0),
)


def from_rows(rows: Iterable[Iterable[object]]) -> Schedule:
    """The schedule of PyTorch's rows, one a rank, of cells such as 2F0; None where a rank waits."""
    cells = [[re.findall(r"(\d+)([FBIW])(\d+)", str(cell)) for cell in row if cell is not None] for row in rows]
    ranks = [tuple(Action(kind, int(s), int(k)) for ((s, kind, k),) in row) for row in cells]
    placed = {action.stage: rank for rank, row in enumerate(ranks) for action in row}
    m = 1 + max(action.microbatch for action in ranks[0])
    return Schedule("theirs", m, tuple(placed[s] for s in sorted(placed)), tuple(ranks))


def _steps() -> Iterator[Row]:
    for compared in COMPARED:
        with mr.World(RANKS) as world:
            measured = world.run(_pairs, compared)
        what = f"step of a GPT, {SIZE:.1f} M parameters, p = {RANKS}, m = {MICROBATCHES}: {compared.names}"
        yield Row(what, **training.slowest(measured), ratio_at_most=compared.at_most)


def _pairs(compared: Compared) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds a step, on this rank. First of all, that the gradients are the same."""
    steps = _ours_and_theirs(compared)
    measures = [lambda step=step: training.fastest(step, STEPS) for step in steps]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _ours_and_theirs(compared: Compared) -> tuple[Step, Step]:
    torch.manual_seed(0)
    tokens, targets = torch.randint(CONFIG.vocab, (2, BATCH, CONFIG.seq))
    models = GPT(CONFIG), GPT(CONFIG)
    own, their_own = (_own_stages(model, compared.placement) for model in models)
    them = _theirs(their_own, compared)
    us = Pipeline(own, compared.ours(them), loss=loss)
    inputs = [tokens] if 0 in own else []
    last = {"target": targets} if len(compared.placement) - 1 in own else {}

    def our_step() -> None:
        models[0].zero_grad()
        us.step(tokens, targets)

    def their_step() -> None:
        models[1].zero_grad()
        them.step(*inputs, **last, return_outputs=False)

    our_step()
    their_step()
    for ours, others in zip(*(model.parameters() for model in models), strict=True):
        if ours.grad is not None or others.grad is not None:
            torch.testing.assert_close(ours.grad, others.grad, rtol=1e-3, atol=1e-6)
    return our_step, their_step


def _own_stages(model: GPT, placement: tuple[int, ...]) -> dict[int, Stage]:
    stages = enumerate(split(model, len(placement)))
    return {s: stage for s, stage in stages if placement[s] == dist.get_rank()}


def _theirs(own: dict[int, Stage], compared: Compared) -> theirs._PipelineSchedule:
    cpu, count = torch.device("cpu"), len(compared.placement)
    stages = [PipelineStage(stage, s, count, cpu) for s, stage in own.items()]
    kind = getattr(theirs, compared.theirs)
    return kind(stages[0] if count == RANKS else stages, MICROBATCHES, loss_fn=loss)


# Paced ranks


def _paced() -> Iterator[Row]:
    for p in (4, 8):
        with mr.World(p) as world:
            for schedule in _schedules(p):
                yield _bubbles(world, schedule)


def _schedules(p: int) -> Iterator[Schedule]:
    yield schedules.naive(p, 2)  # its bubble is the same share for any m
    made = (schedules.gpipe, schedules.one_f_one_b, partial(schedules.interleaved, v=2), schedules.zb_h1)
    for make in (*made, schedules.zb_h2, schedules.zb_v, schedules.dualpipe_v, dualpipe, automatic):
        yield make(p, 2 * p)


def _bubbles(world: mr.World, schedule: Schedule) -> Row:
    """By how much measured bubbles miss the replayed ones; of a few runs, that which was disturbed least."""
    times = Times(SECONDS, SECONDS, SECONDS)
    replayed = _shares(replay(program(schedule), times))
    tries: list[tuple[float, str]] = []
    while not tries or (min(tries)[0] > TARGET and len(tries) < TRIES):
        measured = _shares(timeline(world.run(paced, schedule, times)))
        both = list(zip(measured, replayed, strict=True))
        tries.append((max(abs(a - b) for a, b in both), ", ".join(f"{a:.1%} for {b:.1%}" for a, b in both)))
    gap, shown = min(tries)
    what = f"paced {schedule.name}, {len(schedule.ranks)} ranks: bubble of all, of the longest span {shown}"
    return Row(what, (gap,), unit="share", at_most=TARGET)


def _shares(found: Timeline) -> tuple[float, float]:
    """Shares of the makespan: what all ranks idle, and the bubble of the longest span."""
    idle = sum(map(found.bubble, found.ranks)) / len(found.ranks)
    return idle, bubble(found) / found.makespan
