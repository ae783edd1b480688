"""Tables in a notebook: plain text for tests and terminals, HTML for the browser."""

import html
from collections.abc import Mapping, Sequence


class Table:
    """Rows under a header; displays itself."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence]):
        self.header, self.rows = list(header), [[_text(cell) for cell in row] for row in rows]

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]
        lines = [_line(row, widths) for row in [self.header, *self.rows]]
        return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:{_align(i)}'>{html.escape(name)}</th>" for i, name in enumerate(self.header))
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:{_align(i)}'>{html.escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(header: Sequence[str], rows: Sequence[Sequence]) -> Table:
    """A table; the first column is left-aligned, the others right-aligned. Numbers get thousands separators."""
    return Table(header, rows)


def reconcile(theory: Mapping[str, float], measured: Mapping[str, float | None], against: str = "measured") -> Table:
    """Theory beside measurement, one quantity a row. against: what the second one is, "replayed" or "published" for instance.

    A measurement of None is one that this system cannot make. Raises ValueError unless both have the same quantities.
    """
    if theory.keys() != measured.keys():
        raise ValueError(f"theory has {list(theory)}, {against} has {list(measured)}: give the same quantities in both")
    rows = [(name, theory[name], measured[name], _difference(theory[name], measured[name])) for name in theory]
    return Table(["", "theory", against, "difference"], rows)


def _difference(theory: float, measured: float | None) -> str:
    if measured is None:
        return ""
    if measured == theory:
        return "0"
    share = f" ({(measured - theory) / theory:+.1%})" if theory else ""
    return f"{_text(measured - theory)}{share}"


def _text(cell) -> str:
    if cell is None:
        return "not counted"
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()


def _align(column: int) -> str:
    return "right" if column else "left"
