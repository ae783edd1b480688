"""The planner over every way to train a model on many GPUs, beside a Python loop in the same minute: explorers wait for it."""

from collections.abc import Callable, Iterator

from benchmarks.compare import Row, timed
from manyranks import theory
from manyranks.theory.published import fit

SEARCHES = (  # model, number of H100s, choices
    ("llama3-405b", 16_384, {"embedding_slots": True}),
    ("deepseek-v3", 512, {}),
    ("qwen3-235b-a22b", 512, {}),
    ("deepseek-v3", 16_384, {}),
)
LOOP = 10_000_000  # turns, which take 0.25 s where the planner has 3 s


def rows() -> Iterator[Row]:
    for name, gpus, choices in SEARCHES:
        search = _searching(name, gpus, choices)
        both = [(timed(search), timed(_loop)) for _ in range(3)]
        ours, theirs = zip(*both, strict=True)
        yield Row(f"planner: {name} on {gpus:,} GPUs; a loop of 10 million", ours, theirs, ratio_at_most=12)
    yield Row("123 published runs predicted, 6 fits without one table", tuple(timed(fit.leave_one_out) for _ in range(3)))


def _searching(name: str, gpus: int, choices: dict[str, object]) -> Callable[[], None]:
    def search() -> None:
        forget()
        theory.planner.search(theory.models[name], theory.clusters["h100-dgx"], gpus, **choices)

    return search


def _loop() -> None:
    for _ in range(LOOP):
        pass


def forget() -> None:
    """Empties the caches that a first search fills, so that each search is a first one."""
    names = ("activations", "communicate", "compute", "pace", "stages", "states", "planner")
    modules = [*(getattr(theory, name) for name in names), theory.planner.bounds]
    for module in modules:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
