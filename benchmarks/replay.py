"""Replaying a pipeline schedule on the virtual clock. There is no peer: the goal is the speed of explorers and planners.

Seconds are the processor's, not the wall's: replay is one thread that waits for nothing.
"""

from collections.abc import Callable, Iterator

from benchmarks.compare import Row, processor_seconds
from manyranks.timeline import Collective, Compute, Durations, Program, Recv, Send, Wait, replay

STAGES, MICROBATCHES = 16, 256
COSTS = Durations({"F": 1.0, "B": 2.0}, latency=0.01, bandwidth=1e5)


def rows() -> Iterator[Row]:
    pipeline, data_parallel = one_f_one_b(STAGES, MICROBATCHES), all_reduces(64, 256)
    what = f"1F1B, {STAGES} stages, {MICROBATCHES} micro-batches: an instruction"
    yield Row(f"replay of {what}", _seconds_each(pipeline, lambda: replay(pipeline, COSTS), 40), at_most=1e-6)
    shared = _seconds_each(pipeline, lambda: replay(pipeline, COSTS, sharing=True), 10)
    yield Row("  … with sharing", shared, at_most=1e-5)
    reduced = _seconds_each(data_parallel, lambda: replay(data_parallel, COSTS), 10)
    yield Row("replay of 256 overlapped all-reduces of 64 ranks: an instruction", reduced)


def one_f_one_b(p: int, m: int) -> Program:
    """Receives block; sends do not."""
    return Program(tuple(tuple(_stage(p, m, stage)) for stage in range(p)))


def all_reduces(n: int, layers: int) -> Program:
    """A backward of so many layers, each with an all-reduce under the next; at the end all are waited for."""
    group = tuple(range(n))
    steps = [(Compute("B", "B"), Collective("all_reduce", 1000, group, handle=layer)) for layer in range(layers)]
    rank = [instruction for step in steps for instruction in step] + [Wait(layer) for layer in range(layers)]
    return Program((tuple(rank),) * n)


def _stage(p: int, m: int, stage: int) -> Iterator[Compute | Send | Recv]:
    ahead = min(m, p - 1 - stage)
    for i in range(ahead):
        yield from _action("F", i, stage - 1, stage + 1, p)
    for i in range(m):
        if ahead + i < m:
            yield from _action("F", ahead + i, stage - 1, stage + 1, p)
        yield from _action("B", i, stage + 1, stage - 1, p)


def _action(kind: str, microbatch: int, before: int, after: int, p: int) -> Iterator[Compute | Send | Recv]:
    if 0 <= before < p:
        yield Recv(before, 1000, kind)
    yield Compute(f"{kind}{microbatch}", kind)
    if 0 <= after < p:
        yield Send(after, 1000, kind, handle=(kind, microbatch))


def _seconds_each(program: Program, call: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """Processor seconds an instruction, of each of so many calls."""
    return tuple(processor_seconds(call) / len(program) for _ in range(rounds))
