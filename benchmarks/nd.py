"""All axes at once: a step on 16 ranks, and what it takes to say where so many ranks stand."""

import time
from collections.abc import Callable, Iterator

import manyranks as mr
from benchmarks.compare import Row
from manyranks.parallel.mesh import Mesh
from manyranks.theory import Plan, nd
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer

ROUNDS, STEPS = 5, 5
MODEL = GPTConfig(layers=4, hidden=64, heads=4, kv_heads=2, seq=64)  # chapter 10's
SHARED = {"seq": 64, "batch": 8, "precision": "fp32", "recompute": "none"}
PLANS = {
    "dp 2 × pp 2 × cp 2 × tp 2": Plan(dp=2, pp=2, cp=2, tp=2, microbatch=2, **SHARED),
    "the same with ZeRO-3": Plan(dp=2, pp=2, cp=2, tp=2, microbatch=2, zero=3, **SHARED),
    "dp 16": Plan(dp=16, **SHARED | {"batch": 16}),
}


def rows() -> Iterator[Row]:
    with mr.World(16) as world:
        for name, plan in PLANS.items():
            gpt = MODEL if plan.zero < 3 else GPTConfig(**vars(MODEL) | {"tied": False})
            seconds = max(world.run(_step_seconds, gpt, TrainingConfig(plan=plan)))
            yield Row(f"a step of chapter 10's model on 16 ranks, {name}", tuple(seconds), at_most=3.0)
        yield Row("16 ranks make the groups of a mesh", tuple(max(world.run(_groups)) for _ in range(ROUNDS)))
    llama = Mesh(dp=128, pp=16, tp=8)
    yield Row("a mesh of 16,384 ranks, as one of them", _each(lambda: _inspect(llama)), at_most=1.0)
    case = next(case for case in nd.rules.CASES if case.name == "70B on 1,024, 4M tokens")
    yield Row("rule of thumb and planner, 70B on 1,024 GPUs", _each(case.compare), at_most=2.0)


def _step_seconds(gpt: GPTConfig, training: TrainingConfig) -> list[float]:
    """Measures the seconds per step, once per round."""
    trainer, found = Trainer(gpt, training), []
    trainer.run(1)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        trainer.run(STEPS)
        found.append((time.perf_counter() - started) / STEPS)
    return found


def _groups() -> float:
    started = time.perf_counter()
    Mesh(dp=2, pp=2, cp=2, tp=2, ep=2).build()
    return time.perf_counter() - started


def _inspect(mesh: Mesh) -> None:
    with mesh.as_rank(12_345):
        pass


def _each(function: Callable[[], object]) -> tuple[float, ...]:
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return tuple(found)
