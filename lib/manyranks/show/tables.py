"""Tables in a notebook: plain text for tests and terminals, HTML for the browser."""

import csv
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files


class Table:
    """Rows under a header; displays itself. The first column is left-aligned, the others right-aligned.

    Numbers get thousands separators.
    """

    def __init__(self, header: Iterable[str], rows: Iterable[Sequence]):
        self.header, self.rows = list(header), [[_text(cell) for cell in row] for row in rows]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        head, *lines = (
            "  ".join(f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
            for row in [self.header, *self.rows]
        )
        return "\n".join([head, "─" * len(head), *lines])

    def _repr_html_(self) -> str:
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{_cells('th', self.header)}</tr></thead><tbody>{body}</tbody></table>"


table = Table


def reconcile(theory: Mapping[str, float], measured: Mapping[str, float | None], against: str = "measured") -> Table:
    """Theory next to measurement, one quantity a row.

    against: what the second one is, "replayed" or "published" for instance

    A measurement of None is one that this system cannot make. Raises ValueError unless both have the same quantities.
    """
    if theory.keys() != measured.keys():
        raise ValueError(f"theory has {list(theory)}, {against} has {list(measured)}: give the same quantities in both")
    rows = [(name, theory[name], measured[name], _difference(theory[name], measured[name])) for name in theory]
    return Table(["", "theory", against, "difference"], rows)


def axes() -> Table:
    """Shows which models that nobody here wrote train along which axis of parallelism, as the tests found it.

    Returns: a table with a row per model, and a word per axis: yes; by hand; not tried; has none
    """
    with (files("manyranks.show") / "axes.csv").open(encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
    return Table(header, rows)


def _difference(theory: float, measured: float | None) -> str:
    if measured is None:
        return ""
    if measured == theory:
        return "0"
    return _text(measured - theory) + (f" ({(measured - theory) / theory:+.1%})" if theory else "")


def _text(cell) -> str:
    if cell is None:
        return "not counted"
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"


def _cells(tag: str, row: Sequence[str]) -> str:
    look = "<{0} style='text-align:{1}'>{2}</{0}>".format
    return "".join(look(tag, "right" if i else "left", html.escape(cell)) for i, cell in enumerate(row))
