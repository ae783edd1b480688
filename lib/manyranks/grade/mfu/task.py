"""What the tasks of this exercise have in common."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyranks.grade.mfu.amounts import Unit, times
from manyranks.grade.old.scripted import ScriptTask
from manyranks.grade.old.trial import Trial

_FIELDS = "the table above has the names of what you are given"


@dataclass(frozen=True)
class MfuTask(ScriptTask):
    """unexplained: the hint for amounts that no known mistake explains; measured: how what is right was found."""

    part: ClassVar[bool] = True
    only_two: ClassVar[str] = "the line above says in which case it went wrong: go through this case on paper"
    unexplained: ClassVar[str] = ""
    measured: ClassVar[str] = "counted were"
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"AttributeError: '\w+' object has no attribute", _FIELDS),
        (r"AttributeError: can't set attribute", "what you are given cannot be changed: compute a new number"),
    )

    def found(self, trial: Trial, name: str, got: Tensor, right: Tensor, unit: Unit) -> str:
        """Both amounts, and their quotient where it is simple."""
        there, here = unit(got.item()), unit(right.item())
        if there == here:
            there, here = f"{got.item():.15g}", f"{right.item():.15g}"
        simple = times(got.item(), right.item())
        return f"{name}: you have {there}, {self.measured} {here}" + (f"; yours is {simple} that" if simple else "")

    def otherwise(self, trial: Trial, name: str) -> str:
        """What else may explain a wrong amount."""
        return ""
