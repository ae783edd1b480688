"""An explorer: controls, a figure that follows them, and a line that says what limits now.

An explorer is driven by a plot: an object with `figure`, `moving` (the artists that follow the controls) and
`update(**values)`, which moves them and returns the status line. It may have `idle(**values)`: the names of controls that do
nothing right now, and are switched off. What else is in the figure, such as axes and legends, is drawn again only when an
update has changed it: that takes a few times as long. What a plot cannot show it refuses with a ValueError, whose text
becomes the status line.
"""

import asyncio
import base64
import contextlib
import html
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

import ipywidgets as widgets
import numpy as np
import traitlets
from IPython.display import display
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from manyranks.show import style

_PAUSE = 0.02  # seconds without a further change before a redraw: a dragged slider does not queue up pictures
_MARGIN = 0.12  # inches, for labels that grow when a control is moved
# JupyterLab and Notebook 7 take arrows, letters and Enter for themselves, unless the element that has the focus has this
# attribute. Keys with Ctrl, Cmd or Shift, such as those that save or run, stay theirs. The rest is for screen readers: a
# slider has a name, and the status line is spoken when it changes. In the dark theme a list's arrow is black on black.
_KEYS = """<style onload="
    const box = this.closest('.manyranks-explorer');
    const keep = ({target, ctrlKey, metaKey, shiftKey}) =>
        target.toggleAttribute('data-lm-suppress-shortcuts', !(ctrlKey || metaKey || shiftKey));
    for (const type of ['focusin', 'keydown', 'keyup']) box.addEventListener(type, keep);
    box.addEventListener('focusin', ({target}) => {
        box.querySelector(':scope > .widget-html').ariaLive = 'polite';
        if (target.role === 'slider') target.ariaLabel = target.closest('.widget-inline-hbox').querySelector('label').innerText;
    });
">
.manyranks-explorer > .widget-html .widget-html-content { line-height: 1.35; }
[data-jp-theme-light="false"] .manyranks-explorer select { appearance: auto; background-image: none; color-scheme: dark; }
</style>"""
# A saved page keeps a picture, this note and the controls. The controls are alive as long as the kernel is: then they alone
# are to be seen, else the picture and the note. A page that drops styles, such as GitHub's, shows picture and note.
_NOTE = """<style>
.jp-OutputArea:has(.manyranks-explorer) > .jp-OutputArea-child:has(.manyranks-note),
.jp-OutputArea:has(.manyranks-explorer) > .jp-OutputArea-child:has(+ .jp-OutputArea-child .manyranks-note),
.jp-OutputArea:not(:has(.manyranks-explorer)) > .jp-OutputArea-child:has(.manyranks-note) + .jp-OutputArea-child
{ display: none; }
</style><p class="manyranks-note"><i>The controls come when you run this cell.</i></p>"""
# Three controls side by side where there is room, else two.
_LAYOUT = widgets.Layout(width="33%", min_width="268px", margin="1px 0")
_LABELS = {"description_width": "128px"}


def slider(label: str, value: int, low: int, high: int, step: int = 1) -> widgets.IntSlider:
    """A control for a whole number."""
    return widgets.IntSlider(value, low, high, step, description=label, layout=_LAYOUT, style=_LABELS)


def value_slider(label: str, value: float, values: Sequence[float], show=str) -> widgets.SelectionSlider:
    """A control for one of several numbers, in their order; show: value -> text beside the slider."""
    options = [(show(number), number) for number in values]
    return widgets.SelectionSlider(options=options, value=value, description=label, layout=_LAYOUT, style=_LABELS)


def log_slider(label: str, value: float, low: int, high: int, base: int = 2, show=str) -> widgets.SelectionSlider:
    """A control for a power of `base`, from base**low to base**high; show: value -> text beside the slider."""
    return value_slider(label, value, [base**k for k in range(low, high + 1)], show)


def choice(label: str, value: str, options: Sequence[str]) -> widgets.Dropdown:
    """A control for one of several names."""
    return widgets.Dropdown(options=list(options), value=value, description=label, layout=_LAYOUT, style=_LABELS)


class Plot(Protocol):
    """What an explorer drives."""

    figure: Figure
    moving: Sequence[Artist]

    def update(self, **values) -> str: ...


class Explorer:
    """Shows `plot` under `controls`; every change calls plot.update(**values).

    figure, controls (by name), values, status and png can be read. A picture that does not belong to the controls, because the
    plot has refused them, is dimmed.
    """

    def __init__(self, plot: Plot, **controls: widgets.ValueWidget):
        self.figure, self.status = plot.figure, ""
        self._plot, self.controls = plot, controls
        self._canvas = FigureCanvasAgg(self.figure)
        self.figure.set_dpi(2 * style.DOTS)
        self._image, self._line = _Picture(format="png", width=f"{self.figure.get_figwidth() * style.DOTS:.0f}"), widgets.HTML()
        self._waiting: asyncio.TimerHandle | None = None
        self._background = None  # what does not move, drawn
        self._shown: np.ndarray | None = None  # the last picture that belonged to its setting
        for artist in plot.moving:
            artist.set_animated(True)  # leaves it out of the drawing that the redraws start from
        if isinstance(layout := self.figure.get_layout_engine(), ConstrainedLayoutEngine):
            layout.set(w_pad=_MARGIN)
        self._redraw()
        self.figure.set_layout_engine("none")  # axes stay where they are; to place them takes as long as to draw them
        self._redraw()  # now that a plot can see how large they are
        for control in controls.values():
            control.observe(self._soon, "value")

    @property
    def values(self) -> dict:
        """The controls' present values by name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def png(self) -> bytes:
        """The picture that is shown now."""
        return self._image.value

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

    def _soon(self, _=None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no notebook around us
            return self._follow()
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = loop.call_later(_PAUSE, self._follow)

    def _follow(self) -> None:
        """Redraws after a moved control, where nobody could catch an error: the status line says it."""
        with contextlib.suppress(Exception):
            self._redraw()

    def _redraw(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None
        idle = self._plot.idle(**self.values) if hasattr(self._plot, "idle") else ()
        for name, control in self.controls.items():
            control.disabled = name in idle
        try:
            self.status = self._plot.update(**self.values)
            self._shown = self._drawn()
        except Exception as error:
            refused = isinstance(error, ValueError)
            self.status = f"Not possible: {error}" if refused else f"Error: {type(error).__name__}: {error}"
            self._show(_dimmed(self._drawn() if self._shown is None else self._shown))
            if not refused:
                raise
        else:
            self._show(self._shown)

    def _drawn(self) -> np.ndarray:
        """The picture of the plot as it is now: height, width, and red, green, blue and alpha."""
        if self._background is None or self.figure.stale:  # animated artists do not make a figure stale
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        self._canvas.restore_region(self._background)
        for artist in self._plot.moving:
            artist.axes.draw_artist(artist)
        return np.array(self._canvas.buffer_rgba())

    def _show(self, picture: np.ndarray) -> None:
        self._line.value = _with_limit(self.status)
        self._image.tooltip = self.status
        self._image.value = _png(picture)

    def _ipython_display_(self) -> None:
        keys = widgets.HTML(_KEYS, layout=widgets.Layout(display="none"))
        controls = widgets.Box(list(self.controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
        box = widgets.VBox([controls, self._line, self._image, keys]).add_class("manyranks-explorer")
        high, wide = (round(inches * style.DOTS) for inches in reversed(self.figure.get_size_inches()))
        picture = {"text/plain": repr(self), "image/png": base64.b64encode(style.in_few_colors(self.png)).decode()}
        display(picture, raw=True, metadata={"image/png": {"width": wide, "height": high}})
        display({"text/plain": "The controls come when you run this cell.", "text/html": _NOTE}, raw=True)
        display({"text/plain": ""} | _view(box), raw=True)

    def __repr__(self) -> str:
        return f"Explorer({', '.join(f'{k}={v}' for k, v in self.values.items())}): {self.status}"


class _Picture(widgets.Image):
    """A picture whose tooltip, which is its text for those who cannot see it, can be set: a page wants a description too."""

    description = traitlets.Unicode().tag(sync=True)


def _with_limit(status: str) -> str:
    """HTML of a status line, with what limits in bold."""
    said = html.escape(status)
    return re.sub(r"Limit: .*?\.(?=\s|$)", r"<b>\g<0></b>", said) if "Limit: " in said else f"<b>{said}</b>"


def _dimmed(picture: np.ndarray) -> np.ndarray:
    faint = picture.copy()
    faint[..., 3] //= 4
    return faint


def _png(picture: np.ndarray) -> bytes:
    """Writes a PNG file. Rows are stored as differences to the row above: choosing a filter for each takes twice as long."""
    high, wide, _ = picture.shape
    rows = np.full((high, 1 + 4 * wide), 2, np.uint8)  # each begins with its filter's number
    rows[:, 1:] = picture.reshape(high, -1)
    rows[1:, 1:] -= picture.reshape(high, -1)[:-1]
    parts = {b"IHDR": struct.pack(">2I5B", wide, high, 8, 6, 0, 0, 0), b"IDAT": zlib.compress(rows, 1), b"IEND": b""}
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _allowed(control: widgets.ValueWidget) -> str:
    """What this control can be set to; empty if it does not say."""
    if hasattr(control, "options"):
        values = [repr(option[1] if isinstance(option, tuple) else option) for option in control.options]
        return "one of " + ", ".join(values if len(values) <= 12 else [*values[:3], "…", values[-1]])
    if hasattr(control, "min"):
        return f"from {control.min} to {control.max} in steps of {control.step}"
    return ""


def _view(box: widgets.Widget) -> dict:
    mime = "application/vnd.jupyter.widget-view+json"
    bundle = box._repr_mimebundle_()
    return {mime: (bundle[0] if isinstance(bundle, tuple) else bundle)[mime]}
