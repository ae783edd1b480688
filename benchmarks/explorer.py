"""One redraw of an explorer, from a moved control to the PNG in the widget; a schedule's against a new pyplot figure for each.

Pictures have twice the pixels they're shown with (2×), the new figure's as many (1×). Seconds are the processor's, not the
wall's: a redraw is one thread that waits for nothing. At most 40 ms for each control of each chapter, and 60 ms for 2×.
"""

import gc
import io
import itertools
from collections.abc import Callable, Iterator

import ipywidgets as widgets
from matplotlib import pyplot
from matplotlib.patches import Patch

from benchmarks.compare import Row, pairs, processor_seconds
from benchmarks.replay import COSTS, one_f_one_b
from manyranks import show
from manyranks.show import gantt, style
from manyranks.show.explorer import Panels, Said
from manyranks.timeline import Timeline, replay
from manyranks.timeline.spans import COMMUNICATION

ROUNDS = 21


class Schedules(Panels):
    """A plot for an explorer: 1F1B schedules that were replayed beforehand, by their number of micro-batches."""

    @style.styled
    def __init__(self, stages: int, microbatches: tuple[int, ...]):
        self.timelines = {m: replay(one_f_one_b(stages, m), COSTS) for m in microbatches}
        keys = [Patch(**gantt.KINDS[kind].look) for kind in ("F", "B", COMMUNICATION)]
        self.figure = gantt.frame(min(0.5 * stages, 5.0), ["time (s)"], keys)
        self._chart = gantt.Gantt(self.figure.axes[0])
        self.panels = [self._chart]

    def update(self, m: int) -> Said:
        timeline = self.timelines[m]
        self._chart.update("1F1B", [f"rank {rank}" for rank in timeline.ranks], gantt.boxes(timeline), timeline.makespan)
        return Said(f"{m} micro-batches", {"bubble": f"{timeline.bubble(0):.1%}"})


# Chapter -> its explorer, a setting to start from, and controls that start longer work, and say so.
CHAPTERS = {
    "00": (show.hardware.explorer, {}, ()),
    "01": (lambda: show.collectives.explorer(), {"n": 16}, ()),
    "02": (lambda: show.data_parallel.explorer(), {}, ()),
    "03": (lambda: show.zero.explorer(), {}, ()),
    "04": (lambda: show.checkpointing.explorer(), {}, ()),
    "05": (lambda: show.pipeline.explorer(), {}, ()),
    "05, 8 ranks, 32 micro-batches": (lambda: show.pipeline.explorer(), {"pp": 8, "m": 32}, ()),
    "06": (lambda: show.tensor.explorer(), {}, ()),
    "07": (lambda: show.context.explorer(), {}, ()),
    "08": (lambda: show.expert.explorer(), {}, ()),
    "09": (lambda: show.mfu.explorer(), {}, ()),
    "10": (lambda: show.nd.explorer(), {}, ("best",)),
    "11": (lambda: show.kernels.explorer(), {}, ()),
    "12": (lambda: show.failures.explorer(), {}, ()),
}
SCALES = ((1, 0.040), (2, 0.060))  # pixels of a picture for one on the page; seconds at most


def rows() -> Iterator[Row]:
    for stages, m, at_most in ((8, 64, 0.060), (16, 128, 0.060)):
        what = f"redraw of 1F1B, {stages} stages, {m} micro-batches"
        plot = Schedules(stages, (m - 1, m, m // 2))
        ours, theirs = _moves(plot, m - 1, m), _new_figures(plot, m - 1, m)
        yield Row(f"{what}: explorer; new pyplot figures", **pairs(ours, theirs, ROUNDS), at_most=at_most)
        yield Row("  … to half as many micro-batches", _each(_moves(plot, m // 2, m)))
    for chapter, (make, setting, but) in CHAPTERS.items():
        for scale, at_most in SCALES:
            for when, seconds in _worst(_scaled(make().set(**setting), scale), but):
                yield Row(f"{scale}×: the worst move in chapter {chapter}, {when}", (seconds,), at_most=at_most)


def _scaled(explorer: show.Explorer, scale: int) -> show.Explorer:
    explorer.figure.set_dpi(scale * style.DOTS)
    return explorer.set()


def _moves(plot: Schedules, *microbatches: int) -> Callable[[], float]:
    """Seconds of one move of the control, to each of these in turn."""
    explorer = show.Explorer(plot, m=show.slider("micro-batches", microbatches[-1], min(microbatches), max(microbatches)))
    turns = itertools.cycle(microbatches)
    return lambda: processor_seconds(lambda: explorer.set(m=next(turns)))


def _new_figures(plot: Schedules, *microbatches: int) -> Callable[[], float]:
    """The same by what comes to mind first: a figure of broken_barh each time, saved into an image widget."""
    pyplot.switch_backend("agg")
    image, turns = widgets.Image(format="png"), itertools.cycle(microbatches)

    def redraw() -> None:
        picture = io.BytesIO()
        figure = _figure(plot.timelines[next(turns)], plot.figure.get_size_inches())
        figure.savefig(picture, format="png")
        pyplot.close(figure)
        image.value = picture.getvalue()

    return lambda: processor_seconds(redraw)


@style.styled
def _figure(timeline: Timeline, inches: tuple[float, float]) -> pyplot.Figure:
    figure, axes = pyplot.subplots(figsize=inches)
    for rank in timeline.ranks:
        for letters, kind, top in (("F", "compute", -0.42), ("B", "compute", -0.42), ("", "communication", 0.02)):
            spans = [s for s in timeline.of(rank, kind) if s.name.startswith(letters)]
            bars = [(s.started, s.seconds) for s in spans]
            axes.broken_barh(bars, (rank + top, 0.4), facecolor=gantt.KINDS[letters or kind].color, label=letters or kind)
    axes.set(xlabel="time (s)", yticks=range(len(timeline.ranks)), yticklabels=[f"rank {r}" for r in timeline.ranks])
    axes.legend(*(part[:3] for part in axes.get_legend_handles_labels()), loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def _worst(explorer: show.Explorer, but: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """The longest of all moves from where it stands to another value of one control, and back.

    but: controls that start longer work, and say so.
    A full garbage collection, which falls into one of a hundred redraws and takes as long as it, is not counted.
    """
    opened = explorer.values
    moved = {name: control for name, control in explorer.controls.items() if name not in but}
    moves = [opened | {name: value} for name, control in moved.items() for value in _options(control)]
    first = [_collected(lambda move=move: explorer.set(**move)) for move in moves]
    again = [min(processor_seconds(lambda move=move: explorer.set(**move)) for _ in range(3)) for move in moves]
    yield from (("the first time", max(first)), ("again", max(again)))


def _options(control: widgets.ValueWidget) -> list:
    if not hasattr(control, "options"):
        return list(range(control.min, control.max + 1))
    return [option[1] if isinstance(option, tuple) else option for option in control.options]


def _each(measure: Callable[[], float]) -> tuple[float, ...]:
    measure()
    return tuple(measure() for _ in range(ROUNDS))


def _collected(fn: Callable[[], object]) -> float:
    gc.collect()
    return processor_seconds(fn)
