"""The planner over every way to train Llama 3 405B on 16,384 GPUs. There is no peer: the goal is an explorer that answers."""

from collections.abc import Iterator

from benchmarks.compare import Row, timed
from manyranks import theory
from manyranks.theory.published import fit

GPUS, SEQ, BATCH = 16_384, 8_192, 2_048


def rows() -> Iterator[Row]:
    shape, cluster = theory.models["llama3-405b"], theory.clusters["h100-dgx"]

    def search() -> None:
        _forget()
        theory.planner.search(shape, cluster, GPUS, SEQ, BATCH, embedding_slots=True)

    yield Row("planner: Llama 3 405B on 16,384 GPUs", tuple(timed(search) for _ in range(5)), at_most=2.0)
    yield Row("123 published runs predicted, 6 fits without one table", tuple(timed(fit.leave_one_out) for _ in range(3)))


def _forget() -> None:
    """Empties the caches that a first search fills, so that each search is a first one."""
    modules = (theory.activations, theory.communicate, theory.compute, theory.pace, theory.stages, theory.states)
    for module in modules:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
