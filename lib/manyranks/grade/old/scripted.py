"""What tasks with scripts have in common: what is no answer, and advice on what Python and torch say of wrong ones."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from manyranks.grade.old.check import Task
from manyranks.grade.old.report import Line
from manyranks.grade.old.scripts import is_sound
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Finding
from manyranks.measure.journal import Stopped


@dataclass(frozen=True)
class ScriptTask(Task):
    """call: how the check calls the learner's function, "average(model, examples)".

    advice: pattern of what was found and its hint, and what to say then, in front of the hint; guesses: the same, at its end,
    where there is no advice; methods: of the learner's class, how each is called; hook: what to say of a function that is
    none of these.
    """

    call: str

    advice: ClassVar[tuple[tuple[str, str], ...]] = ()
    guesses: ClassVar[tuple[tuple[str, str], ...]] = ()
    methods: ClassVar[dict[str, str]] = {}
    hook: ClassVar[str] = "PyTorch calls hook(parameter): with this parameter, and nothing else"

    def refusal(self, tried: list[Trial]) -> Finding | None:
        """Where what a rank sent back is not what the check notes."""
        for trial in tried:
            for rank, answer in enumerate(trial.answers):
                if not is_sound(answer):
                    found = f"{trial.case}, rank {rank} did not return what the check notes"
                    return Finding(Line(False, "can be judged", found, "leave the check as it is"), trial)
        return None

    def line(self, finding: Finding, function) -> Line:
        """With advice before the hint, or a guess after it, where a run did not end well."""
        line = finding.line
        if finding.trial is None or not finding.trial.trouble:
            return line
        advice = self._on_arguments(line, function) or _on_words(line, self.advice)
        guess = "" if advice else _on_words(line, self.guesses)
        return replace(line, hint="; ".join(filter(None, (advice, line.hint, guess))))

    def _on_arguments(self, line: Line, function) -> str:
        """Where torch or the check called something of the learner's, with other arguments than it takes: no line is theirs."""
        called = re.search(r"TypeError: (\S+\.)?(\S+)\(\) (takes|missing|got an unexpected) ", line.found)
        if line.hint or not (called or "takes no arguments" in line.found):
            return ""
        if not called or not isinstance(function, type) or called[2] == "__init__":
            return f"the check calls {self.call}"
        return self.methods.get(called[2], self.hook)


def _on_words(line: Line, known: tuple[tuple[str, str], ...]) -> str:
    return next((said for pattern, said in known if re.search(pattern, f"{line.found}\n{line.hint}")), "")


def refuse_ready(kind: type, modules: tuple[str, ...], hint: str) -> None:
    """Raises Stopped for a class of these modules, or one that is derived from theirs."""
    for base in kind.__mro__:
        if base.__module__.startswith(modules):
            raise Stopped(f"{base.__name__} is not allowed", hint)
