"""An explorer: controls, a figure that follows them, and a line that says what limits now.

An explorer is driven by a plot: an object with `figure`, `moving` (the artists that follow the controls; all else is drawn
once) and `update(**values)`, which moves them and returns the status line. What it cannot show it refuses with a
ValueError, whose text becomes the status line.
"""

import asyncio
import base64
import html
import io
from collections.abc import Sequence
from typing import Protocol

import ipywidgets as widgets
import numpy as np
import PIL.Image
from IPython.display import display
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PAUSE = 0.02  # seconds without a further change before a redraw: a dragged slider does not queue up pictures
_LAYOUT = widgets.Layout(width="460px")
_LABELS = {"description_width": "150px"}


def slider(label: str, value: int, low: int, high: int, step: int = 1) -> widgets.IntSlider:
    """A control for a whole number."""
    return widgets.IntSlider(value, low, high, step, description=label, layout=_LAYOUT, style=_LABELS)


def log_slider(label: str, value: float, low: int, high: int, base: int = 2, show=None) -> widgets.SelectionSlider:
    """A control for a power of `base`, from base**low to base**high; show: value -> text beside the slider."""
    options = [((show or str)(base**k), base**k) for k in range(low, high + 1)]
    return widgets.SelectionSlider(options=options, value=value, description=label, layout=_LAYOUT, style=_LABELS)


def choice(label: str, value: str, options: Sequence[str]) -> widgets.Dropdown:
    """A control for one of several names."""
    return widgets.Dropdown(options=list(options), value=value, description=label, layout=_LAYOUT, style=_LABELS)


class Plot(Protocol):
    """What an explorer drives."""

    figure: Figure
    moving: Sequence[Artist]

    def update(self, **values) -> str: ...


class Explorer:
    """Shows `plot` under `controls`; every change calls plot.update(**values). figure, values and status can be read."""

    def __init__(self, plot: Plot, **controls: widgets.ValueWidget):
        self.figure, self.status = plot.figure, ""
        self._plot, self._controls = plot, controls
        self._canvas = FigureCanvasAgg(self.figure)
        self._image, self._line = widgets.Image(format="png"), widgets.HTML()
        self._waiting: asyncio.TimerHandle | None = None
        for artist in plot.moving:
            artist.set_animated(True)  # leaves it out of the drawing that the redraws start from
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        self._redraw()
        for control in controls.values():
            control.observe(self._soon, "value")

    @property
    def values(self) -> dict:
        """The controls' present values by name."""
        return {name: control.value for name, control in self._controls.items()}

    def set(self, **values) -> "Explorer":
        """Moves controls, as a hand would, and redraws at once. Raises ValueError for a name or value that none has."""
        for name, value in values.items():
            if name not in self._controls:
                raise ValueError(f"{name!r}: this explorer has {', '.join(self._controls)}")
            self._put(self._controls[name], name, value)
        self._redraw()
        return self

    def _put(self, control: widgets.ValueWidget, name: str, value) -> None:
        control.unobserve(self._soon, "value")
        try:
            control.value = value
        except Exception as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
        finally:
            control.observe(self._soon, "value")

    def _soon(self, _=None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no notebook around us
            return self._redraw()
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = loop.call_later(_PAUSE, self._redraw)

    def _redraw(self) -> None:
        self._waiting = None
        try:
            self.status = self._plot.update(**self.values)
        except ValueError as error:
            self.status = f"Not possible: {error}"
        self._line.value = f"<b>{html.escape(self.status)}</b>"
        self._image.value = self._png()

    def _png(self) -> bytes:
        self._canvas.restore_region(self._background)
        for artist in self._plot.moving:
            artist.axes.draw_artist(artist)
        picture = io.BytesIO()
        PIL.Image.fromarray(np.asarray(self._canvas.buffer_rgba())).save(picture, "png", compress_level=1)
        return picture.getvalue()

    def _ipython_display_(self) -> None:
        box = widgets.VBox([*self._controls.values(), self._line, self._image])
        # A page without a kernel, such as GitHub's, shows the picture; the notebook shows the controls.
        bundle = {"text/plain": repr(self), "image/png": base64.b64encode(self._image.value).decode()} | _view(box)
        display(bundle, raw=True)

    def __repr__(self) -> str:
        return f"Explorer({', '.join(f'{k}={v}' for k, v in self.values.items())}): {self.status}"


def _view(box: widgets.Widget) -> dict:
    mime = "application/vnd.jupyter.widget-view+json"
    bundle = box._repr_mimebundle_()
    return {mime: (bundle[0] if isinstance(bundle, tuple) else bundle)[mime]}
