"""The library's own source, shown in a chapter: what is read is what runs."""

import html
import inspect
import textwrap
from collections.abc import Callable, Sequence

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

# A light panel: a listing doesn't know whether its page is dark, and no colors can be read on both kinds of page.
_PANEL = "background-color: #f8f8f8; color: #111111; padding: 0.5em; white-space: pre-wrap; word-break: normal"
_FORMATTER = HtmlFormatter(noclasses=True, nobackground=True, prestyles=_PANEL)


class Listing:
    """Source code, one text open and the others folded under a line each; displays itself."""

    def __init__(self, text: str, folded: Sequence[str] = ()):
        self.text, self.folded = text, tuple(folded)

    def __repr__(self) -> str:
        return "\n\n\n".join([self.text, *self.folded])

    def _repr_html_(self) -> str:
        each = "<details><summary><code>{}</code></summary>{}</details>".format
        return _coloured(self.text) + "".join(each(html.escape(_name(text)), _coloured(text)) for text in self.folded)


def source(thing: Callable, *folded: Callable) -> Listing:
    """The source of a function or class of the library, and of others that it uses, which open on a click.

    Raises ValueError for what has no source in Python.
    """
    return Listing(_source(thing), [_source(other) for other in folded])


def _source(thing: Callable) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing)).rstrip()
    except (TypeError, OSError) as error:
        raise ValueError(f"source({thing!r}): only functions and classes written in Python have a source to show") from error


def _coloured(text: str) -> str:
    return highlight(text, PythonLexer(), _FORMATTER)


def _name(text: str) -> str:
    """The first line that defines something: "def f(x", "class C"."""
    defined = next(line for line in text.splitlines() if line.lstrip().startswith(("def ", "class ", "async def ")))
    return defined.strip().partition("(")[0].rstrip(":") + " …"
