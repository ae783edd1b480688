"""Chapter 03's figures of memory over a step."""

from collections.abc import Callable, Mapping

from manyranks.show import drawings, style


def watched(train: Callable, stage: type, held: Callable) -> list:
    """Returns what held(stage) says after each part's forward and backward, in the second step."""
    seen = []

    class Watched(stage):
        def after_forward(self, k: int) -> None:
            seen.append(held(self))
            super().after_forward(k)

        def after_backward(self, k: int) -> None:
            seen.append(held(self))
            super().after_backward(k)

    train(Watched, steps=2)
    return seen[len(seen) // 2 :]


def steps_over_time(run: Callable, train: Callable, held: Callable, stages: Mapping[str, type]) -> style.Figure:
    """Draws what rank 0 holds over the second step of several stages, by name, side by side."""
    steps = {name: run(watched, train, stage, held)[0] for name, stage in stages.items()}
    samples = {name: {kind: [moment[kind] for moment in step] for kind in step[0]} for name, step in steps.items()}
    events = len(next(iter(steps.values())))
    return drawings.memory_over_time(samples, [(0, events / 2, "forward"), (events / 2, events, "backward")])
