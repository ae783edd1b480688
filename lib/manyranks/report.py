"""The report of a check, for learners and nbgrader: a line with its hint for each thing checked, and the points."""

import html
import re
from dataclasses import dataclass

from manyranks import scores

UNWRITTEN, NOT_JUDGED = "not written yet", "not judged"  # said in place of points
_COLORS = {"✓": "#009E73", "✗": "#D55E00"}  # read on white and in the dark theme


@dataclass(frozen=True)
class Line:
    """A thing that was checked.

    ok: None where it could not be judged
    found: what was measured
    hint: what to look at
    """

    ok: bool | None
    what: str
    found: str = ""
    hint: str = ""


class _Points(float):
    """A number that nbgrader reads and a page doesn't show: the report has said it."""

    def _repr_html_(self) -> str:
        return ""


@dataclass(frozen=True)
class Report:
    """The verdict on one task.

    points: reached, of `out_of`
    printed: what the ranks printed in the run called `run`
    """

    task: str
    points: float
    out_of: float
    lines: tuple[Line, ...]
    printed: str = ""
    run: str = ""
    exercise: str = ""

    @property
    def passed(self) -> bool:
        """Returns whether everything that was checked holds."""
        return all(line.ok for line in self.lines)

    def show(self) -> float:
        """Displays the report and the total, and returns the points, which nbgrader takes from a test cell's last line."""
        from IPython.display import display

        display(self)
        hint = next((line.hint for line in self.lines if not line.ok and line.found), "")  # not of what isn't written yet
        if total := scores.after(self.exercise, self.task, self.points, hint):
            display(total)
        return _Points(self.points)

    def __repr__(self) -> str:
        parts = [f"{_mark(self._head())} {self._head().what}"]
        for line in self.lines:
            parts.append(f"{_mark(line)} {line.what}" + (f": {line.found}" if line.found else ""))
            parts += [f"    hint: {line.hint}"] if line.hint else []
        parts += [f"what the ranks printed {self.run}:", self.printed] if self.printed else []
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = "".join(f"<li style='list-style:none'>{_item(line)}</li>" for line in self.lines)
        printed = f"<div>what the ranks printed {self.run}:</div><pre>{html.escape(self.printed)}</pre>" if self.printed else ""
        return f"<div><b>{_item(self._head())}</b><ul style='padding-left:1em;margin:2px'>{rows}</ul>{printed}</div>"

    def _head(self) -> Line:
        said = [line.what.partition(":")[0] for line in self.lines]
        points = f"{self.points:g} of {self.out_of:g} points"
        instead = next((words for words in (UNWRITTEN, NOT_JUDGED) if words in said), points)
        return Line(None if instead == NOT_JUDGED else self.passed, f"{self.task}: {instead}")


def _mark(line: Line) -> str:
    return "○" if line.what.endswith(UNWRITTEN) else {True: "✓", False: "✗", None: "·"}[line.ok]


def _item(line: Line) -> str:
    mark, found = _mark(line), f": {line.found}" if line.found else ""
    said = html.escape(line.what + found) + (f"<br><i>hint: {html.escape(line.hint)}</i>" if line.hint else "")
    said = re.sub("`([^`]+)`", r"<code>\1</code>", said)
    return f"<span style='white-space:pre-wrap'><span style='color:{_COLORS.get(mark, 'inherit')}'>{mark}</span> {said}</span>"
