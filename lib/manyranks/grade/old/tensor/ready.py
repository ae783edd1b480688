"""What was ready, the library's or PyTorch's, is refused: calls of it raise Stopped."""

from functools import partial

from manyranks.grade.old.refused import refused

READY = ("manyranks.parallel", "torch.distributed.tensor")
YOURSELF = "write it yourself: the text above says all that it needs"
_OTHERS = ("manyranks.", "torch.", "contextlib", "functools")  # call these modules for themselves

# Inside, the learner's function runs, and may not call what raises before it sends anything.
own = partial(refused, READY, YOURSELF, _OTHERS)
