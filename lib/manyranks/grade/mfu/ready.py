"""What was ready, the library's, PyTorch's or this check's, is refused: a learner's call of it raises Stopped."""

from functools import partial

from manyranks.grade.old.refused import refused

_MEASURE = ("budget", "flops", "kinds", "machine", "profile", "timing")  # other modules note what goes on
_HERE = (
    "budgets",
    "counting",
    "forward",
    "kernels",
    "roofline",
    "spent",
    "timing",
    "trace",
    "training",
    "utilisation",
)  # what is right
_READY = (
    *(f"manyranks.grade.mfu.{name}" for name in _HERE),
    *("manyranks.theory", "manyranks.training", "manyranks.timeline.intervals"),
    *(f"manyranks.measure.{name}" for name in _MEASURE),
    *("torch.utils.flop_counter", "torch.utils.benchmark", "torch.profiler"),
)
_OTHERS = ("manyranks.", "torch.", "contextlib", "functools")  # call these modules for themselves
_YOURSELF = "what is ready is no answer: the text above says all that it needs"

# Inside, the learner's function runs.
own = partial(refused, _READY, _YOURSELF, _OTHERS)
