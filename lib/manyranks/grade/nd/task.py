"""What the tasks of this exercise have in common."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from manyranks.grade.nd.answers import Exam
from manyranks.grade.report import Line
from manyranks.grade.scripted import ScriptTask
from manyranks.grade.verdict import Finding

_UNKNOWN_AXIS = "sizes has only some axes, in any order: ask it which ones, no name stands for sure"
_FIELDS = "the table above has the names of what you are given"


@dataclass(frozen=True)
class NdTask(ScriptTask):
    """unexplained: the hint for answers that no known mistake explains; endless: for a run that takes too long."""

    sizes: ClassVar[tuple[int, ...]] = (1,)
    part: ClassVar[bool] = True
    only_two: ClassVar[str] = "the line above says in which case it went wrong: go through this case on paper"
    unexplained: ClassVar[str] = ""
    endless: ClassVar[str] = ""
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"KeyError: '(dp|pp|cp|tp|ep)'", _UNKNOWN_AXIS),
        (r"AttributeError: '\w+' object has no attribute", _FIELDS),
        (r"'(float|Tensor)' object cannot be interpreted as an integer", "whole numbers: // in place of /"),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        """Both, in words."""
        return f"{part} is {shown(got)}; right is {shown(right)}"

    def otherwise(self, part: str, exam: Exam, got: list) -> str:
        """What else may explain a wrong part."""
        return ""

    def line(self, finding: Finding, function) -> Line:
        """Of a run that was not over, what takes so long."""
        line, trial = super().line(finding, function), finding.trial
        slow = trial and trial.trouble and trial.trouble.hung and not trial.trouble.deadlock
        return replace(line, hint=f"{self.endless}; or a loop does not end") if slow and self.endless else line


def shown(value: Any, longest: int = 120) -> str:
    """An answer, for a report."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {one}" for name, one in value.items()) + "}"
    elif isinstance(value, list) and value and isinstance(value[0], list):
        text = ", ".join(str(tuple(one)) for one in value)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= longest else f"{text[:longest]} …"
