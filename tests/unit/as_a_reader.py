"""What a reader writes against the library. `make types` checks it in full, and that each result has the type it says.

Nothing runs it. A name that a reader's type checker got wrong once stands here.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import manyranks as mr
from manyranks import measure, parallel, show, theory, training
from manyranks.parallel.pipeline import program, schedules
from manyranks.theory.calls import Calls, Passes
from manyranks.theory.planner import Found
from manyranks.timeline import Timeline, replay


def total(x: float) -> float:
    return x


def ranks() -> None:
    with mr.World(4, timeout=60) as world:
        assert_type(world.size, int)
        world.run(total, 1.0)
        counted = world.measure(total, 1.0, flops=True)
    assert_type(counted.payload_bytes, dict[int, int])
    assert_type(counted.sent_bytes, dict[int, int] | None)
    assert_type(counted.timeline, Timeline)
    show.timeline(counted.timeline).savefig("calls.png")
    show.table(["rank", "bytes"], counted.payload_bytes.items())


def formulas() -> None:
    shape, cluster = theory.models["llama3-405b"], theory.clusters["h100-dgx"]
    plan = theory.Plan(dp=64, pp=16, tp=8, seq=8192, batch=2048, virtual=8, embedding_slots=True)
    assert_type(plan.gpus, int)
    assert_type(plan.layer_plan.recompute, str)
    assert_type(plan.layer_plan.rank_tokens, int)
    assert_type(theory.step.estimate(shape, plan, cluster).mfu, float)
    found = theory.planner.search(shape, cluster, gpus=8192, tp=8)
    assert_type(found[0], Found)
    assert_type(found[:10], list[Found])
    assert_type(found.checked, Found | None)
    assert_type(3 * Calls(all_reduce=1) * 2 + Calls(), Calls)
    assert_type(2 * Passes(forward=Calls(send=1)), Passes)


def replays() -> None:
    schedule = schedules.one_f_one_b(4, 8)
    times = program.Times(F=1.0, B=2.0)
    assert_type(replay(program.program(schedule), times), Timeline)
    replay(program.program(schedule), theory.clusters["h100-dgx"])


def training_loop(x: Tensor) -> None:
    gpt = training.GPT(training.GPTConfig(layers=2))
    assert_type(parallel.DataParallel(nn.Linear(2, 2)).module, nn.Module)
    model = parallel.Zero3(gpt)
    model(x).sum().backward()
    with measure.parity.record(gpt) as trace:
        gpt(x)
    measure.parity.Part(rows=torch.arange(2)).of(trace, trace)
