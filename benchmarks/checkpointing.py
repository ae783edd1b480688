"""Activation checkpointing against PyTorch's own: time and peak of a step of a small GPT; and the time of its planner.

Seconds are the processor's, of one thread, not the wall's: a step waits for nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.utils import checkpoint as theirs

from benchmarks.compare import Row, one_thread, pairs, processor_seconds
from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import PeakBytes
from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules, selective_checkpoint
from manyranks.parallel.recompute_policy import products
from manyranks.theory import checkpointing
from manyranks.theory.checkpointing import Layer
from manyranks.theory.optimal_checkpoints import Schedules
from manyranks.training import gpt
from manyranks.training.config import GPTConfig

ROUNDS, STEPS = 11, 2
CONFIG = GPTConfig(layers=6, hidden=256, heads=8, vocab=1024, seq=128, dropout=0.1)
SIZE = CONFIG.shape().parameters / 1e6
BATCH = 4

Step = Callable[[], None]


def rows() -> Iterator[Row]:
    yield from _planner()
    with one_thread():
        yield from _steps()


def _planner() -> Iterator[Row]:
    chain = [Layer(1 + k * 7 % 5, 2, 1000 + 37 * k % 999, 4000 + 91 * k % 3333) for k in range(128)]
    most = checkpointing.run(chain, checkpointing.keep_all(128)).peak
    for slots in (64, 256):
        seconds = tuple(processor_seconds(lambda slots=slots: Schedules(chain, most, slots)) for _ in range(5))
        yield Row(f"optimal plans of 128 unequal layers, {slots} budgets", seconds, at_most=1.0)


def _steps() -> Iterator[Row]:
    plain, theirs_full, no_dropout = _step(None), partial(theirs.checkpoint, **_THEIRS), replace(CONFIG, dropout=0.0)
    full, selective = _step(checkpoint), _step(partial(selective_checkpoint, products))
    early, whole = _step(theirs_full, no_dropout), _step(checkpoint, no_dropout)
    stops = f"every layer, no dropout; which lets it stop early (ours has {_flops(whole) / _flops(early):.3f} times its FLOPs)"
    yield from _compared("every layer; torch.utils.checkpoint", full, _step(theirs_full), at_most=1.03)
    yield from _compared("products kept; its selective contexts", selective, _step(_their_selective), at_most=1.03)
    yield from _compared(stops, whole, early)
    for what, step in (("every layer", full), ("products kept", selective)):
        cost = f"{what}; no checkpoints ({_flops(step) / _flops(plain):.3f} times the FLOPs)"
        yield Row(cost, **_seconds(step, plain))


def _compared(names: str, ours: Step, other: Step, at_most: float | None = None) -> Iterator[Row]:
    yield Row(f"step of a GPT, {SIZE:.1f} M parameters: {names}", **_seconds(ours, other), ratio_at_most=at_most)
    yield Row(f"its peak of memory: {names}", (_peak(ours),), (_peak(other),), unit="bytes", ratio_at_most=1.0)


def _step(how: Callable | None, config: GPTConfig = CONFIG) -> Step:
    """A forward and a backward, each layer called as how(layer, x, …)."""
    model = gpt.GPT(config)
    if how is not None:
        checkpoint_modules(model, lambda module: isinstance(module, gpt.Layer), how)
    tokens_BS = torch.randint(config.vocab, (BATCH, config.seq), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad()
        gpt.loss(model(tokens_BS), tokens_BS).backward()

    return step


_THEIRS = {"use_reentrant": False, "preserve_rng_state": True}


def _their_selective(function: Callable, *args):
    return theirs.checkpoint(
        function, *args, **_THEIRS, context_fn=partial(theirs.create_selective_checkpoint_contexts, _policy)
    )


def _policy(context, operator, *args, **kwargs) -> theirs.CheckpointPolicy:
    keep = products(operator)
    return theirs.CheckpointPolicy.MUST_SAVE if keep else theirs.CheckpointPolicy.PREFER_RECOMPUTE


def _seconds(ours: Step, other: Step) -> dict[str, tuple[float, ...]]:
    measures = [lambda step=step: min(processor_seconds(step) for _ in range(STEPS)) for step in (ours, other)]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _peak(step: Step) -> float:
    with PeakBytes() as memory:
        step()  # the counter meets every tensor that stays
        memory.peak_bytes = 0
        step()
    return memory.peak_bytes


def _flops(step: Step) -> int:
    with WorkCounter() as work:
        step()
    return work.flops
