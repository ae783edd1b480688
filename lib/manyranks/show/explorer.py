"""An explorer: controls, a figure that follows them, numbers as tiles, and a sentence that says what limits now.

It is driven by setting.Panels, a chapter's by a setting.Board. The rest of the figure, such as axes and legends, is drawn again
only when an update has changed it: that is several times slower.
"""

import asyncio
import base64
import contextlib
import itertools
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import ipywidgets as widgets
import numpy as np
import traitlets
from IPython.display import display
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.layout_engine import ConstrainedLayoutEngine

from manyranks.measure.compared import SmallRun
from manyranks.show import page, scenario, style
from manyranks.show.degree_curves import Curves
from manyranks.show.scenario import choice, log_slider, slider, value_slider
from manyranks.show.setting import Board, Panels, Part, Said, Setting

__all__ = ["Board", "Explorer", "Panels", "Part", "Said", "Setting", "choice", "log_slider", "slider", "value_slider"]

_REST = 1.0  # seconds without a change before a setting counts as the one to compare with
_PAUSE = 0.02  # seconds without a further change before a redraw: a dragged slider does not queue up pictures
_MARGIN = 0.12  # inches, for labels that grow when a control is moved
_LATER = "Run this cell to get the controls."
_TIGHT = widgets.Layout(margin="1px 2px")


class Measure(Protocol):
    """Runs the same thing on a few real ranks, as manyranks.few_ranks does.

    say: is called with a share of 1, and words
    """

    def __call__(self, values: Mapping[str, object], say: Callable[[float, str], None]) -> SmallRun: ...

    def stop(self) -> None: ...


class Explorer:
    """Shows `plot` under `controls`; every change calls plot.update(**values).

    presets: button name -> values that it sets, while all others go back to their first values
    measure: what "Measure it" runs

    figure, controls (by name), values, status, png, tiles and parts can be read. A picture that doesn't belong to the
    controls, because the plot has refused them, is dimmed. In a notebook, shared controls (scenario.SHARED) open where the
    reader has left them in the explorer before.
    """

    def __init__(
        self,
        plot: Panels,
        presets: Mapping[str, Mapping[str, object]] | None = None,
        measure: Measure | None = None,
        **controls: widgets.ValueWidget,
    ):
        self.figure, self.status, self.curves = plot.figure, "", None
        if plot.over:
            over = {curve: plot.apart.get(curve, plot.over) for curve in plot.curves}
            named = {each: (controls[each].description, scenario.values(controls[each])) for each in over.values()}
            with style.context():
                self.curves = Curves(self.figure, over, named)
        self.plot, self.controls, self._first = plot, controls, {name: each.value for name, each in controls.items()}
        self.presets, self._measure = dict(presets or {}), measure
        self._canvas = FigureCanvasAgg(self.figure)
        self.figure.set_dpi(2 * style.DOTS)
        self._image = _Picture(format="png", width=f"{self.figure.get_figwidth() * style.DOTS:.0f}")
        self._line, self.tiles, self.parts, self._copy, self.carried = (widgets.HTML(layout=_TIGHT) for _ in range(5))
        self.bar = widgets.FloatProgress(0.0, min=0.0, max=1.0, layout=widgets.Layout(width="90px", display="none"))
        self._waiting: asyncio.TimerHandle | None = None
        self._background = None  # what does not move, drawn
        self._shown: np.ndarray | None = None  # the last picture that belonged to its setting
        self.said: Said | None = None  # the words on the last setting that was possible
        self._before, self._moved = None, 0.0
        self._drawing = threading.RLock()  # a kernel may handle one control's change during another's, in two threads
        for artist in self._moving:
            artist.set_animated(True)  # leaves it out of the drawing that the redraws start from
        if isinstance(layout := self.figure.get_layout_engine(), ConstrainedLayoutEngine):
            layout.set(w_pad=_MARGIN)
        self._redraw()
        self.figure.set_layout_engine("none")  # axes stay where they are; to place them takes as long as to draw them
        self.said = None
        self._redraw()  # now that a plot can see how large they are
        for control in controls.values():
            control.observe(self._soon, "value")
        if _loop() is not None:
            self._carry(scenario.saved())

    @property
    def values(self) -> dict:
        return {name: control.value for name, control in self.controls.items()}

    @property
    def _moving(self) -> list[Artist]:
        return [*self.plot.moving, *(self.curves.moving if self.curves else [])]

    @property
    def png(self) -> bytes:
        return self._image.value

    def preset(self, name: str) -> "Explorer":
        """Sets what the button of this name sets. Raises ValueError for a name that no button has."""
        if name not in self.presets:
            raise ValueError(f"{name!r}: the presets are {', '.join(self.presets) or 'none'}")
        return self.set(**self._first | self.presets[name])

    def reset(self) -> "Explorer":
        """Sets the controls back to where they were at first, and forgets what is carried from explorer to explorer."""
        scenario.forget()
        return self.set(**self._first)

    def measured(self) -> SmallRun:
        """Runs what "Measure it" runs, and shows it. Raises what that raises, and ValueError where there is nothing to run."""
        if self._measure is None:
            raise ValueError("this explorer has nothing to measure: make it with measure=, as the chapter does")
        small = self._measure(self.values, lambda share, words: None)
        self._show_small(small)
        return small

    def set(self, **values) -> "Explorer":
        """Moves controls, as a hand would, and redraws at once.

        Raises ValueError for a name or value that no control has, and then moves none; and what plot.update raises, except a
        ValueError, which becomes the status line.
        """
        before = self.values
        try:
            for name, value in values.items():
                self._put(name, value)
        except ValueError:
            for name, value in before.items():
                self._put(name, value)
            raise
        self._redraw()
        return self

    def _put(self, name: str, value) -> None:
        if name not in self.controls:
            raise ValueError(f"{name!r}: this explorer has {', '.join(self.controls)}")
        control = self.controls[name]
        control.unobserve(self._soon, "value")
        try:
            control.value = value
        except Exception as error:
            raise ValueError(f"{name}={value!r}: {_allowed(control) or error}") from error
        finally:
            control.observe(self._soon, "value")
        if control.value != value:  # a slider takes its nearest value without a word
            raise ValueError(f"{name}={value!r}: {_allowed(control)}")

    def _carry(self, saved: Mapping[str, object]) -> None:
        """Opens where the reader has been before, as far as this explorer can."""
        carried = {name: value for name, value in saved.items() if self.values.get(name, value) != value}
        for name, value in list(carried.items()):
            try:
                self._put(name, value)
            except ValueError:
                del carried[name]
        if carried:
            self.said = None  # nothing was before
            self._redraw()
            if self.status.startswith("Not possible"):
                self.set(**self._first)
            else:
                self.carried.value = page.small_print(f"From your last explorer: {scenario.shown(carried)}. Reset undoes it.")
        self._before = None

    def _soon(self, change=None) -> None:
        if (loop := _loop()) is None:
            return self._follow()
        if change is not None:
            scenario.save({name: control.value for name, control in self.controls.items() if control is change.owner})
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = loop.call_later(_PAUSE, self._follow)

    def _follow(self) -> None:
        """Redraws after a control has moved. Nobody can catch an error here, so the sentence reports it."""
        with contextlib.suppress(Exception):
            self._redraw(dragged=time.monotonic() - self._moved < _REST)

    def _redraw(self, dragged: bool = False) -> None:
        """Redraws.

        dragged: the last setting was mid-drag, so compare with the one before it
        """
        with self._drawing:
            if self._waiting is not None:
                self._waiting.cancel()
            self._waiting, self._moved, self.carried.value = None, time.monotonic(), ""
            idle = self.plot.idle(**self.values)
            for name, control in self.controls.items():
                control.disabled = idle.get(name, False)
            try:
                answer = self.plot.update(**self.values)
                if self.curves is not None:
                    self.curves.update(lambda name, degrees: self.plot.along(name, degrees, **self.values))
                self._shown = self._drawn()
            except Exception as error:
                refused, kind = isinstance(error, ValueError), type(error).__name__
                self.status = f"Not possible: {scenario.in_words(str(error))}" if refused else f"Error: {kind}: {error}"
                whole = self._drawn() if self._shown is None else self._shown
                self._show(whole // np.array([1, 1, 1, 4], np.uint8), page.with_limit(self.status))  # dimmed
                self.parts.value = self._copy.value = ""
                if self.said is not None:
                    self.tiles.value = f'{page.TILES}<div style="opacity:.3">{page.tiles(self.said)}</div>'
                if not refused:
                    raise
            else:
                self.status = str(answer)
                self._show(self._shown, page.with_limit(answer.sentence))
                self._show_parts()
                self._before = self._before if dragged else self.said
                self.said = answer
                self.tiles.value = page.TILES + page.tiles(answer, self._before)
                self._copy.value = page.copies(self.code())

    def code(self) -> str:
        """Python that computes what is shown; empty where a plot has none."""
        return self.plot.code(**self.values)

    def _drawn(self) -> np.ndarray:
        """The picture of the plot as it is now: height, width, and red, green, blue and alpha."""
        if self._background is None or self.figure.stale:  # animated artists do not make a figure stale
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        self._canvas.restore_region(self._background)
        for artist in self._moving:
            artist.axes.draw_artist(artist)
        return np.array(self._canvas.buffer_rgba())

    def _show(self, picture: np.ndarray, line: str) -> None:
        self._line.value = line
        self._image.tooltip = self.status
        self._image.value = _png(picture)

    def _show_parts(self) -> None:
        boxes, whole = [], (self.figure.bbox.width, self.figure.bbox.height)
        parts = [*self.plot.parts(), *(self.curves.parts() if self.curves else ())]
        for axes, own in itertools.groupby(parts, lambda part: part[0]):  # to place many takes as long as to place one
            _, left, right, bottom, top, says = zip(*own, strict=True)
            corners = [axes.transData.transform(np.column_stack(each)) / whole for each in ((left, bottom), (right, top))]
            boxes += map(page.box, *np.sort(corners, axis=0).transpose(2, 0, 1).reshape(4, -1).tolist(), says)
        self.parts.value = "".join(boxes)

    def _show_small(self, small: SmallRun) -> None:
        png = self.plot.pictured(small) if small.points else b""
        self.tiles.value = page.TILES + page.measured(small, self.said or Said(), png)

    def _ipython_display_(self) -> None:
        keys = widgets.HTML(page.KEYS + page.PICTURE, layout=widgets.Layout(display="none"))
        controls = widgets.Box(list(self.controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        controls.add_class("manyranks-controls")
        picture = widgets.Box([self._image, self.parts]).add_class("manyranks-picture")
        # What comes and goes stands at the end, where it moves nothing.
        below = widgets.Box([self.bar, self.carried], layout=widgets.Layout(align_items="center"))
        box = widgets.VBox([controls, self.buttons(), self._line, picture, self.tiles, below, keys])
        box.add_class("manyranks-explorer")
        high, wide = (round(inches * style.DOTS) for inches in reversed(self.figure.get_size_inches()))
        stored = {"text/plain": repr(self), "image/png": base64.b64encode(style.in_few_colors(self.png)).decode()}
        display(stored, raw=True, metadata={"image/png": {"width": wide, "height": high, "alt": self.status}})
        display({"text/plain": _LATER, "text/html": page.NOTE % _LATER + self.tiles.value}, raw=True)
        view = "application/vnd.jupyter.widget-view+json"
        display({"text/plain": "", view: box._repr_mimebundle_()[view]}, raw=True)

    def buttons(self) -> widgets.Box:
        """Presets, reset, what measures, and what copies the code."""
        row = [widgets.HTML(page.small_print("Try"), layout=widgets.Layout(margin="0 4px"))] if self.presets else []
        row += [_button(name, lambda _, name=name: self.preset(name)) for name in self.presets]
        row.append(_button("Reset", lambda _: self.reset()))
        if self._measure is not None:
            row.append(_Measuring(self, self._measure).start)
        row.append(self._copy)
        return widgets.Box(row, layout=widgets.Layout(flex_flow="row wrap", align_items="center"))

    def __repr__(self) -> str:
        return f"Explorer({', '.join(f'{k}={v}' for k, v in self.values.items())}): {self.status}"


class _Measuring:
    """The button "Measure it", which is "Stop" while ranks run. A separate thread runs them."""

    def __init__(self, explorer: Explorer, measure: Measure):
        self._explorer, self._measure, self._thread, self._stopped = explorer, measure, None, False
        self.bar, self.start = explorer.bar, _button("Measure it", self._clicked, "100px")
        self.start.tooltip = "Runs a small version on real ranks on this machine"

    def _clicked(self, _) -> None:
        if self._thread is not None:
            self._stopped = True
            self._say(self.bar.value, "stopping …")
            threading.Thread(target=self._measure.stop, daemon=True).start()
            return
        if self._explorer.status.startswith("Not possible"):
            return self._say(0.0, "Not measured: this setting isn't possible")
        self._stopped = False
        self.start.description = "Stop"
        self.bar.layout.display = None
        self._say(0.0, "starting ranks")
        self._thread = threading.Thread(target=self._run, args=(asyncio.get_running_loop(), self._explorer.values), daemon=True)
        self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop, values: dict) -> None:
        """Measures in the thread: widgets are the kernel's, so they're set from its loop."""
        small, failed = None, ""
        try:
            small = self._measure(values, lambda share, words: loop.call_soon_threadsafe(self._say, share, words))
        except Exception as error:
            failed = (f"{error}".strip() or type(error).__name__).splitlines()[0]
        loop.call_soon_threadsafe(self._ended, small, failed)

    def _say(self, share: float, words: str) -> None:
        self.bar.value = share
        self._explorer.carried.value = page.small_print(words)

    def _ended(self, small: SmallRun | None, failed: str) -> None:
        if small is not None and not self._stopped:
            self._explorer._show_small(small)
        self._thread = None
        self.start.description = "Measure it"
        self.bar.layout.display = "none"
        self._say(0.0, "stopped" if self._stopped else f"Not measured: {failed}" if failed else "")


def _button(name: str, clicked: Callable, width: str = "auto") -> widgets.Button:
    button = widgets.Button(description=name, layout=widgets.Layout(width=width, height="24px", margin="1px"))
    button.on_click(clicked)
    return button


def _loop() -> asyncio.AbstractEventLoop | None:
    """The notebook's loop, where one is around us."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()


class _Picture(widgets.Image):
    """A picture whose tooltip, which is its text for those who cannot see it, can be set: a page wants a description too."""

    description = traitlets.Unicode().tag(sync=True)


def _png(picture: np.ndarray) -> bytes:
    """Writes a PNG file. Rows are stored as differences to the row above: choosing a filter for each takes twice as long."""
    high, wide, _ = picture.shape
    rows = np.full((high, 1 + 4 * wide), 2, np.uint8)  # each begins with its filter's number
    rows[:, 1:] = picture.reshape(high, -1)
    rows[1:, 1:] -= picture.reshape(high, -1)[:-1]
    parts = {b"IHDR": struct.pack(">2I5B", wide, high, 8, 6, 0, 0, 0), b"IDAT": zlib.compress(rows, 1), b"IEND": b""}
    pack = struct.Struct(">I").pack
    chunks = [pack(len(data)) + name + data + pack(zlib.crc32(name + data)) for name, data in parts.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _allowed(control: widgets.ValueWidget) -> str:
    """Says what this control can be set to; empty if it does not say."""
    if hasattr(control, "options"):
        values = list(map(repr, scenario.values(control)))
        return "choose one of " + ", ".join(values if len(values) <= 12 else [*values[:3], "…", values[-1]])
    return f"from {control.min} to {control.max} in steps of {control.step}" if hasattr(control, "min") else ""
