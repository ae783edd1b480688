"""A run while it lasts, as a notebook shows it: a small cell for each rank, and a tab with what it prints.

It appears after a second. A run that ends well takes it away; one that does not leaves its last state.
"""

import html
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from manyranks import progress_bar
from manyranks.measure.calls import Call
from manyranks.measure.fingerprints import size
from manyranks.world import cells
from manyranks.world.faults import diagnose
from manyranks.world.faults.outcome import Outcome
from manyranks.world.notebook.output import Output
from manyranks.world.rank.watch import Whereabouts

DELAY, EVERY = 1.0, 0.25  # seconds before it is shown, and between two changes
Looks = dict[int, Whereabouts | None]

_STYLE = """<style>
.manyranks-run { display: flex; flex-wrap: wrap; gap: 3px; font-size: 12px; line-height: 1.25; margin: 2px 0; }
.manyranks-run > div { border: 1px solid #78787880; border-left: 4px solid #787878; border-radius: 3px; padding: 1px 6px;
    min-width: 84px; max-width: 220px; }
.manyranks-run small { display: block; opacity: .8; font-size: 11px; }
.manyranks-run > span { align-self: center; margin: 0 4px; }
</style>"""
_PRE = "<pre style='margin:0;max-height:18em;overflow:auto;font-size:12px;line-height:1.3'>{}</pre>"
# Presses the ■ of the notebook's own toolbar, in JupyterLab and Notebook 7.
_STOP = """<button style="white-space: nowrap; font-size: 12px; padding: 3px 8px; margin-left: 6px; cursor: pointer"
 title="Interrupts the run, as the ■ above the notebook does" onclick="
    this.closest('.jp-NotebookPanel')?.querySelector('[data-command=&quot;notebook:interrupt-kernel&quot;]')
        ?.dispatchEvent(new MouseEvent('mousedown', {bubbles: true, button: 0}));
    this.textContent = 'stopping …';
">■ stop</button>"""


class State(NamedTuple):
    """The state of a rank at this moment.

    sign, color: of its cell
    words: what it does, in short
    more: who waits for whom, and where
    """

    sign: str
    words: str
    more: str
    color: str


@contextmanager
def show_live(outcome: Outcome, output: Output) -> Iterator["Live"]:
    """Gives what a run shows of itself. In a notebook, text is held back until the run ends: then it is in rank order."""
    with progress_bar.place() as free:
        shown = Live(outcome, output) if free else Nothing(outcome, output)
        try:
            yield shown
        except KeyboardInterrupt:
            shown.clear()
            raise
        except BaseException:
            shown.leave()
            raise
        shown.clear()


class Nothing:
    """Shows text alone, as it comes: outside a notebook."""

    def __init__(self, outcome: Outcome, output: Output):
        self._outcome, self._output = outcome, output

    def step(self, looks: Looks) -> None:
        """Time has passed.

        looks: what ranks did when they were last looked at
        """
        self._output.show_live(time.monotonic())

    def leave(self) -> None:
        """The run did not end well: the last state stays."""

    def clear(self) -> None:
        """The run has ended well."""


class Live(Nothing):
    """Shows each rank in its own cell, in a notebook."""

    def __init__(self, outcome: Outcome, output: Output):
        super().__init__(outcome, output)
        self._started = self._last = time.monotonic()
        self._printed: dict[int, int] = {}
        self._looks: Looks = {}
        self._handle = self._box = self._cells = None

    def step(self, looks: Looks) -> None:
        now = time.monotonic()
        if now - self._started < DELAY or now - self._last < EVERY:
            return
        self._last, self._looks = now, looks
        if self._handle is None:
            self._show()
        self._cells.value = self._strip()
        self._fill()

    def leave(self) -> None:
        if self._handle is not None:
            self._looks |= self._outcome.whereabouts
            still = [rank for rank in self._outcome.missing if (seen := self._looks.get(rank)) and seen.blocked is None]
            self._outcome.stopped |= set(still)
            states = _states(self._outcome, self._looks, set()).items()
            lines = (f"rank {rank}: {', '.join(filter(None, (state.words, state.more)))}" for rank, state in states)
            self._end({"text/html": self._strip(), "text/plain": "\n".join(lines)})

    def clear(self) -> None:
        if self._handle is not None:
            self._end({"text/plain": ""})

    def _show(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._cells = ipywidgets.HTML()
        self._box = ipywidgets.VBox([ipywidgets.HBox([self._cells, ipywidgets.HTML(_STOP)])])
        self._handle = display(self._box, display_id=True)

    def _fill(self) -> None:
        """A tab for each rank and one for all, as soon as something was printed; a single rank has no tabs."""
        import ipywidgets

        ranks, tails = self._outcome.ranks, self._output.tails
        if not tails:
            return
        if len(self._box.children) == 1:
            texts = [ipywidgets.HTML() for _ in range(len(ranks) + 1)]
            tabs = ipywidgets.Tab(texts, titles=["all", *(f"rank {rank}" for rank in ranks)])
            self._box.children = (self._box.children[0], tabs)
        tails = {rank: _overwritten(text) for rank, text in tails.items()}
        every = "".join(f"── rank {rank} ──\n{tails[rank]}\n" for rank in ranks if rank in tails)
        for widget, text in zip(self._box.children[1].children, [every, *(tails.get(rank, "") for rank in ranks)], strict=True):
            if (value := _PRE.format(html.escape(text))) != widget.value:
                widget.value = value

    def _end(self, data: dict[str, str]) -> None:
        self._handle.update(data, raw=True)
        self._box.close()
        self._handle = None

    def _strip(self) -> str:
        states = _states(self._outcome, self._looks, self._printing())
        shown = "".join(_cell(rank, state, self._looks.get(rank)) for rank, state in states.items())
        return f"{_STYLE}<div class='manyranks-run'>{shown}<span>{self._last - self._started:.0f} s</span></div>"

    def _printing(self) -> set[int]:
        now = {rank: self._output.printed(rank) for rank in self._outcome.ranks}
        before, self._printed = self._printed, now
        return {rank for rank, count in now.items() if count > before.get(rank, 0)}


def _overwritten(text: str) -> str:
    """Returns what stands on each line in the end: \\r begins it anew, as progress bars do."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _states(outcome: Outcome, looks: Looks, printing: set[int]) -> dict[int, State]:
    """Returns each rank's state.

    printing: the ranks that have printed since the last look
    """
    seen = replace(outcome, whereabouts=looks)
    return {rank: _state(rank, seen, rank in printing) for rank in outcome.ranks}


def _state(rank: int, outcome: Outcome, printing: bool) -> State:
    if rank in outcome.deaths:
        return State("✗", "died", "", "#D55E00")
    if rank in outcome.stopped:
        return State("■", "was stopped", "", "#787878")
    if rank in outcome.replies:
        failure = outcome.replies[rank][0].failure
        return State("✗", "raised", failure.kind, "#D55E00") if failure else State("✓", "done", "", "#009E73")
    seen = outcome.whereabouts.get(rank)
    if rank in outcome.debugged:
        return State("?", "in the debugger", cells.label(seen.place) if seen is not None else "", "#CC79A7")
    if seen is not None and seen.blocked is not None:
        culprit = diagnose.waits_for(rank, outcome)
        call = f"{seen.blocked.op} #{seen.blocked.sequence}" if isinstance(seen.blocked, Call) else str(seen.blocked)
        place = cells.label(seen.blocked.where if isinstance(seen.blocked, Call) else seen.place)
        whom = "" if culprit is None else f"for rank {culprit}"
        return State("…", f"waits in {call}", ", ".join(filter(None, (whom, place))), "#E69F00")
    place = cells.label(seen.place) if seen is not None else ""
    return State("✎", "prints", place, "#0072B2") if printing else State("▶", "runs", place, "#0072B2")


def _cell(rank: int, state: State, seen: Whereabouts | None) -> str:
    sent = f"<small>{size(seen.moved[0])} sent</small>" if seen is not None and seen.moved[0] else ""
    more = f"<small>{html.escape(state.more)}</small>" if state.more else ""
    words = html.escape(f"{state.sign} {state.words}")
    return f"<div style='border-left-color:{state.color}'><b>rank {rank}</b> {words}{more}{sent}</div>"
