"""What a check found, as the learner sees it: ✓ and ✗ lines, what was measured, a hint."""

import html
from dataclasses import dataclass

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class Line:
    """One thing that was checked. ok: None where it could not be judged; found: what was measured; hint: what to look at."""

    ok: bool | None
    what: str
    found: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """The verdict on one task. points: reached, of `out_of`; printed: what the ranks printed in the run called `run`."""

    task: str
    points: float
    out_of: float
    lines: tuple[Line, ...]
    printed: str = ""
    run: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything that was checked holds."""
        return all(line.ok for line in self.lines)

    def show(self) -> float:
        """Displays the report and returns the points, which nbgrader takes from the last line of a test cell."""
        from IPython.display import display

        display(self)
        return self.points

    def __repr__(self) -> str:
        parts = [self._head()]
        for line in self.lines:
            parts.append(f"{_mark(line)} {line.what}" + (f": {line.found}" if line.found else ""))
            parts += [f"    hint: {line.hint}"] if line.hint else []
        if self.printed:
            parts += [f"what the ranks printed {self.run}:", self.printed]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = "".join(f"<li style='list-style:none'>{_item(line)}</li>" for line in self.lines)
        printed = f"<div>what the ranks printed {self.run}:</div><pre>{html.escape(self.printed)}</pre>" if self.printed else ""
        return f"<div><b>{html.escape(self._head())}</b><ul style='padding-left:1em;margin:2px'>{rows}</ul>{printed}</div>"

    def _head(self) -> str:
        return f"{_mark(Line(self.passed, ''))} {self.task}: {self.points:g} of {self.out_of:g} points"


def size(n: int) -> str:
    """3500000 -> "3.5 MB"; three digits, and exact bytes below 1 kB."""
    for unit, name in _UNITS:
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n} bytes"


def listed(words: list[str]) -> str:
    """ "2, 3 and 4"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _mark(line: Line) -> str:
    return {True: "✓", False: "✗", None: "·"}[line.ok]


def _item(line: Line) -> str:
    found = f": {html.escape(line.found)}" if line.found else ""
    hint = f"<br><i>hint: {html.escape(line.hint)}</i>" if line.hint else ""
    return f"<span style='white-space:pre-wrap'>{_mark(line)} {html.escape(line.what)}{found}{hint}</span>"
