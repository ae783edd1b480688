"""What the tasks of this exercise have in common: their points, and advice on what Python and torch say of wrong answers."""

import re
from dataclasses import dataclass, replace

from manyranks.grade.check import Task
from manyranks.grade.report import Line
from manyranks.grade.verdict import Finding

NONE = "a parameter that a rank's examples do not use has a gradient of None there: make it zeros, and send it all the same"
_ADVICE = (
    (r"'NoneType' object (has no|is not|does not support item)|argument 'tensors'|found NoneType", NONE),
    (
        r"(waits in|to its|called) all_reduce",
        "is something left out where a gradient is None? It counts as zeros, and is sent all the same",
    ),
    (r"a leaf Variable that requires grad", "change parameters under torch.no_grad()"),
    (r"does not have a grad_fn", "inside no_sync() backward must still make gradients"),
)


@dataclass(frozen=True)
class GradientTask(Task):
    """call: how the check calls the learner's function, "average(model, examples)"."""

    call: str

    def line(self, finding: Finding, function) -> Line:
        """With advice in front of the hint where a run did not end well."""
        line = finding.line
        if finding.trial is None or not finding.trial.trouble:
            return line
        advice = self._advice(line.found, line.hint)
        return replace(line, hint="; ".join(filter(None, (advice, line.hint)))) if advice else line

    def _advice(self, found: str, hint: str) -> str:
        if re.search(r"TypeError: .*(positional argument|takes no arguments)", found):
            return f"the check calls {self.call}"
        return next((advice for pattern, advice in _ADVICE if re.search(pattern, f"{found} {hint}")), "")
