"""What the tasks of this exercise have in common: advice on what Python and torch say of wrong answers."""

from dataclasses import dataclass
from typing import ClassVar

from manyranks.grade.old.scripted import ScriptTask

NONE = "a parameter that a rank's examples do not use has a gradient of None there: make it zeros, and send it all the same"
_LEFT_OUT = "is something left out where a gradient is None? It counts as zeros, and is sent all the same"


@dataclass(frozen=True)
class GradientTask(ScriptTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
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
    methods: ClassVar[dict[str, str]] = {
        "finish": "the training loop calls model.finish()",
        "no_sync": "the training loop calls model.no_sync()",
        "forward": "forward(self, *args, **kwargs) hands on what it is given",
    }
