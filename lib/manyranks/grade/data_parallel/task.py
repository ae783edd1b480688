"""What the tasks of this exercise have in common: their points, and advice on what Python and torch say of wrong answers."""

import re
from dataclasses import dataclass, replace

from manyranks.grade.check import Task
from manyranks.grade.report import Line
from manyranks.grade.scripts import is_sound
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Finding

NONE = "a parameter that a rank's examples do not use has a gradient of None there: make it zeros, and send it all the same"
_LEFT_OUT = "is something left out where a gradient is None? It counts as zeros, and is sent all the same"
_ADVICE = (  # on what was found and its hint, which ends with the learner's line
    (
        r"generator didn't yield|'NoneType' object is not an iterator",
        "no_sync() has to `yield`, where what stands inside is to run",
    ),
    (r"generator didn't stop", "no_sync() has to `yield` once, and no more"),
    (r"'NoneType' object has no attribute 'wait'", "dist.all_reduce returns something to wait for with async_op=True only"),
    (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b", NONE),
    (r"expected a non-empty list of Tensors", NONE),
    (
        r"hook on a tensor that doesn't require grad",
        "frozen parameters get no gradient and no hook: ask parameter.requires_grad",
    ),
    (r"(waits in|to its|called) all_reduce", _LEFT_OUT),
    (r"a leaf Variable that requires grad", "change parameters under torch.no_grad()"),
    (r"does not have a grad_fn", "inside no_sync() backward must still make gradients"),
)
_METHODS = {
    "finish": "the training loop calls model.finish()",
    "no_sync": "the training loop calls model.no_sync()",
    "forward": "forward(self, *args, **kwargs) hands on what it is given",
}


@dataclass(frozen=True)
class GradientTask(Task):
    """call: how the check calls the learner's function, "average(model, examples)"."""

    call: str

    def refusal(self, tried: list[Trial]) -> Finding | None:
        """Where what a rank sent back is not what the check notes."""
        for trial in tried:
            for rank, answer in enumerate(trial.answers):
                if not is_sound(answer):
                    found = f"{trial.case}, rank {rank} did not return what the check notes"
                    return Finding(Line(False, "can be judged", found, "leave the check as it is"), trial)
        return None

    def line(self, finding: Finding, function) -> Line:
        """With advice in front of the hint where a run did not end well."""
        line = finding.line
        if finding.trial is None or not finding.trial.trouble:
            return line
        advice = self._on_arguments(line, function) or _advice(line)
        return replace(line, hint="; ".join(filter(None, (advice, line.hint)))) if advice else line

    def _on_arguments(self, line: Line, function) -> str:
        """Where torch or the check called something of the learner's, with other arguments than it takes: no line is theirs."""
        called = re.search(r"TypeError: (\S+\.)?(\S+)\(\) (takes|missing) ", line.found)
        if line.hint or not (called or "takes no arguments" in line.found):
            return ""
        if not called or not isinstance(function, type) or called[2] == "__init__":
            return f"the check calls {self.call}"
        return _METHODS.get(called[2], "PyTorch calls hook(parameter): with this parameter, and nothing else")


def _advice(line: Line) -> str:
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, f"{line.found}\n{line.hint}")), "")
