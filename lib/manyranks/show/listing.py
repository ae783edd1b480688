"""The library's own source, and what a step of the reader's script changes: what is read is what runs."""

import difflib
import html
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

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
        return _colored(self.text) + "".join(each(html.escape(_name(text)), _colored(text)) for text in self.folded)


def source(thing: Callable, *folded: Callable) -> Listing:
    """The source of a function or class of the library, and of others that it uses, which open on a click.

    Raises ValueError for what has no source in Python.
    """
    return Listing(_source(thing), [_source(other) for other in folded])


class Changes:
    """The lines that one file has and another hasn't, under one line that opens on a click."""

    def __init__(self, name: str, lines: Sequence[str]):
        self.lines, changed = lines, [line[0] for line in lines if line[:1] in ("+", "-")]
        self.said = f"{name}: {changed.count('+')} lines come, {changed.count('-')} go"

    def __repr__(self) -> str:
        return self.said

    def _repr_html_(self) -> str:
        text = highlight("\n".join(self.lines), DiffLexer(), _FORMATTER)
        return f"<details><summary><code>{html.escape(self.said)}</code></summary>{text}</details>"


def changes(before: str | Path, after: str | Path) -> Changes:
    """Compares two files, such as two steps of a script.

    before: "" for a script's first step
    Raises ValueError for a file that isn't there.
    """
    texts = []
    for file in (before, after):
        if file and not Path(file).is_file():
            raise ValueError(f"{file}: no such file; paths are relative to {Path.cwd().name}/")
        texts.append(Path(file).read_text(encoding="utf-8").splitlines() if file else [])
    found = list(difflib.unified_diff(*texts, n=2, lineterm=""))[2:]
    return Changes(str(after), found)


def _source(thing: Callable) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing)).rstrip()
    except (TypeError, OSError) as error:
        raise ValueError(f"source({thing!r}): only functions and classes written in Python have a source to show") from error


def _colored(text: str) -> str:
    return highlight(text, PythonLexer(), _FORMATTER)


def _name(text: str) -> str:
    """The first line that defines something: "def f(x", "class C"."""
    defined = next(line for line in text.splitlines() if line.lstrip().startswith(("def ", "class ", "async def ")))
    return defined.strip().partition("(")[0].rstrip(":") + " …"
