"""The library's own source, shown in a chapter: what is read is what runs."""

import inspect
from collections.abc import Callable

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer


class Listing:
    """The source of a function or class; displays itself."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return highlight(self.text, PythonLexer(), HtmlFormatter(noclasses=True, nobackground=True))


def source(thing: Callable) -> Listing:
    """The source of a function or class of the library. Raises ValueError for what has none."""
    try:
        return Listing(inspect.getsource(thing).rstrip())
    except (TypeError, OSError) as error:
        raise ValueError(f"source({thing!r}): only functions and classes written in Python have a source to show") from error
