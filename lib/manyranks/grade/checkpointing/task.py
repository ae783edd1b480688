"""What the tasks of this exercise have in common: advice on what Python and torch say."""

from dataclasses import dataclass
from typing import ClassVar

from manyranks.grade.checkpointing.judges import Must
from manyranks.grade.scripted import ScriptTask
from manyranks.grade.scripts import judge_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Verdict

_OFF = (
    "autograd is off inside backward: run the function again under torch.enable_grad(), and go back from its result y with "
    "grad; a sum of y that is made outside has no graph, and grad is not a sum's"
)
_NOTHING = "nothing needs a gradient here, and the second run has no backward: ask y.requires_grad"
_CONSUMED = (
    "something went backward twice: the second run needs a leaf of its own, x.detach().requires_grad_(), and its graph is good "
    "for one backward, which gives the gradients of x and of the parameters at once"
)
_ONLY_LEARN = (
    "frozen parameters have no gradient, and a function need not have any that learns: torch.autograd.backward finds them"
)


_PLACES = (
    "backward returns one for each argument of forward past ctx, in the order in which apply got them: None for the function"
)


@dataclass(frozen=True)
class CheckpointTask(ScriptTask):
    """Runs on one rank."""

    sizes: ClassVar[tuple[int, ...]] = (1,)
    part: ClassVar[bool] = True
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            r"'(Function|Layer)' object has no attribute",
            "function may be any callable: it need not be a module",
        ),
        (r"(a frozen layer|an x that needs no gradient).*element 0 of tensors does not require grad", _NOTHING),
        (r"element 0 of tensors does not require grad", _OFF),
        (r"One of the differentiated Tensors does not require grad", _ONLY_LEARN),
        (r"backward through the graph a second time", _CONSUMED),
        (
            r"returned an incorrect number of gradients",
            "backward returns one for each argument of apply, None for what has none",
        ),
        (r"a gradient different than None at position", _PLACES),
        (r"not used in the graph|not have been used", "x was not what the second run computed with: give it the same leaf"),
        (r"a leaf Variable that requires grad|modified by an inplace", "leave x as it is: work on x.detach()"),
    )

    def why_calls(self, phase: str, got: list[str], must: Must) -> str:
        """The hint for calls that are not as they must be."""
        if phase == "forward":
            return "forward runs each function once" if got else "forward has to compute the result"
        if not got:
            return "backward has to run the function again, for forward keeps nothing but x"
        if len(got) > len(must.backward):
            return "one run more is enough: one backward through it gives the gradients of x and of the parameters"
        return "each checkpoint computes its own function again when backward comes to it, the last one first"


def values(task: CheckpointTask, trial: Trial) -> Verdict:
    """The aspect of the results; where there is one rank, it has no number."""
    verdict = judge_values(task, trial)
    return verdict if trial.case.n > 1 else verdict._replace(found=verdict.found.removeprefix("rank 0: "))
