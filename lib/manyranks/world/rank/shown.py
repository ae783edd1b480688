"""Figures, tables and HTML that a rank shows: they go to the notebook, to their place among what the rank prints."""

import base64
import importlib.machinery
import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARK = "\x1dshown\x1d"  # stands where something was shown, in what a rank prints
MOST_BYTES, MOST = 5_000_000, 50  # of one thing that is shown; things of one rank in one run
FROM_STRANGERS = ("text/plain", "image/png")
_KINDS = ("text/", "image/", "application/json", "application/vnd.plotly", "application/vnd.vega")
_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
}
_DISPLAY = "IPython.core.display_functions"
_send: Callable[["Shown"], None] | None = None
_count = 0


@dataclass
class Shown:
    """A thing as a notebook shows it: MIME type -> text, or bytes in base64."""

    data: dict[str, str]


def start(send: Callable[[Shown], None]) -> None:
    """Lets what this rank shows go through `send`; IPython's display, too, where somebody imports it."""
    global _send
    _send = send
    sys.meta_path.insert(0, _Finder())


def renew() -> None:
    """A run begins."""
    global _count
    _count = 0


class Handle:
    """The handle that display gives for a display_id. A thing that was shown stays as it is, so an update is shown below it."""

    def update(self, *objects, **options) -> None:
        display(*objects, **options | {"display_id": None})

    display = update


def display(*objects, raw: bool = False, display_id=None, **_options) -> Handle | None:
    """Shows each object in the notebook as a cell there would.

    raw: the objects are dictionaries, MIME type -> data
    display_id: returns a Handle. IPython's other options are ignored.
    """
    for one in objects:
        _show({kind: _text(data) for kind, data in one.items()} if raw else bundle(one))
    return Handle() if display_id else None


def flush_figures() -> None:
    """Shows the figures that pyplot has open, and closes them, as a notebook does at a cell's end."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot is not None else ():
        display(figure := pyplot.figure(number))
        pyplot.close(figure)


def last_value(value) -> None:
    """Prints a value, or shows it where a notebook can do more than that."""
    data = bundle(value)
    if len(data) > 1:
        _show(data)
    else:
        print(data["text/plain"])


def bundle(value) -> dict[str, str]:
    """The forms that a notebook can show a value in: its text, and what its methods or matplotlib make."""
    found: dict[str, Any] = {"text/plain": _text_of(value)}
    if isinstance(value, type):
        return found
    many = _made(value, "_repr_mimebundle_")
    found = (many if isinstance(many, dict) else {}) | found
    for kind, name in _METHODS.items():
        if kind not in found and (made := _made(value, name)) is not None:
            found[kind] = made
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        value.savefig(image := io.BytesIO(), format="png", bbox_inches="tight")
        found["image/png"] = image.getvalue()
    texts = {kind: _text(data) for kind, data in found.items() if isinstance(kind, str) and kind.startswith(_KINDS)}
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}


def _text_of(value) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose __repr__ raises {type(error).__name__}: {error}>"


def _made(value, method: str):
    """Returns what the method gives, without the metadata that may come with it; None where there is none, or it fails."""
    try:
        made = getattr(value, method)()
    except Exception:
        return None
    return made[0] if isinstance(made, tuple) and made else made


def limited(data: Mapping[str, str], kinds: tuple[str, ...] = _KINDS) -> dict[str, str]:
    """The forms that may be shown. The text says what was left out."""
    kept = {kind: text for kind, text in data.items() if kind.startswith(kinds) and len(text) <= MOST_BYTES}
    large = [f"{kind} of {len(text) / 1e6:.1f} MB" for kind, text in data.items() if len(text) > MOST_BYTES]
    if large:
        said = f"[left out: {', '.join(large)}; at most {MOST_BYTES / 1e6:g} MB are shown]"
        kept["text/plain"] = f"{kept.get('text/plain', '')}\n{said}".strip()
    return kept


def _show(data: dict[str, str]) -> None:
    global _count
    _count += 1
    if _count == MOST + 1:
        print(f"[the first {MOST} things are shown as a notebook would; the others are text]")
    if _count > MOST or _send is None:
        print(data.get("text/plain", ""))
        return
    sys.stdout.flush()
    _send(Shown(limited(data)))
    os.write(1, MARK.encode())


def _text(data) -> Any:
    return base64.b64encode(data).decode() if isinstance(data, bytes) else data


class _Finder(importlib.machinery.PathFinder):
    """Finds IPython's display, and puts ours in its place as soon as it is there."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != _DISPLAY or (spec := super().find_spec(fullname, path, target)) is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            module.display, module.clear_output = display, lambda wait=False: None  # what was shown stays

        spec.loader.exec_module = exec_module
        return spec
