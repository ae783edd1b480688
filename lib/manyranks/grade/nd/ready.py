"""What was ready, the library's or PyTorch's, is refused: a learner's call of it raises Stopped."""

from functools import partial

from manyranks.grade.refused import refused

_HERE = (
    "averaging",
    "cluster",  # and clusters
    "drifts",
    "grouping",
    "layouts",
    "misplacing",
    "placing",
    "planning",
    "setups",
    "standing",
    "straggling",
)
_READY = (
    *(f"manyranks.grade.nd.{name}" for name in _HERE),
    *("manyranks.parallel", "manyranks.theory", "manyranks.training", "torch.distributed.device_mesh"),
)
_OTHERS = ("manyranks.", "torch.", "contextlib", "functools")  # call these modules for themselves
_YOURSELF = "what is ready is no answer: the text above says all that it needs"

# Inside, the learner's function runs.
own = partial(refused, _READY, _YOURSELF, _OTHERS)
