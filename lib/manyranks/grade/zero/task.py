"""What the tasks of this exercise have in common: advice on what Python and torch say, and what is no answer."""

from dataclasses import dataclass, replace
from typing import ClassVar

from manyranks.grade.journal import Stopped
from manyranks.grade.report import Line
from manyranks.grade.scripted import ScriptTask, refuse_ready
from manyranks.grade.verdict import Finding
from manyranks.grade.watch import Watch

NONE = "a parameter that a rank's examples do not use has a gradient of None there: zeros take its place, and are sent"
ABSENT = (
    "a parameter was used whose memory had been given back: it must be gathered, and waited for, before its layer computes, "
    "and into the same storage as before: autograd has saved that one"
)
BYTES = "storage.resize_ takes bytes, not elements: t.nbytes is what t needs"
_YOURSELF = "write it yourself, with dist.all_gather_single and dist.reduce_scatter_single"
_ROOM = "the whole tensor has N times as many elements as a shard, padding included: make room for all of them"
_SHARDS_OWN = (
    "a shard's own .grad is None before its first backward, and after zero_grad(): where it is None, the mean takes its place"
)
_ORDER = (
    "is something left out where a gradient is None? It counts as zeros, which are sent all the same; and gradients leave in "
    "the same order on all ranks"
)
_READY = (
    "manyranks.parallel",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.distributed._composable",
)


@dataclass(frozen=True)
class ZeroTask(ScriptTask):
    """Its lines do not say where a rank died that has no Python line any more."""

    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"for \+=?: 'NoneType'|'NoneType' object has no attribute 'add_?'", _SHARDS_OWN),
        (r"IndexError.*\n.*chunk", "few elements make fewer chunks than N: pad with zeros to a multiple of N first"),
        (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b", NONE),
        (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
        (r"out of bounds for storage of size [1-9]", BYTES),
        (r"signal 11|SIGSEGV|exited with code -11|Segmentation|storage of size 0|no storage", ABSENT),
        (r"hook on a tensor that doesn't require grad", "frozen parameters get no gradient: ask parameter.requires_grad"),
        (r"a leaf Variable that requires grad", "change parameters under torch.no_grad(), or give parameter.detach() away"),
        (r"empty parameter list", "params may be a generator, which can be gone through once: begin with list(params)"),
        (
            r"modified by an inplace operation",
            "change parameter.data: autograd counts other changes",
        ),
        (r"(output|input) tensor size must be equal|invalid tensor size at index", _ROOM),
        (r"is invalid for input of size", "every shard has S elements, padding included, on all ranks"),
    )
    guesses: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"(waits in|to its|called) reduce_scatter", _ORDER),
        (r"(waits in|to its|called) all_gather", "all ranks gather the same tensors in the same order"),
    )
    methods: ClassVar[dict[str, str]] = {
        "step": "the training loop calls optimizer.step()",
        "finish": "the training loop calls optimizer.finish()",
        "zero_grad": "the training loop calls optimizer.zero_grad()",
        "start": "the schedule calls unit.start()",
        "wait": "the schedule calls unit.wait()",
        "free": "the schedule calls unit.free()",
        "reduce": "the schedule calls unit.reduce()",
        "before_forward": "the driver calls schedule.before_forward(k)",
        "after_forward": "the driver calls schedule.after_forward(k)",
        "before_backward": "the driver calls schedule.before_backward(k)",
        "after_backward": "the driver calls schedule.after_backward(k)",
    }

    def line(self, finding: Finding, function) -> Line:
        line = super().line(finding, function)
        return replace(line, found=line.found.replace(" at <string>, line 1", ""))


def refuse(watch: Watch) -> None:
    """From now on, calls that an answer which was ready makes raise Stopped."""
    watch.refuse(_READY, _YOURSELF)


def made(kind, watch: Watch, call: str, methods: tuple[str, ...], *args, **kwargs):
    """What the learner's class makes of the arguments. Raises Stopped where it lacks a method, or was ready.

    call: how the check calls it, in words.
    """
    refuse(watch)
    refuse_ready(kind if isinstance(kind, type) else type(kind), _READY, _YOURSELF)
    answer = kind(*args, **kwargs)
    for part in [answer, *getattr(answer, "__dict__", {}).values()]:
        refuse_ready(type(part), _READY, _YOURSELF)
    for name in methods:
        if not callable(getattr(answer, name, None)):
            what = f"{call} gave a {type(answer).__name__}, which has no {name}()"
            raise Stopped(what, f"write {name} in the class")
    return answer
